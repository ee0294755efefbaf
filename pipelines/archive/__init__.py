"""Query `archive`: decodes frames into the tables `frames`, `copies`, `subscriptions`, `controls` and `messages`."""
