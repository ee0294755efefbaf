"""The options of delta-rs as S3A's settings: the same store, the same user, whatever form the options have."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.conf.process.location import parse_location
from kiln.pipelines.runtime.session import build_s3a_settings

PLACE = "s3://kiln/lake"
AT = "spark.hadoop.fs.s3a.bucket.kiln."
USER = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}


def settings_of(options: dict[str, str], environ: dict[str, str] | None = None) -> dict[str, str]:
    found = build_s3a_settings([parse_location(PLACE, options), parse_location(PLACE, options)], environ or {})
    return {key.removeprefix(AT): value for key, value in found.items()}


def test_a_place_on_a_disk_needs_nothing(tmp_path: Path) -> None:
    assert build_s3a_settings([parse_location(tmp_path)], {"AWS_REGION": "eu-west-1"}) == {}


@pytest.mark.parametrize("key", ["aws_endpoint_url", "AWS_ENDPOINT_URL", "aws_endpoint", "endpoint", "endpoint_url"])
def test_an_endpoint_is_reached_as_it_is_written(key: str) -> None:
    plain = settings_of({key: "http://127.0.0.1:7070"})
    assert (plain["endpoint"], plain["connection.ssl.enabled"]) == ("http://127.0.0.1:7070", "false")
    assert plain["path.style.access"] == "true"
    secure = settings_of({key: "https://store", "aws_virtual_hosted_style_request": "true"})
    assert (secure["connection.ssl.enabled"], secure["path.style.access"]) == ("true", "false")


def test_an_option_weighs_more_than_the_environment() -> None:
    environ = {"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-2", "AWS_ENDPOINT_URL": "https://other"}
    assert settings_of({}, environ)["endpoint.region"] == "eu-west-1"
    told = settings_of({"aws_region": "us-east-1", "aws_endpoint_url": "https://this"}, environ)
    assert (told["endpoint.region"], told["endpoint"]) == ("us-east-1", "https://this")


def test_credentials_are_given_or_looked_for_as_delta_rs_does() -> None:
    given = settings_of(USER)
    assert (given["access.key"], given["secret.key"]) == ("k", "s")
    assert given["aws.credentials.provider"].endswith("SimpleAWSCredentialsProvider")
    short = settings_of({**USER, "aws_session_token": "t"})
    assert short["session.token"] == "t"
    assert short["aws.credentials.provider"].endswith("TemporaryAWSCredentialsProvider")
    looked = settings_of({}, {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"})
    assert looked["aws.credentials.provider"].endswith("DefaultCredentialsProvider")
    assert not {"access.key", "secret.key"} & looked.keys()


def test_http_is_allowed_where_the_endpoint_says_http() -> None:
    assert parse_location(PLACE, {"aws_endpoint_url": "http://127.0.0.1:7070"}).options["aws_allow_http"] == "true"
    assert "aws_allow_http" not in parse_location(PLACE, {"aws_endpoint_url": "https://store"}).options
