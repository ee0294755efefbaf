"""Read-only SQL over the lake with Spark, and the guard that rejects every other statement."""
