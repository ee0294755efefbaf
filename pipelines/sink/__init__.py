"""Query `sink`: writes the records of Kafka topics into Delta tables."""
