"""How Kiln stands, found out without Spark: the broker's topics, the queries' checkpoints, the lake's tables.

A query's progress is read from the checkpoint that Spark keeps: `offsets/N` says up to where micro-batch N reads,
`commits/N` that it was done. So it is right while Kiln runs, and after it stopped or crashed.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from kiln.conf.process.bridge_status import BridgeStatus
from kiln.conf.process.bridge_status import read_status as read_bridge_status
from kiln.conf.process.errors import SettingsError
from kiln.conf.process.kafka_errors import describe_kafka_error
from kiln.conf.process.kafka_topics import TopicIdentity, describe_replaced, describe_topics, replaced_topics
from kiln.conf.process.location import Location
from kiln.conf.settings.model import Kafka, Settings
from kiln.deploy.ops.bridges import BridgeMember, list_live_bridges
from kiln.deploy.ops.clocks import ClockStatus, find_trailing_clocks
from kiln.pipelines.decode.breaker_state import BreakerState, read_breaker_state
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.pipelines.runtime.topics import read_noted
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.topics import lag
from kiln.schemas.queries import QUERIES

Offsets = dict[str, dict[int, int]]
"""topic -> partition -> offset of the next record"""


@dataclass(frozen=True)
class CheckpointProgress:
    """Where a query is: its newest finished micro-batch (None: none yet) and the offsets up to which that one read."""

    batch: int | None
    committed_at: datetime | None
    offsets: Offsets


@dataclass(frozen=True)
class TopicStatus:
    """A topic's offsets by partition: the oldest record still held, and the next one to come."""

    name: str
    begin: dict[int, int]
    end: dict[int, int]
    id: str = ""
    """Kafka's; empty if the broker does not tell"""

    @property
    def records(self) -> int:
        """How many offsets lie between the two."""
        return sum(end - self.begin.get(partition, 0) for partition, end in self.end.items())


@dataclass(frozen=True)
class BrokerStatus:
    """Whether the broker answers, and what it has; `problem` says why not."""

    servers: str
    reachable: bool
    problem: str
    topics: tuple[TopicStatus, ...]


@dataclass(frozen=True)
class QueryStatus:
    """A query: `lag` is how many records it is behind (None: the broker does not say, or nothing was committed)."""

    name: str
    batch: int | None
    committed_at: datetime | None
    offsets: Offsets
    lag: int | None
    problem: str


@dataclass(frozen=True)
class TableStatus:
    """A Delta table, from its log alone. `rows` is None where a file has no count of its rows."""

    name: str
    rows: int | None
    files: int
    bytes: int
    version: int | None
    committed_at: datetime | None
    problem: str


@dataclass(frozen=True)
class WireSavings:
    """What topics by index took on the wire one way, and what their names would have, in bytes."""

    name: str
    """a topic, or a peer id"""
    direction: str
    references: int
    as_names: int
    as_indices: int


@dataclass(frozen=True)
class TopicTableSavings:
    """What the bridge said last of its topic tables; `by_peer`: of the peers that are connected, over all topics."""

    said_at: datetime
    by_topic: tuple[WireSavings, ...]
    by_peer: tuple[WireSavings, ...]


@dataclass(frozen=True)
class KilnStatus:
    """All of it; `savings` is None where no topic went by index, `clocks` has those that trail, `trip` is None where
    the breaker has not tripped, or its query has started since. `bridges`: those of the network that live, on whatever
    machine."""

    state: str
    broker: BrokerStatus
    queries: tuple[QueryStatus, ...]
    tables: tuple[TableStatus, ...]
    savings: TopicTableSavings | None = None
    clocks: tuple[ClockStatus, ...] = ()
    trip: BreakerState | None = None
    bridges: tuple[BridgeMember, ...] = ()


# ---------------------------------------------------------------- checkpoints


class CheckpointError(ValueError):
    """A checkpoint file is not what Spark writes; the message names it."""


