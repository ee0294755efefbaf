"""Kafka in the bridge: producers, threads that work on Kafka, the writer of quarantine records."""
