"""A decoder of the user's own: what it returns is JSON, and whatever it does is a fault of that one message."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from kiln.conf.settings.model import Network, Settings
from kiln.pipelines.app.launch import decode_config
from kiln.pipelines.decode.user_decoder import (
    DECODER_FAILED,
    DECODER_OUTPUT,
    DECODER_TOO_SLOW,
    MAX_DECODED,
    DecoderError,
    MessageDecoder,
    load_decoder,
)
from kiln.schemas.reject import Rejected
from kit.decoder_package import install_decoders


@pytest.fixture(autouse=True)
def decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_decoders(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_decoder.cache_clear()
    yield
    load_decoder.cache_clear()
    sys.modules.pop("some_decoders", None)


def test_what_the_decoder_returns_is_json() -> None:
    decoder = MessageDecoder("some_decoders.parse")
    assert decoder.decode(b'{"sensor": 7, "at": "\xc3\xa9t\xc3\xa9"}') == '{"sensor":7,"at":"été"}'


def test_the_largest_dict_is_stored() -> None:
    text = json.dumps({"text": "x" * (MAX_DECODED - 11)}, separators=(",", ":"))
    assert len(text) == MAX_DECODED
    assert MessageDecoder("some_decoders.parse").decode(text.encode()) == text


@pytest.mark.parametrize(
    ("name", "data", "reason", "detail"),
    [
        ("parse", b"no JSON", DECODER_FAILED, "JSONDecodeError"),
        ("fail", b"abc", DECODER_FAILED, "RuntimeError at some_decoders.py:10: cannot read 3 bytes"),
        ("fail_silently", b"", DECODER_FAILED, "SilentError"),
        ("fail_strangely", b"\xff", DECODER_FAILED, "ValueError at some_decoders.py:23: "),
        ("leave", b"", DECODER_FAILED, "SystemExit at some_decoders.py:27: 3"),
        ("parse", b"[1, 2]", DECODER_OUTPUT, "the decoder returned list, not a dict"),
        ("parse", b"null", DECODER_OUTPUT, "the decoder returned NoneType, not a dict"),
        ("parse", b'{"many": 1' + b"0" * 30 + b"}", DECODER_OUTPUT, "the dict cannot be written as JSON"),
        ("parse", b'{"half": "\\ud800"}', DECODER_OUTPUT, "the dict cannot be written as JSON"),
        ("give_bytes", b"", DECODER_OUTPUT, "the dict cannot be written as JSON"),
        ("grow", b"", DECODER_OUTPUT, "the dict has 1,048,587 bytes as JSON; at most 1,048,576 are stored"),
    ],
)
def test_whatever_goes_wrong_is_a_reason(name: str, data: bytes, reason: str, detail: str) -> None:
    rejected = MessageDecoder(f"some_decoders.{name}").decode(data)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == reason
    assert rejected.detail.startswith(detail)
    rejected.detail.encode()  # it is text that tables can hold


def test_a_decoder_that_hangs_is_stopped_and_then_not_called_again() -> None:
    before = signal.getsignal(signal.SIGALRM)
    decoder = MessageDecoder("some_decoders.hang", time_limit=0.01)
    assert decoder.decode(b"quick") == '{"size":5}'
    slow = [decoder.decode(b"slow") for _ in range(6)]
    assert slow[:5] == [Rejected(DECODER_TOO_SLOW, "the decoder was stopped after 0.01 s")] * 5
    assert slow[5] == Rejected(
        DECODER_TOO_SLOW, "the decoder was not called: it was too slow on 5 messages of this task"
    )
    assert isinstance(decoder.decode(b"quick"), Rejected)
    assert MessageDecoder("some_decoders.hang").decode(b"quick") == '{"size":5}'  # the next task tries again
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_decoder_works_in_a_thread_too() -> None:
    results: list[str | Rejected] = []
    thread = threading.Thread(target=lambda: results.append(MessageDecoder("some_decoders.parse").decode(b"{}")))
    thread.start()
    thread.join()
    assert results == ["{}"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "no installed package has this entry point in the group kiln.decoders (installed: some_decoders.f"),
        ("some_decoders.missing", "cannot import some_decoders:missing (AttributeError"),
        ("some_decoders.number", "some_decoders:number is not a function"),
    ],
)
def test_a_decoder_that_cannot_be_used_is_named_before_any_query_starts(
    name: str, problem: str, tmp_path: Path
) -> None:
    settings = Settings(state=tmp_path / "state", network=Network(kind="gossip", decoder=name))
    with pytest.raises(DecoderError) as raised:
        decode_config(settings)
    assert f'network.decoder = "{name}": {problem}' in str(raised.value)


def test_the_example_decodes_a_waku_message(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "docs/examples/waku-decoder"))
    decode = import_module("waku_decoder").decode
    # the last test vector of 14/WAKU2-MESSAGE, Deterministic message hashing, without its payload
    topic, meta, at = b"/waku/2/default-content/proto", b"super-secret", 0x175789BFA23F8400
    zigzag, varint = at << 1, bytearray()
    while zigzag >= 0x80:
        varint.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    varint.append(zigzag)
    data = b"\x12%c%b\x50%b\x5a%c%b" % (len(topic), topic, bytes(varint), len(meta), meta)
    found = decode(data)
    assert json.loads(json.dumps(found)) == {
        "content_topic": topic.decode(),
        "version": 0,
        "timestamp": at,
        "ephemeral": False,
        "payload": "",
        "meta": meta.hex(),
    }
    with pytest.raises(ValueError, match="it has no content topic"):
        decode(b"")
