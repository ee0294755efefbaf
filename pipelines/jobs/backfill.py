"""A backfill run as an application of its own: `spark-submit pipelines/jobs/backfill.py --from T --to T --run NAME`."""

from pipelines.backfill import main

if __name__ == "__main__":
    raise SystemExit(main())
