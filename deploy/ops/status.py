"""Status of Kiln without Spark: the broker's topics, the queries' checkpoints, the lake's tables.

The progress of a query comes from its checkpoint: `offsets/N` holds the end offsets of micro-batch N, and `commits/N`
exists once that micro-batch is done. So it is correct even after Kiln stopped or crashed.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec
from deltalake.exceptions import DeltaError

from kiln.conf.process.bridge_status import BridgeStatus
from kiln.conf.process.bridge_status import read_status as read_bridge_status
from kiln.conf.process.errors import SettingsError
from kiln.conf.process.extras import format_install_command
from kiln.conf.process.kafka_errors import describe_kafka_error
from kiln.conf.process.kafka_topics import TopicIdentity, describe_replaced_topic, describe_topics, find_replaced_topics
from kiln.conf.process.location import Location
from kiln.conf.settings.model import Kafka, Settings
from kiln.deploy.ops.bridges import BridgeMember, list_live_bridges
from kiln.deploy.ops.clocks import ClockStatus, find_trailing_clocks
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.pipelines.delta.reading_faults import list_reader_features
from kiln.pipelines.native.library import find_engine
from kiln.pipelines.runtime.checkpoint import Checkpoint, CheckpointError
from kiln.pipelines.runtime.topics import read_topic_ids
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.topics import Offsets, count_unread
from kiln.schemas.queries import CERAMIC_QUERIES, QUERIES


@dataclass(frozen=True)
class CheckpointProgress:
    """Newest finished micro-batch of a query, `None` before the first, and the offsets where that micro-batch ends."""

    batch: int | None
    committed_at: datetime | None
    offsets: Offsets


@dataclass(frozen=True)
class TopicStatus:
    """Offsets of the oldest record that the broker holds and of the next record, for each partition of a topic."""

    name: str
    begin: dict[int, int]
    end: dict[int, int]
    id: str = ""
    """Kafka's topic id; empty if the broker does not report one"""

    @property
    def records(self) -> int:
        """Number of offsets between beginning and end."""
        return sum(end - self.begin.get(partition, 0) for partition, end in self.end.items())


@dataclass(frozen=True)
class BrokerStatus:
    """State and topics of the broker; `problem` is empty if it answers."""

    servers: str
    reachable: bool
    problem: str
    topics: tuple[TopicStatus, ...]


@dataclass(frozen=True)
class QueryStatus:
    """Progress of a query; `lag` in records, `None` if the broker does not answer or nothing was committed."""

    name: str
    batch: int | None
    committed_at: datetime | None
    offsets: Offsets
    lag: int | None
    problem: str


@dataclass(frozen=True)
class TableStatus:
    """State of a Delta table, read only from its log; `rows` is `None` if a file has no row count, or the table may
    have deletion vectors, which mark rows of a file as removed."""

    name: str
    rows: int | None
    files: int
    bytes: int
    version: int | None
    committed_at: datetime | None
    problem: str


@dataclass(frozen=True)
class WireSavings:
    """Topic references sent or received by index: the bytes that they took on the wire, and the bytes of the names that
    they replace."""

    name: str
    """a topic, or a peer id"""
    direction: str
    references: int
    as_names: int
    as_indices: int


@dataclass(frozen=True)
class TopicTableSavings:
    """Savings by topic tables from the bridge's newest status; `by_peer` sums the topics of each connected peer."""

    said_at: datetime
    by_topic: tuple[WireSavings, ...]
    by_peer: tuple[WireSavings, ...]


@dataclass(frozen=True)
class KilnStatus:
    """Status of Kiln.

    Attributes:
        savings: `None` if no topic was referenced by index.
        clocks: Clocks that are behind stored times.
        bridges: Live bridges of the network, on any machine.
    """

    state: str
    broker: BrokerStatus
    queries: tuple[QueryStatus, ...]
    tables: tuple[TableStatus, ...]
    savings: TopicTableSavings | None = None
    clocks: tuple[ClockStatus, ...] = ()
    bridges: tuple[BridgeMember, ...] = ()
    engine: str = ""
    """engine that decodes frames: the native core, or Python with the reason"""


