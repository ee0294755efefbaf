"""kiln.conf.settings: one commented file, the environment above it, and errors that name the place and the nearest
key."""

from __future__ import annotations

import os
import re
import tomllib
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kiln.conf.process.errors import SettingsError
from kiln.conf.settings.durations import duration_text, micros, parse_duration, spark_interval
from kiln.conf.settings.keys import list_keys, name_variable
from kiln.conf.settings.model import Kafka, Settings
from kiln.conf.settings.reading import DEFAULT_FILE, environment, format_settings, line_of, load, load_settings
from kiln.schemas.wire.signing_policy import Policy, match_policy


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KILN_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(config: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(config)
    return str(caught.value)


# ---------------------------------------------------------------- kiln.toml


def leaves(tree: dict[str, object], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    found: dict[tuple[str, ...], object] = {}
    for key, value in tree.items():
        path = (*above, key)
        if isinstance(value, dict) and value:
            found |= leaves(value, path)
        else:
            found[path] = value
    return found


def test_kiln_toml_lists_every_key_and_nothing_else() -> None:
    listed = leaves(tomllib.loads(DEFAULT_FILE.read_text(encoding="utf-8")))
    assert set(listed) == set(list_keys())


def test_kiln_toml_has_the_defaults() -> None:
    assert Settings.model_validate(tomllib.loads(DEFAULT_FILE.read_text(encoding="utf-8"))) == Settings()


def test_what_the_protocols_fix_is_the_default() -> None:
    """CIP-123: T "should be set to 1", and a BATCH_UPDATE has typ 3. Without bundles no topic table is agreed on."""
    found = Settings()
    assert (found.batch.window, found.batch.typ) == (timedelta(seconds=1), 3)
    assert found.batch.max_block_bytes == 256_000  # js-ceramic loads no larger one
    assert (found.batch.only_verified, found.batch.authors) == (False, ("*",))
    assert found.topic_table.bundles == {}


def test_kiln_toml_comments_every_key() -> None:
    lines = DEFAULT_FILE.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if re.match(r"\w+ = ", line):
            assert re.match(r"# \S.{4}", lines[number - 1]), f"no comment above {line!r}"


# ---------------------------------------------------------------- where values come from


def test_the_environment_weighs_more_than_the_file_and_the_command_line_more_than_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 'state = "from-file"\n[network]\nname = "of-file"\n[batch]\nwindow = "2s"\ntick = "50ms"\n')
    monkeypatch.setenv("KILN_BATCH__WINDOW", "3s")
    monkeypatch.setenv("KILN_STATE", "from-environment")
    settings = load_settings(path)
    assert settings.batch.window == timedelta(seconds=3)
    assert settings.batch.tick == timedelta(milliseconds=50)
    assert settings.batch.max_block_bytes == 256_000
    assert settings.state == Path("from-environment").absolute()
    assert settings.network.name == "of-file"
    assert load(path, state=tmp_path / "cli").settings.lake_root.folder == tmp_path / "cli" / "lake"


@pytest.mark.parametrize("keys", sorted(list_keys()))
def test_every_key_can_be_set_by_environment(keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "networks": '{"testnet-clay": "none"}',
        "topics": '{"/ceramic/*": "none"}',
        "conf": '{"spark.a.b": "c"}',
        "bundles": '{"clay": ["/ceramic/testnet-clay"]}',
        "send": "eager",
        "queries": "archive,batch",
        "default": "either",
        "bootstrap": "broker:9092",
        "security_protocol": "SSL",
        "sasl_mechanism": "PLAIN",
        "embedded_heap": "512m",
        "driver_memory": "3g",
        "enabled": "false" if keys[0] in ("traffic", "discovery") else "true",
        "ui": "true",
        "garbage": "0.5",
        "forged": "0.5",
    }
    if keys == ("kafka", "security_protocol"):
        monkeypatch.setenv("KILN_KAFKA__BOOTSTRAP", "broker:9092")
    if keys[0] == "network" and keys[1] not in ("name", "kind"):
        monkeypatch.setenv("KILN_NETWORK__KIND", "gossip")
    before: object = load_settings()
    if keys[0] == "network":
        values |= {"kind": "gossip", "protocols": "/meshsub/1.1.0", "topics": "/app/*", "message_id": "sha256_data"}
    if keys[0] in ("bep50", "monitor"):
        values |= {
            "listen": "127.0.0.1:77",
            "contacts": "127.0.0.1:77",
            "follow": f"{'ab' * 32}/model/kabc",
            "publish": "false",
        }
    peer = "/ip4/192.0.2.1/tcp/4811/p2p/12D3KooWGzxzKZYveHXtpG6AsrUJBcWxHBFS2HsEoGTxrMLvKXtf"
    if keys[0] in ("bridge", "ipfs"):
        values |= {"listen": "/ip4/127.0.0.1/tcp/77", "bootstrap": peer, "peers": peer if keys[0] == "ipfs" else "77"}
    if keys[0] == "discovery":
        values |= {"server_mode": "false", "protocol_prefix": "/kiln", "announce": "/ip4/192.0.2.1/tcp/4811"}
    values |= {"api": "http://127.0.0.1:5001", "api_auth": "bearer:token", "fetch": "false"}
    if keys[0] == "transition":
        values |= {"mode": "duplicate", "at": "2027-01-31T12:00:00Z", "rpc_url": "http://127.0.0.1:8545"}
        if keys[-1] == "height":
            monkeypatch.setenv("KILN_TRANSITION__RPC_URL", values["rpc_url"])
        if keys[-1] == "phase_out":
            monkeypatch.setenv("KILN_TRANSITION__AT", values["at"])
    if keys[0] == "batch":
        values |= {"authors": peer.rpartition("/")[2], "only_verified": "true"}
    if keys[0] in ("lake", "maintenance"):
        values |= {
            "retention": '{"frames": "30d"}',
            "history_retention": "2h",
            "storage_options": '{"aws_region": "us-east-1"}',
        }
    if keys[0] == "log":
        values |= {"format": "json", "level": "debug", "levels": '{"kiln.bridge.libp2p": "error"}'}
    values["durability"] = "process"
    values["implied_separator"] = "model"
    values["check_genesis"] = "false"
    guesses = [values[keys[-1]]] if keys[-1] in values else ["4", "77000", "77000000", "77s", "77h", "other"]
    for guess in guesses:
        monkeypatch.setenv(name_variable(keys), guess)
        try:
            after: object = load_settings()
        except SettingsError:
            continue
        break
    else:
        pytest.fail(f"{name_variable(keys)} takes none of {guesses}")
    for key in keys:
        before, after = getattr(before, key), getattr(after, key)
    assert after != before


def test_tables_may_be_given_key_by_key_or_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_JOBS", '{"archive": {"trigger": "9s"}}')
    monkeypatch.setenv("KILN_POLICY__NETWORKS", '{"testnet-clay": "none"}')
    settings = load_settings()
    assert settings.jobs.of("archive").trigger == timedelta(seconds=9)
    assert settings.jobs.of("archive").max_offsets_per_trigger == 400_000
    assert settings.policy.of("testnet-clay") == "none"
    assert settings.policy.of("mainnet") == "strict"


def test_the_policy_of_a_topic_is_that_of_the_longest_pattern() -> None:
    topics: dict[str, Policy] = {"/ceramic/n/sep/*": "either", "/ceramic/n/sep/*/k1": "strict", "/[a]?": "strict"}
    assert match_policy("/ceramic/n", topics) is None
    assert match_policy("/ceramic/n/sep/model/k2", topics) == "either"
    assert match_policy("/ceramic/n/sep/model/k1", topics) == "strict"
    assert match_policy("/[a]?", topics) == "strict"
    assert match_policy("/ab", topics) is None  # no character but the asterisk is special


def test_part_of_a_table_in_a_file_leaves_its_other_keys_at_their_defaults(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, '[jobs.archive]\ntrigger = "9s"\n'))
    assert settings.jobs.of("archive").max_offsets_per_trigger == Settings().jobs.of("archive").max_offsets_per_trigger
    assert settings.jobs.of("archive").trigger == timedelta(seconds=9)


