"""Hostile peers for as long as you like, and the figures: `make hostile ARGS="flood --seconds 600"`.

flood: floods of every kind and a crowd that comes and goes, beside honest traffic. topics: peers that are each on
thousands of topics. batches: such a flood beside a whole Kiln, and how late its batches come. Exit code 0: all that is
promised held. 1: something did not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from kit.bridge_alone import BridgeAlone

from conf.settings.model import Bridge
from hostile.scene import MEMORY, MIB, flood, names, wrong
from hostile.whole import whole

_TOPICS = Bridge().max_topics


def _flood(args: argparse.Namespace, folder: Path) -> list[str]:
    bridge = BridgeAlone(
        folder / "state",
        KILN_BRIDGE__PEER_BYTES=str(args.peer_mib * MIB),
        KILN_BRIDGE__ALL_BYTES=str(args.all_mib * MIB),
        KILN_BRIDGE__SPOOL_BYTES=str(1 << 40),
    )
    try:
        came = flood(bridge, folder, args.quiet, args.seconds, args.crowd, args.seed)
    finally:
        bridge.kill()
    print(came)
    return list(wrong(came, args.peer_mib * MIB, args.all_mib * MIB))


def _batches(args: argparse.Namespace, folder: Path) -> list[str]:
    settings = {
        "KILN_BRIDGE__PEER_BYTES": str(args.peer_mib * MIB),
        "KILN_BRIDGE__ALL_BYTES": str(args.all_mib * MIB),
    }
    came = whole(folder, args.quiet, args.seconds, args.crowd, args.seed, settings)
    print(came)
    return came.wrong()


def _names(args: argparse.Namespace, folder: Path) -> list[str]:
    bridge = BridgeAlone(folder / "state", KILN_BRIDGE__BAN=args.ban)
    try:
        came = names(bridge, folder, args.quiet, args.seconds, args.peers, args.topics, args.at_once)
    finally:
        bridge.kill()
    print(came)
    joined = came.machine.topics
    return [
        text
        for text, bad in (
            (f"{joined} topics joined", joined > _TOPICS + 1),
            (f"{came.machine.memory / MIB:.0f} MiB of memory", came.machine.memory > MEMORY),
            ("the five topics gave way", not came.few_kept),
        )
        if bad
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    for name, run, before in (("flood", _flood, 20), ("batches", _batches, 60)):
        one = kinds.add_parser(name)
        one.add_argument("--seconds", type=float, default=60)
        one.add_argument("--quiet", type=float, default=before, help="seconds without an attack, to compare with")
        one.add_argument("--crowd", type=int, default=500, help="peers that come and go")
        one.add_argument("--seed", type=int, default=1)
        one.add_argument("--peer-mib", type=int, default=256, help="bridge.peer_bytes, in MiB")
        one.add_argument("--all-mib", type=int, default=1024, help="bridge.all_bytes, in MiB")
        one.set_defaults(run=run)
    other = kinds.add_parser("topics")
    other.add_argument("--seconds", type=float, default=60)
    other.add_argument("--quiet", type=float, default=20, help="seconds without an attack, to compare with")
    other.add_argument("--peers", type=int, default=6)
    other.add_argument("--topics", type=int, default=30_000, help="of each peer")
    other.add_argument("--at-once", type=int, default=2500, help="topics in an RPC")
    other.add_argument("--ban", default="1h", help='bridge.ban; "0s": the bridge hangs up on nobody')
    other.set_defaults(run=_names)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        problems: list[str] = args.run(args, Path(folder))
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
