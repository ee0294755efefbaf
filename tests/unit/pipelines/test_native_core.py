"""The native core: the same rows as in Python, whatever the records, and Python's where it is wrong."""

from __future__ import annotations

import ctypes
import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import NamedTuple
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import VECTORS
from kiln.conf.process.errors import PrerequisiteError
from kiln.deploy.demo.traffic import Traffic, TrafficOptions
from kiln.deploy.demo.traffic.capture_files import replay
from kiln.deploy.stack import native_core
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, MessageCopy, check_signature
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.native import core, library
from kiln.pipelines.updates import transform as updates
from kiln.pipelines.updates.row_builder import RowBuilder, UpdateRow
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import Judgement, Verdict, build_ed25519_peer_id
from kiln.schemas.wire.signing_policy import Policy
from kiln.schemas.wire.topic_table import BundleSet
from kit import engines
from kit.changed_records import BUNDLES, RecordChanger

needs_core = pytest.mark.skipif(engines.core_is_missing(), reason="no native core to compare with Python")
needs_rustc = pytest.mark.skipif(library.find_rustc() is None, reason="no rustc to build a core with")

CAPTURES = VECTORS / "captures"
_START_NS = 1_735_689_600_000_000_000


@cache
def traffic(count: int, *, is_checked: bool = True) -> list[bytes]:
    """Frames of a network whose bridge has checked all messages, or most of them."""
    options = TrafficOptions(network="local-bench", checked=1.0) if is_checked else TrafficOptions(seed=9, checked=0.7)
    frames = Traffic(options, _START_NS, 200.0, keep_ledger=False).frames()
    return [frame.value for frame, _ in zip(frames, range(count), strict=False)]


CONFIGS = (
    DecodeConfig(bundles=BUNDLES),
    DecodeConfig("either", bundles=BUNDLES, batch_typ=4),
    DecodeConfig("none", bundles=BUNDLES, ceramic=False),
    DecodeConfig(bundles=BUNDLES, batch_typ=7, unsigned_horizon=1_000),
)


# ---------------------------------------------------------------- equal rows


@needs_core
@pytest.mark.parametrize("is_checked", [True, False])
def test_both_engines_write_the_same(is_checked: bool) -> None:
    """Rows, faults, statistics, digests, ranges of frames and counts; also of frames that came twice."""
    frames = traffic(1_500, is_checked=is_checked)
    batches = engines.build_batches([*frames, *frames[300:400]], 700, 2)
    assert engines.find_differences(batches, DecodeConfig()) == []


@needs_core
def test_the_core_decodes_nearly_all_live_traffic() -> None:
    frames = traffic(1_500)
    archived, updated = engines.count_left(engines.build_batches(frames), DecodeConfig())
    assert archived < len(frames) / 20
    assert updated < len(frames) / 20


