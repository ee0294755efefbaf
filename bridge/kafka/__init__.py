"""Kafka clients of the bridge: producers, threads of consumer groups, and the writer of quarantine records."""
