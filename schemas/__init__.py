"""What bytes and rows look like: pure functions and data classes, with no Spark session, no socket and no clock."""

from schemas.topic_table import bundle_hash, intersect

__all__ = ["bundle_hash", "intersect"]
