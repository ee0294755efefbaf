"""deploy/packaging/helm/kiln: what the chart makes passes its schemas, a broken copy does not, and its pods can run
Kiln."""

from __future__ import annotations

import copy
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any  # what a manifest in YAML may hold

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from kiln.conf.settings.keys import list_keys, name_variable
from kiln.conf.settings.reading import load_settings
from kiln.schemas.queries import QUERIES
from kit import validators
from kit.service_links import ServicePort, injected

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy/packaging/helm/kiln"
RULES = ROOT / "deploy/packaging/prometheus/kiln.rules.yml"
WAYS = ("together", "pods", "spark-applications")

SETTINGS = """
settings:
  network: {name: testnet-clay}
  kafka: {bootstrap: "kafka-1:9093,kafka-2:9093", security_protocol: SASL_SSL, sasl_username: k, frames_partitions: 8}
  bridge:
    bootstrap: ["/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWGzxzKZYveHXtpG6AsrUJBcWxHBFS2HsEoGTxrMLvKXtf"]
    spool_bytes: 2147483648
  traffic: {garbage: 0.02}
  lake: {uri: "s3://kiln/lake", storage_options: {AWS_ENDPOINT_URL: "http://minio:9000"}}
  checkpoints: {uri: "s3://kiln/checkpoints"}
secrets:
  KILN_KAFKA__SASL_PASSWORD: {secret: kiln-kafka, key: password}
extraVolumes: [{name: ca, secret: {secretName: kafka-ca}}]
extraVolumeMounts: [{name: ca, mountPath: /etc/kafka-ca, readOnly: true}]
serviceMonitor: {enabled: true, labels: {team: data}}
prometheusRule: {enabled: true, runbookUrl: "https://kiln.example/RUNBOOK.html"}
image: {repository: registry.example/kiln, tag: 0.1.0, pullSecrets: [registry]}
"""

