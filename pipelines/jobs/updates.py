"""Spark application of the query `updates`: `spark-submit pipelines/jobs/updates.py`."""

from kiln.pipelines.app.submit import main

if __name__ == "__main__":
    raise SystemExit(main("updates"))
