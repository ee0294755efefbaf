"""Kafka topics and their records."""
