"""Entry points that start queries and backfill runs from the settings."""