def parse_offsets(text: str) -> Offsets:
    """Offsets out of a file of Spark's offset log, version 1: header, metadata, then one line a source ("-": nothing).

    CheckpointError: another version, or not JSON.
    """
    header, *lines = text.splitlines() or [""]
    if header != "v1":
        raise CheckpointError(f"version {header!r} of Spark's offset log is not known here, only 'v1' is")
    merged: Offsets = {}
    for line in lines[1:]:
        if line.strip() in ("", "-"):
            continue
        try:
            source = json.loads(line)
            for topic, partitions in source.items():
                into = merged.setdefault(topic, {})
                into |= {int(partition): int(offset) for partition, offset in partitions.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"not Kafka offsets: {line[:80]}") from error
    return merged


def read_checkpoint(folder: Location) -> CheckpointProgress:
    """A query's progress. CheckpointError: a file cannot be understood; the message names it."""
    done = _list_micro_batches(folder / "commits")
    both = done.keys() & _list_micro_batches(folder / "offsets").keys()
    if not both:
        return CheckpointProgress(None, None, {})
    newest = max(both)
    path = folder / "offsets" / str(newest)
    try:
        offsets = parse_offsets(path.read().decode())
        committed = done[newest]
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except FileNotFoundError:
        # Spark removes old ones while it runs: what is newest now is newer than what was listed
        return read_checkpoint(folder)
    return CheckpointProgress(newest, datetime.fromtimestamp(committed / 1e6, UTC), offsets)


def _list_micro_batches(folder: Location) -> dict[int, int]:
    """Micro-batches, and when Spark wrote the file of each, µs."""
    return {int(found.name): found.modified for found in folder.files() if found.name.isdigit()}


def compute_lag(committed: Offsets, topics: Mapping[str, TopicStatus]) -> int | None:
    """Records between what was committed and the end of the topics; None where a topic is not known.

    A partition not yet read counts from its oldest record; records that retention removed are not counted.
    """
    if not committed or not committed.keys() <= topics.keys():
        return None
    read = {name: topics[name] for name in committed}
    return lag(
        committed,
        {name: topic.end for name, topic in read.items()},
        {name: topic.begin for name, topic in read.items()},
    )


def read_query_status(name: str, folder: Location, topics: Mapping[str, TopicStatus]) -> QueryStatus:
    """One query's progress and lag."""
    try:
        checkpoint, noted = read_checkpoint(folder), read_noted(folder)
    except (CheckpointError, OSError, msgspec.DecodeError) as error:
        return QueryStatus(name, None, None, {}, None, str(error))
    there = {topic: TopicIdentity(each.id, len(each.end)) for topic, each in topics.items()}
    replaced = replaced_topics(noted, there)
    problem = "; ".join(describe_replaced(topic, noted[topic], there[topic].id) for topic in replaced)
    behind = None if problem else compute_lag(checkpoint.offsets, topics)
    return QueryStatus(name, checkpoint.batch, checkpoint.committed_at, checkpoint.offsets, behind, problem)


# ---------------------------------------------------------------- broker


def read_broker_status(kafka: Kafka, patience: float = 3.0) -> BrokerStatus:
    """Ask the broker for Kiln's topics; waits at most about `patience` seconds for it to answer."""
    # kafka-python goes on trying for long where nothing listens, so look first
    if not any(is_listening(server, patience) for server in kafka.server_list()):
        return BrokerStatus(kafka.servers, False, "nothing listens there", ())
    from kafka.errors import KafkaError

    from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
    from kiln.conf.process.kafka_clients import open_client

    millis = int(patience * 1000)
    try:
        options = kafka.client_options()
    except SettingsError as error:  # the broker runs, and the user may not read the password
        return BrokerStatus(kafka.servers, False, str(error), ())
    try:
        consumer = open_client(
            KafkaConsumer,
            **options,
            bootstrap_timeout_ms=millis,
            request_timeout_ms=max(millis, 1000),
            allow_auto_create_topics=False,
            enable_auto_commit=False,
        )
    except (KafkaError, OSError, ValueError) as error:
        return BrokerStatus(kafka.servers, False, describe_kafka_error(error, options, patience), ())
    try:
        names = sorted(name for name in consumer.topics() if name.startswith(kafka.prefix) and name != kafka.prefix)
        with open_client(KafkaAdminClient, **options, bootstrap_timeout_ms=millis) as admin:
            identities = describe_topics(admin, names) if names else {}
        topics = []
        for name in names:
            partitions = [TopicPartition(name, number) for number in consumer.partitions_for_topic(name) or ()]
            begin, end = consumer.beginning_offsets(partitions), consumer.end_offsets(partitions)
            topics.append(
                TopicStatus(
                    name,
                    {place.partition: offset for place, offset in sorted(begin.items())},
                    {place.partition: offset for place, offset in sorted(end.items())},
                    identities[name].id if name in identities else "",
                )
            )
        return BrokerStatus(kafka.servers, True, "", tuple(topics))
    except (KafkaError, OSError) as error:
        return BrokerStatus(kafka.servers, False, describe_kafka_error(error, options), ())
    finally:
        consumer.close()


