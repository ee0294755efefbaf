"""Made-up traffic of a gossipsub network, and the ledger of what is true of it.

`Traffic` is what a bridge would see: Frames of several connections, with the messages of many authors, in several
copies, among control messages, garbage and forgeries. `bad_inputs` is bad input of one kind. Both are functions of
their arguments: they read no clock, and draw chance from the seed only.
"""

from kiln.deploy.demo.traffic.bad_inputs import BAD_KINDS, BadInputs, BadKind, bad_inputs
from kiln.deploy.demo.traffic.capture_file import capture_records, write_traffic
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
    "bad_inputs",
    "capture_records",
    "read_ledger",
    "write_traffic",
]
