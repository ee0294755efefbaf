"""Runtime on Spark and Kafka: session, source, table commits, deduplication, checkpoints, progress."""
