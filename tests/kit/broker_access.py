"""Options and settings of clients of an embedded broker, with the password from the broker's state folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kiln.conf.settings.model import EMBEDDED_USER, Kafka
from kiln.deploy.stack.ports import find_port_holder


def client(address: str) -> dict[str, str | list[str]]:
    """Return keyword arguments of kafka-python clients for the embedded broker that runs at `host:port`."""
    return {"bootstrap_servers": [address], **security(address)}


def security(address: str) -> dict[str, str]:
    """Return the arguments of `client` without the address, which Kiln's classes take as `client_options`."""
    return Kafka().of_state(_broker_dir(address)).security_options()


def variables(address: str) -> dict[str, str]:
    """Return the settings with which a Kiln uses the embedded broker of another state folder as an external broker."""
    return {
        "KILN_KAFKA__BOOTSTRAP": address,
        "KILN_KAFKA__SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "KILN_KAFKA__SASL_MECHANISM": "PLAIN",
        "KILN_KAFKA__SASL_USERNAME": EMBEDDED_USER,
        "KILN_KAFKA__SASL_PASSWORD_FILE": str(_broker_dir(address) / "password"),
    }


@cache  # a test may ask while the broker is away
def _broker_dir(address: str) -> Path:
    holder = find_port_holder(int(address.rpartition(":")[2]))
    assert holder is not None, f"nothing listens at {address}"
    assert holder.state is not None, f"no embedded broker at {address}"
    return holder.state / "broker"
