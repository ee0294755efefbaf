"""Decoding of frames into messages, and the breaker for faults of our own decoder."""
