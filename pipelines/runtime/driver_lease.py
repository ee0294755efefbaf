"""One driver for each query, whatever the machine: the driver is the one member of a consumer group of its own
(decision 25). Kafka keeps the group, so this holds where no lock on a folder does."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

from kafka.coordinator.base import MemberState
from kafka.errors import FencedInstanceIdError, KafkaError
from kafka.structs import OffsetAndMetadata

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kiln.conf.process.errors import KilnError
from kiln.conf.process.kafka_clients import open_client

SESSION = 10.0
"""s after which Kafka takes a driver for dead of which Kafka hears nothing"""
_PATIENCE = 2 * SESSION + 5  # s for a session to run out, and for a first join, which Kafka holds up by 3 s
_EVERY = 1.0  # s between two checks
_JOIN = 5.0  # s for a join: Kafka holds up the first one of a group by 3 s
_INSTANCE = "driver"
"""The group.instance.id (KIP-345) of every driver of a query: Kafka knows one at a time, and fences the one before."""


class SecondDriverError(KilnError):
    """Another driver runs the query."""


class DriverLease:
    """This process as the driver of one query. For one thread.

    The process that has taken the query keeps it while Kafka hears of the process. Another process takes it only where
    Kafka has heard nothing for `SESSION`, or where the process before ran on the same machine and has ended.
    """

    def __init__(
        self, client_options: Mapping[str, object], query: str, topic: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`query`, `topic`: full names; the topic must be there, and is not read. `now`: a monotonic clock in s."""
        self._options = client_options
        self._query = query
        self._group = f"{query}.driver"
        self._partition = TopicPartition(topic, 0)
        self._now = now
        self._checked_at = 0.0
        self._consumer: KafkaConsumer | None = None

    def acquire(self, patience: float = _PATIENCE) -> None:
        """Wait until this process is the driver.

        Raises:
            SecondDriverError: Another process stays the driver.
        """
        until = self._now() + patience
        while (holder := self._find_holder(until)) is not None and not _has_ended(holder):
            if self._now() >= until:
                raise SecondDriverError(
                    f"{self._query} is run by another driver, {_describe(holder)}, and two of them would write the "
                    "same things twice. Stop that one first. After its end this one may start at once on the same "
                    f"machine, and {SESSION:.0f} s later on another"
                )
            time.sleep(0.5)
        self._consumer = consumer = open_client(
            KafkaConsumer,
            **self._options,
            group_id=self._group,
            group_instance_id=_INSTANCE,
            client_id=_build_process_id(),
            session_timeout_ms=round(SESSION * 1000),
            heartbeat_interval_ms=round(SESSION * 1000 / 5),
            max_poll_interval_ms=2**31 - 1,  # a query may take long to start
            enable_auto_commit=False,
        )
        until = self._now() + patience
        # A member that joins before it knows of the topic, which may be new, is given nothing.
        while not consumer.partitions_for_topic(self._partition.topic):
            self._check_deadline(until)
            time.sleep(0.1)
        consumer.subscribe([self._partition.topic])
        try:
            while not consumer.assignment():
                self._poll_group(consumer)
                self._check_deadline(until)
        except FencedInstanceIdError:
            raise self._build_takeover_error() from None

    def check(self) -> None:
        """To be called every second or so. SecondDriverError: another driver has taken the query.

        While no broker answers, this driver goes on: what it might write goes through that broker, or is fenced by the
        transactions of the tables.
        """
        if self._consumer is None or self._now() < self._checked_at + _EVERY:
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
        """Joins, also anew where the session has run out. The group is for its membership alone, and reads nothing."""
        until = self._now() + _JOIN
        consumer.poll(timeout_ms=0, max_records=1)
        # kafka-python 3.0.12 forgets how a join ended that ended between two polls, and joins again: a driver that only
        # looked in now and then would never be in the group, and never hear that another has taken over
        while consumer.group_metadata().state is not MemberState.STABLE and self._now() < until:
            # nor does it join again where what it took for a change of the topic was none: then it sends no heartbeat
            coordinator = consumer._coordinator
            if not coordinator.need_rejoin():
                coordinator.request_rejoin()
            consumer.pause(*consumer.assignment())  # else a record ends each poll at once
            consumer.poll(timeout_ms=200, max_records=1)
        consumer.pause(*consumer.assignment())

    def _check_deadline(self, until: float) -> None:
        if self._now() >= until:
            raise SecondDriverError(f"{self._query}: Kafka has not let this driver into the group {self._group}")

    def _build_takeover_error(self) -> SecondDriverError:
        holder = self._find_holder(self._now())
        return SecondDriverError(
            f"{self._query} has been taken over by another driver{', ' + _describe(holder) if holder else ''}: Kafka "
            f"had heard nothing of this one for {SESSION:.0f} s, or both started at once. This one has stopped"
        )

    def close(self) -> None:
        """Lets Kafka hear nothing more of this process."""
        if self._consumer is not None:
            self._consumer.close(autocommit=False)

    def _find_holder(self, until: float) -> str | None:
        """The `client_id` of the driver that Kafka knows; None: Kafka knows none. KafkaError.

        `until`: how long to ask again where Kafka cannot tell yet, as before its first group.
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


def _build_process_id() -> str:
    """This process, as others are told of it: `PID_MACHINE_HOST`."""
    return f"{os.getpid()}_{_compute_machine_id()}_{socket.gethostname()}"


def _compute_machine_id() -> str:
    """Compute an id of the processes that see each other's process ids: the machine since its start, and the
    namespace."""
    try:
        known = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        known = socket.gethostname()
    return blake2b(known.encode(), digest_size=8).hexdigest()


def _has_ended(process: str) -> bool:
    """Report if a driver ran here and has ended. A driver of this very process is one before this one."""
    pid, machine, _ = process.split("_", 2)
    if machine != _compute_machine_id():
        return False
    if int(pid) == os.getpid():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # of another user
        return False
    return False


def _describe(process: str) -> str:
    pid, _, host = process.split("_", 2)
    return f"process {pid} on {host}"
