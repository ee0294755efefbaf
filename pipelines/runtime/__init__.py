"""Runtime on Spark and Kafka: session, sources and sinks, ticks, progress, state."""
