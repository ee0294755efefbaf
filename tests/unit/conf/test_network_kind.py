"""`network.kind`: what another network than a Ceramic one has, and the settings that contradict it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.conf.process.errors import SettingsError
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import DEFAULT_FILE, load_settings

GOSSIP = '[network]\nkind = "gossip"\n'


def settings_of(folder: Path, text: str) -> Settings:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_settings(path)


def test_another_network_is_only_captured(tmp_path: Path) -> None:
    bootstrap = 'bootstrap = ["/ip4/192.0.2.1/tcp/4811/p2p/12D3KooWGzxzKZYveHXtpG6AsrUJBcWxHBFS2HsEoGTxrMLvKXtf"]\n'
    settings = settings_of(tmp_path, f"{GOSSIP}[bridge]\n{bootstrap}")
    assert settings.queries == ("archive", "sink")
    assert (settings.publishes, settings.announces, settings.fetches) == (False, False, False)
    ceramic = settings_of(tmp_path, f"[bridge]\n{bootstrap}[publish]\nenabled = true\n")
    assert ceramic.queries == ("archive", "updates", "batch", "sink")
    assert (ceramic.publishes, ceramic.fetches) == (True, True)
    assert settings_of(tmp_path, f'{GOSSIP}[jobs]\nqueries = ["archive"]\n').queries == ("archive",)


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        ("[publish]\nenabled = true\n", "publish.enabled", "remove it"),
        ("[bep50]\nenabled = true\n", "bep50.enabled", "remove it"),
        ("[ipfs]\nfetch = true\n", "ipfs.fetch", "remove it"),
        ('[bridge]\ninterests = ["model"]\n', "bridge.interests", "name the topics in network.topics"),
        ('[transition]\nmode = "duplicate"\n', "transition", "remove it"),
        ('[jobs]\nqueries = ["archive", "batch"]\n', "jobs.queries", "leave out batch and updates"),
    ],
)
def test_settings_of_ceramic_contradict_another_kind(tmp_path: Path, text: str, key: str, remedy: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_of(tmp_path, GOSSIP + text)
    assert str(caught.value).endswith(
        f'{key} is for a Ceramic network, but network.kind is "gossip", where Kiln only captures: {remedy}'
    )
    settings_of(tmp_path, text)


@pytest.mark.parametrize(
    "line",
    [
        'topics = ["/app/*"]',
        'protocols = ["/meshsub/1.1.0"]',
        'message_id = "sha256_data"',
        "max_message_bytes = 1000",
        'decoder = "waku"',
    ],
)
def test_settings_of_other_networks_contradict_ceramic(tmp_path: Path, line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_of(tmp_path, f"[network]\n{line}\n")
    key = line.split()[0]
    assert f'{key} is only for network.kind = "gossip": remove it' in str(caught.value)
    settings_of(tmp_path, f"{GOSSIP}{line}\n")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("topics = []", "at least one"),
        ('topics = ["/app/*", ""]', '"": expected a topic of 1 to 1024 bytes'),
        (f'topics = ["{"x" * 1025}"]', "expected a topic of 1 to 1024 bytes"),
        ("protocols = []", "at least one"),
        ('protocols = ["meshsub"]', '"meshsub": expected the id of a pubsub protocol'),
        ('message_id = "md5_data"', '"author_seqno", "sha256_data"'),
        ('message_id = "sha256_data:hex65"', "an id of 8 to 64 hex digits"),
        ('message_id = "blake2b_data:4"', "an id of 8 to 32 bytes"),
        ("max_message_bytes = -1", "greater than or equal to 0"),
        ('decoder = "a b"', "the name of an entry point in the group kiln.decoders"),
    ],
)
def test_a_faulty_setting_of_another_network_is_named(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_of(tmp_path, f"{GOSSIP}{line}\n")
    assert f"mine.toml:3: network.{line.split()[0]}" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"), [("ceramic", "ceramic"), ("kubo-pubsub", "gossip"), ("filecoin", "gossip"), ("waku", "gossip")]
)
def test_the_profiles_are_of_their_kind(name: str, kind: str) -> None:
    settings = load_settings(DEFAULT_FILE.with_name(f"{name}.toml"))
    assert settings.network.kind == kind
