"""Synthetic traffic of a gossipsub network, and a ledger that lists its messages and bad frames.

`Traffic` generates the frames that a bridge would capture from several connections: messages of many authors in several
copies, control messages, garbage and forgeries. Equal arguments give equal traffic: no clock is read, and all
randomness comes from the seed.
"""

from kiln.deploy.demo.traffic.generator import GeneratedFrame, Traffic, write_traffic
from kiln.deploy.demo.traffic.ledger import FrameEntry, Ledger, MessageEntry
from kiln.deploy.demo.traffic.options import TrafficOptions

__all__ = ["FrameEntry", "GeneratedFrame", "Ledger", "MessageEntry", "Traffic", "TrafficOptions", "write_traffic"]