@needs_core
@settings(max_examples=4)
@given(st.integers(0, 1 << 32))
def test_both_engines_read_changed_records_alike(seed: int) -> None:
    records = RecordChanger(seed).change([*traffic(1_500), *traffic(700, is_checked=False)], 1_200)
    batches = engines.build_batches(records, (300, 1_200)[seed % 2], 1 + seed % 3)
    assert engines.find_differences(batches, CONFIGS[seed // 2 % 4]) == []


STREAM = "kjzl6hvfrbw6c8x4r08h39j30tl3a19x0r80i15hubw8afv4fu2w9m9owz4cbol"
TIP = "bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y"
_JSON_VALUES = (
    *("1", "-0", "01", "-", "1.", "1e", "1e5", "-1.5e3", "1e999", "9223372036854775807", "9223372036854775808", "tru"),
    *(
        "null",
        "true",
        "[1,{}]",
        "[1,]",
        "[",
        "{",
        '{"a":1,}',
        '"\\u00e9\\ud83d\\ude00\\n\\/"',
        '"\\ud800"',
        '"\\udc00"',
    ),
    *(
        '"\\x"',
        '"\x01"',
        '"\\u+123"',
        '"\\u12',
        '"\x7f"',
        '"é"',
        "[" * 63 + "]" * 63,
        "[" * 65 + "]" * 65,
        "[" * 99_000,
    ),
)
UNUSUAL_DATA = (
    *(f'{{"typ":3,"ts":5,"x":{value}}}' for value in _JSON_VALUES),
    *(
        "",
        "[]",
        "{}x",
        ' {"typ":3,"ts":5,"ver":"2.35.0"} ',
        '\ufeff{"typ":3,"ts":5}',
        "{typ:3}",
        '{"typ"}',
        '{"typ":9}',
    ),
    *('{"typ":true}', '{"typ":3}', '{"typ":3.0,"ts":5}', '{"typ":3,"ts":8640000000000001}', '{"typ":4,"ts":5}'),
    *('{"typ":3,"ts":5,"ver":null}', '{"typ":1,"typ":3,"ts":5}', f'{{"typ":2,"id":"x","tips":{{"{STREAM}":"{TIP}"}}}}'),
    *(f'{{"typ":0,"doc":"{prefix}{STREAM}","tip":"{TIP}"}}' for prefix in ("", "/ceramic/", "ceramic://", "x")),
    *(f'{{"typ":0,"stream":"{text}","tip":"{TIP}"}}' for text in (STREAM[:-1], STREAM.upper(), "k", "k0", "k2", "")),
    *(f'{{"typ":0,"stream":"{STREAM}","tip":"{text}"}}' for text in (TIP[:58], TIP[:58] + "z", TIP.upper(), "Qm", "")),
    *(f'{{"typ":3,"sep":"{sep}","batch":"{TIP}"}}' for sep in ("model/2z", "a/b/k2", "/k2", "x", "m/K2", "m/baf")),
)
UNUSUAL_PAYLOADS = (
    b"\x1a\x03\x0a\x01t\x0a\x07\x12\x01a\x12\x02bc\x22\x08\x12\x04\x0a\x02id\x18\x3c",
    b"\x1a\x14\x1a\x03\x0a\x01t\x0a\x03\x0a\x01t\x22\x08\x12\x04\x0a\x02id\x18\x3c",
    b"\x0a\x05\x08\x01\x12\x01t",
    b"\x0a\x07\x08\x01\x12\x01t\x20\x01",  # an unknown field, as of partial messages
    b"\x0a\x05\x12\x01t\x08\x01",  # fields in another order
    b"\x0a\x05\x08\x81\x00\x18\x01",  # a padded varint
    *(b"\x0a\x0d\x08\x01\x12\x07" + b"t" * 7 + b"\x18" + bytes((size,)) for size in (0, 1)),
    *(b"\x0a" + bytes((size | 128, 1)) + b"\x12" + bytes((size - 3 | 128, 1)) + b"t" * (size + 125) for size in (3, 4)),
    *(b"\x22\x01x", b"\x1a\x00\x1a\x00", b"\x1a\x04\x32\x02\x08\x01", b"\x1a\x07\x1a\x05\x0a\x01t\x10\x01"),
    *(
        b"\x12\x04\x22\x02\xff\xfe",
        b"\x88\x00\x01",
        b"\x00\x01",
        b"\x0b",
        b"\x12\x02a",
        b"\x12\xff\xff\xff\xff\xff\x01",
    ),
    *(b"\x1a\x0d\x22\x0b\x18" + b"\xff" * 9 + bytes((last,)) for last in (1, 2)),
)


@needs_core
def test_both_engines_read_unusual_data_and_rpcs_alike() -> None:
    frame = next(frame for frame in map(Frame.FromString, traffic(600)) if _is_signed(frame))
    message, records = RPC.FromString(frame.payload).publish[0], list[bytes | None](traffic(100))
    payloads = list(UNUSUAL_PAYLOADS)
    for text in UNUSUAL_DATA:
        message.data = text.encode()
        payloads.append(RPC(publish=[message]).SerializeToString())
    for sequence, payload in enumerate(payloads, 1_000):
        frame.payload, frame.sequence = payload, sequence
        frame.verdicts = bytes([Verdict.VALID]) if payload[:1] == b"\x12" else b""
        records.append(frame.SerializeToString())
    assert engines.find_differences(engines.build_batches(records), DecodeConfig(bundles=BUNDLES)) == []


@needs_core
def test_null_values_and_slices_are_read_in_place() -> None:
    """An Arrow batch may begin within its buffers, at any bit."""
    records: list[bytes | None] = [*traffic(300)]
    records[7] = records[100] = None
    (whole,) = engines.build_batches(records)
    assert engines.find_differences([whole.slice(3, 150), whole.slice(153, 120)], DecodeConfig()) == []


@needs_core
def test_a_call_takes_32_mib_at_most() -> None:
    frame = Frame.FromString(traffic(1)[0])
    frame.payload = bytes(1 << 20)
    large = [frame.SerializeToString()] * 70
    (batch,) = engines.build_batches(large)
    spans = [(rows.first, rows.end) for rows in core.Core(DecodeConfig()).archive(batch)]
    assert [end - first for first, end in spans] == [31, 31, 8]
    assert spans[-1][1] == 70


@needs_core
def test_a_call_ends_before_its_rows_fill_the_memory() -> None:
    """An entry of two bytes makes a row of some hundred."""
    frame = Frame.FromString(traffic(1)[0])
    frame.payload, frame.verdicts = b"\x0a\x00" * 19_999, b""
    (batch,) = engines.build_batches([frame.SerializeToString()] * 40)
    spans = [(rows.first, rows.end, len(rows.left)) for rows in core.Core(DecodeConfig()).archive(batch)]
    assert spans == [(0, 14, 0), (14, 28, 0), (28, 40, 0)]


@needs_core
@pytest.mark.parametrize(("name", "left"), [("go4nosign", 12), ("go4tt", 31), ("jsc3", 0)])
def test_both_engines_read_captures_of_other_programs_alike(name: str, left: int) -> None:
    """No bridge has checked their signatures. In go4tt, messages have topic indices."""
    config, records = DecodeConfig(), list[bytes | None]()
    if name == "go4tt":
        topics = json.loads((CAPTURES / f"{name}.meta.json").read_text())["topics"]
        config = DecodeConfig(bundles=BundleSet({name: topics}))
    replay(
        CAPTURES / f"{name}.rpc.gz",
        lambda frame: records.append(frame.SerializeToString()),
        now=lambda: 0.0,
        sleep=lambda _: None,
    )
    batches = engines.build_batches(records, 500)
    assert engines.find_differences(batches, config) == []
    assert engines.count_left(batches, config)[0] == left, "those with data that is no Ceramic message, and their like"


@needs_core
def test_signatures_that_no_bridge_has_checked_are_checked_once() -> None:
    signed = [frame for frame in map(Frame.FromString, traffic(600)) if _is_signed(frame)]
    assert len(signed) > 200
    before, _ = engines.count_left(_build_batches(signed), DecodeConfig())
    for frame in signed:
        frame.verdicts = b""
    rpc = RPC.FromString(signed[0].payload)
    rpc.publish[0].data += b" "
    signed[0].payload = rpc.SerializeToString()  # forged
    batches, checked = _build_batches(signed), list[bytes]()

    def check(message: Message, topic: str, given: int, policy: Policy) -> Judgement:
        checked.append(message.SerializeToString())
        return check_signature(message, topic, given, policy)

    with patch.object(core, "check_signature", check):
        assert engines.count_left(batches, DecodeConfig()) == (before + 1, before + 1)
    messages = {message.SerializeToString() for frame in signed for message in RPC.FromString(frame.payload).publish}
    assert sorted(checked) == sorted(messages)
    assert engines.find_differences(batches, DecodeConfig()) == []
    assert engines.find_differences(batches, DecodeConfig("none")) == []
    assert engines.count_left(batches, DecodeConfig("none")) == (len(signed), len(signed))


def _is_signed(frame: Frame) -> bool:
    """True if the bridge has found all messages valid, and all authors have ed25519 keys."""
    if set(frame.verdicts) != {Verdict.VALID}:
        return False
    peers = [getattr(message, "from") for message in RPC.FromString(frame.payload).publish]
    return all(peer.startswith(build_ed25519_peer_id(b"")) for peer in peers)


def _build_batches(frames: Sequence[Frame]) -> list[pa.RecordBatch]:
    return engines.build_batches([frame.SerializeToString() for frame in frames], 100)


@needs_core
def test_the_core_has_the_columns_of_the_tables() -> None:
    (rows,) = core.Core(DecodeConfig()).archive(engines.build_batches(traffic(2))[0])
    for name, table in zip(library.TABLES_OF_CORE, rows.tables, strict=False):
        expected = build_arrow_schema(TABLES[name].columns)
        assert table.schema.names == expected.names, name
        for ours, theirs in zip(table.schema, expected, strict=True):
            assert ours.type == theirs.type, f"{name}.{ours.name}"


# ---------------------------------------------------------------- which engine


@needs_core
def test_small_tasks_and_unusual_settings_stay_in_python() -> None:
    assert core.can_decode(DecodeConfig(), core.MIN_RECORDS)
    assert not core.can_decode(DecodeConfig(), core.MIN_RECORDS - 1)
    assert not core.can_decode(DecodeConfig(native_core=False), 1_000)
    assert not core.can_decode(DecodeConfig(decoder="module:function"), 1_000)


def test_without_a_library_python_decodes_and_the_command_is_named(tmp_path: Path) -> None:
    with engines.other_library(tmp_path / "none.so"):
        assert not core.can_decode(DecodeConfig(), 1_000)
        assert library.find_engine().describe().endswith("the native core is not built. Run make native")
        found = engines.archive(engines.build_batches(traffic(200)), DecodeConfig())
    assert isinstance(found["frames"], pa.Table)


@needs_core
def test_a_library_of_other_sources_is_stale(tmp_path: Path) -> None:
    (tmp_path / "lib.rs").write_text("// changed")
    library._open_library.cache_clear()
    try:
        with patch.object(library, "SOURCES", tmp_path):
            assert library.find_engine() == library.Engine(
                False, "the native core was built from other sources. Run make native"
            )
    finally:
        library._open_library.cache_clear()


def test_a_file_that_is_no_library_is_not_used(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with engines.other_library(broken):
        assert "cannot be loaded" in library.find_engine().reason


def test_setup_without_rustc_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(native_core, "find_rustc", lambda: None):
        assert native_core.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rustc is not installed, so Python decodes all frames, more slowly. To get the native core: make native"
    ]


def test_make_native_fails_without_rustc(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        patch.object(native_core, "find_rustc", lambda: None),
        patch("shutil.which", lambda _: None),
    ):
        assert native_core.main(["--install"]) == 1
    assert "rustc 1.63 or later" in capsys.readouterr().err


# ---------------------------------------------------------------- digests


@needs_core
def test_digests_are_those_of_hashlib() -> None:
    """Random bytes of each length around the blocks of both functions, and published vectors: FIPS 180-4's, and
    BLAKE2b-128 of "abc"."""
    loaded = library.load_library()
    assert loaded is not None

    def compute(data: bytes) -> tuple[str, str]:
        sha, blake = ctypes.create_string_buffer(32), ctypes.create_string_buffer(16)
        loaded.kiln_sha256(data, len(data), sha)
        loaded.kiln_blake2b(data, len(data), blake)
        return sha.raw.hex(), blake.raw.hex()

    assert compute(b"abc") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "cf4ab791c62b8d2b2109c90275287816",
    )
    two_blocks = b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"
    assert compute(two_blocks)[0] == "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
    for size in [*range(300), 4_095, 4_096, 100_001]:
        data = random.randbytes(size)
        expected = hashlib.sha256(data).hexdigest(), hashlib.blake2b(data, digest_size=16).hexdigest()
        assert compute(data) == expected, size


# ---------------------------------------------------------------- a core that is wrong


MUTANTS = {
    "a peer id loses its leading zeros": (
        "base_text.rs",
        "let mut text = vec![alphabet[0]; zeros];",
        "let mut text = vec![];",
    ),
    "an index is off by one": ("decoder.rs", ".checked_sub(1).and_then", ".checked_sub(0).and_then"),
    "an unsigned message is lasting": ("decoder.rs", "self.verdict == VALID && self.message.is_signed", "true"),
    "nanoseconds are not cut to µs": ("frame.rs", "self.observed_at / 1_000", "self.observed_at / 1_001"),
    "an unchecked signature is accepted": (
        "decoder.rs",
        "NOT_CHECKED if frame.origin == REPLAY && !message.is_signed => UNSIGNED",
        "NOT_CHECKED => UNSIGNED",
    ),
    "a bad signature is valid": (
        "signatures.rs",
        "self.verdicts.get(&build_key(origin, topic, message)) == Some(&true)",
        "self.verdicts.contains_key(&build_key(origin, topic, message))",
    ),
}


class MutantBuilder:
    """Builds wrong cores in one folder, so that rustc compiles again only what differs."""

    def __init__(self, folder: Path) -> None:
        self._sources, self._incremental = folder / "src", folder / "incremental"
        copytree(library.SOURCES, self._sources)

    def build(self, path: Path, file: str, old: str, new: str) -> Path:
        source = self._sources / file
        text = source.read_text()
        assert text.count(old) == 1
        source.write_text(text.replace(old, new))
        rustc = library.find_rustc()
        assert rustc is not None
        quick = ["-C", "opt-level=0", "-C", "codegen-units=64", "-C", f"incremental={self._incremental}"]
        try:
            library.build_library(rustc, path, self._sources, quick)
        finally:
            source.write_text(text)
        return path


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> MutantBuilder:
    return MutantBuilder(tmp_path_factory.mktemp("mutants"))


def claim_own_sources(path: Path) -> ExitStack:
    """Use a library although it was built from other sources."""
    stack = engines.other_library(path)
    stack.enter_context(patch.object(library, "compute_sources_digest", lambda: _read_digest(path)))
    return stack


def _read_digest(path: Path) -> str:
    digest = ctypes.create_string_buffer(64)
    ctypes.CDLL(str(path)).kiln_sources(digest)
    return digest.raw.decode()


@needs_core
def test_of_the_copies_of_an_update_only_the_first_is_built() -> None:
    copies: Counter[tuple[MessageCopy | None, int]] = Counter()
    build = RowBuilder.build

    def count(self: RowBuilder, item: DecodedMessage) -> list[UpdateRow]:
        copies[item.copy, item.ref.partition] += 1
        return build(self, item)

    with patch.object(RowBuilder, "build", count):
        engines.update(engines.build_batches(traffic(200), 200), DecodeConfig(), engines.SEPARATING[0])
    assert set(copies.values()) == {1}


@needs_core
def test_a_message_that_differs_turns_the_core_off_in_updates() -> None:
    batches = engines.build_batches(traffic(200), 200)
    expected = engines.update(batches, DecodeConfig(native_core=False), engines.SEPARATING[0])
    build = updates._build_messages

    def build_wrong(messages: pa.RecordBatch, batch: pa.RecordBatch) -> list[DecodedMessage]:
        return [message._replace(observed_at=message.observed_at + 1) for message in build(messages, batch)]

    counted: list[int] = []
    with (
        patch.object(updates, "_build_messages", build_wrong),
        patch.object(core, "SAMPLE_ONE_IN", 1),
        patch.object(library, "_turned_off", []),
    ):
        assert engines.update(batches, DecodeConfig(), engines.SEPARATING[0], counted.append) == expected
        assert not library.find_engine().is_native
    assert counted == [1]


class Changed(NamedTuple):
    """Changed records, and what Python makes of them."""

    batches: list[pa.RecordBatch]
    in_python: engines.TaskOutputs


@pytest.fixture(scope="module")
def changed() -> Changed:
    records = RecordChanger(1).change([*traffic(1_500), *traffic(700, is_checked=False)], 1_200)
    batches = engines.build_batches(records, 400)
    return Changed(batches, engines.decode_in_python(batches, DecodeConfig(bundles=BUNDLES)))


@pytest.mark.slow
@needs_rustc
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_core_is_noticed_and_turned_off(
    mutant: str, changed: Changed, mutants: MutantBuilder, tmp_path: Path
) -> None:
    """The comparison fails for it; and with samples, a task of either query writes Python's rows and counts the
    difference."""
    batches, in_python = changed
    config = DecodeConfig(bundles=BUNDLES)
    with claim_own_sources(mutants.build(tmp_path / "mutant.so", *MUTANTS[mutant])):
        assert library.find_engine().is_native
        assert engines.find_differences(batches, config, in_python)
        with patch.object(core, "SAMPLE_ONE_IN", 1):
            found = engines.archive(batches, config)
        assert not library.find_engine().is_native, "the core is turned off"
        expected = in_python.archive | {"differences": 1}
        assert [name for name in expected if not engines.is_equal(expected[name], found[name])] == []
        counted: list[int] = []
        with patch.object(core, "SAMPLE_ONE_IN", 1), patch.object(library, "_turned_off", []):
            assert engines.update(batches, config, engines.SEPARATING[0], counted.append) == in_python.updates[0]
            assert not library.find_engine().is_native
        assert counted == [1]


@pytest.mark.slow
@needs_rustc
def test_a_panic_leaves_the_record_or_the_call_to_python(tmp_path: Path) -> None:
    rustc = library.find_rustc()
    assert rustc is not None
    library.build_library(rustc, tmp_path / "faults.so", None, ["--cfg", "kiln_faults", "-C", "opt-level=0"])
    records: list[bytes | None] = [*traffic(900)]
    for at, word in ((100, b"panic"), (101, b"panic"), (500, b"PANIC"), (899, b"panic")):
        records[at] = (records[at] or b"") + b"\xa2\x06\x05" + word  # an unknown field
    with engines.other_library(tmp_path / "faults.so"):
        assert library.find_engine().is_native
        for size in (150, 900):
            batches = engines.build_batches(records, size)
            archived, _ = engines.count_left(batches, DecodeConfig())
            assert archived > 3
            assert engines.find_differences(batches, DecodeConfig()) == []


@needs_rustc
def test_sources_that_do_not_compile_are_named(tmp_path: Path) -> None:
    (tmp_path / "lib.rs").write_text("this is no Rust")
    rustc = library.find_rustc()
    assert rustc is not None
    with pytest.raises(PrerequisiteError, match="cannot build the native core"):
        library.build_library(rustc, tmp_path / "core.so", tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "lib.rs"]
