"""A backfill run as an application of its own: `spark-submit pipelines/jobs/backfill.py --from T --to T --run NAME`."""

from kiln.pipelines.app.backfill_run import main

if __name__ == "__main__":
    raise SystemExit(main())
