"""Backfill: Spark batch jobs that process history with the functions of the streaming queries, and write it to tables
of the run (docs/design, decision 21)."""
