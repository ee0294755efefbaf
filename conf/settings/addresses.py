"""Checks of addresses, peer ids, topics and separators in the settings.

Each check raises ValueError with a description of what is expected. The packages that parse these formats take tenths
of a second to import, so each check imports its package only when called.
"""

from __future__ import annotations

import json
import re
from typing import Final
from urllib.parse import urlsplit

_HOST_AND_PORT: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):(\d+)")
_UNUSABLE: Final = re.compile(r"%[0-9A-Fa-f]{2}|[\\\[\]^|?\x00-\x1f\x7f]")
_MAX_PORT: Final = 65535

MAX_TOPIC_BYTES: Final = 1024
"""Maximum size of a topic name. The router reads as many characters (`RouterOptions.max_topic_length`)."""


def check_servers(text: str) -> None:
    """Check a list of Kafka servers, `host:port,host:port`. If it contains a password, the error does not repeat it."""
    expected = 'host:port, separated by commas, such as "kafka-1:9092,kafka-2:9092"'
    if "@" in text:
        raise ValueError(f"expected {expected}. Set user and password in kafka.sasl_username and kafka.sasl_password")
    for server in text.split(","):
        if "://" in server:
            raise ValueError(f'"{server}": expected {expected}. Set the protocol in kafka.security_protocol')
        match = _HOST_AND_PORT.fullmatch(server.strip())
        if match is None:
            raise ValueError(f'"{server}": expected {expected}')
        if not 1 <= int(match[1]) <= _MAX_PORT:
            raise ValueError(f'"{server}": expected a port from 1 to {_MAX_PORT}')


def check_path(path: str) -> None:
    """Check the path of a folder with Delta tables or a database.

    delta-rs and DuckDB turn the path into a URL. Some characters then fail, and others lead to a different folder.
    """
    match = _UNUSABLE.search(path)
    if match is not None:
        raise ValueError(f"expected a path without {json.dumps(match[0])}: delta-rs and DuckDB cannot open such a path")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError("expected a path in UTF-8") from None


def check_file_name(text: str) -> None:
    """Check the path of a file or folder, which need not exist."""
    if not text or "\0" in text:
        raise ValueError("expected the path of a file or folder")


def check_listener(text: str) -> None:
    """Check the port of `host:port` to listen on. Port 0 selects a free one."""
    if int(text.rpartition(":")[2]) > _MAX_PORT:
        raise ValueError(f"expected a port of at most {_MAX_PORT}")


def check_url(text: str) -> None:
    """Check a URL for an HTTP client."""
    expected = "expected a URL that begins with http:// or https://"
    if not text.startswith(("http://", "https://")):
        raise ValueError(expected)
    try:
        host, port = urlsplit(text).hostname, urlsplit(text).port
    except ValueError as error:
        raise ValueError(f"{expected}, with a port from 1 to {_MAX_PORT}") from error
    if not host or port == 0:
        raise ValueError(f"{expected}, with a host and a port from 1 to {_MAX_PORT}")


def check_tcp(text: str) -> None:
    """Check a TCP multiaddr, such as `/ip4/127.0.0.1/tcp/4811`, with or without a peer id."""
    expected = 'a multiaddr of TCP, such as "/ip4/127.0.0.1/tcp/4811"'
    names = _protocols(text, expected)
    if names[:1] == ["dnsaddr"]:
        raise ValueError(
            f"Kiln does not resolve dnsaddr addresses (expected {expected}). Give an address from the TXT records of "
            "that name"
        )
    if "p2p-circuit" in names:
        raise ValueError(
            f"this address goes through a relay (p2p-circuit), which Kiln does not use (expected {expected}). Give the "
            "address at which the peer itself listens"
        )
    if names == ["p2p"]:
        raise ValueError(f"expected {expected}: the address of the peer is missing. Put it before /p2p/")
    if names[1:2] != ["tcp"] or not {"tcp", "p2p"}.issuperset(names[1:]):
        raise ValueError(f"expected {expected}. Kiln uses only TCP, not QUIC or WebSocket")


def check_tcp_at_ip(text: str) -> None:
    """Check a TCP multiaddr with an IP address, which peers can dial without DNS."""
    check_tcp(text)
    if not re.match(r"/ip[46]/[^/]+/tcp/0*[1-9]", text):
        raise ValueError('expected TCP at an IP address and with a port, such as "/ip4/192.0.2.1/tcp/4811"')


