"""The results of `make wheel` and `make docs`, and the files that follow settings and lock files by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from kiln.conf.settings.keys import list_keys
from kiln.deploy.stack import native_core
from kiln.pipelines.native.library import LIBRARY
from kit import engines
from kit.built_wheel import build_wheel

UV = Path(sys.executable).with_name("uv")
PACKAGES = ("schemas", "pipelines", "bridge", "conf", "deploy")
OF_THE_CHECKOUT = re.compile(
    r"schemas/proto/generate\.sh|deploy/packaging/(mkdocs\.yml|(compose|grafana|helm|images|prometheus)/.*)"
)
"""Files beside the code that no code opens."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


@pytest.mark.slow
def test_the_wheel_has_every_file_of_its_packages(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=root, capture_output=True, text=True, check=True)
    names = [name for name in tracked.stdout.splitlines() if (root / name).exists()]
    packaged = {f"kiln/{name}" for name in names if not OF_THE_CHECKOUT.fullmatch(name)}
    assert inside == packaged | {"kiln/__init__.py", "kiln/py.typed"}


@pytest.mark.slow
@pytest.mark.skipif(engines.core_is_missing(), reason="no native core to put into a wheel")
def test_the_wheel_with_the_native_core_loads_it(wheel: Path, tmp_path: Path) -> None:
    tag = native_core.find_tag()
    assert tag is not None
    native = native_core.add_core(wheel, LIBRARY, tag)
    environment = tmp_path / "environment"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    options = ["--quiet", "--offline", "--no-deps", "--no-index", "--find-links", str(native.parent)]
    subprocess.run([UV, "pip", "install", *options, "--python", environment, "kiln-gossip"], check=True)
    native.unlink()
    code = "from kiln.pipelines.native.library import find_engine; print(find_engine().describe())"
    site = sysconfig.get_path("purelib")  # for the other packages
    run = subprocess.run(
        [environment / "bin" / "python", "-c", f"import sys; sys.path.append({site!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "native core\n"


@pytest.mark.slow
def test_wheel_and_source_name_version_and_commit(wheel: Path, root: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout
    found = re.fullmatch(r"kiln_gossip-(\d+\.\d+\.\d+)\+g([0-9a-f]{12})(\.dirty)?-py3-none-any\.whl", wheel.name)
    assert found is not None, wheel.name
    assert commit.startswith(found[2])
    (source,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(source) as file:
        assert {"pyproject.toml", "kiln/conf/kiln.toml"} <= {name.partition("/")[2] for name in file.getnames()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--version",), r"kiln \d+\.\d+\.\d+\+g[0-9a-f]{12}(\.dirty)?\n"),
        (("--help",), r"(?s).*quarantine.*"),
        (("config", "show"), r"(?s)# settings file: .*/conf/kiln\.toml;.*\[kafka\].*"),
        (("config", "check"), r".*kiln\.toml: fine\n"),
    ],
)
def test_the_command_runs_from_the_wheel_alone(
    unpacked: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    # -S: the link from .venv to the checkout is not followed; other packages come from .venv all the same
    start = "import sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[1:3]; from kiln.deploy.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start, str(unpacked), sysconfig.get_path("purelib"), *arguments],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(said, done.stdout), done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_site_has_every_page_and_a_link_to_nowhere_is_refused(root: Path) -> None:
    done = subprocess.run(
        ["make", "--old-file=.venv/.installed", "docs"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    pages = [page.relative_to(root / "build/docs") for page in (root / "build/docs").rglob("*.md")]
    assert Path("docs/concepts.md") in pages
    assert len(list((root / "build/site").rglob("*.html"))) == len(pages) + 1  # 404.html
    with (root / "build/docs/README.md").open("a", encoding="utf-8") as readme:
        readme.write("\n[on](docs/nowhere.md) and [further](docs/concepts.md#nowhere)\n")
    command = [str(Path(sys.executable).with_name("mkdocs")), "build", "--strict", "-f", "deploy/packaging/mkdocs.yml"]
    broken = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert broken.returncode != 0
    assert "docs/nowhere.md" in broken.stderr
    assert "#nowhere" in broken.stderr


def test_the_schema_of_the_chart_has_every_key_of_the_settings(root: Path) -> None:
    schema = json.loads((root / "deploy/packaging/helm/kiln/values.schema.json").read_bytes())

    def read_keys(part: dict[str, dict[str, object]], *above: str) -> dict[tuple[str, ...], bool]:
        """Read the keys of a section; true for those that are tables of a user's own keys."""
        found: dict[tuple[str, ...], bool] = {}
        for name, each in part.items():
            match each:
                case {"properties": dict(below)}:
                    assert each["additionalProperties"] is False, name
                    found |= read_keys(below, *above, name)
                case _:
                    found[*above, name] = each.get("type") == "object"
        return found

    assert read_keys(schema["properties"]["settings"]["properties"]) == list_keys()


def test_each_vex_statement_is_about_a_version_that_is_installed(root: Path) -> None:
    pins = re.findall(r"^([a-z0-9-]+)==([^ ]+)", (root / "requirements.lock").read_text(), re.MULTILINE)
    statements = json.loads((root / "conf/kiln.vex.json").read_bytes())["statements"]
    products = {product["@id"] for statement in statements for product in statement["products"]}
    assert products <= {f"pkg:pypi/{name}@{version}" for name, version in pins}
    assert all(each["justification"] and each["impact_statement"] for each in statements)