# ---------------------------------------------------------------- checkpoints


def read_checkpoint(folder: Location) -> CheckpointProgress:
    """Read the progress of a query.

    Raises:
        CheckpointError: A file cannot be parsed; the message names it.
    """
    commits = _list_micro_batches(folder / "commits")
    finished = commits.keys() & _list_micro_batches(folder / "offsets").keys()
    if not finished:
        return CheckpointProgress(None, None, {})
    newest = max(finished)
    try:
        offsets = Checkpoint(folder).ends(newest)
    except FileNotFoundError:
        # Spark removes old files while it runs, so a newer one exists by now
        return read_checkpoint(folder)
    return CheckpointProgress(newest, datetime.fromtimestamp(commits[newest] / 1e6, UTC), offsets)


def _list_micro_batches(folder: Location) -> dict[int, int]:
    """List micro-batches with the time when Spark wrote the file of each, µs."""
    return {int(file.name): file.modified for file in folder.files() if file.name.isdigit()}


def compute_lag(committed: Offsets, topics: Mapping[str, TopicStatus]) -> int | None:
    """Count the records between the committed offsets and the end of the topics.

    A partition not yet read counts from its oldest record; records that retention removed are not counted.

    Returns:
        The number of records, or `None` if a topic is not known.
    """
    if not committed or not committed.keys() <= topics.keys():
        return None
    read = {name: topics[name] for name in committed}
    return count_unread(
        committed,
        {name: topic.end for name, topic in read.items()},
        {name: topic.begin for name, topic in read.items()},
    )


def read_query_status(name: str, folder: Location, topics: Mapping[str, TopicStatus]) -> QueryStatus:
    """Read the progress of a query and compute its lag."""
    try:
        checkpoint, noted = read_checkpoint(folder), read_topic_ids(folder)
    except (CheckpointError, OSError, msgspec.DecodeError) as error:
        return QueryStatus(name, None, None, {}, None, str(error))
    identities = {topic: TopicIdentity(status.id, len(status.end)) for topic, status in topics.items()}
    replaced = find_replaced_topics(noted, identities)
    problem = "; ".join(describe_replaced_topic(topic, noted[topic], identities[topic].id) for topic in replaced)
    topic_lag = None if problem else compute_lag(checkpoint.offsets, topics)
    return QueryStatus(name, checkpoint.batch, checkpoint.committed_at, checkpoint.offsets, topic_lag, problem)


# ---------------------------------------------------------------- broker


def read_broker_status(kafka: Kafka, patience: float = 3.0) -> BrokerStatus:
    """Read Kiln's topics from the broker.

    Args:
        kafka: Settings of the broker.
        patience: Seconds to wait for an answer, approximately.
    """
    # kafka-python keeps retrying a closed port for long
    if not any(is_listening(server, patience) for server in kafka.server_list()):
        return BrokerStatus(kafka.servers, False, "nothing listens there", ())
    try:
        from kafka.errors import KafkaError

        from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
    except ModuleNotFoundError:
        problem = f"kafka-python, which queries the broker, is not installed: {format_install_command('bridge')}"
        return BrokerStatus(kafka.servers, False, problem, ())
    from kiln.conf.process.kafka_clients import open_client

    millis = int(patience * 1000)
    try:
        options = kafka.client_options()
    except SettingsError as error:  # the broker runs, and this user cannot read the password
        return BrokerStatus(kafka.servers, False, str(error), ())
    try:
        consumer = open_client(
            KafkaConsumer,
            **options,
            bootstrap_timeout_ms=millis,
            request_timeout_ms=max(millis, 1000),
            allow_auto_create_topics=False,
            enable_auto_commit=False,
            isolation_level="read_committed",
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
                    {partition.partition: offset for partition, offset in sorted(begin.items())},
                    {partition.partition: offset for partition, offset in sorted(end.items())},
                    identities[name].id if name in identities else "",
                )
            )
        return BrokerStatus(kafka.servers, True, "", tuple(topics))
    except (KafkaError, OSError) as error:
        return BrokerStatus(kafka.servers, False, describe_kafka_error(error, options), ())
    finally:
        consumer.close()


