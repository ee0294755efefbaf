"""Topic names of a Ceramic network, and the separators in them (CIP-120, Specification).

Names::

    /ceramic/<network>                      the network topic. CIP-120 adds a slash at its end, which no known node
                                            does. Kiln also uses the name with the slash while a peer does
    /ceramic/<network>/sep/<key>/<value>    the topic of a separator. The value is base36 multibase text, "k…". Values
                                            without the prefix "k", as in CIP-120, are read but never written

A key is any text and may contain slashes; a value cannot. So the last slash separates key and value, in a topic name
and in the ``sep`` of a BATCH_UPDATE (CIP-123, "<separator-key>/<separator-value>").
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from libipld import encode_multibase

MAX_NAME = 1024
"""Maximum number of characters of a topic name that the bridge subscribes to or publishes on. Network (up to 256
characters), key and value always fit."""

MAX_VALUE = 512
"""Maximum number of characters of a separator value's text, for about 330 bytes. A model's StreamID has 40 bytes."""

MAX_KEY = 224
"""Maximum number of characters of a separator key."""

_MAX_CACHED = 1024  # characters

_BASE32_CIDS = ("bae", "baf", "bag")


class TopicError(ValueError):
    """A network, separator key or separator value cannot be part of a topic name."""


class Separator(NamedTuple):
    """Key and value by which streams are divided into topics (CIP-120). ``key`` is ``sep`` in the header of a genesis,
    such as ``model``. ``value`` is base36 multibase text, ``k…``, as in the topic name."""

    key: str
    value: str


class Topic(NamedTuple):
    """Network and separator that a Ceramic topic name contains. The separator is `None` on the network topic."""

    network: str
    separator: Separator | None


def parse_topic(name: str) -> Topic | None:
    """Parse a topic name. Return `None` if it does not begin with ``/ceramic/<network>``.

    A name below ``/ceramic/<network>`` that is not a valid separator topic counts as the network topic, so that
    its messages are not lost. Examples are the ``/ceramic/<network>/<sep>`` of CIP-120's first draft, a value that is
    not lower-case base36, and a key longer than MAX_KEY. For the bare ``/ceramic`` of 2020 the result is `None`,
    and the caller takes the network of the frame (docs/design/contracts.md).
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
        TopicError: The network, key or value is invalid, so ``parse_topic`` would not return it.
    """
    if not network or "/" in network:
        raise TopicError(f"network {network[:80]!r} must be non-empty and without a slash")
    name = f"/ceramic/{network}" if separator is None else f"/ceramic/{network}/sep/{format_separator(separator)}"
    _require_utf8(name, "topic name")
    return name


def network_topics(network: str) -> tuple[str, str]:
    """Return both names of the network topic: the one that nodes use, and CIP-120's, with a slash at its end."""
    name = format_topic(network, None)
    return name, f"{name}/"


def encode_separator_value(raw: bytes) -> str:
    """Encode a separator value as base36 multibase text.

    Raises:
        TopicError: The value is empty or longer than MAX_VALUE.
    """
    if not raw:
        raise TopicError("a separator value must not be empty")
    # each byte takes at least one digit
    text: str = encode_multibase("k", raw) if len(raw) < MAX_VALUE else ""
    if not text or len(text) > MAX_VALUE:
        raise TopicError(f"separator value of {len(raw)} bytes; as base36 text it may have {MAX_VALUE} characters")
    return text


def format_separator(s: Separator) -> str:
    """Format a separator as ``key/value``, as in the ``sep`` of a BATCH_UPDATE.

    Raises:
        TopicError: The key or value is invalid.
    """
    _require_key(s.key)
    if not _is_value(s.value):
        raise TopicError(f"{s.value[:80]!r} is not a separator value: use non-empty lower-case base36 multibase (k…)")
    return f"{s.key}/{s.value}"


def parse_separator(text: str) -> Separator:
    """Parse a separator in the form ``key/value``, which is split at the last slash.

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
    """Separators that a node follows: all if `key` is `None`, all with this key if `value` is `None`, else one."""

    key: str | None
    value: str | None

    def covers(self, separator: Separator) -> bool:
        """Return true if the interest includes a separator."""
        return self.key in (None, separator.key) and self.value in (None, separator.value)


def parse_interest(text: str) -> Interest:
    """Parse an interest: ``*``, a key, ``key/*`` or ``key/value``.

    If the part after the last slash is not a value with the prefix ``k``, the whole text is a key. The form ``key/*``
    is for keys that would be ambiguous: ``*/*`` is the key ``*``, and ``a/k2/*`` the key ``a/k2``.

    Raises:
        TopicError: The text is empty, or its key is invalid.
    """
    if not text:
        raise TopicError("an interest must not be empty: write *, KEY, KEY/* or KEY/VALUE")
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
    """Return a separator value with its prefix "k", or `None` if the text is not base36.

    A text that begins like a CID in base32 gets no prefix, so it is refused.
    """
    value = text if text.startswith(("k", *_BASE32_CIDS)) else f"k{text}"
    return value if _is_value(value) else None


def _is_value(value: str) -> bool:
    # each such text is canonical, because base36 multibase also encodes leading zero bytes as zero digits
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
