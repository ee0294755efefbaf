"""Gossipsub without sockets: framing, the router's state machine, its caches and its peer score.

Nothing here reads a clock, a socket or a random source of its own: time, bytes and `random.Random` come from the
caller (docs/design, The bridge).
"""
