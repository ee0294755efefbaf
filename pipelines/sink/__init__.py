"""Query `sink`: Kafka topics into their Delta tables."""
