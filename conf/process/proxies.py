"""The rule for proxies: HTTP clients follow `http_proxy`, `https_proxy` and `no_proxy`, but use none to loopback."""

from __future__ import annotations

from collections.abc import MutableMapping
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")
_EXCEPTIONS: Final = ("no_proxy", "NO_PROXY")


def exempt_loopback(environ: MutableMapping[str, str]) -> None:
    """Add the loopback addresses to `no_proxy`, if a proxy is set.

    Clients that read the variables themselves, such as delta-rs and Spark's S3A, then use no proxy to loopback.
    """
    if not any(environ.get(name) or environ.get(name.upper()) for name in _PROXIES):
        return
    hosts = [host.strip() for name in _EXCEPTIONS for host in environ.get(name, "").split(",")]
    for name in _EXCEPTIONS:
        environ[name] = ",".join(dict.fromkeys([*filter(None, hosts), *_LOOPBACK]))


def is_loopback(url: str) -> bool:
    """Return true if the host of a URL is loopback. No proxy is used for such URLs."""
    host = urlsplit(url).hostname or ""
    try:
        return host == _LOOPBACK[0] or ip_address(host).is_loopback
    except ValueError:
        return False
