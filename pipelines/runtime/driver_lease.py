"""Lease that allows one Spark driver per query: the driver is the only member of a consumer group of the query.

The group is in Kafka, so the lease works across machines, unlike a lock file. Source: decision 25.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

from kafka.coordinator.base import MemberState
from kafka.errors import FencedInstanceIdError, KafkaError
from kafka.structs import OffsetAndMetadata

from kafka import ConsumerRebalanceListener, KafkaAdminClient, KafkaConsumer, TopicPartition
from kiln.conf.process.errors import KilnError
from kiln.conf.process.kafka_clients import open_client

SESSION = 10.0
"""session timeout of the consumer group, in seconds"""
_PATIENCE = 2 * SESSION + 5  # seconds for a session to expire and a first join, which Kafka delays by 3 s
_CHECK_INTERVAL = 1.0  # seconds
HOLDER_POLL_INTERVAL = 0.5
"""seconds between two checks whether another driver still holds the lease"""
_JOIN_TIMEOUT = 5.0  # seconds; Kafka delays the first join of a group by 3 s
_INSTANCE = "driver"
"""group.instance.id (KIP-345) of every driver of a query: Kafka fences the previous driver when the next one joins"""


class SecondDriverError(KilnError):
    """Another driver runs the query, or joining the query's consumer group timed out."""


class _PauseAtOnce(ConsumerRebalanceListener):  # type: ignore[misc]  # kafka-python has no types
    """Listener that pauses assigned partitions at once: no records are needed, and some make kafka-python fail."""

    def __init__(self, consumer: KafkaConsumer) -> None:
        self._consumer = consumer

    def on_partitions_revoked(self, revoked: object) -> None: ...

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._consumer.pause(*assigned)