def test_kiln_config_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_CONFIG", str(write(tmp_path, '[network]\nname = "mainnet"\n')))
    assert load_settings().network.name == "mainnet"
    assert load_settings(DEFAULT_FILE).network.name == "local-demo"


def test_the_name_of_the_network_has_a_short_variable_and_a_short_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, '[network]\nname = "from-file"\n')
    monkeypatch.setenv("KILN_NETWORK", "from-environment")
    loaded = load(path)
    assert loaded.settings.network.name == "from-environment"
    assert loaded.source(("network", "name")) == "environment KILN_NETWORK"
    assert environment(loaded.settings)["KILN_NETWORK"] == "from-environment"
    loaded = load(path, network="from-option")
    assert (loaded.settings.network.name, loaded.source(("network", "name"))) == ("from-option", "command line")
    monkeypatch.setenv("KILN_NETWORK", "a/b")
    assert problems(path) == 'environment KILN_NETWORK: network.name = "a/b": expected a name without slash and space'
    monkeypatch.setenv("KILN_NETWORK__NAME", "mainnet")
    assert "environment KILN_NETWORK__NAME: no such setting; did you mean KILN_NETWORK?" in problems(path)


def test_settings_are_frozen_and_construct_without_reading_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_NETWORK", "from-environment")
    settings = Settings()
    assert settings.network.name == "local-demo"
    with pytest.raises(ValidationError):
        settings.network.name = "other"


