"""Synthetic traffic of a gossipsub network, and a ledger of its content.

`Traffic` is the traffic that a bridge would capture: frames of several connections, with messages of many authors in
several copies, control messages, garbage and forgeries. `generate_bad_inputs` generates one kind of bad input. Both
depend on their arguments only: they read no clock, and their randomness comes from the seed.
"""

from kiln.deploy.demo.traffic.bad_inputs import BAD_KINDS, BadInputs, BadKind, generate_bad_inputs
from kiln.deploy.demo.traffic.capture_file import build_capture_records, write_traffic
from kiln.deploy.demo.traffic.connection import GeneratedFrame
from kiln.deploy.demo.traffic.generator import Traffic
from kiln.deploy.demo.traffic.ledger import (
    Entry,
    FrameEntry,
    Ledger,
    LedgerError,
    MessageEntry,
    SeparatorEntry,
    read_ledger,
)
from kiln.deploy.demo.traffic.options import GARBAGE, GarbageKind, TrafficOptions

__all__ = [
    "BAD_KINDS",
    "GARBAGE",
    "BadInputs",
    "BadKind",
    "Entry",
    "FrameEntry",
    "GarbageKind",
    "GeneratedFrame",
    "Ledger",
    "LedgerError",
    "MessageEntry",
    "SeparatorEntry",
    "Traffic",
    "TrafficOptions",
    "build_capture_records",
    "generate_bad_inputs",
    "read_ledger",
    "write_traffic",
]
