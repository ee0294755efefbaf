"""What may be secret in the settings is shown nowhere: not by `kiln config show`, not in an error."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from pydantic import SecretStr

from kiln.conf.settings.keys import get_value, join_key, list_keys
from kiln.conf.settings.model import Settings
from kiln.conf.settings.values import MASK, is_secret_key, mask_secrets
from kiln.deploy.cli.app import run_command

SECRET_KEYS = [
    "spark.authenticate.secret",
    "spark.ssl.keyPassword",
    "spark.ssl.trustStorePassword",
    "spark.hadoop.fs.s3a.access.key",
    "spark.hadoop.fs.s3a.secret.key",
    "spark.hadoop.fs.s3a.session.token",
    "spark.hadoop.fs.s3a.encryption.key",
    "spark.hadoop.fs.s3a.server-side-encryption.key",
    "spark.hadoop.fs.azure.account.key.lake.blob.core.windows.net",
    "spark.hadoop.fs.azure.account.oauth2.client.secret",
    "spark.hadoop.fs.azure.sas.container.lake.blob.core.windows.net",
    "spark.hadoop.hadoop.security.credential.provider.path",
    "spark.kafka.clusters.a.sasl.jaas.config",
    "kafka.ssl.keystore.key",
    "kafka.ssl.key.password",
    "kafka.sasl.jaas.config",
    "AWS_SECRET_ACCESS_KEY",
    "aws_access_key_id",
    "AWS_SESSION_TOKEN",
    "azure_storage_sas_token",
    "google_service_account_key",
    "spark.kubernetes.authenticate.oauthToken",
    "spark.hadoop.javax.jdo.option.ConnectionPassword",
]
OPEN_KEYS = [
    "spark.sql.session.timeZone",
    "spark.authenticate",
    "spark.hadoop.fs.s3a.endpoint",
    "spark.sql.shuffle.partitions",
    "spark.hadoop.fs.s3a.path.style.access",
    "kafka.security.protocol",
    "kafka.sasl.mechanism",
    "kafka.ssl.truststore.location",
    "aws_region",
    "spark.keyed",
]


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_a_key_that_names_a_secret_is_known(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize("key", OPEN_KEYS)
def test_other_keys_are_shown(key: str) -> None:
    assert not is_secret_key(key)


def test_each_setting_with_the_name_of_a_secret_is_one() -> None:
    # the path of a file is none
    named = [keys for keys in list_keys() if is_secret_key(join_key(keys)) and not keys[-1].endswith("_file")]
    assert ("kafka", "sasl_password") in named
    for keys in named:
        value = get_value(Settings(), keys)
        assert isinstance(value, SecretStr | int), keys  # a number counts keys, and is none


def test_config_show_masks_the_secrets_of_free_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = {**dict.fromkeys(SECRET_KEYS, "hunter2"), **dict.fromkeys(OPEN_KEYS, "open")}
    monkeypatch.setenv("KILN_SPARK__CONF", json.dumps({**conf, "spark.proxy": "http://me:hunter2@127.0.0.1:80/"}))
    monkeypatch.setenv("KILN_SPARK__MASTER", "spark://me:hunter2@127.0.0.1:7077")
    assert run_command(["config", "show"]) == 0
    said = capsys.readouterr().out
    assert "hunter2" not in said
    found = tomllib.loads(said)["spark"]
    assert {key for key, value in found["conf"].items() if value == MASK} == set(SECRET_KEYS)
    assert {key for key, value in found["conf"].items() if value == "open"} == set(OPEN_KEYS)
    assert found["conf"]["spark.proxy"] == f"http://{MASK}@127.0.0.1:80/"
    assert found["master"] == f"spark://{MASK}@127.0.0.1:7077"


@pytest.mark.parametrize(
    "toml",
    [
        '[spark]\nconf = { "fs.s3a.secret.key" = 42424242 }',
        '[spark]\nconf = { "x" = { "secret.key" = "42424242" } }',
        '[spark]\nconf = "--password 42424242 password=42424242"',
        "[kafka]\nsasl_password = 42424242",
        '[spark]\ndriver_memory = "2g -Dpassword=42424242"',
        '[spark]\njava_options = "-Djavax.net.ssl.keyStorePassword=42424242"',
        '[spark]\nconf = { "spark.driver.extraJavaOptions" = "-Da=b -Dx.secret=\'42424242\'" }',
    ],
)
def test_no_error_shows_a_secret(toml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kiln.toml"
    file.write_text(toml)
    assert run_command(["config", "check", str(file)]) == 2
    said = capsys.readouterr().err
    assert str(file) in said
    assert "42424242" not in said


def test_no_error_shows_the_value_of_a_variable_that_gives_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ('"42424242"', "{password: 42424242}", "42424242"):
        monkeypatch.setenv("KILN_SPARK__CONF", value)
        assert run_command(["config", "show"]) == 2
        said = capsys.readouterr().err
        assert "KILN_SPARK__CONF" in said
        assert "42424242" not in said


def test_a_password_on_the_jvms_command_line_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KILN_SPARK__JAVA_OPTIONS", "-Xss4m -Djavax.net.ssl.trustStorePassword=hunter2")
    assert run_command(["config", "show"]) == 2
    said = capsys.readouterr().err
    assert "spark.java_options contains a secret" in said
    assert "JDK_JAVA_OPTIONS" in said
    assert "hunter2" not in said


def test_text_without_its_secrets() -> None:
    assert mask_secrets('a.password="x \\" y" b=c') == f"a.password={MASK} b=c"
    assert mask_secrets("http://host/path?token=abc&n=1") == f"http://host/path?token={MASK}&n=1"
    assert mask_secrets("-XX:+UseParallelGC -Dfoo=bar") == "-XX:+UseParallelGC -Dfoo=bar"
    assert mask_secrets("/ip4/192.0.2.1/tcp/4811/p2p/12D3KooW") == "/ip4/192.0.2.1/tcp/4811/p2p/12D3KooW"
    assert mask_secrets("9" * 1_000_000) == "9" * 1_000_000  # in one pass: from each character, it would take hours
