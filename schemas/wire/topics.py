"""Topic names of a Ceramic network (CIP-120, Specification) and the separators in them.

Names::

    /ceramic/<network>                              the network topic. CIP-120 writes it with a slash at its end. No
                                                    known node uses that name: Kiln joins and publishes on the topic
                                                    with the slash while a peer is on it
    /ceramic/<network>/sep/<key>/<value>            the topic of one separator; value in base36 multibase, "k…". CIP-120
                                                    says base36: a value without the multibase prefix is read, and
                                                    never written

A key is any text, so it may contain slashes; a value cannot: the last slash separates them, in a topic name and in the
``sep`` of a BATCH_UPDATE (CIP-123, "<separator-key>/<separator-value>").
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from libipld import encode_multibase

MAX_NAME = 1024
"""Longest topic name that the bridge subscribes to and publishes on, in characters. The longest network (256), key and
value fit into it, so every separator that is read has a topic."""

MAX_VALUE = 512
"""Longest accepted separator value, in characters of its text: about 330 bytes; a model's StreamID has 40."""

MAX_KEY = 224
"""Longest accepted separator key in characters."""

_MAX_CACHED = 1024  # characters

_BASE32_CIDS = ("bae", "baf", "bag")


class TopicError(ValueError):
    """A network, key or value that cannot be part of a topic name."""


class Separator(NamedTuple):
    """Group of a stream (CIP-120): ``key`` as in the genesis header's ``sep``; ``value`` as base36 multibase
    text, ``k…``, as in the topic name."""

    key: str
    value: str


class Topic(NamedTuple):
    """A Ceramic topic: its network, and the separator if it is a separator's topic."""

    network: str
    separator: Separator | None


def parse_topic(name: str) -> Topic | None:
    """Parse a topic name; None if it is not a Ceramic topic.

    Any name below ``/ceramic/<network>`` belongs to that network. A name that is neither the network topic nor a
    well-formed separator topic (the ``/ceramic/<network>/<sep>`` of CIP-120's first draft, ``/ceramic/inmemory/test``,
    a value that is no lower-case base36, a key longer than MAX_KEY) has no separator: its messages are read as on the
    network topic, so that none is lost for a bad name and no separator is guessed. The bare ``/ceramic`` of 2020 names
    no network and gives None: the network is then that of the frame (docs/design/contracts.md).
    """
    if len(name) > _MAX_CACHED:  # before the cache, so that it stores no large name
        return _parse_topic(name)
    return _parse_cached(name)


def _parse_topic(name: str) -> Topic | None:
    if not name.startswith("/ceramic/"):
        return None
    network, _, rest = name[9:].partition("/")
    if not network:
        return None
    if rest.startswith("sep/"):
        key, _, text = rest[4:].rpartition("/")
        value = _normalize_value(text)
        if 0 < len(key) <= MAX_KEY and value is not None:
            return Topic(network, Separator(key, value))
    return Topic(network, None)


_parse_cached = lru_cache(maxsize=16384)(_parse_topic)


def format_topic(network: str, separator: Separator | None) -> str:
    """Format a topic name.

    Raises:
        TopicError: ``parse_topic`` would not return the same network and separator.
    """
    if not network or "/" in network:
        raise TopicError(f"network {network[:80]!r} must be non-empty and without a slash")
    name = f"/ceramic/{network}" if separator is None else f"/ceramic/{network}/sep/{format_separator(separator)}"
    _require_utf8(name, "topic name")
    return name


def network_topics(network: str) -> tuple[str, str]:
    """Return the network's topic in the form that nodes use, and in CIP-120's form, with a slash at its end."""
    name = format_topic(network, None)
    return name, f"{name}/"


def encode_separator_value(raw: bytes) -> str:
    """Encode a separator value as base36 multibase text.

    Raises:
        TopicError: The value is empty or longer than MAX_VALUE.
    """
    if not raw:
        raise TopicError("a separator value must not be empty")
    # A byte is never less than one digit.
    text: str = encode_multibase("k", raw) if len(raw) < MAX_VALUE else ""
    if not text or len(text) > MAX_VALUE:
        raise TopicError(f"separator value of {len(raw)} bytes; as base36 text it may have {MAX_VALUE} characters")
    return text


def format_separator(s: Separator) -> str:
    """Format ``key/value``, the ``sep`` of a BATCH_UPDATE.

    Raises:
        TopicError: The key or value is invalid.
    """
    _require_key(s.key)
    if not _is_value(s.value):
        raise TopicError(f"{s.value[:80]!r} is not a separator value: use non-empty lower-case base36 multibase (k…)")
    return f"{s.key}/{s.value}"


def parse_separator(text: str) -> Separator:
    """Parse ``key/value``, split at the last slash.

    Raises:
        TopicError: The text has another form.
    """
    key, slash, value = text.rpartition("/")
    if not slash:
        raise TopicError(f"separator {text[:80]!r} has no slash between key and value")
    _require_key(key)
    normalized = _normalize_value(value)
    if normalized is None:
        raise TopicError(f"separator {text[:80]!r}: its value is not lower-case base36 (k…), non-empty")
    return Separator(key, normalized)


class Interest(NamedTuple):
    """Separators that a node follows: all (no key), all separators of a key (no value), or a single separator."""

    key: str | None
    value: str | None

    def covers(self, separator: Separator) -> bool:
        """Return true if the node follows this separator."""
        return self.key in (None, separator.key) and self.value in (None, separator.value)


def parse_interest(text: str) -> Interest:
    """Parse ``*``, a key, ``key/*`` or ``key/value``.

    A text without a value after its last slash is a key. Write ``key/*`` for a key that would be ambiguous alone:
    ``*/*`` is the key ``*``, and ``a/k2/*`` the key ``a/k2``. A value must have its prefix.

    Raises:
        TopicError: The text is empty, or its key is invalid.
    """
    if not text:
        raise TopicError("an interest must not be empty: it is *, a key, key/* or key/value")
    if text == "*":
        return Interest(None, None)
    key, slash, value = text.rpartition("/")
    if slash and key and value == "*":
        value = ""
    elif not (slash and key and _is_value(value)):
        key, value = text, ""
    _require_key(key)
    return Interest(key, value or None)


def _normalize_value(text: str) -> str | None:
    """Return the value with its prefix; None if the text is no base36.

    A text without prefix may not begin with "k", or with the letters of a CID in base32.
    """
    value = text if text.startswith(("k", *_BASE32_CIDS)) else f"k{text}"
    return value if _is_value(value) else None


def _is_value(value: str) -> bool:
    # Every such text is canonical: base36 multibase maps n leading zero digits to n leading zero bytes, one to one.
    return (
        1 < len(value) <= MAX_VALUE
        and value.startswith("k")
        and value.isascii()
        and value.isalnum()
        and value.islower()
    )


def _require_key(key: str) -> None:
    if not key:
        raise TopicError("a separator key must not be empty")
    if len(key) > MAX_KEY:
        raise TopicError(f"separator key {key[:80]!r}… has {len(key)} characters; it may have {MAX_KEY}")
    _require_utf8(key, "separator key")


def _require_utf8(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TopicError(f"{name} {text[:80]!r} has a lone surrogate and has no UTF-8 form") from error
