"""Programs that judge manifests as their readers do: helm, kubeconform, and compose-go's own command.

`PYTHONPATH=tests:. .venv/bin/python -m kit.validators` builds them with Go into `.peers/validators`, in five minutes.
Tests that need one skip until then.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
from ruamel.yaml import YAML

from kit.foreign_peer import BUILT, ROOT

SOURCE = ROOT / "tests" / "kit" / "validators"
FOLDER = BUILT / "validators"
SCHEMAS = FOLDER / "schemas"
KUBERNETES = "1.34"

_PROGRAMS = {
    "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform",
    "helm": "helm.sh/helm/v3/cmd/helm",
    "compose": "github.com/compose-spec/compose-go/v2/cmd",
}
_RESOURCES = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
_RESOURCES_FOLDER = "example/prometheus-operator-crd"


def program(name: str) -> Path:
    """Where a program is, or will be."""
    return FOLDER / name


def built() -> bool:
    """Whether all are there."""
    return SCHEMAS.is_dir() and all(program(name).exists() for name in _PROGRAMS)


def build() -> None:
    """Builds what is missing. CalledProcessError: Go says why on stderr."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, package in _PROGRAMS.items():
        if not program(name).exists():
            print(f"building {name}", flush=True)
            unfinished = program(f"{name}.new")
            flags = ["-mod=readonly", "-trimpath", "-ldflags=-s -w"]
            subprocess.run(
                ["go", "build", *flags, "-o", unfinished, package],
                cwd=SOURCE,
                env={**os.environ, "CGO_ENABLED": "0"},
                check=True,
            )
            unfinished.replace(program(name))
    unfinished = FOLDER / "schemas.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    write_schemas(unfinished)
    shutil.rmtree(SCHEMAS, ignore_errors=True)
    unfinished.replace(SCHEMAS)


def write_schemas(folder: Path) -> None:
    """Schemas for kubeconform: of Kubernetes out of a package of PyPI, of the Prometheus operator out of one of Go."""
    folder.mkdir(parents=True)
    packaged = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{KUBERNETES}.0-local-strict"
    definitions = (SCHEMAS / "_definitions.json").as_uri()
    for file in packaged.glob("*.json"):
        schema = json.loads(file.read_text(encoding="utf-8").replace("/api/_definitions.json", definitions))
        schema.pop("$id", None)
        (folder / file.name).write_text(json.dumps(schema), encoding="utf-8")
    told = subprocess.run(["go", "mod", "download", "-json", _RESOURCES], capture_output=True, text=True, check=True)
    for kind in ("prometheusrule", "servicemonitor"):
        file = Path(json.loads(told.stdout)["Dir"], _RESOURCES_FOLDER, f"monitoring.coreos.com_{kind}s.yaml")
        (version,) = YAML(typ="safe").load(file)["spec"]["versions"]
        schema = strict(version["schema"]["openAPIV3Schema"])
        (folder / f"{kind}-monitoring-{version['name']}.json").write_text(json.dumps(schema), encoding="utf-8")


def strict(schema: object) -> object:
    """The schema with no room for fields that the schema does not name, as the API server refuses them."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(each) for name, each in schema.items()}
    if "properties" in made and made.get("type") == "object" and "x-kubernetes-preserve-unknown-fields" not in made:
        made.setdefault("additionalProperties", False)
    return made


def kubeconform(manifest: Path) -> subprocess.CompletedProcess[str]:
    """What kubeconform says of a file, strictly and offline."""
    where = SCHEMAS / "{{.ResourceKind}}{{.KindSuffix}}.json"
    return subprocess.run(
        [program("kubeconform"), "-strict", "-summary", "-schema-location", where, manifest],
        capture_output=True,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    build()
    print(FOLDER)
    sys.exit(0)
