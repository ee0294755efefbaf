"""The query `batch` as a Spark application of its own: `spark-submit pipelines/jobs/batch.py`."""

from kiln.pipelines.app.submit import main

if __name__ == "__main__":
    raise SystemExit(main("batch"))