# ---------------------------------------------------------------- errors


def test_an_unknown_key_is_an_error_that_names_the_line_and_the_nearest_key(tmp_path: Path) -> None:
    path = write(tmp_path, 'state = "s"\n\n[batch]\nwindow = "1s"\nwindwo = "2s"\n')
    assert problems(path) == f"{path}:5: batch.windwo: no such setting; did you mean batch.window?"


def test_an_unknown_table_and_a_key_in_the_wrong_table(tmp_path: Path) -> None:
    path = write(tmp_path, '[bach]\nwindow = "1s"\n[kafka]\nlike_nothing_else = 1\nrestarts = 3\n')
    lines = set(problems(path).splitlines())
    assert f"{path}:1: bach: no such setting; did you mean batch?" in lines
    assert f"{path}:4: kafka.like_nothing_else: no such setting; see conf/kiln.toml for all settings" in lines
    assert f"{path}:5: kafka.restarts: no such setting; did you mean jobs.max_restarts?" in lines


def test_an_unknown_variable_is_an_error_that_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_BATCH__WINDWO", "1s")
    monkeypatch.setenv("KILN_STAT", "x")
    assert problems().splitlines() == [
        "environment KILN_BATCH__WINDWO: no such setting; did you mean KILN_BATCH__WINDOW?",
        "environment KILN_STAT: no such setting; did you mean KILN_STATE?",
    ]


def test_a_wrong_value_is_named_with_its_place_and_what_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "[batch]\nwindow = 1\n[jobs]\nqueries = ['archive', 'bach']\n")
    monkeypatch.setenv("KILN_KAFKA__FRAMES_PARTITIONS", "many")
    text = problems(path)
    assert f'{path}:2: batch.window = 1: expected a duration such as "100ms"' in text
    assert f"{path}:4: jobs.queries = \"bach\": expected 'archive', 'updates', 'batch' or 'sink'" in text
    assert (
        'environment KILN_KAFKA__FRAMES_PARTITIONS: kafka.frames_partitions = "many": expected a valid integer' in text
    )


