"""Gossipsub as a state machine without I/O: framing, router, caches and peer scores.

No module here reads a clock or a socket. The caller passes the time, the received bytes and a `random.Random`
(docs/design/bridge.md).
"""
