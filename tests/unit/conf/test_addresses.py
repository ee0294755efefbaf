"""kiln.conf.settings.addresses: what a multiaddr, a peer id and an interest may be, and how `kiln config check` says
so."""

from __future__ import annotations

import re
import string
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiformats import CID, multibase, multihash

from kiln.conf.process.errors import SettingsError
from kiln.conf.settings.addresses import check_interest, check_peer, check_tcp, check_tcp_at_ip, check_tcp_of_peer
from kiln.conf.settings.reading import load_settings

ED25519 = "12D3KooWGzxzKZYveHXtpG6AsrUJBcWxHBFS2HsEoGTxrMLvKXtf"
RSA = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
AS_CID = "k51qzi5uqu5dh9ihj8u2k5zk8pn8l0gvjdz7mpfjnkx9ep0qm8nkwq2pbv1kwd"
MODEL = "k2t6wz4z9kggqqnbn3vqggh2z4fe9jctr9vvbc1em2yho0qnzzrtzz1n2hr4lq"
TIP = "bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y"
CHECKS = [check_tcp, check_tcp_at_ip, check_tcp_of_peer, check_peer, check_interest]
Check = Callable[[str], None]


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (check_tcp, "/ip4/127.0.0.1/tcp/4811"),
        (check_tcp, "/ip6/::/tcp/0"),
        (check_tcp, f"/dns4/kiln.example/tcp/4811/p2p/{ED25519}"),
        (check_tcp_at_ip, "/ip4/192.0.2.1/tcp/4811"),
        (check_tcp_at_ip, f"/ip6/2001:db8::1/tcp/4811/p2p/{ED25519}"),
        *((check_tcp_of_peer, f"/ip4/192.0.2.1/tcp/4811/p2p/{peer}") for peer in (ED25519, RSA, AS_CID)),
        (check_peer, f"/ip4/192.0.2.1/udp/4001/quic-v1/p2p/{RSA}"),
        (check_peer, f"/dnsaddr/bootstrap.example/p2p/{ED25519}"),
        *((check_interest, text) for text in ("*", "model", "a/b", f"model/{MODEL}", "model/kabc", f"a/{'word' * 20}")),
    ],
)
def test_what_is_right(check: Check, text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    ("check", "text", "says"),
    [
        (check_tcp, "localhost:4811", "a multiaddr of TCP"),
        *((each, "", "the value is empty") for each in (check_tcp, check_tcp_at_ip, check_tcp_of_peer, check_peer)),
        (check_tcp, "/ip4/300.0.0.1/tcp/1", "300.0.0.1"),
        (check_tcp, "/ip4/127.0.0.1/tcp/70000", "65536"),
        (check_tcp, "/ip4/127.0.0.1/tcp", "missing value for protocol: tcp"),
        (check_tcp, "/ip4/127.0.0.1/udp/4001/quic-v1", "Kiln uses only TCP, not QUIC or WebSocket"),
        (check_tcp, "/ip4/127.0.0.1/tcp/4001/ws", "Kiln uses only TCP, not QUIC or WebSocket"),
        (check_tcp, f"/ip4/127.0.0.1/tcp/1/p2p/{ED25519[:-1]}", f'or Qm…, not "{ED25519[:-1]}"'),
        (check_tcp_at_ip, "/dns4/kiln.example/tcp/4811", "TCP at an IP address"),
        (check_tcp_at_ip, "/ip4/192.0.2.1/tcp/0", "with a port"),
        (check_tcp_of_peer, "/ip4/192.0.2.1/tcp/4811", "ends in /p2p/<peer id>"),
        (check_tcp_of_peer, f"/dnsaddr/bootstrap.example/p2p/{ED25519}", "does not resolve dnsaddr"),
        (check_tcp_of_peer, f"/ip4/192.0.2.1/tcp/4811/p2p/{TIP}", "a peer id after /p2p/"),
        (check_peer, f"/p2p/{ED25519}/p2p-circuit", "ends in /p2p/<peer id>"),
        (check_peer, "/ip4/192.0.2.1/tcp/4811/p2p/", 'or Qm…, not ""'),
        (check_interest, "", "an interest must not be empty"),
        (check_interest, f"model/{MODEL.upper()}", f'"model/{MODEL}"'),
        (check_interest, f"model/{TIP}", f'"model/{multibase.encode(bytes(CID.decode(TIP)), "base36")}"'),
        (check_interest, f"model/{RSA}", '"model/k'),
    ],
)
def test_what_is_wrong_and_what_is_expected(check: Check, text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are looked at below
        check(text)
    assert says in str(caught.value)


@given(st.binary(min_size=32, max_size=32), st.sampled_from("123456789ABCDEFabcdef0OIl"))
def test_every_ed25519_peer_id_passes_and_none_that_is_cut_or_longer(key: bytes, character: str) -> None:
    peer = multibase.encode(multihash.wrap(b"\x08\x01\x12\x20" + key, "identity"), "base58btc")[1:]
    check_peer(f"/p2p/{peer}")
    for wrong in (peer[:-1], peer + character):
        with pytest.raises(ValueError, match="a peer id after /p2p/"):
            check_peer(f"/p2p/{wrong}")


ALPHANUMERIC = string.ascii_letters + string.digits
PARTS = st.sampled_from(["ip4", "127.0.0.1", "tcp", "4811", "p2p", ED25519, RSA, "dns4", "quic-v1", "", "k", "é", "\0"])


@given(
    st.sampled_from(CHECKS),
    st.one_of(st.text(), st.lists(PARTS).map("/".join), st.text(ALPHANUMERIC, min_size=40).map("/p2p/{0}".format)),
)
def test_a_check_says_no_in_no_other_way(check: Check, text: str) -> None:
    with suppress(ValueError):
        check(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '[bridge]\nlisten = [\n"/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/udp/1"]',
            'bridge.listen: "/ip4/127.0.0.1/udp/1": expected a multiaddr of TCP, such as "/ip4/127.0.0.1/tcp/4811". ',
        ),
        (
            f'[bridge]\nbootstrap = ["/ip4/192.0.2.1/tcp/1/p2p/{ED25519[:-2]}"]',
            f'bridge.bootstrap: "/ip4/192.0.2.1/tcp/1/p2p/{ED25519[:-2]}": expected a peer id after /p2p/, such as ',
        ),
        (f'[bridge]\ninterests = ["model/{TIP}"]', f'bridge.interests: "model/{TIP}": expected the value of the '),
        ('[discovery]\nannounce = ["/dns4/a/tcp/1"]', 'discovery.announce: "/dns4/a/tcp/1": expected TCP at an IP '),
        ('[ipfs]\npeers = ["/ip4/192.0.2.1/tcp/1"]', 'ipfs.peers: "/ip4/192.0.2.1/tcp/1": expected a multiaddr that '),
    ],
)
def test_the_settings_name_the_place(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{file}:2: {says}")


def test_the_settings_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_BRIDGE__BOOTSTRAP", "/ip4/192.0.2.1/tcp/1")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    (problem,) = caught.value.problems
    assert problem.startswith(
        'environment KILN_BRIDGE__BOOTSTRAP: bridge.bootstrap: "/ip4/192.0.2.1/tcp/1": expected a '
    )


def test_the_default_settings_import_no_codec() -> None:
    """So that `kiln --help` and `kiln sql` are quick."""
    slow = ("multiformats", "multiaddr", "kiln.schemas.wire.topics", "kiln.schemas.dht")
    code = (
        "import sys\nfrom kiln.conf.settings.reading import load\nload()\n"
        f"print([m for m in {slow} if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"/ip4/192.0.2.1/tcp/4001/ipfs/{RSA}", f'old name of /p2p/. Write "/ip4/192.0.2.1/tcp/4001/p2p/{RSA}"'),
        (f"/ip4/192.0.2.1/tcp/4001/p2p/{RSA}/p2p-circuit/p2p/{ED25519}", "goes through a relay"),
        (f"/p2p/{ED25519}", "the address of the peer is missing"),
        (ED25519, "does not begin with a slash"),
    ],
)
def test_an_address_of_another_form_says_what_to_write(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_tcp_of_peer(text)
