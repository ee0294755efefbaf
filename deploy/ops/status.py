"""Reads the status of Kiln without Spark: topics, progress of the queries, tables, and running bridges.

The progress of a query comes from its checkpoint: `offsets/N` has the end offsets of micro-batch N, and `commits/N`
exists once the micro-batch is done. So the progress is correct even if Kiln has stopped or crashed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec
from deltalake.exceptions import DeltaError

from kiln.bridge.cluster.group import GroupView, Member, group_name
from kiln.conf.process.errors import SettingsError
from kiln.conf.process.extras import format_install_command
from kiln.conf.process.kafka_topics import TopicIdentity, describe_replaced_topic, describe_topics, find_replaced_topics
from kiln.conf.process.location import Location
from kiln.conf.settings.model import Kafka, Settings
from kiln.deploy.stack.ports import is_listening
from kiln.pipelines.delta.lake import Lake, LakeError, list_reader_features
from kiln.pipelines.native.library import find_engine
from kiln.pipelines.runtime.checkpoint import Checkpoint, CheckpointError, read_topic_ids
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.topics import Offsets, count_unread
from kiln.schemas.queries import CERAMIC_QUERIES, QUERIES


@dataclass(frozen=True)
class TopicStatus:
    """A topic, with the first offset (`begin`) and the end offset of each partition."""

    name: str
    begin: dict[int, int]
    end: dict[int, int]
    id: str = ""
    """Kafka's topic id; empty if the broker does not report one"""

    @property
    def records(self) -> int:
        """Sum of the differences between end offset and first offset: an upper bound for the number of records."""
        return sum(end - self.begin.get(partition, 0) for partition, end in self.end.items())


@dataclass(frozen=True)
class BrokerStatus:
    """State and topics of the Kafka broker; `problem` is empty if the broker answers."""

    servers: str
    reachable: bool
    problem: str
    topics: tuple[TopicStatus, ...]


@dataclass(frozen=True)
class QueryStatus:
    """Progress of a query.

    Attributes:
        batch: Number of the newest finished micro-batch; `None` before the first.
        offsets: End offsets of this micro-batch.
        lag: Number of unread records; `None` if the broker does not answer, no micro-batch is finished, or a topic was
            deleted and created again.
    """

    name: str
    batch: int | None
    committed_at: datetime | None
    offsets: Offsets
    lag: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class TableStatus:
    """State of a Delta table according to its log."""

    name: str
    rows: int | None
    """`None` if the log does not have the number: a file has no statistics, or the table has deletion vectors"""
    files: int
    bytes: int
    version: int | None
    committed_at: datetime | None
    problem: str


@dataclass(frozen=True)
class KilnStatus:
    """Status of Kiln.

    Attributes:
        bridges: Running bridges of the network, on any machine.
    """

    state: str
    broker: BrokerStatus
    queries: tuple[QueryStatus, ...]
    tables: tuple[TableStatus, ...]
    bridges: tuple[BridgeMember, ...] = ()
    engine: str = ""
    """decoder of frames: "native core", or Python and why the core is not used"""


# ---------------------------------------------------------------- checkpoints


def read_checkpoint(folder: Location) -> QueryStatus:
    """Read the progress of a query from its checkpoint, without its lag.

    Raises:
        CheckpointError: A file cannot be parsed. The error names the file.
    """
    commits = _list_micro_batches(folder / "commits")
    finished = commits.keys() & _list_micro_batches(folder / "offsets").keys()
    if not finished:
        return QueryStatus(folder.name, None, None, {})
    newest = max(finished)
    try:
        offsets = Checkpoint(folder).ends(newest)
    except FileNotFoundError:
        # Spark has removed the file, so a newer micro-batch is finished
        return read_checkpoint(folder)
    return QueryStatus(folder.name, newest, datetime.fromtimestamp(commits[newest] / 1e6, UTC), offsets)


def _list_micro_batches(folder: Location) -> dict[int, int]:
    """Return the time when Spark wrote the file of each micro-batch in a folder, in µs, by number."""
    return {int(file.name): file.modified for file in folder.files() if file.name.isdigit()}


def compute_lag(committed: Offsets, topics: Mapping[str, TopicStatus]) -> int | None:
    """Count the records from the committed offsets to the end of the topics. Deleted records do not count.

    Args:
        committed: Offsets that a query has committed. A partition that is missing counts from its oldest record.
        topics: Topics of the broker, by name.

    Returns:
        The number of records, or `None` if the broker does not have one of the topics.
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
    """Read the progress of a query from its checkpoint, and compute its lag. `topics` are the broker's, by name."""
    try:
        status, noted = read_checkpoint(folder), read_topic_ids(folder)
    except (CheckpointError, OSError, msgspec.DecodeError) as error:
        return QueryStatus(name, None, None, {}, problem=str(error))
    identities = {name: TopicIdentity(topic.id, len(topic.end)) for name, topic in topics.items()}
    replaced = find_replaced_topics(noted, identities)
    problem = "; ".join(describe_replaced_topic(topic, noted[topic], identities[topic].id) for topic in replaced)
    lag = None if problem else compute_lag(status.offsets, topics)
    return replace(status, name=name, lag=lag, problem=problem)


