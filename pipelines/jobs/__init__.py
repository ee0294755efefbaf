"""Scripts for spark-submit: one for each query, for backfill runs and for quality checks."""