def test_a_table_that_cannot_be_names_all_that_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "[traffic]\npeers = 3\n")
    monkeypatch.setenv("KILN_TRAFFIC__COPIES", "9")
    assert problems(path).startswith(f"{path}:1, environment KILN_TRAFFIC__COPIES: traffic: copies cannot be more than")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("KAFKA__EMBEDDED_HEAP", "2gb", 'a size as -Xmx takes it, such as "384m" or "2g"'),
        ("KAFKA__PREFIX", "kiln/", "at most 100 letters, digits, dots, - and _"),
        ("DISCOVERY__PROTOCOL_PREFIX", "ipfs", 'the start of a protocol\'s name, such as "/ipfs"'),
        ("PUBLISH__ENABLED", "maybe", 'true, false or "auto"'),
        ("TRAFFIC__SEED", "many", "a valid integer"),
        ("TRAFFIC__ENABLED", "maybe", "a valid boolean"),
    ],
)
def test_what_is_expected_is_said_in_words(
    name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"KILN_{name}", value)
    key = name.lower().replace("__", ".")
    assert problems() == f'environment KILN_{name}: {key} = "{value}": expected {expected}'


def test_json_that_is_none_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_POLICY__NETWORKS", "{testnet-clay: none}")
    monkeypatch.setenv("KILN_BATCH", "4")
    text = problems()
    assert "environment KILN_POLICY__NETWORKS: not JSON" in text
    assert "environment KILN_BATCH: expected a JSON object" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[traffic]\ncopies = 9\npeers = 3\n", "copies cannot be more than peers"),
        ("[kafka]\nembedded_port = 29093\n", "must differ"),
        ('[kafka]\nsecurity_protocol = "SSL"\n', "for a broker named in bootstrap"),
        (
            '[kafka]\nbootstrap = "a:1"\nsecurity_protocol = "SASL_SSL"\n',
            "needs sasl_username, and sasl_password or sasl_password_file",
        ),
        ('[kafka]\nbootstrap = "a:1"\nsasl_password = "x"\nsasl_password_file = "y"\n', "choose one"),
        *(
            (f'[kafka]\nbootstrap = "{text}"\n', f'kafka.bootstrap: "{shown}": expected {expected}')
            for text, shown, expected in (
                ("localhost", "localhost", "host:port, separated by commas"),
                ("a:1,localhost:", "localhost:", "host:port"),
                ("a:1;b:2", "a:1;b:2", "host:port, separated by commas"),
                ("a:1 b:2", "a:1 b:2", "host:port, separated by commas"),
                ("PLAINTEXT://k:9092", "PLAINTEXT://k:9092", "host:port, separated by commas"),
                ("k:99999", "k:99999", "a port from 1 to 65535"),
                ("k:0", "k:0", "a port from 1 to 65535"),
                ("::1:9092", "::1:9092", "host:port"),
                (",", "", "host:port"),
            )
        ),
        ('[monitor]\nlisten = "127.0.0.1:99999"\n', 'monitor.listen = "127.0.0.1:99999": expected a port of at most'),
        (
            '[ipfs]\napi = "http://127.0.0.1:99999"\n',
            "expected a URL that begins with http:// or https://, with a port",
        ),
        ('[transition]\nrpc_url = "https://"\n', "expected a URL that begins with http:// or https://, with a host"),
        ("[jobs]\nqueries = ['batch', 'batch']\n", "each query at most once"),
        ('[network]\nname = "a/b"\n', "network.name"),
        ('network = "mainnet"\n', 'network = "mainnet": expected a table: [network]'),
        ("batch = 3\n", "a table: [batch]"),
        ("[topic_table]\nbundles = { a = [] }\n", "bundle 'a' needs at least one topic"),
        (
            '[topic_table]\nbundles = { a = ["x", ""] }\n',
            "bundle 'a' needs at least one topic, and no topic may be empty",
        ),
        ('[topic_table.bundles]\na = ["x", "y"]\nb = ["y", "x"]\n', "bundles 'a' and 'b' both have the same topics"),
        (
            '[topic_table.bundles]\na = ["ab", "c"]\nb = ["a", "bc"]\n',
            "bundles 'a' and 'b' both have the same hash, f20015ad,",
        ),
        ('[topic_table]\nbundles = { a = "x" }\n', "topic_table.bundles.a"),
        ('[topic_table]\nsend = "always"\n', "'cautious', 'eager' or 'off'"),
        ("window = \n", "not TOML"),
    ],
)
def test_what_cannot_be_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    found = problems(path)
    assert expected in found
    assert str(path) in found
    assert "Traceback" not in found
    assert "pydantic" not in found


