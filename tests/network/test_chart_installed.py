"""The chart on a real API server: helm installs what the server accepts, the pods come up, and a broken copy of each
manifest is refused. No kubelet runs there: a pod is ready because kwok says so, and no container starts."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any  # what a manifest in YAML may hold

import pytest
from ruamel.yaml import YAML

from kiln.schemas.queries import QUERIES
from kit import api_server, validators
from kit.api_server import ApiServer
from kit.awaiting import wait_until

CHART = Path(__file__).resolve().parents[2] / "deploy/packaging/helm/kiln"
WAYS = ("together", "pods", "spark-applications")

VALUES = """
settings:
  network: {name: testnet-clay}
  kafka: {bootstrap: "kafka-1:9093", security_protocol: SASL_SSL, sasl_username: k}
  bridge: {bootstrap: ["/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWGzxzKZYveHXtpG6AsrUJBcWxHBFS2HsEoGTxrMLvKXtf"]}
  lake: {uri: "s3://kiln/lake"}
  checkpoints: {uri: "s3://kiln/checkpoints"}
secrets:
  KILN_KAFKA__SASL_PASSWORD: {secret: kiln-kafka, key: password}
serviceMonitor: {enabled: true}
prometheusRule: {enabled: true}
"""

# a document of YAML, of any kind
Document = dict[str, Any]

pytestmark = pytest.mark.skipif(
    not (api_server.built() and validators.HELM.exists()),
    reason="no API server, or no helm",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server.running(tmp_path_factory.mktemp("kubernetes")) as server:
        for file in api_server.definitions():
            definition = YAML(typ="safe").load(file)
            server.make("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
            spec = definition["spec"]
            path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            wait_until(partial(server.knows, path), f"the server knows {path}", 60)
        for number in range(8):  # nobody makes volumes for claims here
            server.make("/api/v1/persistentvolumes", volume(f"volume-{number}"))
        yield server


def volume(name: str) -> Document:
    spec = {"capacity": {"storage": "200Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": f"/{name}"}}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("values") / "values.yaml"
    file.write_text(VALUES, encoding="utf-8")
    return file


def helm(server: ApiServer, *arguments: str | Path) -> str:
    command = [validators.HELM, *arguments, "--kubeconfig", server.kubeconfig]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def state(pods: list[Document]) -> dict[str, bool]:
    """Which pods are ready, by name."""
    return {
        pod["metadata"]["name"]: any(
            each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ())
        )
        for pod in pods
    }


@pytest.mark.parametrize("way", WAYS)
def test_helm_installs_the_chart_and_every_pod_comes_up(server: ApiServer, values: Path, way: str) -> None:
    namespace = f"kiln-{way}"
    told = ("--namespace", namespace, "--values", values, "--set", f"jobs.as={way}")
    helm(server, "install", "kiln", CHART, *told, "--create-namespace", "--wait", "--timeout", "60s")
    jobs = {"together": ["kiln-jobs-0"], "pods": [f"kiln-{query}-0" for query in QUERIES], "spark-applications": []}
    pods = state(server.items(f"/api/v1/namespaces/{namespace}/pods"))
    assert pods == dict.fromkeys(["kiln-bridge-0", *jobs[way]], True)
    claims = server.items(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims")
    assert {claim["status"]["phase"] for claim in claims} == {"Bound"}
    applications = server.items(f"/apis/sparkoperator.k8s.io/v1beta2/namespaces/{namespace}/sparkapplications")
    wanted = QUERIES if way == "spark-applications" else ()
    assert {each["metadata"]["name"] for each in applications} == {f"kiln-{query}" for query in wanted}
    assert len(server.items(f"/apis/monitoring.coreos.com/v1/namespaces/{namespace}/servicemonitors")) == 1

    helm(
        server,
        "upgrade",
        "kiln",
        CHART,
        *told,
        "--set",
        "settings.network.name=elsewhere",
        "--wait",
        "--timeout",
        "60s",
    )
    (settings,) = (
        each
        for each in server.items(f"/api/v1/namespaces/{namespace}/configmaps")
        if each["metadata"]["name"] == "kiln-settings"
    )
    assert 'name = "elsewhere"' in settings["data"]["kiln.toml"]

    helm(server, "uninstall", "kiln", "--namespace", namespace, "--wait")
    wait_until(lambda: server.items(f"/api/v1/namespaces/{namespace}/pods") == [], "the pods to go", 60)


@pytest.mark.parametrize("way", WAYS)
def test_the_server_refuses_a_broken_copy_of_each_manifest(server: ApiServer, values: Path, way: str) -> None:
    text = helm(
        server,
        "template",
        "kiln",
        CHART,
        "--values",
        values,
        "--set",
        f"jobs.as={way}",
        "--kube-version",
        api_server.VERSION,
    )
    resources = {(each["groupVersion"], each["kind"]): each["name"] for each in kinds(server)}
    seen = set()
    for each in YAML(typ="safe").load_all(text):
        group = each["apiVersion"]
        root = "/api/v1" if group == "v1" else f"/apis/{group}"
        path = f"{root}/namespaces/default/{resources[group, each['kind']]}?dryRun=All&fieldValidation=Strict"
        status, answer = server.ask("POST", path, each)
        assert status == 201, answer
        other = copy.deepcopy(each)
        other.get("spec", other)["nobodyKnowsThis"] = 1
        status, answer = server.ask("POST", path, other)
        assert status in (400, 422), each["kind"]
        assert "nobodyKnowsThis" in str(answer["message"])
        seen.add(each["kind"])
    assert {"StatefulSet", "ServiceMonitor", "PrometheusRule", "NetworkPolicy"} <= seen


def kinds(server: ApiServer) -> Iterator[Document]:
    """What the server knows of each kind."""
    groups = server.ask("GET", "/apis")[1]["groups"]
    assert isinstance(groups, list)
    versions = [("v1", "/api/v1")]
    versions += [
        (each["groupVersion"], f"/apis/{each['groupVersion']}") for group in groups for each in group["versions"]
    ]
    for version, path in versions:
        found = server.ask("GET", path)[1]["resources"]
        assert isinstance(found, list)
        yield from ({**each, "groupVersion": version} for each in found if "/" not in each["name"])
