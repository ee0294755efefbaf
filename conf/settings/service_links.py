"""Service links: environment variables that Kubernetes sets in each container for the Services of its namespace.

Their names may begin like those of settings. For a Service `kiln-bridge` with the port 4811, named `gossip`, they are
KILN_BRIDGE_SERVICE_HOST, KILN_BRIDGE_SERVICE_PORT, KILN_BRIDGE_SERVICE_PORT_GOSSIP, KILN_BRIDGE_PORT,
KILN_BRIDGE_PORT_4811_TCP, and the last name followed by _PROTO, _PORT and _ADDR (Kubernetes, Concepts, Service,
"Environment variables"; makeLinkVariables in pkg/kubelet/envvars).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Final

_PROTOCOLS: Final = ("tcp", "udp", "sctp")
_OF_PORT: Final = r"_PORT_[0-9]{1,5}_(TCP|UDP|SCTP)"


def is_service_link(name: str, value: str) -> bool:
    """Return true if both the name and the value of a variable are those of a service link.

    The value distinguishes a service link from a misspelt setting, such as `KILN_KAFKA_EMBEDDED_PORT=29092`.
    """
    return any(re.fullmatch(f"[A-Z][A-Z0-9_]*{ending}", name) and fits(value) for ending, fits in _FORMS.items())


def _is_address(value: str) -> bool:
    try:
        ip_address(value)
    except ValueError:
        return False
    return True


def _is_port(value: str) -> bool:
    return re.fullmatch("[1-9][0-9]{0,4}", value) is not None


def _is_endpoint(value: str) -> bool:
    """Return true for `tcp://10.0.0.11:4811`, or an IPv6 address in brackets."""
    protocol, separator, rest = value.partition("://")
    host, _, port = rest.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return bool(separator) and protocol in _PROTOCOLS and _is_address(bare) and _is_port(port)


_FORMS: Final[Mapping[str, Callable[[str], bool]]] = {
    "_SERVICE_HOST": _is_address,
    "_SERVICE_PORT(_[A-Z0-9_]+)?": _is_port,
    "_PORT": _is_endpoint,
    _OF_PORT: _is_endpoint,
    f"{_OF_PORT}_PROTO": _PROTOCOLS.__contains__,
    f"{_OF_PORT}_PORT": _is_port,
    f"{_OF_PORT}_ADDR": _is_address,
}