@pytest.mark.parametrize("text", ["a:1,b:2", "a:1, b:2", "[::1]:9092,10.0.0.5:9092", "kafka-1.example.org:9092"])
def test_servers_of_kafka(text: str, tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, f'[kafka]\nbootstrap = "{text}"\n')).kafka.server_list()


def test_a_password_in_the_servers_of_kafka_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = write(tmp_path, '[kafka]\nbootstrap = "SASL_SSL://user:hunter2@k:9092"\n')
    with pytest.raises(SettingsError, match="Set user and password in") as refused:
        load_settings(path)
    assert "hunter2" not in str(refused.value)


def test_a_missing_file_says_how_it_is_named(tmp_path: Path) -> None:
    assert problems(tmp_path / "none.toml").startswith(f"{tmp_path / 'none.toml'}: no such settings file")


def test_the_line_of_a_key_is_found_in_every_spelling() -> None:
    text = "a = 1\n[x]\n# b = 0\nb = 2\nc.d = 3\n[x.y] # comment\n'e' = 4\n"
    assert [line_of(text, tuple(key.split("."))) for key in ("a", "x.b", "x.c.d", "x.y.e", "x.y.z", "q")] == [
        1,
        4,
        5,
        7,
        6,
        0,
    ]


# ---------------------------------------------------------------- durations


@given(st.integers(0, 10**15).map(lambda number: timedelta(microseconds=number)))
def test_durations_are_read_back_as_written(value: timedelta) -> None:
    assert parse_duration(duration_text(value)) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1s", 1_000_000), ("100ms", 100_000), ("1h30m", 5_400_000_000), ("0s", 0), ("7d", 604_800_000_000)],
)
def test_durations_in_microseconds(text: str, expected: int) -> None:
    assert micros(parse_duration(text)) == expected


@pytest.mark.parametrize("text", ["", "1", "s", "-1s", "1 s", "1x", "1.5s", 1, None, "9" * 30 + "d"])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="a duration"):
        parse_duration(text)


def test_spark_interval() -> None:
    assert spark_interval(timedelta(0)) == "0 milliseconds"
    assert spark_interval(timedelta(seconds=2)) == "2000 milliseconds"


# ---------------------------------------------------------------- the broker


SASL: dict[str, object] = {
    "bootstrap": "a:9092, b:9092",
    "security_protocol": "SASL_SSL",
    "sasl_username": "kiln",
    "sasl_password": 'se"cr\\et',
    "ssl_cafile": "/etc/ca.pem",
    "ssl_certfile": "/etc/me.pem",
}


def test_the_embedded_broker_has_the_password_of_its_folder(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path)
    with pytest.raises(SettingsError, match="the embedded broker has not run yet"):
        settings.broker.client_options()
    settings.broker_dir.mkdir()
    (settings.broker_dir / "password").write_text("hunter2")
    assert settings.broker.client_options() == {
        "bootstrap_servers": ["127.0.0.1:29092"],
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "kiln",
        "sasl_plain_password": "hunter2",
    }
    assert 'PlainLoginModule required username="kiln" password="hunter2";' in str(settings.broker.spark_options())
    assert "hunter2" not in repr(settings.broker)
    assert settings.broker.topic("frames") == "kiln.frames"


