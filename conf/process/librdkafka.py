"""Options, log and decode errors that all clients of librdkafka in Kiln share.

This module imports no kafka-python, because Spark starts a dozen Python processes that need librdkafka alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from confluent_kafka import KafkaError

READ_OPTIONS: Final[Mapping[str, str | int | bool]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # skip the records of aborted transactions, and wait for the end of open ones
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
    "check.crcs": True,
    "allow.auto.create.topics": False,
}
"""Options of every consumer of librdkafka in Kiln."""

UNDECODABLE: Final = frozenset((KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION))
"""Errors of a record batch of Kafka that no client can decode, such as after damage on the broker's disk. librdkafka
repeats them until it is assigned an offset after the record batch."""

LIBRDKAFKA_LOG: Final = logging.getLogger("librdkafka")
"""Log of every client of librdkafka in Kiln."""
LIBRDKAFKA_LOG.addHandler(logging.NullHandler())  # else, in a Python worker, each line would go to stderr

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "security_protocol": ("security.protocol",),
    "sasl_mechanism": ("sasl.mechanism",),
    "sasl_plain_username": ("sasl.username",),
    "sasl_plain_password": ("sasl.password",),
    "ssl_cafile": ("ssl.ca.location",),
    # PEM, with the key in the same file
    "ssl_certfile": ("ssl.certificate.location", "ssl.key.location"),
}

_ALWAYS: Final[Mapping[str, str | int | bool]] = {
    # so that a broker that is available again is found within a second
    "reconnect.backoff.max.ms": 1_000,
    # brokers may request metrics of clients (KIP-714); Kiln's metrics are at monitor.listen
    "enable.metrics.push": False,
}


def librdkafka_options(client_options: Mapping[str, object]) -> dict[str, str | int | bool]:
    """Convert kafka-python's options, as `Kafka.client_options` of the settings returns them, to librdkafka's.

    Argument and result contain the password in clear text: never print them.

    Raises:
        KeyError: An option is unknown.
    """
    servers = client_options["bootstrap_servers"]
    options: dict[str, str | int | bool] = {
        **_ALWAYS,
        "bootstrap.servers": ",".join(servers) if isinstance(servers, list) else str(servers),
    }
    for name, value in client_options.items():
        if name != "bootstrap_servers":
            options |= dict.fromkeys(_NAMES[name], str(value))
    return options


def describe_undecodable(error: KafkaError) -> bytes:
    """Return a value for a record that cannot be decoded. The decoder of each Kiln topic rejects this value."""
    return f"no record can be decoded here: {error.str()}".encode()
