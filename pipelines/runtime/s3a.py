"""Settings of Hadoop's S3A, by which Spark reaches an object store, built from delta-rs's storage options.

S3A reads tables, and reads and writes checkpoints. It never commits to a table: it has no put-if-absent, and Delta's
log store for it loses commits if there is another writer (docs/object-store.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kiln.conf.process.location import Location, StorePrefix

_PREFIX: Final = "spark.hadoop.fs.s3a."
_ENVIRONMENT: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
"""variables that delta-rs reads and S3A does not; if two have the same meaning, the first takes precedence"""

_SIMPLE: Final = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
_TEMPORARY: Final = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"
_DEFAULT_CHAIN: Final = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
"""the same sources as delta-rs: variables, profile files, web identity, instance role"""


def build_s3a_settings(locations: Iterable[Location], environ: Mapping[str, str]) -> dict[str, str]:
    """Build Spark settings for the locations in an object store. They contain secrets: never print them."""
    settings = {
        f"{_PREFIX}bucket.{location.bucket}.{key}": value
        for location in locations
        if isinstance(location, StorePrefix)
        for key, value in _build_bucket_settings(location.options, environ).items()
    }
    return {**settings, f"{_PREFIX}impl": "org.apache.hadoop.fs.s3a.S3AFileSystem"} if settings else {}


def _build_bucket_settings(options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Build the settings of one bucket."""
    known = {_normalize_key(key): environ[key] for key in reversed(_ENVIRONMENT) if environ.get(key)}
    known |= {_normalize_key(key): value for key, value in options.items()}
    settings: dict[str, str] = {}
    if endpoint := known.get("endpoint"):
        settings["endpoint"] = endpoint
        settings["connection.ssl.enabled"] = str(not endpoint.startswith("http://")).lower()
        settings["path.style.access"] = str(
            known.get("virtual_hosted_style_request", "false").lower() != "true"
        ).lower()
    if region := known.get("region"):
        settings["endpoint.region"] = region
    if (key := known.get("access_key_id")) and (secret := known.get("secret_access_key")):
        settings |= {"access.key": key, "secret.key": secret, "aws.credentials.provider": _SIMPLE}
        if token := known.get("token"):
            settings |= {"session.token": token, "aws.credentials.provider": _TEMPORARY}
    else:
        settings["aws.credentials.provider"] = _DEFAULT_CHAIN
    return settings


_ALIASES: Final = {
    "endpoint_url": "endpoint",
    "endpoint_url_s3": "endpoint",
    "default_region": "region",
    "session_token": "token",
}


def _normalize_key(key: str) -> str:
    """Normalize a key of delta-rs: it may be in upper case, have the prefix `aws_`, and be one of several names."""
    plain = key.lower().removeprefix("aws_")
    return _ALIASES.get(plain, plain)
