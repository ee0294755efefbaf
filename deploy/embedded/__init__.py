"""What Kiln runs by itself when nothing is configured: Java, the pinned jars, a Kafka broker and its topics."""