def test_a_password_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    kafka = Kafka.model_validate({**SASL, "sasl_password": "", "sasl_password_file": str(path)})
    with pytest.raises(SettingsError, match=r"kafka\.sasl_password_file: .*: the file does not exist"):
        kafka.client_options()
    path.write_text("hunter2\n")
    assert kafka.client_options()["sasl_plain_password"] == "hunter2"
    assert Settings(kafka=kafka).broker == kafka


def test_a_secured_broker_is_told_to_both_clients() -> None:
    kafka = Kafka.model_validate(SASL)
    assert kafka.client_options() == {
        "bootstrap_servers": ["a:9092", "b:9092"],
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "kiln",
        "sasl_plain_password": 'se"cr\\et',
        "ssl_cafile": "/etc/ca.pem",
        "ssl_certfile": "/etc/me.pem",
    }
    spark = kafka.spark_options()
    assert spark["kafka.security.protocol"] == "SASL_SSL"
    assert spark["kafka.sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="kiln" password="se\\"cr\\\\et";'
    )
    assert spark["kafka.ssl.truststore.location"] == "/etc/ca.pem"
    assert spark["kafka.ssl.keystore.type"] == "PEM"


def test_kafka_python_knows_every_option() -> None:
    from kafka import KafkaProducer

    assert set(Kafka.model_validate(SASL).client_options()) <= set(KafkaProducer.DEFAULT_CONFIG)


def test_a_password_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**SASL, "sasl_password": "hunter2"}.items():
        monkeypatch.setenv(name_variable(("kafka", key)), str(value))
    loaded = load()
    assert 'sasl_password = "**********"' in format_settings(loaded)
    assert "hunter2" not in f"{format_settings(loaded)} {loaded!r} {loaded.settings.model_dump_json()}"
    monkeypatch.setenv("KILN_KAFKA__SASL_USERNAME", "")
    assert "hunter2" not in problems()


def test_what_kubo_asks_for_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_IPFS__API_AUTH", "bearer:hunter2")
    loaded = load()
    assert loaded.settings.ipfs.api_auth.get_secret_value() == "bearer:hunter2"
    assert "hunter2" not in f"{format_settings(loaded)} {loaded!r} {loaded.settings.model_dump_json()}"
    monkeypatch.setenv("KILN_IPFS__API_AUTH", "hunter2")
    assert "hunter2" not in problems()
    assert 'expected "bearer:TOKEN" or "basic:USER:PASSWORD"' in problems()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("height = 5", "transition.height needs transition.rpc_url, which serves the height (eth_blockNumber)"),
        ('height = 5\nat = "2027-01-31T12:00:00Z"', "transition.at and transition.height: choose one"),
        ('phase_out = "1h"', "transition.phase_out counts from transition.at or transition.height: set one of them"),
        ('at = "2027-01-31 12:00"', "expected a time with its zone in RFC 3339"),
        ('at = "soon"', "expected a time with its zone in RFC 3339"),
        ('rpc_url = "secret.example/key"', "expected a URL that begins with http:// or https://"),
        ('mode = "both"', "expected 'cutover' or 'duplicate'"),
    ],
)
def test_transition_that_cannot_be(text: str, says: str, tmp_path: Path) -> None:
    found = problems(write(tmp_path, f"[transition]\n{text}\n"))
    assert says in found
    assert "secret" not in found


def test_moment_of_a_transition_is_that_of_its_zone(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, '[transition]\nat = "2027-01-31T12:00:00+02:00"\n'))
    assert settings.transition.at_us == 1_801_389_600_000_000


@pytest.mark.parametrize("api", ["", "self", "http://127.0.0.1:5001"])
@pytest.mark.parametrize(("enabled", "announces"), [('"auto"', False), ("true", True), ("false", False)])
def test_batches_are_announced_only_if_the_settings_say_so(
    enabled: str, api: str, announces: bool, tmp_path: Path
) -> None:
    overlay = f"[bep50]\nenabled = true\npublish = {enabled}\n"
    settings = load_settings(write(tmp_path, f'[publish]\nenabled = {enabled}\n[ipfs]\napi = "{api}"\n{overlay}'))
    assert (settings.publishes, settings.announces) == (announces, announces)