# ---------------------------------------------------------------- broker


def read_broker_status(kafka: Kafka, patience: float = 3.0) -> BrokerStatus:
    """Read the state of the Kafka broker, and its topics that begin with Kiln's prefix.

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
        problem = f"the Python package kafka-python is not installed. Install it: {format_install_command('bridge')}"
        return BrokerStatus(kafka.servers, False, problem, ())
    from kiln.conf.process.kafka_clients import describe_kafka_error, open_client

    millis = int(patience * 1000)
    try:
        options = kafka.client_options()
    except SettingsError as error:  # the broker runs, and this user cannot read the password
        return BrokerStatus(kafka.servers, False, str(error), ())
    reading = {"allow_auto_create_topics": False, "enable_auto_commit": False, "isolation_level": "read_committed"}
    limits = {"bootstrap_timeout_ms": millis, "request_timeout_ms": max(millis, 1000)}
    topics = []
    try:
        with (
            open_client(KafkaConsumer, **options, **limits, **reading) as consumer,
            open_client(KafkaAdminClient, **options, bootstrap_timeout_ms=millis) as admin,
        ):
            names = sorted(name for name in consumer.topics() if name.startswith(kafka.prefix) and name != kafka.prefix)
            identities = describe_topics(admin, names) if names else {}
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
    except (KafkaError, OSError, ValueError) as error:
        return BrokerStatus(kafka.servers, False, describe_kafka_error(error, options, patience), ())
    return BrokerStatus(kafka.servers, True, "", tuple(topics))


# ---------------------------------------------------------------- tables


def read_table_status(lake: Lake, name: str) -> TableStatus:
    """Read size and newest commit of a table from its Delta log, without opening a data file."""
    try:
        table = lake.open(name)
        adds = table.get_add_actions(flatten=True)
        counts = adds["num_records"].to_pylist() if "num_records" in adds.schema.names else [None] * len(adds)
        sizes = adds["size_bytes"].to_pylist()
        newest = table.history(1)
        has_deletion_vectors = "deletionVectors" in list_reader_features(table)
    except (LakeError, DeltaError) as error:  # DeltaError: for example, a feature that delta-rs does not have
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


# ---------------------------------------------------------------- together


def read_status(settings: Settings) -> KilnStatus:
    """Read the status of Kiln: broker, queries, tables and bridges."""
    broker = read_broker_status(settings.broker)
    topics = {topic.name: topic for topic in broker.topics}
    checkpoints = settings.checkpoints_root
    running = [name for name in QUERIES if settings.is_ceramic or name not in CERAMIC_QUERIES]
    names = [*running, *sorted(set(checkpoints.folders()) - set(running))]
    queries = tuple(read_query_status(name, checkpoints / name, topics) for name in names)
    bridges = list_live_bridges(settings.broker, settings.network.name) if broker.reachable else ()
    tables = read_lake_status(Lake.from_location(settings.lake_root))
    return KilnStatus(str(settings.state), broker, queries, tables, bridges, find_engine().describe())


_PATIENCE = 3_000  # timeout of the request that lists the bridges, in ms


@dataclass(frozen=True)
class BridgeMember:
    """A running bridge.

    Attributes:
        peer: Peer id of the bridge.
        host: Name of its machine.
        address: Address of its machine, as the broker sees it.
        leads: True if this bridge fetches missing blocks for all bridges.
        duties: 1 if its settings allow it to fetch blocks, else 0.
    """

    peer: str
    host: str
    address: str
    leads: bool
    duties: int


def list_live_bridges(kafka: Kafka, network: str) -> tuple[BridgeMember, ...]:
    """List the running bridges of a network from their consumer group, ordered by peer id.

    Returns:
        The bridges; empty if the broker does not describe the group.
    """
    from kafka.admin import KafkaAdminClient
    from kafka.errors import KafkaError

    from kiln.conf.process.kafka_clients import open_client

    group = group_name(kafka.prefix, network)
    try:
        with open_client(KafkaAdminClient, **kafka.client_options(), bootstrap_timeout_ms=_PATIENCE) as admin:
            described = admin.describe_groups([group])[group]
    except (KafkaError, OSError):
        return ()
    return tuple(sorted(_read_members(described["members"]), key=lambda member: member.peer))


def _read_members(descriptions: Sequence[Mapping[str, object]]) -> Iterator[BridgeMember]:
    for description in descriptions:
        metadata = _read_user_data(description["member_metadata"])
        assignment = _read_user_data(description["member_assignment"])
        try:
            member = msgspec.json.decode(metadata, type=Member)
            view = msgspec.json.decode(assignment, type=GroupView) if assignment else GroupView("", (), ())
        except msgspec.DecodeError:
            continue  # not a bridge, or a bridge of another version
        address = str(description["client_host"]).lstrip("/")
        yield BridgeMember(member.peer, member.host, address, view.leader == member.peer, int(member.fetches))


def _read_user_data(protocol: object) -> bytes:
    """Return the user data of a member's subscription or assignment, as kafka-python describes it; empty if none."""
    data = protocol.get("user_data") if isinstance(protocol, Mapping) else None
    return data.encode() if isinstance(data, str) else b""
