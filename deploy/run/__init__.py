"""What `kiln run` does: broker, network, queries, brought up, looked after and brought down."""
