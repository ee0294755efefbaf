"""Hostile peers for as long as you like, and the figures: `make hostile ARGS="flood --seconds 600"`.

flood: floods of every kind and a crowd that comes and goes, beside honest traffic. topics: peers that are each on
thousands of topics. batches: such a flood beside a whole Kiln, and how late its batches come. giants: RPCs and records
with giant fields beside a whole Kiln, likewise. models: valid updates of one author, each with a new model, beside a
whole Kiln. keys: what an RPC costs by what is in it, and expensive keys in every field beside a whole Kiln. large:
messages of more than go accepts, to a bridge with Kubo and go-libp2p-pubsub behind it, and to a whole Kiln. kubos:
nobody hostile, three Kubos that fetch each batch for an hour. silent: peers that say nothing hold all slots of the
bridge, and honest ones come meanwhile. bitswap: one hostile peer of bitswap after another, beside gossip and fetching.
announcements: strangers announce batches that nobody has, beside honest batches and geneses that the bridge fetches.
soak: nobody hostile, 13 foreign peers for 20 minutes, jitter on relays, and a `kill -9` of the bridge. Exit code 0: all
that is promised held. 1: something did not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from hostile.announcements import announcements
from hostile.bitswap import bitswap
from hostile.costs import dear, measure, rpcs, slowness, table
from hostile.giants import giants_in_the_log
from hostile.kubos import kubos
from hostile.large import large_messages
from hostile.scene import MEMORY, MIB, flood, names, wrong
from hostile.silent import silent_peers
from hostile.soak import soak
from hostile.whole import whole
from kiln.conf.settings.model import Bridge
from kit.bridge_alone import BridgeAlone
from kit.raw_bitswap import HOSTILE

_TOPICS = Bridge().max_topics


def _flood(args: argparse.Namespace, folder: Path) -> list[str]:
    bridge = BridgeAlone(
        folder / "state",
        KILN_BRIDGE__MAX_PEER_BYTES_PER_HOUR=str(args.peer_mib * MIB),
        KILN_BRIDGE__MAX_BYTES_PER_HOUR=str(args.all_mib * MIB),
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
        "KILN_BRIDGE__MAX_PEER_BYTES_PER_HOUR": str(args.peer_mib * MIB),
        "KILN_BRIDGE__MAX_BYTES_PER_HOUR": str(args.all_mib * MIB),
    }
    came = whole(folder, args.quiet, args.seconds, args.seed, settings, ("--flood", "--crowd", args.crowd))
    print(came)
    return came.wrong()


def _giants(args: argparse.Namespace, folder: Path) -> list[str]:
    came = whole(folder, args.quiet, args.seconds, args.seed, {}, ("--giants",), giants_in_the_log)
    print(came)
    return came.wrong()


def _models(args: argparse.Namespace, folder: Path) -> list[str]:
    kind = "received" if args.received else "ignored"
    came = whole(folder, args.quiet, args.seconds, args.seed, {}, ("--models", kind))
    print(came)
    return came.wrong()


def _large(args: argparse.Namespace, folder: Path) -> list[str]:
    heard = large_messages(folder / "alone", args.messages, args.seed)
    print(heard)
    if not args.seconds:
        return heard.wrong()
    came = whole(folder / "whole", args.quiet, args.seconds, args.seed, {}, ("--large",))
    print(came)
    return heard.wrong() + came.wrong()


def _keys(args: argparse.Namespace, folder: Path) -> list[str]:
    before = slowness()
    costs = [measure(what, rpc) for what, rpc in rpcs()]
    slow = max(before, slowness())
    print(table(costs), f"all of this {slow:.1f} times slower than with nothing else to do", sep="\n\n")
    if not args.seconds:
        return dear(costs, slow)
    came = whole(folder, args.quiet, args.seconds, args.seed, {}, ("--keys",))
    print(came)
    return dear(costs, slow) + came.wrong()


def _kubos(args: argparse.Namespace, folder: Path) -> list[str]:
    came = kubos(folder, args.seconds, args.rate)
    print(came)
    return came.wrong()


def _soak(args: argparse.Namespace, folder: Path) -> list[str]:
    came = soak(folder, args.seconds, args.rate, args.tables)
    print(came)
    return came.wrong()


def _bitswap(args: argparse.Namespace, folder: Path) -> list[str]:
    bridge = BridgeAlone(folder / "state")
    try:
        came = bitswap(bridge, folder, args.quiet, args.seconds, args.kinds)
    finally:
        bridge.kill()
    print(came)
    return came.wrong()


def _announcements(args: argparse.Namespace, folder: Path) -> list[str]:
    came = announcements(folder, args.quiet, args.seconds, args.seed)
    print(came)
    return came.wrong()


def _silent(args: argparse.Namespace, folder: Path) -> list[str]:
    bridge = BridgeAlone(folder / "state")
    try:
        came = silent_peers(bridge, folder, args.quiet, args.seconds, args.peers, args.newcomers)
    finally:
        bridge.kill()
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
        one.add_argument("--peer-mib", type=int, default=256, help="bridge.max_peer_bytes_per_hour, in MiB")
        one.add_argument("--all-mib", type=int, default=1024, help="bridge.max_bytes_per_hour, in MiB")
        one.set_defaults(run=run)
    giants = kinds.add_parser("giants")
    giants.add_argument("--seconds", type=float, default=120)
    giants.add_argument("--quiet", type=float, default=60, help="seconds without an attack, to compare with")
    giants.add_argument("--seed", type=int, default=1)
    giants.set_defaults(run=_giants)
    keys = kinds.add_parser("keys")
    keys.add_argument("--seconds", type=float, default=120, help="of attack on a whole Kiln; 0: no whole Kiln")
    keys.add_argument("--quiet", type=float, default=60, help="seconds without an attack, to compare with")
    keys.add_argument("--seed", type=int, default=1)
    keys.set_defaults(run=_keys)
    models = kinds.add_parser("models")
    models.add_argument("--seconds", type=float, default=120)
    models.add_argument("--quiet", type=float, default=45, help="seconds without an attack, before and after")
    models.add_argument("--seed", type=int, default=1)
    models.add_argument("--received", action="store_true", help="the stranger is on the topics of its models")
    models.set_defaults(run=_models)
    large = kinds.add_parser("large")
    large.add_argument("--messages", type=int, default=150, help="honest ones that go peers behind a bridge receive")
    large.add_argument("--seconds", type=float, default=120, help="of attack on a whole Kiln; 0: no whole Kiln")
    large.add_argument("--quiet", type=float, default=60, help="seconds without an attack, to compare with")
    large.add_argument("--seed", type=int, default=1)
    large.set_defaults(run=_large)
    hour = kinds.add_parser("kubos")
    hour.add_argument("--seconds", type=float, default=3600)
    hour.add_argument("--rate", type=float, default=50, help="messages per second, of all three Kubos")
    hour.set_defaults(run=_kubos)
    blocks = kinds.add_parser("bitswap")
    blocks.add_argument("--seconds", type=float, default=60, help="of each kind")
    blocks.add_argument("--quiet", type=float, default=20, help="seconds without an attack, to compare with")
    blocks.add_argument("--kinds", nargs="+", choices=HOSTILE, default=list(HOSTILE))
    blocks.set_defaults(run=_bitswap)
    promises = kinds.add_parser("announcements")
    promises.add_argument("--seconds", type=float, default=120)
    promises.add_argument("--quiet", type=float, default=30, help="seconds without an attack, to compare with")
    promises.add_argument("--seed", type=int, default=1)
    promises.set_defaults(run=_announcements)
    long = kinds.add_parser("soak")
    long.add_argument("--seconds", type=float, default=1200)
    long.add_argument("--rate", type=float, default=25, help="messages per second, of all peers")
    long.add_argument("--tables", action="store_true", help="run the query archive over the frames at the end")
    long.set_defaults(run=_soak)
    silent = kinds.add_parser("silent")
    silent.add_argument("--seconds", type=float, default=60)
    silent.add_argument("--quiet", type=float, default=20, help="seconds without an attack, to compare with")
    silent.add_argument("--peers", type=int, default=300)
    silent.add_argument("--newcomers", type=int, default=20, help="honest peers that come during the attack")
    silent.set_defaults(run=_silent)
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
