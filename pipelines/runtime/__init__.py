"""What touches Spark and Kafka: session, sources and sinks, ticks, progress, state."""
