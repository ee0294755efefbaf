"""What a run shows over HTTP: metrics, whether Kiln is alive and ready, the status page."""
