"""Spark application of the query `batch`: `spark-submit pipelines/jobs/batch.py`."""

from kiln.pipelines.app.submit import main

if __name__ == "__main__":
    raise SystemExit(main("batch"))
