"""Decoding of frames into messages, and the circuit breaker that stops a query if Kiln's own decoder is at fault."""
