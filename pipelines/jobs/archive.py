"""Spark application of the query `archive`: `spark-submit pipelines/jobs/archive.py`."""

from kiln.pipelines.app.submit import main

if __name__ == "__main__":
    raise SystemExit(main("archive"))
