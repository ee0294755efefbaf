"""The folder of jars: complete or repaired, never half."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from kiln.deploy.stack import jars
from kiln.deploy.stack.jars import JarsError, Progress, ensure_jars, explain_ivy_failure, is_complete, read_pinned_jars

IVY = """<ivy-module version="2.0"><info organisation="kiln" module="jars"/>
<configurations><conf name="spark" transitive="false"/><conf name="broker" transitive="false"/></configurations>
<dependencies>
  <dependency org="a" name="one" rev="{one}" conf="spark->master"/>
  <dependency org="b" name="two_2.13" rev="2.0-1" conf="broker->master"/>
</dependencies></ivy-module>"""


class Resolver:
    """Stands in for Ivy: writes the jars it is asked for, or stops in the middle."""

    def __init__(self) -> None:
        self.runs = 0
        self.stop_after: int | None = None

    def __call__(self, ivy_xml: Path, into: Path, progress: Progress) -> None:
        self.runs += 1
        names = [(conf, name) for conf, names in read_pinned_jars(ivy_xml.read_bytes()).items() for name in names]
        for count, (conf, name) in enumerate(names):
            if count == self.stop_after:
                raise KeyboardInterrupt
            (into / conf).mkdir(exist_ok=True)
            (into / conf / name).write_bytes(b"PK" + name.encode())
        progress("done")


@pytest.fixture
def ivy(tmp_path: Path) -> Path:
    path = tmp_path / "ivy.xml"
    path.write_text(IVY.format(one="1.0"))
    names = ("spark/one-1.0.jar", "spark/one-1.1.jar", "broker/two_2.13-2.0-1.jar")
    sums = (f"{hashlib.sha256(b'PK' + name.partition('/')[2].encode()).hexdigest()}  {name}\n" for name in names)
    (tmp_path / "jars.sha256").write_text("".join(sums))
    return path


def test_second_time_costs_nothing(tmp_path: Path, ivy: Path) -> None:
    resolver, folder = Resolver(), tmp_path / "jars"
    assert not is_complete(folder, ivy)
    ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    assert is_complete(folder, ivy)
    assert (folder / "spark" / "one-1.0.jar").is_file()
    assert (folder / "broker" / "two_2.13-2.0-1.jar").is_file()
    ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    assert resolver.runs == 1


def test_interrupted_is_repaired(tmp_path: Path, ivy: Path) -> None:
    resolver, folder = Resolver(), tmp_path / "jars"
    resolver.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    assert not is_complete(folder, ivy)
    (folder / "fetching-killed").mkdir()  # as `kill -9` leaves it
    resolver.stop_after = None
    ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    assert is_complete(folder, ivy)
    assert not list(folder.glob("fetching-*"))


def test_lost_or_cut_jar_is_fetched_again(tmp_path: Path, ivy: Path) -> None:
    resolver, folder = Resolver(), tmp_path / "jars"
    ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    jar = folder / "spark" / "one-1.0.jar"
    jar.unlink()
    ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    assert jar.is_file()
    jar.write_bytes(b"P")
    assert not is_complete(folder, ivy)
    ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    assert resolver.runs == 3


def test_other_pins_replace_the_jars(tmp_path: Path, ivy: Path) -> None:
    resolver, folder = Resolver(), tmp_path / "jars"
    ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    ivy.write_text(IVY.format(one="1.1"))
    ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    assert [jar.name for jar in (folder / "spark").iterdir()] == ["one-1.1.jar"]


def test_jar_that_the_repository_did_not_give(tmp_path: Path, ivy: Path) -> None:
    def nothing(ivy_xml: Path, into: Path, progress: Progress) -> None:
        (into / "spark").mkdir()

    with pytest.raises(JarsError, match=r"did not fetch one-1\.0\.jar, two_2\.13-2\.0-1\.jar"):
        ensure_jars(tmp_path / "jars", ivy_xml=ivy, resolve=nothing)
    assert not is_complete(tmp_path / "jars", ivy)


def test_a_jar_that_differs_from_its_checksum_is_refused_and_never_used(tmp_path: Path, ivy: Path) -> None:
    resolver, folder = Resolver(), tmp_path / "jars"

    def forged(ivy_xml: Path, into: Path, progress: Progress) -> None:
        resolver(ivy_xml, into, progress)
        (into / "spark" / "one-1.0.jar").write_bytes(b"PK and something else")

    with pytest.raises(
        JarsError, match=r"(?s)^these jars do not match .*spark/one-1\.0\.jar: sha256 [0-9a-f]{64}, expected .*~/.ivy2"
    ):
        ensure_jars(folder, ivy_xml=ivy, resolve=forged)
    assert not is_complete(folder, ivy)
    assert not list(folder.rglob("*.jar"))
    ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    (folder / "broker" / "two_2.13-2.0-1.jar").write_bytes(b"PK" + b"x" * len("two_2.13-2.0-1.jar"))
    assert is_complete(folder, ivy)  # as long as before: only `make jars` reads all bytes
    with pytest.raises(JarsError, match="two_2"):
        jars.verify_checksums(folder, ivy)


def test_a_pin_without_a_checksum_is_refused_until_make_lock(tmp_path: Path, ivy: Path) -> None:
    resolver, folder = Resolver(), tmp_path / "jars"
    ivy.write_text(IVY.format(one="1.2"))
    with pytest.raises(JarsError, match=r"spark/one-1\.2\.jar: no line in jars\.sha256.*make lock"):
        ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    jars.write_checksums(ivy, resolver)
    ensure_jars(folder, ivy_xml=ivy, resolve=resolver)
    assert is_complete(folder, ivy)


def test_make_jars_says_in_words_that_a_jar_was_changed(
    tmp_path: Path, ivy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ensure_jars(tmp_path / "jars", ivy_xml=ivy, resolve=Resolver())
    monkeypatch.setattr(jars, "default_root", lambda: folder)
    monkeypatch.setattr(jars, "is_complete", lambda root, ivy_xml: True)
    monkeypatch.setattr(jars, "IVY_XML", ivy)
    monkeypatch.setattr(sys, "argv", ["jars"])
    assert jars.main() == 0
    (folder / "spark" / "one-1.0.jar").write_bytes(b"PK and something else")
    assert jars.main() == 1
    assert "do not match the checksums" in capsys.readouterr().err


@pytest.mark.parametrize("ivy_xml", [jars.IVY_XML, jars.IVY_S3], ids=lambda path: path.name)
def test_every_pinned_jar_has_a_checksum_and_no_other(ivy_xml: Path) -> None:
    named = [line.split()[1] for line in jars.checksums_path(ivy_xml).read_text().splitlines()]
    files = read_pinned_jars(ivy_xml.read_bytes())
    assert sorted(named) == sorted(f"{conf}/{name}" for conf, names in files.items() for name in names)


def test_incomplete_folder_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(JarsError, match="make jars"):
        jars.list_jars("spark", tmp_path)


@pytest.mark.parametrize("revision", ["latest.integration", "1.+", "[1.0,2.0)", ""])
def test_floating_versions_are_refused(revision: str) -> None:
    with pytest.raises(JarsError, match="is not one version"):
        read_pinned_jars(IVY.format(one=revision).encode())


def test_project_pins_what_spark_and_the_broker_need() -> None:
    files = read_pinned_jars(jars.IVY_XML.read_bytes())
    assert len(files["spark"]) == 7
    assert "kafka_2.13-4.4.0.jar" in files["broker"]
    assert all(len(set(names)) == len(names) for names in files.values())


def test_words_when_there_is_no_network() -> None:
    said = [
        "WARN: Host not found",
        ":: problems summary ::",
        "Server access error at url … (java.net.UnknownHostException)",
    ]
    assert "Check the network and run this again" in explain_ivy_failure(said, 1)
    assert "UnknownHostException" in explain_ivy_failure(said, 1)
