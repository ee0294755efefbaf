"""The checks of the tables as an application of its own: `spark-submit pipelines/jobs/quality.py`."""

from kiln.pipelines.quality.check import main

if __name__ == "__main__":
    raise SystemExit(main())
