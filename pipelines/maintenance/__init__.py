"""Maintenance of tables: compaction, log trimming, vacuum, and retention."""
