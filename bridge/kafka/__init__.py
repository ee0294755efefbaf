"""Kafka from the bridge: producers, the thread that talks to Kafka, the writer of quarantine."""
