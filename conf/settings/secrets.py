"""Detection of secret settings, and masking of secrets in text.

Kiln's own secret settings are `SecretStr`. Free tables, such as `spark.conf`, have keys of Hadoop, Spark, Kafka and
object stores, where secrets are recognized by the name of the key.
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
    r"(?<![\w.\-])(?P<name>[\w.\-]++)(?P<equals>[\"']?\s*(?:=|:(?!//))\s*)"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s;,&\"']+)"
)


def is_secret_key(key: str) -> bool:
    """Return true if the name of a key in a free table suggests a secret."""
    return _SECRET.search(key) is not None


def mask_secrets(text: str) -> str:
    """Mask the secrets in a text: values assigned to secret names, and user and password of URLs."""
    return _ASSIGNED.sub(_mask, _USER_INFO.sub(MASK, text))


def _mask(found: re.Match[str]) -> str:
    return f"{found['name']}{found['equals']}{MASK}" if is_secret_key(found["name"]) else found[0]
