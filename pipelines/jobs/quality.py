"""Spark application of the quality checks of the tables: `spark-submit pipelines/jobs/quality.py`."""

from kiln.pipelines.quality.check import main

if __name__ == "__main__":
    raise SystemExit(main())