PEER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWM68GyFKBT9JsuTRB6CYkF61PtMuSkynUauSQEGBX51JW"


@pytest.mark.parametrize(
    ("text", "fetches"),
    [
        ("", False),  # the demo network
        (f'[bridge]\nbootstrap = ["{PEER}"]', True),
        (f'[ipfs]\npeers = ["{PEER}"]', True),
        ("[bep50]\nenabled = true", True),
        ("[ipfs]\nfetch = true", True),
        ('[ipfs]\napi = "http://127.0.0.1:5001"', True),
        (f'[bridge]\nbootstrap = ["{PEER}"]\n[ipfs]\nfetch = false', False),
        (f'[bridge]\nbootstrap = ["{PEER}"]\n[ipfs]\napi = ""', False),
        ('[ipfs]\napi = ""\nfetch = true', False),
    ],
)
def test_blocks_are_fetched_where_a_peer_may_have_them(text: str, fetches: bool, tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, text)).fetches is fetches


def test_the_bridge_itself_is_connected_over_tcp_alone(tmp_path: Path) -> None:
    quic = PEER.replace("tcp/4001", "udp/4001/quic-v1")
    assert "ipfs.peers" in problems(write(tmp_path, f'[ipfs]\npeers = ["{quic}"]'))
    load_settings(write(tmp_path, f'[ipfs]\napi = "http://127.0.0.1:5001"\npeers = ["{quic}"]'))


KEY = "ab" * 32


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('listen = ["localhost:4813"]', "'localhost' does not appear to be an IPv4 or IPv6 address"),
        ('listen = ["127.0.0.1:1", "127.0.0.1:2"]', "an IPv4 address, an IPv6 address, or one of each"),
        ("listen = []", "an IPv4 address, an IPv6 address, or one of each"),
        ('listen = ["::1:4813"]', "write an IPv6 address in brackets"),
        ('bootstrap = ["router.example"]', "is not HOST:PORT"),
        ('contacts = ["kiln.example:4813"]', "'kiln.example' does not appear to be"),
        ('follow = ["model/k2t6"]', "does not begin with a public key"),
        (f'follow = ["{KEY}/model"]', "has no slash between key and value"),
        ("max_topics = 0", "greater than or equal to 1"),
    ],
)
def test_an_overlay_that_cannot_be(text: str, says: str, tmp_path: Path) -> None:
    said = problems(write(tmp_path, f"[bep50]\n{text}"))
    assert f"mine.toml:2: bep50.{text.split()[0]}" in said
    assert says in said


def test_an_overlay_that_can_be(tmp_path: Path) -> None:
    text = f'''[bep50]
enabled = true
listen = ["0.0.0.0:4813", "[::]:4813"]
bootstrap = ["router.example:6881", "[2001:db8::1]:6881"]
contacts = ["10.0.0.1:4813"]
follow = ["{KEY}/model/k2t6"]'''
    settings = load_settings(write(tmp_path, text))
    assert settings.bep50.bootstrap == ("router.example:6881", "[2001:db8::1]:6881")
    assert not settings.announces
    assert load_settings(write(tmp_path, f"{text}\npublish = true")).announces
    assert not load_settings(write(tmp_path, "[bep50]\npublish = true")).announces


def test_shown_is_toml_that_reads_back_and_says_where_values_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILN_BATCH__WINDOW", "1500ms")
    path = write(tmp_path, '[policy]\nnetworks = { "testnet-clay" = "none" }\n')
    loaded = load(path, state=tmp_path)
    text = format_settings(loaded)
    assert 'window = "1s500ms"  # environment KILN_BATCH__WINDOW' in text
    assert f'networks = {{ "testnet-clay" = "none" }}  # {path}' in text
    assert f'state = "{tmp_path}"  # command line' in text
    assert "typ = 3\n" in text
    assert Settings.model_validate(tomllib.loads(text)) == loaded.settings
