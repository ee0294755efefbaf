"""Spark application of the query `sink`: `spark-submit pipelines/jobs/sink.py`."""

from kiln.pipelines.app.submit import main

if __name__ == "__main__":
    raise SystemExit(main("sink"))