def check_tcp_of_peer(text: str) -> None:
    """Check a TCP multiaddr that ends in a peer id."""
    check_tcp(text)
    check_peer(text)


def check_peer(text: str) -> None:
    """Check a multiaddr of any transport that ends in `/p2p/<peer id>`."""
    expected = 'a multiaddr that ends in /p2p/<peer id>, such as "/ip4/192.0.2.1/tcp/4811/p2p/12D3KooW…"'
    if _protocols(text, expected)[-1:] != ["p2p"]:
        raise ValueError(f"expected {expected}: the given address has no peer id. Append /p2p/<peer id>")


def check_author(text: str) -> None:
    """Check `*`, or a peer id in base58 or as a CID."""
    from kiln.schemas.wire.identity import PeerIdError, peer_bytes

    try:
        if text != "*":
            peer_bytes(text)
    except PeerIdError as error:
        raise ValueError(f'expected "*" or a peer id, such as "12D3KooW…": {error}') from error


def check_interest(text: str) -> None:
    """Check an interest: `*`, a separator key, or `key/value` (CIP-120) with the value in base36, as in a topic name.

    A key may contain slashes. So `model/`, followed by a StreamID or CID in another base, would pass as a key. It is
    refused, because no topic has such a key.
    """
    from kiln.schemas.wire.topics import parse_interest

    interest = parse_interest(text)
    key, _, value = text.rpartition("/")
    # an identifier is longer than the words that keys consist of
    if interest.value is None and key and re.fullmatch(r"[A-Za-z0-9]{40,}", value):
        base36 = _in_base36(value)
        if base36 is not None:
            raise ValueError(f'expected the value of the separator in base36: "{key}/{base36}"')


def check_topic(text: str) -> None:
    """Check the name of a pubsub topic, or a pattern of names. In a pattern, `*` stands for any characters."""
    if not 0 < len(text.encode("utf-8", "replace")) <= MAX_TOPIC_BYTES:
        raise ValueError(f'expected a topic of 1 to {MAX_TOPIC_BYTES} bytes, or a pattern such as "/app/*"')


def check_protocol(text: str) -> None:
    """Check the id of a pubsub protocol."""
    if not re.fullmatch(r"/[!-~]{1,255}", text):
        raise ValueError('expected the id of a pubsub protocol, such as "/meshsub/1.1.0" or "/vac/waku/relay/2.0.0"')


def _protocols(text: str, expected: str) -> list[str]:
    """Parse the names of a multiaddr's protocols with py-multiaddr, because `multiformats` lacks p2p and dns."""
    from multiaddr import Multiaddr
    from multiaddr.exceptions import ParseError, ProtocolLookupError

    from kiln.schemas.wire.identity import PeerIdError, peer_bytes

    if not text:
        raise ValueError(f"expected {expected}: the value is empty")
    if "/ipfs/" in text:
        address = text.replace("/ipfs/", "/p2p/")
        raise ValueError(f'expected {expected}: /ipfs/ is the old name of /p2p/. Write "{address}"')
    if not text.startswith("/"):
        raise ValueError(f"expected {expected}: the value does not begin with a slash")
    try:
        for peer in re.findall(r"/p2p/([^/]*)", text):
            peer_bytes(peer)
    except PeerIdError as error:  # py-multiaddr reports a bad peer id only as "not a CID"
        raise ValueError(f'expected a peer id after /p2p/, such as 12D3KooW… or Qm…, not "{peer}"') from error
    try:
        return [protocol.name for protocol in Multiaddr(text).protocols()]
    except (ParseError, ProtocolLookupError, ValueError) as error:
        reason = str(error).split(" (string: ")[0].removeprefix(f"Invalid MultiAddr {text!r}: ")  # without the input
        raise ValueError(f"expected {expected}: {reason}") from error


def _in_base36(text: str) -> str | None:
    """Convert a StreamID or CID in any base to base36. Return `None` for any other text."""
    from multiformats import CID, multibase

    try:
        raw = bytes(CID.decode(text))
    except (ValueError, LookupError):
        try:
            raw = multibase.decode(text)
        except (ValueError, LookupError):
            return None
        if not raw.startswith(_STREAMID):
            return None
    return str(multibase.encode(raw, "base36"))


_STREAMID = b"\xce\x01"  # the multicodec `streamid` as a varint (CIP-59)
