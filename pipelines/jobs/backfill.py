"""Spark application of a backfill run: `spark-submit pipelines/jobs/backfill.py --from TIME --to TIME --run NAME`."""

from kiln.pipelines.app.backfill_run import main

if __name__ == "__main__":
    raise SystemExit(main())
