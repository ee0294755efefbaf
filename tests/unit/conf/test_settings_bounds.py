"""Each number and duration of the settings has declared bounds, and a value beyond them is refused by its key."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from kiln.conf.process.errors import SettingsError
from kiln.conf.settings.durations import duration_text
from kiln.conf.settings.keys import Keys, find_bounds, find_field, join_key, list_keys, name_variable
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import load_settings

NEEDS: dict[Keys, dict[str, str]] = {
    ("network", "max_message_bytes"): {"KILN_NETWORK__KIND": "gossip"},
    ("transition", "height"): {"KILN_TRANSITION__RPC_URL": "http://127.0.0.1:8545"},
    ("transition", "phase_out"): {"KILN_TRANSITION__AT": "2027-01-31T12:00:00Z"},
    ("traffic", "copies"): {"KILN_TRAFFIC__PEERS": "10000"},
    ("traffic", "peers"): {"KILN_TRAFFIC__COPIES": "1"},
}
"""settings without which a value of the key has no effect, and is refused"""


def is_numeric(field: FieldInfo) -> bool:
    return field.annotation in (int, float, timedelta)


NUMERIC = [keys for keys in list_keys() if is_numeric(find_field(keys))]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KILN_"):
            monkeypatch.delenv(name)


def text_of(value: object) -> str:
    return duration_text(value) if isinstance(value, timedelta) else str(value)


def refusal(keys: Keys, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why the value is refused; empty if it is accepted."""
    for name, value in {**NEEDS.get(keys, {}), name_variable(keys): text}.items():
        monkeypatch.setenv(name, value)
    try:
        load_settings()
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("keys", NUMERIC, ids=join_key)
def test_each_number_has_bounds_and_is_refused_beyond_them(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    least, most = find_bounds(keys)
    assert least is not None, "declare ge"
    assert most is not None, "declare le"
    assert refusal(keys, text_of(least), monkeypatch) == ""
    if keys != ("kafka", "embedded_port"):  # its greatest value is fine, and one that no other setting has
        assert refusal(keys, text_of(most), monkeypatch) == ""
    is_duration = isinstance(least, timedelta)
    beyond = ["-1s", "1000000d", "9" * 5000 + "s"] if is_duration else ["-1", str(10**20), "9" * 5000, "nan", "inf"]
    if least:
        beyond.append("0s" if is_duration else "0")
    for text in beyond:
        words = refusal(keys, text, monkeypatch)
        assert words.startswith(f"environment {name_variable(keys)}: {join_key(keys)} = "), words
        assert len(words) < 500
        assert "**" not in words


def test_the_retention_of_tables_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, words in (("1h", "at least 1d"), ("100000d", "at most 36500d")):
        assert words in refusal(("lake", "retention"), f'{{"frames": "{text}"}}', monkeypatch)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("kafka.retention", "0s", '"0s": expected 1h to 36500d'),
        ("kafka.frames_retention_bytes", "1", '"1": expected 0 or at least 67108864'),
        ("maintenance.interval", "1us", '"1us": expected "0s" or at least 1s'),
        ("quality.interval", "1us", '"1us": expected "0s" or at least 1s'),
        ("publish.author_keys", "0", '"0": expected greater than or equal to 1'),
        ("kafka.embedded_heap", "1m", '"1m": expected "128m" to "1024g"'),
        ("spark.driver_memory", "999999999g", '"999999999g": expected "768m" to "1024g"'),
    ],
)
def test_a_value_at_which_records_would_be_lost_is_refused(
    key: str, text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tuple(key.split("."))
    assert refusal(keys, text, monkeypatch) == f"environment {name_variable(keys)}: {key} = {words}"


@pytest.mark.parametrize("text", [f"x = {'[' * 200_000}", f"x = {'9' * 5_000}", "x = "])
def test_a_settings_file_that_the_parser_cannot_take_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kiln.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as refused:
        load_settings(path)
    assert str(refused.value).startswith(f"{path}: not TOML: ")


def test_a_variable_with_thousands_of_names_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_POLICY__NETWORKS" + "__A" * 5_000, "none")
    with pytest.raises(SettingsError, match="no such setting"):
        load_settings()


def test_a_byte_order_mark_is_no_part_of_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "kiln.toml"
    path.write_bytes(b'\xef\xbb\xbfstate = "s"\n')
    assert load_settings(path).state == Path("s").absolute()


@pytest.mark.parametrize("name", ["KILN_STATE", "KILN_CONFIG"])
def test_an_empty_path_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(SettingsError, match=f"environment {name}: .*the path of a"):
        load_settings()


def test_an_empty_suite_is_not_the_current_folder() -> None:
    with pytest.raises(ValueError, match="the path of a file or folder"):
        Settings.model_validate({"quality": {"suites": [""]}})
