"""The query `archive` as a Spark application of its own: `spark-submit pipelines/jobs/archive.py`."""

from pipelines.submit import main

if __name__ == "__main__":
    raise SystemExit(main("archive"))
