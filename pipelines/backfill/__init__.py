"""Backfill: history through the functions of the streams, as Spark batch jobs, into tables of a run's own
(docs/design, decision 21)."""
