"""What `kiln recover` does."""