def is_listening(server: str, patience: float) -> bool:
    """Whether something accepts connections at `host:port`."""
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=patience):
            return True
    except (OSError, ValueError):
        return False


# ---------------------------------------------------------------- tables


def read_table_status(lake: Lake, name: str) -> TableStatus:
    """A table's size and newest commit, from its log; no data file is opened."""
    try:
        table = lake.open(name)
        adds = table.get_add_actions(flatten=True)
        counts = adds["num_records"].to_pylist() if "num_records" in adds.schema.names else [None] * len(adds)
        sizes = adds["size_bytes"].to_pylist()
        newest = table.history(1)
    except LakeError as error:
        return TableStatus(name, None, 0, 0, None, None, str(error))
    rows = None if any(count is None for count in counts) else sum(counts)
    stamp = newest[0].get("timestamp") if newest else None
    committed = datetime.fromtimestamp(stamp / 1000, UTC) if isinstance(stamp, int) else None
    return TableStatus(name, rows, len(sizes), sum(sizes), table.version(), committed, "")


def read_lake_status(lake: Lake) -> tuple[TableStatus, ...]:
    """Every table of a lake, in the order docs/design names them."""
    order = {name: place for place, name in enumerate(TABLES)}
    names = sorted(lake.tables(), key=lambda name: (order.get(name, len(order)), name))
    return tuple(read_table_status(lake, name) for name in names)


# ---------------------------------------------------------------- topics by index


def summarize_savings(bridge: BridgeStatus | None) -> TopicTableSavings | None:
    """What a bridge's status says of topics by index."""
    if bridge is None or not bridge.savings:
        return None
    by_topic = tuple(
        WireSavings(each.topic, each.direction, each.references, each.as_names, each.as_indices)
        for each in bridge.savings
    )
    by_peer: dict[tuple[str, str], WireSavings] = {}
    for peer in bridge.peers:
        for each in peer.savings:
            before = by_peer.get((peer.peer, each.direction), WireSavings(peer.peer, each.direction, 0, 0, 0))
            by_peer[peer.peer, each.direction] = WireSavings(
                peer.peer,
                each.direction,
                before.references + each.references,
                before.as_names + each.as_names,
                before.as_indices + each.as_indices,
            )
    return TopicTableSavings(datetime.fromtimestamp(bridge.at, UTC), by_topic, tuple(by_peer.values()))


# ---------------------------------------------------------------- together


def read_status(settings: Settings, patience: float = 3.0) -> KilnStatus:
    """How Kiln stands now."""
    broker = read_broker_status(settings.broker, patience)
    topics = {topic.name: topic for topic in broker.topics}
    checkpoints = settings.checkpoints_root
    names = [*QUERIES, *_list_other_checkpoints(checkpoints)]
    queries = tuple(read_query_status(name, checkpoints / name, topics) for name in names)
    savings = summarize_savings(read_bridge_status(settings.bridge_dir / "status.json"))
    updates = topics.get(settings.kafka.topic("updates"))
    clocks = find_trailing_clocks(settings, updates.end if updates else ())
    bridges = list_live_bridges(settings.broker, settings.network.name, patience) if broker.reachable else ()
    tables = read_lake_status(Lake.from_location(settings.lake_root))
    trip = read_breaker_state(settings.state)
    return KilnStatus(str(settings.state), broker, queries, tables, savings, clocks, trip, bridges)


def _list_other_checkpoints(folder: Location) -> Sequence[str]:
    return sorted(set(folder.folders()) - set(QUERIES))
