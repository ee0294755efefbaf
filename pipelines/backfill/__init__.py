"""Backfill runs: Spark batch jobs that process the frames of a time range with the functions of the streaming queries.

A run writes to tables of its own, next to the live tables that the streaming queries write. A swap then replaces the
live rows of the time range. Source: docs/design, decisions 21 and 22.
"""