class DriverLease:
    """Lease by which this process is the only driver of one query. For one thread.

    A driver holds the lease while Kafka receives its heartbeats. Another process can take the lease in two cases: Kafka
    has received no heartbeat for 10 s, or the holder ran on the same machine and its process has ended.
    """

    def __init__(
        self, client_options: Mapping[str, object], query: str, topic: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the lease. Call `acquire` to take it.

        Args:
            client_options: kafka-python's options.
            query: Name of the query, with the prefix of the topics.
            topic: Name with prefix of an existing topic, to which the group subscribes. Its records are not read.
            now: Monotonic clock, in seconds.
        """
        self._options = client_options
        self._query = query
        self._group = f"{query}.driver"
        self._partition = TopicPartition(topic, 0)
        self._now = now
        self._checked_at = 0.0
        self._consumer: KafkaConsumer | None = None

    def acquire(self, patience: float = _PATIENCE) -> None:
        """Wait until this process holds the lease, for up to `patience` seconds.

        Raises:
            SecondDriverError: Another driver still holds the lease, or joining the consumer group timed out.
        """
        until = self._now() + patience
        while (holder := self._find_holder(until)) is not None and not _has_ended(holder):
            if self._now() >= until:
                raise SecondDriverError(
                    f"cannot run the query {self._query}: another driver runs it ({_describe(holder)}). Stop that "
                    f"driver. Then start this one: at once on the same machine, {SESSION:.0f} s later on another "
                    "machine"
                )
            time.sleep(HOLDER_POLL_INTERVAL)
        self._consumer = consumer = open_client(
            KafkaConsumer,
            **self._options,
            group_id=self._group,
            group_instance_id=_INSTANCE,
            client_id=f"{os.getpid()}_{_compute_machine_id()}_{socket.gethostname()}",  # other drivers read it
            session_timeout_ms=round(SESSION * 1000),
            heartbeat_interval_ms=round(SESSION * 1000 / 5),
            max_poll_interval_ms=2**31 - 1,  # a query may take long to start
            enable_auto_commit=False,
        )
        until = self._now() + patience
        # A member that joins before it knows of the topic, which may be new, is assigned nothing.
        while not consumer.partitions_for_topic(self._partition.topic):
            self._check_deadline(until)
            time.sleep(0.1)
        consumer.subscribe([self._partition.topic], listener=_PauseAtOnce(consumer))
        try:
            while not consumer.assignment():
                self._poll_group(consumer)
                self._check_deadline(until)
        except FencedInstanceIdError:
            raise self._build_takeover_error() from None

    def check(self) -> None:
        """Check that this process still holds the lease. Call it about every second.

        If the broker does not answer, the check passes. This is safe: without the broker the driver cannot write to
        Kafka, and Delta transactions keep two drivers from committing the same micro-batch.

        Raises:
            SecondDriverError: Another driver has taken over the query.
        """
        if self._consumer is None or self._now() < self._checked_at + _CHECK_INTERVAL:
            return
        self._checked_at = self._now()
        try:
            self._poll_group(self._consumer)
            self._consumer.commit({self._partition: OffsetAndMetadata(0)}, timeout_ms=1_000)
        except FencedInstanceIdError:
            raise self._build_takeover_error() from None
        except KafkaError:
            return

    def _poll_group(self, consumer: KafkaConsumer) -> None:
        """Join the group, or rejoin it after the session has expired, and drop any record."""
        until = self._now() + _JOIN_TIMEOUT
        consumer.poll(timeout_ms=0, max_records=1)
        # kafka-python 3.0.12 drops the result of a join that ends between two polls, and joins again: with rare polls a
        # driver would never be in the group, and never learn that another has taken over.
        while consumer.group_metadata().state is not MemberState.STABLE and self._now() < until:
            # After a false alarm of changed topic metadata, kafka-python does not rejoin, and sends no heartbeats.
            coordinator = consumer._coordinator
            if not coordinator.need_rejoin():
                coordinator.request_rejoin()
            consumer.poll(timeout_ms=200, max_records=1)

    def _check_deadline(self, until: float) -> None:
        if self._now() >= until:
            raise SecondDriverError(
                f"cannot run the query {self._query}: joining the consumer group {self._group} timed out. Check that "
                "the broker runs, and start the query again"
            )

    def _build_takeover_error(self) -> SecondDriverError:
        holder = self._find_holder(self._now())
        return SecondDriverError(
            f"another driver{' (' + _describe(holder) + ')' if holder else ''} has taken over the query {self._query}: "
            f"Kafka received no heartbeat of this driver for {SESSION:.0f} s, or both drivers started at once. This "
            "driver stops. The other one continues the query"
        )

    def close(self) -> None:
        """Close the consumer, which ends the heartbeats of this driver."""
        if self._consumer is not None:
            self._consumer.close(autocommit=False)

    def _find_holder(self, until: float) -> str | None:
        """Find the `client_id` of the group's member; `None` if the group has no member.

        Raises:
            KafkaError: The broker does not answer, or a retriable error persists up to the time `until`.
        """
        admin = open_client(KafkaAdminClient, **self._options)
        try:
            while True:
                try:
                    members = admin.describe_groups([self._group])[self._group]["members"]
                    return next((str(member["client_id"]) for member in members), None)
                except KafkaError as error:
                    if not error.retriable or self._now() >= until:
                        raise
                    time.sleep(0.2)
        finally:
            admin.close()


def _compute_machine_id() -> str:
    """Compute an id from the boot id of the machine and the PID namespace.

    Processes with equal ids see each other's process ids.
    """
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        identity = socket.gethostname()
    return blake2b(identity.encode(), digest_size=8).hexdigest()


def _has_ended(process: str) -> bool:
    """Return true if a driver ran on this machine and its process has ended.

    A driver with the process id of this process is an earlier one, so it has ended too.

    Args:
        process: Kafka's `client_id` of the driver: process id, machine id and host name.
    """
    pid, machine, _ = process.split("_", 2)
    if machine != _compute_machine_id():
        return False
    if int(pid) == os.getpid():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # a process of another user
        return False
    return False


def _describe(process: str) -> str:
    pid, _, host = process.split("_", 2)
    return f"process {pid} on {host}"
