"""The variables that a kubelet sets in a container for a Service, as `FromServices` of Kubernetes' pkg/kubelet/envvars
makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ServicePort(NamedTuple):
    """A port of a Service. `name` may be empty if the Service has only one port."""

    name: str
    number: int
    protocol: str = "TCP"


def injected(service: str, ports: Sequence[ServicePort], address: str = "10.96.0.7") -> dict[str, str]:
    """Return the variables for a Service with the cluster IP `address`. A headless Service has no variables."""
    prefix = _upper(service)
    host = f"[{address}]" if ":" in address else address
    found = {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(ports[0].number)}
    for index, port in enumerate(ports):
        if port.name:
            found[f"{prefix}_SERVICE_PORT_{_upper(port.name)}"] = str(port.number)
        protocol = port.protocol.lower()
        endpoint = f"{protocol}://{host}:{port.number}"
        if index == 0:
            found[f"{prefix}_PORT"] = endpoint
        of_port = f"{prefix}_PORT_{port.number}_{port.protocol}"
        found |= {
            of_port: endpoint,
            f"{of_port}_PROTO": protocol,
            f"{of_port}_PORT": str(port.number),
            f"{of_port}_ADDR": address,
        }
    return found


def _upper(name: str) -> str:
    return name.upper().replace("-", "_")
