"""Where tables and checkpoints are, by the settings; and what a place cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from kiln.conf.process.errors import SettingsError
from kiln.conf.settings.model import Checkpoints, Lake, Settings
from kiln.conf.settings.reading import load

STORE = Lake(uri="s3://kiln/lake", storage_options={"aws_region": "us-east-1"})
ROOT = Path(__file__).resolve().parents[3]


def test_by_default_both_are_in_the_state_folder(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path)
    assert settings.lake_root.folder == tmp_path / "lake"
    assert settings.checkpoints_root.folder == tmp_path / "checkpoints"
    assert not settings.uses_store


def test_a_path_is_taken_from_where_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(lake=Lake(uri="data/lake"), checkpoints=Checkpoints(uri="/srv/checkpoints"))
    assert settings.lake_root.folder == tmp_path / "data" / "lake"
    assert settings.checkpoints_root.folder == Path("/srv/checkpoints")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        *((f"a{text}b", json.dumps(text)) for text in ("%20", "%2F", "\\", "[", "]", "^", "|", "?", "\n", "\x7f")),
        ("stra\udce9e", "UTF-8"),
    ],
)
def test_a_folder_that_cannot_have_tables_is_refused_with_its_source(
    name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs panics in some of them, and writes another folder in others."""
    with pytest.raises(SettingsError) as refused:
        load(state=tmp_path / name)
    assert str(refused.value).startswith("command line: state = ")
    assert shown in str(refused.value).partition(": expected ")[2]
    for key in ("lake", "checkpoints"):
        with monkeypatch.context() as environment:
            environment.setenv(f"KILN_{key.upper()}__URI", str(tmp_path / name))
            with pytest.raises(SettingsError, match=rf"KILN_{key.upper()}__URI: {key}\.uri = "):
                load(state=tmp_path)


def test_a_store_has_the_options_of_the_lake() -> None:
    settings = Settings(lake=STORE, checkpoints=Checkpoints(uri="s3://other/checkpoints/"))
    assert settings.uses_store
    assert (settings.lake_root.uri, settings.lake_root.spark_uri) == ("s3://kiln/lake", "s3a://kiln/lake")
    assert settings.checkpoints_root.uri == "s3://other/checkpoints"
    assert settings.checkpoints_root.options == {"aws_region": "us-east-1"}


def test_the_lake_may_be_in_a_store_alone(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path, lake=STORE)
    assert settings.checkpoints_root.folder == tmp_path / "checkpoints"
    assert settings.uses_store


@pytest.mark.parametrize(
    "uri", ["gs://bucket/lake", "s3://", "s3://a", "s3://UPPER/lake", "s3://bucket/a b", "s3a://b/c"]
)
def test_what_is_no_place_is_refused(uri: str) -> None:
    with pytest.raises(ValidationError, match="s3://BUCKET/PREFIX"):
        Lake(uri=uri)


def test_checkpoints_in_a_store_need_a_lake_in_a_store() -> None:
    with pytest.raises(ValidationError, match=r"Set lake\.uri to a location in the same store"):
        Settings(checkpoints=Checkpoints(uri="s3://kiln/checkpoints"))


def test_the_overlay_for_a_store_is_good() -> None:
    assert load(ROOT / "conf" / "s3.toml").settings.uses_store
