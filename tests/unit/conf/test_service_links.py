"""Variables that a kubelet sets for Services with Kiln's name are no settings; misspelt settings still are refused."""

from __future__ import annotations

import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kiln.conf.process.errors import SettingsError
from kiln.conf.settings import reading
from kiln.conf.settings.reading import find_unknown_variables, load_settings, service_links
from kiln.deploy.cli.app import app
from kit.service_links import ServicePort, injected

SERVICES = {
    "kiln": [ServicePort("", 80)],
    "kiln-bridge": [ServicePort("gossip", 4811), ServicePort("quic", 4811, "UDP")],
    "kiln-jobs": [ServicePort("monitor", 4814)],
    "kiln-bridge--b": [ServicePort("gossip", 4811)],
    "kiln-sql": [ServicePort("flight-sql", 32010), ServicePort("peers", 132, "SCTP")],
}
LINKS = {name: value for service, ports in SERVICES.items() for name, value in injected(service, ports).items()}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KILN_"):
            monkeypatch.delenv(name)
    reading._warn_of_links.cache_clear()


def put(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_settings_load_with_them_and_one_warning_names_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(monkeypatch, LINKS | {"KILN_NETWORK": "testnet-clay", "KILN_BRIDGE__BAN": "3h"})
    with caplog.at_level(logging.WARNING):
        settings = [load_settings() for _ in range(3)]
    assert {(each.network.name, each.bridge.ban.total_seconds()) for each in settings} == {("testnet-clay", 10_800.0)}
    (line,) = caplog.messages
    assert all(name in line for name in LINKS)
    assert "enableServiceLinks: false" in line


def test_nothing_is_said_where_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    load_settings()
    assert caplog.messages == []


def test_config_check_passes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, LINKS)
    done = CliRunner().invoke(app, ["config", "check"])
    assert done.exit_code == 0, done.output


label = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,12}[a-z0-9])?", fullmatch=True)
service_port = st.builds(
    ServicePort, label, st.integers(min_value=1, max_value=65535), st.sampled_from(["TCP", "UDP", "SCTP"])
)


@given(
    label.map(lambda name: f"kiln-{name}"),
    st.lists(service_port, min_size=1, max_size=4),
    st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str),
)
def test_every_variable_of_every_service_is_known_for_what_it_is(
    name: str, ports: list[ServicePort], address: str
) -> None:
    links = injected(name, ports, address)
    assert set(service_links(links)) == set(links)
    assert list(find_unknown_variables(links)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KILN_KAFKA_EMBEDDED_PORT", "29092"),
        ("KILN_BRIDGE_PORT", "4811"),
        ("KILN_BRIDGE_PORT", ""),
        ("KILN_BRIDGE_PORT", "http://10.96.0.7:4811"),
        ("KILN_BRIDGE_PORT", "tcp://kafka:9092"),
        ("KILN_BRIDGE_PORT", "tcp://10.96.0.7"),
        ("KILN_BRIDGE_LISTEN", "tcp://10.96.0.7:4811"),
        ("KILN_KAFKA_BOOTSTRAP", "10.96.0.7:9092"),
        ("KILN_BRIDGE_SERVICE_HOST", "kafka"),
        ("KILN_BRIDGE_SERVICE_HOST", "127.0.0.1:9092"),
        ("KILN_BRIDGE_SERVICE_PORT", "0"),
        ("KILN_BRIDGE_PORT_4811_TCP_PROTO", "TLS"),
        ("KILN_BRIDGE_PORT_4811_TCP_ADDR", "somewhere"),
        ("kiln_bridge_port", "tcp://10.96.0.7:4811"),
    ],
)
def test_a_misspelt_setting_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    put(monkeypatch, LINKS)
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=f"environment {name}: no such setting"):
        load_settings()
