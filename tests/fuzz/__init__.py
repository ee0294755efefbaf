"""Every decoder of bytes from outside, the router and the batcher with state, as functions of bytes."""
