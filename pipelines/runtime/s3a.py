"""How Spark reaches an object store: the settings of Hadoop's S3A, out of the options that delta-rs takes.

S3A reads tables, and reads and writes checkpoints. Nothing commits to a table by it: S3A has no put-if-absent, and
Delta's log store for it loses commits beside another writer (docs/object-store.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kiln.conf.process.location import Location, StorePrefix

_PREFIX: Final = "spark.hadoop.fs.s3a."
_ENVIRONMENT: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
"""What delta-rs takes out of the environment, and S3A does not; of two with one meaning the first counts."""

_SIMPLE: Final = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
_TEMPORARY: Final = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"
_FOUND: Final = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
"""Looks where delta-rs looks: variables, the files of a profile, a web identity, the machine's own role."""


def build_s3a_settings(places: Iterable[Location], environ: Mapping[str, str]) -> dict[str, str]:
    """For Spark's configuration; nothing where no place is in a store. Holds secrets: never print it."""
    found: dict[str, str] = {}
    for place in places:
        if isinstance(place, StorePrefix):
            told = {
                f"{_PREFIX}bucket.{place.bucket}.{key}": value
                for key, value in _build_bucket_settings(place.options, environ).items()
            }
            found |= told
    if found:
        found[f"{_PREFIX}impl"] = "org.apache.hadoop.fs.s3a.S3AFileSystem"
    return found


def _build_bucket_settings(options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The settings for one bucket."""
    known = {_normalize_key(key): environ[key] for key in reversed(_ENVIRONMENT) if environ.get(key)}
    known |= {_normalize_key(key): value for key, value in options.items()}
    told: dict[str, str] = {}
    if endpoint := known.get("endpoint"):
        told["endpoint"] = endpoint
        told["connection.ssl.enabled"] = str(not endpoint.startswith("http://")).lower()
        told["path.style.access"] = str(known.get("virtual_hosted_style_request", "false").lower() != "true").lower()
    if region := known.get("region"):
        told["endpoint.region"] = region
    if (key := known.get("access_key_id")) and (secret := known.get("secret_access_key")):
        told |= {"access.key": key, "secret.key": secret, "aws.credentials.provider": _SIMPLE}
        if token := known.get("token"):
            told |= {"session.token": token, "aws.credentials.provider": _TEMPORARY}
    else:
        told["aws.credentials.provider"] = _FOUND
    return told


_ALIASES: Final = {
    "endpoint_url": "endpoint",
    "endpoint_url_s3": "endpoint",
    "default_region": "region",
    "session_token": "token",
}


def _normalize_key(key: str) -> str:
    """delta-rs takes a key in small letters or in capitals, with `aws_` before it or without, and by several names."""
    plain = key.lower().removeprefix("aws_")
    return _ALIASES.get(plain, plain)
