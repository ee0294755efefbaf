"""Detection of secret settings, and text about settings without them.

The settings that Kiln knows to be secret are `SecretStr`. Free tables, such as `spark.conf`, hold what other programs
name: Hadoop, Spark, Kafka and object stores. There the name of a key tells.
"""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "**********"

# hadoop.security.sensitive-config-keys, spark.redaction.regex, Kafka's type password, the options of object stores
_SECRET: Final = re.compile(
    r"secret|passw|passphrase|pwd|token|credential|jaas|oauth|keytab|private|signature|(^|[._-])sas([._-]|$)|pass$|auth$"
    r"|(^|[._\- ])keys?([._\- ]|$)|(?-i:[a-z]Key)",
    re.IGNORECASE,
)
_USER_INFO: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# -Djavax.net.ssl.keyStorePassword=…, password="…"; and --password …
_ASSIGNED: Final = re.compile(
    r"(?P<name>[\w.\-]+)(?P<equals>[\"']?\s*(?:=|:(?!//))\s*)(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s;,&\"']+)"
)


def may_be_secret(key: str) -> bool:
    """Return true if a key of a free table names something that others should not see."""
    return _SECRET.search(key) is not None


def without_secrets(text: str) -> str:
    """A value as text, without what it names a password, and without user and password in a URL."""
    return _ASSIGNED.sub(_mask, _USER_INFO.sub(MASK, text))


def _mask(found: re.Match[str]) -> str:
    return f"{found['name']}{found['equals']}{MASK}" if may_be_secret(found["name"]) else found[0]