def is_listening(server: str, patience: float) -> bool:
    """Return true if `host:port` accepts connections."""
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=patience):
            return True
    except (OSError, ValueError):
        return False


# ---------------------------------------------------------------- tables


def read_table_status(lake: Lake, name: str) -> TableStatus:
    """Read a table's size and newest commit from its log, without opening a data file."""
    try:
        table = lake.open(name)
        adds = table.get_add_actions(flatten=True)
        counts = adds["num_records"].to_pylist() if "num_records" in adds.schema.names else [None] * len(adds)
        sizes = adds["size_bytes"].to_pylist()
        newest = table.history(1)
        has_deletion_vectors = "deletionVectors" in list_reader_features(table)
    except (LakeError, DeltaError) as error:  # Kiln's own, or such as of a feature that delta-rs does not have
        return TableStatus(name, None, 0, 0, None, None, str(error))
    rows = None if has_deletion_vectors or any(count is None for count in counts) else sum(counts)
    stamp = newest[0].get("timestamp") if newest else None
    committed = datetime.fromtimestamp(stamp / 1000, UTC) if isinstance(stamp, int) else None
    return TableStatus(name, rows, len(sizes), sum(sizes), table.version(), committed, "")


def read_lake_status(lake: Lake) -> tuple[TableStatus, ...]:
    """Read the status of every table of a lake, in the order of `TABLES`."""
    order = {name: number for number, name in enumerate(TABLES)}
    names = sorted(lake.tables(), key=lambda name: (order.get(name, len(order)), name))
    return tuple(read_table_status(lake, name) for name in names)


# ---------------------------------------------------------------- topics by index


def summarize_savings(bridge: BridgeStatus | None) -> TopicTableSavings | None:
    """Sum up the savings by topic tables in a bridge's status."""
    if bridge is None or not bridge.savings:
        return None
    by_topic = tuple(
        WireSavings(saving.topic, saving.direction, saving.references, saving.as_names, saving.as_indices)
        for saving in bridge.savings
    )
    by_peer: dict[tuple[str, str], WireSavings] = {}
    for peer in bridge.peers:
        for saving in peer.savings:
            before = by_peer.get((peer.peer, saving.direction), WireSavings(peer.peer, saving.direction, 0, 0, 0))
            by_peer[peer.peer, saving.direction] = replace(
                before,
                references=before.references + saving.references,
                as_names=before.as_names + saving.as_names,
                as_indices=before.as_indices + saving.as_indices,
            )
    return TopicTableSavings(datetime.fromtimestamp(bridge.at, UTC), by_topic, tuple(by_peer.values()))


# ---------------------------------------------------------------- together


def read_status(settings: Settings) -> KilnStatus:
    """Read the status of Kiln."""
    broker = read_broker_status(settings.broker)
    topics = {topic.name: topic for topic in broker.topics}
    checkpoints = settings.checkpoints_root
    running = [name for name in QUERIES if settings.is_ceramic or name not in CERAMIC_QUERIES]
    names = [*running, *sorted(set(checkpoints.folders()) - set(running))]
    queries = tuple(read_query_status(name, checkpoints / name, topics) for name in names)
    savings = summarize_savings(read_bridge_status(settings.bridge_dir / "status.json"))
    updates = topics.get(settings.kafka.topic("updates"))
    clocks = find_trailing_clocks(settings, updates.end if updates else ())
    bridges = list_live_bridges(settings.broker, settings.network.name) if broker.reachable else ()
    tables = read_lake_status(Lake.from_location(settings.lake_root))
    return KilnStatus(str(settings.state), broker, queries, tables, savings, clocks, bridges, find_engine().describe())
