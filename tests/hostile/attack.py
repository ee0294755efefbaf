"""Peers that mean harm to a node, until stdin ends. Prints a line when the first has come, and at the end what they
did, as JSON.

    cd tests && python -m hostile.attack ADDRESS --seed N [--flood] [--giants] [--announcements] [--keys] [--large]
        [--crowd N] [--topics N --peers N --at-once N] [--silent N] [--bitswap KIND] [--models ignored|received]

Of a flood, each peer does one thing, as fast as it is read. The crowd comes and goes, and each of it keeps its key. The
others subscribe to so many topics and stay; the silent ones subscribe to one. When the node hangs up, a peer comes
again, with a new key.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import count
from random import Random

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import INetStream

from hostile.empty_promises import ANNOUNCEMENTS
from hostile.empty_promises import EVERY as ANNOUNCED_EVERY
from hostile.giants import EVERY, GIANTS
from hostile.keys import KEYS, shown_identities
from hostile.models import EVERY as MODELS_EVERY
from hostile.models import updates_of_new_models
from kiln.bridge.gossipsub.wire import encode
from kiln.bridge.libp2p.streams import get_swarm
from kiln.schemas.kafka.frames import MAX_RPC
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kit.large_messages import large_message, message_of_overhead
from kit.node_town import ENDS, TOPIC, call_at, message, raw_peer, subscription
from kit.raw_bitswap import HOSTILE, raw_bitswap_peer
from kit.strange_identity import disguise

LARGE_EVERY = 2.0  # s
STAY = 20.0  # s: of one of the crowd, in the mean, and away for as long
_DIALS = 8  # of the crowd, at once
_PAUSE = 0.01  # s between two RPCs of a flood
_NICE = 10  # what is measured is not how one machine shares its CPU among those who attack and who are attacked

Speech = Callable[[Random], bytes]


def large(rng: Random) -> bytes:
    """The largest RPC that is taken whole, of empty messages."""
    return b"\x12\x00" * (MAX_RPC // 2)


def subscribe(rng: Random, names: int = 2500) -> bytes:
    """Subscriptions to so many separator topics that nobody else is on."""
    some = rng.getrandbits(64)
    rpc = RPC()
    for number in range(names):
        rpc.subscriptions.add(subscribe=True, topicid=f"{TOPIC}/sep/model/k{some}{number}")
    return rpc.SerializeToString()


def ihave(rng: Random) -> bytes:
    """5,000 ids of nothing."""
    rpc = RPC()
    rpc.control.ihave.add(topicID=TOPIC, messageIDs=_ids(rng))
    return rpc.SerializeToString()


def iwant(rng: Random) -> bytes:
    """5,000 ids of nothing."""
    rpc = RPC()
    rpc.control.iwant.add(messageIDs=_ids(rng))
    return rpc.SerializeToString()


def garbage(rng: Random) -> bytes:
    """Bytes that are hardly ever an RPC."""
    return rng.randbytes(rng.randrange(1, 5000))


def forged(rng: Random) -> bytes:
    """A message with other data than its signature is for."""
    rpc = RPC.FromString(message(rng.getrandbits(31), _FORGER))
    rpc.publish[0].data = rng.randbytes(300)
    return rpc.SerializeToString()


SPEECHES: tuple[Speech, ...] = (large, subscribe, ihave, iwant, garbage, forged)
_FORGER = Ed25519PrivateKey.from_private_bytes(bytes(32))
_MODELS_AUTHOR = Ed25519PrivateKey.from_private_bytes(bytes(31) + b"\1")


def _ids(rng: Random) -> list[bytes]:
    drawn = rng.randbytes(46 * 5000)
    return [drawn[at : at + 46] for at in range(0, len(drawn), 46)]


class Done(msgspec.Struct):
    """Work of the attackers, by kind of attack: bytes that the node took from them, and how often one came."""

    said: dict[str, int]
    came: dict[str, int]


class _Attack:
    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._rng = Random(seed)
        self._dials = trio.CapacityLimiter(_DIALS)
        self._said: Counter[str] = Counter()
        self._came: Counter[str] = Counter()

    @property
    def done(self) -> Done:
        return Done(dict(sorted(self._said.items())), dict(sorted(self._came.items())))

    async def run(self, args: argparse.Namespace) -> None:
        async with trio.open_nursery() as nursery:
            speeches = (
                *((speech, _PAUSE) for speech in (*(SPEECHES if args.flood else ()), *(KEYS if args.keys else ()))),
                *((speech, EVERY) for speech in (GIANTS if args.giants else ())),
                *((speech, ANNOUNCED_EVERY) for speech in (ANNOUNCEMENTS if args.announcements else ())),
            )
            for speech, every in speeches:
                talk = partial(self._flood, speech, speech.__name__, every=every)
                nursery.start_soon(self._again, speech.__name__, talk, 0.0)
            for name, pause in (("reads nothing", float("inf")), ("reads slowly", 1.0)) if args.flood else ():
                nursery.start_soon(self._again, name, partial(self._flood, iwant, name), pause)
            if args.keys:
                nursery.start_soon(self._handshakes)
            if args.models:
                talk = partial(self._models, args.models == "received")
                nursery.start_soon(self._again, "updates of new models", talk, 0.0)
            if args.large:
                nursery.start_soon(self._again, "large messages", self._large, 0.0)
            for number in range(args.crowd):
                nursery.start_soon(self._crowd, Random(self._rng.getrandbits(64)), args.crowd, number)
            if args.bitswap:
                nursery.start_soon(self._bitswap, args.bitswap)
            for _ in range(args.silent):
                nursery.start_soon(self._again, "silent", self._stay, 0.0, self._dials)
            for _ in range(args.peers):
                nursery.start_soon(self._again, "names", partial(self._names, args.topics, args.at_once), 0.0)

    async def _flood(self, speech: Speech, name: str, stream: INetStream, every: float = _PAUSE) -> None:
        while True:
            payload = speech(self._rng)
            await stream.write(encode(payload))
            self._said[name] += len(payload)
            await trio.sleep(every)  # the pace of the attack

    async def _large(self, stream: INetStream) -> None:
        """A message of more than go accepts in an RPC, every other one of those with much beside its data."""
        for number in count(self._rng.getrandbits(32)):
            payload = (large_message if number % 2 else message_of_overhead)(number)
            await stream.write(encode(payload))
            self._said["large messages"] += len(payload)
            await trio.sleep(LARGE_EVERY)  # the pace of the attack

    async def _models(self, subscribe: bool, stream: INetStream) -> None:
        """Updates of one author, each with a new model."""
        began = trio.current_time()
        for number in count():
            payload = updates_of_new_models(self._rng, _MODELS_AUTHOR, subscribe=subscribe)
            await stream.write(encode(payload))
            self._said["updates of new models"] += len(payload)
            await trio.sleep_until(began + number * MODELS_EVERY)  # the pace of the attack

    def _arrive(self, name: str) -> None:
        if not self._came:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._came[name] += 1

    async def _handshakes(self) -> None:
        """Connections whose handshake shows a key that is expensive to read."""
        for shown in shown_identities():
            async with raw_peer() as host:
                disguise(host, shown)
                with suppress(*ENDS, trio.TooSlowError), trio.fail_after(20):
                    await call_at(host, self._address)
            self._arrive("strange handshakes")
            await trio.sleep(0.2)  # the pace of the attack

    async def _names(self, topics: int, at_once: int, stream: INetStream) -> None:
        """Subscribes to so many, and stays until the node hangs up."""
        for start in range(0, topics, at_once):
            payload = subscribe(self._rng, min(at_once, topics - start))
            await stream.write(encode(payload))
            self._said["names"] += len(payload)
        await stream.read(1)

    async def _bitswap(self, kind: str) -> None:
        """A hostile peer of bitswap, which comes again when the node hangs up."""
        while True:
            async with raw_bitswap_peer(self._address) as peer:
                self._arrive(kind)
                with suppress(*ENDS, trio.TooSlowError):
                    await HOSTILE[kind](peer)
            await trio.sleep(0.05)  # the pace of the attack

    async def _stay(self, stream: INetStream) -> None:
        """Says nothing until the node hangs up."""
        await stream.read(1)

    async def _again(
        self,
        name: str,
        talk: Callable[[INetStream], Awaitable[None]],
        pause: float,
        dials: trio.CapacityLimiter | None = None,
    ) -> None:
        """Peer after peer, each with a new key, each for as long as the node bears it."""
        alone = dials or trio.CapacityLimiter(1)
        while True:
            await self._come(name, Ed25519PrivateKey.from_private_bytes(self._rng.randbytes(32)), talk, pause, alone)
            await trio.sleep(0.05)  # the pace of the attack

    async def _crowd(self, rng: Random, crowd: int, number: int) -> None:
        """One that comes, says a little, stays a while, goes, and comes again."""
        key = Ed25519PrivateKey.from_private_bytes(rng.randbytes(32))
        await trio.sleep(rng.random() * STAY * number / crowd)  # the pace of the attack

        async def talk(stream: INetStream) -> None:
            with trio.move_on_after(rng.expovariate(1 / STAY)):
                if rng.random() < 0.5:
                    await stream.write(encode(garbage(rng)))
                await trio.sleep_forever()

        while True:
            await self._come("crowd", key, talk, 0.0, self._dials)
            await trio.sleep(rng.expovariate(1 / STAY))  # the pace of the attack

    async def _come(
        self,
        name: str,
        key: Ed25519PrivateKey,
        talk: Callable[[INetStream], Awaitable[None]],
        pause: float,
        dials: trio.CapacityLimiter,
    ) -> None:
        async with raw_peer(pause=pause, key=key) as host:
            with suppress(*ENDS, trio.TooSlowError):
                async with dials:
                    with trio.fail_after(20):
                        stream = await call_at(host, self._address, "/meshsub/1.2.0")
                self._arrive(name)
                await stream.write(encode(subscription()))
                await talk(stream)
            for conn in get_swarm(host).get_connections():
                with suppress(*ENDS):
                    await conn.close()


async def _until_stdin_ends(attack: _Attack, args: argparse.Namespace) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attack.run, args)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flood", action="store_true", help="floods of every kind, a peer for each")
    parser.add_argument("--giants", action="store_true", help="RPCs with giant fields, a peer for each kind")
    parser.add_argument("--announcements", action="store_true", help="batches that nobody has, a peer for each kind")
    parser.add_argument("--keys", action="store_true", help="expensive keys in every field, a peer for each")
    parser.add_argument("--large", action="store_true", help="a message of more than go accepts, each 2 s")
    parser.add_argument(
        "--models",
        choices=("ignored", "received"),
        help="400 updates/s, each with a new model; received: the peer is on the topics of these models",
    )
    parser.add_argument("--crowd", type=int, default=0, help="peers that come and go")
    parser.add_argument("--peers", type=int, default=0, help="peers that subscribe")
    parser.add_argument("--bitswap", choices=HOSTILE, help="a hostile peer of bitswap")
    parser.add_argument("--silent", type=int, default=0, help="peers that subscribe to the topic and say nothing")
    parser.add_argument("--topics", type=int, default=0, help="to so many topics, each")
    parser.add_argument("--at-once", type=int, default=2500, help="in one RPC")
    args = parser.parse_args()
    os.nice(_NICE)
    attack = _Attack(args.address, args.seed)
    trio.run(_until_stdin_ends, attack, args)
    sys.stdout.write(msgspec.json.encode(attack.done).decode())


if __name__ == "__main__":
    main()
