"""What is in quarantine, brought back into Kafka where it can be used now."""
