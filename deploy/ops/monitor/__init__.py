"""The HTTP endpoints of a run: metrics, health, readiness, the status page."""
