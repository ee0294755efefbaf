"""Synthetic traffic of a gossipsub network, and a ledger of its content.

`Traffic` is the traffic that a bridge would capture: frames of several connections, with messages of many authors in
several copies, control messages, garbage and forgeries. The traffic depends only on the arguments: no clock is read,
and all randomness comes from the seed.
"""

from kiln.deploy.demo.traffic.generator import GeneratedFrame, Traffic, write_traffic
from kiln.deploy.demo.traffic.ledger import FrameEntry, Ledger, MessageEntry
from kiln.deploy.demo.traffic.options import TrafficOptions

__all__ = ["FrameEntry", "GeneratedFrame", "Ledger", "MessageEntry", "Traffic", "TrafficOptions", "write_traffic"]
