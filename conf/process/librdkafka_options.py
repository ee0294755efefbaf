"""Conversion of kafka-python's client options to those of librdkafka."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
    # a broker that is back is found at once
    "reconnect.backoff.max.ms": 1_000,
    # brokers may ask clients for figures; Kiln's own are at monitor.listen
    "enable.metrics.push": False,
}


def librdkafka_options(client_options: Mapping[str, object]) -> dict[str, str | int | bool]:
    """Convert the result of `client_options` of kiln.conf.settings.model.Kafka. Both contain the password in clear
    text, so never print them.

    Raises:
        KeyError: An option is not one of those that `client_options` returns.
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
