"""Code that every top-level package but `schemas` may import: errors, files, locks, logs, Kafka clients."""
