"""Query `archive`: frames into the tables `frames`, `copies` and `messages`."""
