"""Code that the streaming queries share: Spark session, Kafka source, deduplication, checkpoints, progress."""