# a document of YAML, of any kind
Document = dict[str, Any]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not validators.HELM.exists(), reason="no validators of manifests: helm"),
]


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [validators.HELM, *arguments, "--kube-version", f"{validators.KUBERNETES}.0"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("values") / "values.yaml"
    file.write_text(SETTINGS, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def rendered(values: Path) -> dict[str, list[Document]]:
    """What the chart makes, by the way the jobs run."""
    made = {}
    for way in WAYS:
        done = helm("template", "kiln", CHART, "--values", values, "--set", f"jobs.as={way}", "--namespace", "town")
        assert done.returncode == 0, done.stderr
        made[way] = [each for each in YAML(typ="safe").load_all(done.stdout) if each]
    return made


def documents(rendered: dict[str, list[Document]], kind: str) -> list[Document]:
    return [each for way in WAYS for each in rendered[way] if each["kind"] == kind]


def pods(rendered: dict[str, list[Document]]) -> list[Document]:
    """Every pod that the chart asks for, those of SparkApplications as the pods that Spark makes of them."""
    found = [each["spec"]["template"] for each in documents(rendered, "StatefulSet")]
    found += [each["spec"]["jobTemplate"]["spec"]["template"] for each in documents(rendered, "CronJob")]
    for each in documents(rendered, "SparkApplication"):
        spec = each["spec"]
        for part in (spec["driver"], spec["executor"]):
            container = {
                "name": "spark",
                "image": spec["image"],
                **{name: part[name] for name in ("env", "volumeMounts", "securityContext")},
            }
            (named,) = part["template"]["spec"]["containers"]
            pod = {
                **part["template"]["spec"],
                "containers": [{**container, **named}],
                "volumes": spec["volumes"],
                "securityContext": part["podSecurityContext"],
            }
            found.append({"metadata": {"labels": part["labels"]}, "spec": pod})
    return found


def as_pod(template: Document) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": "p"},
        "spec": template["spec"],
    }


def accepted(document: Document) -> bool:
    """Whether a document passes the schema of its kind, strictly; None of ours is of a kind without a schema."""
    try:
        kubernetes_validate.validate(document, validators.KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError:
        return False
    return True


def of_kubernetes(rendered: dict[str, list[Document]]) -> list[Document]:
    """Each document that has a schema here, once."""
    found: list[Document] = []
    for each in [*(each for way in WAYS for each in rendered[way]), *map(as_pod, pods(rendered))]:
        group = each["apiVersion"].partition("/")[0]
        if group not in ("monitoring.coreos.com", "sparkoperator.k8s.io") and each not in found:
            found.append(each)
    return found


def with_an_unknown_field(document: Document) -> None:
    document.get("spec", document)["nobodyKnowsThis"] = 1


def with_a_name_that_is_a_list(document: Document) -> None:
    document["metadata"]["name"] = ["kiln"]


def test_helm_has_nothing_against_the_chart(values: Path) -> None:
    done = helm("lint", CHART, "--strict", "--values", values)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_manifest_passes_its_schema(rendered: dict[str, list[Document]]) -> None:
    seen = set()
    for each in of_kubernetes(rendered):
        assert accepted(each), f"{each['kind']} {each['metadata']['name']}"
        seen.add(each["kind"])
    assert seen == {
        *("ConfigMap", "CronJob", "NetworkPolicy", "Pod", "PodDisruptionBudget", "Role", "RoleBinding", "Service"),
        *("ServiceAccount", "StatefulSet"),
    }


@pytest.mark.parametrize("broken", [with_an_unknown_field, with_a_name_that_is_a_list])
def test_a_broken_copy_of_each_manifest_does_not(
    rendered: dict[str, list[Document]], broken: Callable[[Document], None]
) -> None:
    for each in of_kubernetes(rendered):
        other = copy.deepcopy(each)
        broken(other)
        assert not accepted(other), f"{each['kind']} {each['metadata']['name']}"


@pytest.mark.skipif(not validators.SCHEMAS.is_dir(), reason="no validators of manifests: kubeconform")
def test_resources_of_the_prometheus_operator_pass_its_schemas_and_a_broken_copy_of_each_does_not(
    rendered: dict[str, list[Document]], tmp_path: Path
) -> None:
    found = [each for way in WAYS for each in rendered[way] if each["apiVersion"].startswith("monitoring.coreos.com/")]
    broken = copy.deepcopy({each["kind"]: each for each in found})
    assert broken.keys() == {"ServiceMonitor", "PrometheusRule"}
    for each in broken.values():
        with_an_unknown_field(each)

    def judge(resources: Iterable[Document]) -> subprocess.CompletedProcess[str]:
        manifest = tmp_path / "resources.yaml"
        with manifest.open("w", encoding="utf-8") as file:
            YAML(typ="safe").dump_all(resources, file)
        return validators.run_kubeconform(manifest)

    done = judge(found)
    assert done.returncode == 0, done.stdout + done.stderr
    done = judge(broken.values())
    assert set(re.findall(r" - (\w+) \S+ is invalid: ", done.stdout)) == broken.keys(), done.stdout


@pytest.mark.parametrize(
    "refused",
    [
        "settings.kafka.bootstrap=",
        "settings.kafka.bootstrap=kafka",
        "settings.kafka.bootstrap=PLAINTEXT://kafka:9092",
        "settings.kafka.boostrap=kafka:9092",
        "settings.lake.url=s3://kiln/lake",
        "settings.jobs.archive.triger=5s",
        "settings.tpyo=1",
        "jobs.as=cron",
        "jobs.queries={archive,nothing}",
        "bridge.replica=2",
        "image.jobsDigest=sha256:1",
        "secrets.kiln_password.secret=x",
    ],
)
def test_values_that_make_no_kiln_are_refused(values: Path, refused: str) -> None:
    done = helm("template", "kiln", CHART, "--values", values, "--set", refused)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


def test_pods_may_write_to_their_volumes_alone_and_have_no_rights(rendered: dict[str, list[Document]]) -> None:
    for pod in pods(rendered):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        # With another policy a volume's group would change the mode of the bridge's key, which the bridge then refuses.
        assert pod["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        # the volume of a claim template is none of the pod's own
        volumes = {"state", *(each["name"] for each in pod["spec"]["volumes"])}
        for container in pod["spec"]["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert {each["mountPath"] for each in container["volumeMounts"]} == {
                *("/var/lib/kiln", "/etc/kiln", "/tmp", "/etc/kafka-ca")
            }
            assert {each["name"] for each in container["volumeMounts"]} <= volumes


def test_a_pod_has_the_settings_that_were_given(
    rendered: dict[str, list[Document]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {*map(name_variable, list_keys()), "KILN_CONFIG"}
    for pod in pods(rendered):
        for each in pod["spec"]["containers"][0]["env"]:
            assert each["name"] in known
            if each["name"] == "KILN_KAFKA__SASL_PASSWORD":
                assert each["valueFrom"] == {"secretKeyRef": {"name": "kiln-kafka", "key": "password"}}
    for each in documents(rendered, "ConfigMap"):
        text = each["data"]["kiln.toml"]
        assert tomllib.loads(text)["network"] == {"name": "testnet-clay"}
        file = tmp_path / "kiln.toml"
        file.write_text(text, encoding="utf-8")
        monkeypatch.setenv("KILN_KAFKA__SASL_PASSWORD", "x")
        settings = load_settings(file)
        assert settings.kafka.server_list() == ["kafka-1:9093", "kafka-2:9093"]
        assert (settings.kafka.frames_partitions, settings.bridge.spool_bytes) == (8, 2147483648)
        assert settings.traffic.garbage == 0.02


def test_no_pod_asks_for_service_links(rendered: dict[str, list[Document]]) -> None:
    assert [pod["spec"].get("enableServiceLinks") for pod in pods(rendered)] == [False] * len(pods(rendered))


@pytest.mark.parametrize("release", ["kiln", "kiln-two", "prod"])
def test_settings_load_beside_the_variables_that_a_kubelet_sets_for_the_services(
    values: Path, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = helm("template", release, CHART, "--values", values)
    made = [each for each in YAML(typ="safe").load_all(done.stdout) if each]
    services = [each for each in made if each["kind"] == "Service" and each["spec"].get("clusterIP") != "None"]
    assert services
    for each in services:
        ports = [ServicePort(port["name"], port["port"]) for port in each["spec"]["ports"]]
        for name, value in injected(each["metadata"]["name"], ports).items():
            monkeypatch.setenv(name, value)
    (settings,) = (each for each in made if each["kind"] == "ConfigMap")
    file = tmp_path / "kiln.toml"
    file.write_text(settings["data"]["kiln.toml"], encoding="utf-8")
    monkeypatch.setenv("KILN_KAFKA__SASL_PASSWORD", "x")
    assert load_settings(file).network.name == "testnet-clay"


@pytest.mark.parametrize(
    ("way", "missing", "place"),
    [
        ("spark-applications", ("lake", "checkpoints"), "settings.lake.uri"),
        ("spark-applications", ("checkpoints",), "settings.checkpoints.uri"),
        ("pods", ("lake",), "settings.lake.uri"),
    ],
)
def test_pods_that_share_no_storage_are_refused_in_a_sentence(
    values: Path, way: str, missing: tuple[str, ...], place: str
) -> None:
    told = ["--set", f"jobs.as={way}"]
    for part in missing:
        told += ["--set", f"settings.{part}.uri=/var/lib/kiln/{part}"]  # a folder of each pod's own
    done = helm("template", "kiln", CHART, "--values", values, *told)
    assert done.returncode != 0
    assert f"jobs.as={way} runs each query in pods of its own, and they share no storage. Set {place}" in done.stderr
    # a claim of all pods, or places that only a secret names
    claim = ["--set", "jobs.volume.existingClaim=tables"]
    secret = [f"secrets.KILN_{part.upper()}__URI.{of}" for part in missing for of in ("secret=kiln-store", "key=uri")]
    for shared in (claim, [word for each in secret for word in ("--set", each)]):
        assert helm("template", "kiln", CHART, "--values", values, *told, *shared).returncode == 0


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("settings.network.name=", "settings.network.name is missing: name the network that the bridge joins"),
        ("settings.bridge.bootstrap=null", "settings.bridge.bootstrap is empty, so the bridge would find no peers"),
    ],
)
def test_a_bridge_without_a_network_is_refused_in_a_sentence(values: Path, told: str, said: str) -> None:
    done = helm("template", "kiln", CHART, "--values", values, "--set", told)
    assert done.returncode != 0
    assert said in done.stderr
    assert (
        helm("template", "kiln", CHART, "--values", values, "--set", told, "--set", "bridge.enabled=false").returncode
        == 0
    )


def test_the_jobs_may_reach_the_ports_that_the_settings_name(rendered: dict[str, list[Document]]) -> None:
    for each in documents(rendered, "NetworkPolicy"):
        if each["metadata"]["name"] != "kiln-bridge":
            ports = {port["port"] for rule in each["spec"]["egress"] for port in rule.get("ports", ())}
            assert {53, 443, 9093, 9000} <= ports


def test_the_tables_are_maintained_and_checked_in_each_way(rendered: dict[str, list[Document]]) -> None:
    for way in ("pods", "spark-applications"):
        jobs = [each["spec"] for each in rendered[way] if each["kind"] == "CronJob"]
        pods = [each["jobTemplate"]["spec"]["template"]["spec"] for each in jobs]
        assert [pod["containers"][0]["args"] for pod in pods] == [["maintain"], ["quality", "--since", "1d"]]
        assert {each["concurrencyPolicy"] for each in jobs} == {"Forbid"}
    assert not [each for each in rendered["together"] if each["kind"] == "CronJob"]


def test_each_query_runs_once_in_each_way(rendered: dict[str, list[Document]]) -> None:
    def arguments(way: str) -> list[list[str]]:
        sets = [each["spec"]["template"]["spec"] for each in rendered[way] if each["kind"] == "StatefulSet"]
        return [each["containers"][0]["args"] for each in sets]

    assert arguments("together") == [["bridge"], ["run", "--no-network"]]
    assert sorted(arguments("pods")) == sorted([["bridge"], *(["job", query] for query in QUERIES)])
    applications = [each for each in rendered["spark-applications"] if each["kind"] == "SparkApplication"]
    files = [re.search(r"pipelines/jobs/\w+\.py$", each["spec"]["mainApplicationFile"]) for each in applications]
    assert {ROOT / found[0] for found in files if found} == {ROOT / f"pipelines/jobs/{query}.py" for query in QUERIES}
    assert all(found and (ROOT / found[0]).is_file() for found in files)


def test_the_probes_ask_the_monitor_and_services_find_their_pods(rendered: dict[str, list[Document]]) -> None:
    for way in WAYS:
        labels = [each["metadata"]["labels"] for each in pods(dict.fromkeys(WAYS, rendered[way]))]
        for each in rendered[way]:
            if each["kind"] == "StatefulSet":
                (container,) = each["spec"]["template"]["spec"]["containers"]
                ports = {port["name"]: port["containerPort"] for port in container["ports"]}
                assert ports["monitor"] == 4814
                paths = {
                    name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")
                }
                assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
            if each["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
                spec = each["spec"]
                wanted = spec["selector"] if each["kind"] == "Service" else spec.get("podSelector") or spec["selector"]
                wanted = wanted.get("matchLabels", wanted)
                assert any(wanted.items() <= pod.items() for pod in labels), each["metadata"]["name"]


def test_the_rules_are_those_of_the_monitoring_with_the_address_of_the_runbook(
    rendered: dict[str, list[Document]],
) -> None:
    (rule, *_) = documents(rendered, "PrometheusRule")
    rules = RULES.read_text(encoding="utf-8").replace("docs/RUNBOOK.md#", "https://kiln.example/RUNBOOK.html#")
    assert rule["spec"] == YAML(typ="safe").load(rules)
    (monitor, *_) = documents(rendered, "ServiceMonitor")
    assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/name"  # whose value is the job "kiln" of the rules
    services = [each["metadata"]["labels"] for each in documents(rendered, "Service")]
    assert any(monitor["spec"]["selector"]["matchLabels"].items() <= each.items() for each in services)
