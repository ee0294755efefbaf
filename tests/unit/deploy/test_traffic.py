"""Made-up traffic: the same for the same seed, and what its ledger says is true of its bytes.

Frames are read here with plain protobuf and JSON, so that the ledger is not held against the code it is to test.
"""

from __future__ import annotations

import gzip
import heapq
import io
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import base58
import pytest
from google.protobuf.message import DecodeError

from kiln.deploy.demo.traffic import (
    GeneratedFrame,
    Ledger,
    MessageEntry,
    Traffic,
    TrafficOptions,
    write_traffic,
)
from kiln.deploy.demo.traffic.capture_files import replay, survey_file
from kiln.deploy.demo.traffic.population import ODD_KEY
from kiln.schemas.kafka.frames import REASONS as FRAME_REASONS
from kiln.schemas.kafka.frames import read_frame
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import Verdict, check
from kiln.schemas.wire.pubsub import REASONS as MESSAGE_REASONS
from kiln.schemas.wire.topic_table import REASONS as HELLO_REASONS
from kiln.schemas.wire.topic_table import parse_hello
from kit.bad_inputs import BAD_KINDS, BadKind, generate_bad_inputs
from kit.cpu_time import count_steps
from kit.traffic_ledger import LedgerError, read_ledger

START = 1_700_000_000_000_000_000
RATE = 1000.0
MESSAGES = 3000
# Enough of everything in few messages.
BUSY = TrafficOptions(
    seed=7, garbage=0.1, forged=0.1, impostors=0.05, reconnects=0.01, other_network=0.03, era_2020=0.08, era_doc=0.15
)


class Run(NamedTuple):
    frames: list[GeneratedFrame]
    ledger: Ledger
    by_id: dict[str, MessageEntry]


def run(options: TrafficOptions = BUSY, messages: int = MESSAGES, start_ns: int = START, rate: float = RATE) -> Run:
    traffic = Traffic(options, start_ns, rate)
    frames = list(traffic.frames(messages=messages))
    assert traffic.ledger is not None
    by_id = {message: entry for (_, message), entry in traffic.ledger.messages.items()}
    assert len(by_id) == len(traffic.ledger.messages)
    return Run(frames, traffic.ledger, by_id)


@pytest.fixture(scope="module")
def busy() -> Run:
    return run()


class Seen(NamedTuple):
    """A copy of a message as it came in."""

    frame: Frame
    message: rpc_pb2.Message
    verdict: int

    @property
    def id(self) -> str:
        """The id by its definition in docs/design, not by the code that others use."""
        author: bytes = getattr(self.message, "from")
        if not self.message.HasField("signature"):
            return f"sha256/{sha256(self.message.data).hexdigest()}"
        return f"{base58.b58encode(author).decode()}/{self.message.seqno.hex()}"


def copies(frames: Iterable[GeneratedFrame]) -> Iterator[Seen]:
    """The messages in IN frames that parse."""
    for generated in frames:
        frame = generated.frame
        if frame.direction != Frame.IN or frame.declared_length:
            continue
        try:
            rpc = rpc_pb2.RPC.FromString(frame.payload)
        except DecodeError:
            continue
        for index, message in enumerate(rpc.publish):
            yield Seen(frame, message, frame.verdicts[index] if frame.verdicts else 0)


def fields_of(data: bytes) -> dict[str, object]:
    """The JSON of a good message; the last of equal keys wins and a byte order mark is dropped."""
    found = json.loads(data.decode("utf-8-sig"))
    assert isinstance(found, dict)
    return found


def is_true(seen: Seen, entry: MessageEntry) -> bool:
    """Whether its data is that of the message; that of a forged copy is not."""
    return sha256(seen.message.data).hexdigest() == entry.sha256


# ---------------------------------------------------------------- determinism


def test_the_same_arguments_give_the_same_bytes_and_the_same_ledger() -> None:
    first, second = run(messages=600), run(messages=600)
    assert first.frames == second.frames
    assert written(first.ledger) == written(second.ledger)


@pytest.mark.parametrize(
    "other",
    [
        run(TrafficOptions(seed=8), messages=50),
        run(TrafficOptions(seed=7), messages=50, start_ns=START + 1),
    ],
    ids=["seed", "start"],
)
def test_another_seed_or_start_shares_no_connection_and_no_message(other: Run) -> None:
    base = run(TrafficOptions(seed=7), messages=50)
    assert not {frame.key for frame in base.frames} & {frame.key for frame in other.frames}
    signed = {message for _, message in base.ledger.messages if not message.startswith("sha256/")}
    assert signed
    assert not signed & {message for _, message in other.ledger.messages}


def test_the_streams_and_separators_of_a_world_do_not_depend_on_the_start() -> None:
    def separators(ledger: Ledger) -> dict[str, object]:
        return {e.stream: e.separator for e in ledger.messages.values() if e.stream and e.separator}

    options = TrafficOptions(streams=30)
    one, two = separators(run(options, 400).ledger), separators(run(options, 400, START * 2).ledger)
    assert len(one.keys() & two.keys()) > 20
    assert all(one[stream] == two[stream] for stream in one.keys() & two.keys())


def test_all_kinds_of_keys_sign_and_sign_the_same_each_time() -> None:
    options = TrafficOptions(authors=24)
    kinds = set()
    for seen in copies(run(options, 1500).frames):
        author: bytes = getattr(seen.message, "from")
        key = seen.message.key or author[2:]
        if author:
            kinds.add(rpc_pb2.PublicKey.FromString(key).Type)
    assert kinds == set(rpc_pb2.PublicKey.KeyType.values())
    assert run(options, 300).frames == run(options, 300).frames


# ---------------------------------------------------------------- time and connections


def test_frames_are_due_in_order_and_observed_when_due(busy: Run) -> None:
    assert all(before.due_ns <= after.due_ns for before, after in pairwise(busy.frames))
    assert all(frame.frame.observed_at == START + frame.due_ns for frame in busy.frames)


def test_the_rate_is_that_of_messages_before_copies(busy: Run) -> None:
    seconds = busy.frames[-1].due_ns / 1e9
    assert seconds == pytest.approx(MESSAGES / RATE, rel=0.15)
    assert len(busy.frames) > 2 * MESSAGES


def test_each_direction_is_numbered_without_gap_from_hello_to_closing(busy: Run) -> None:
    lanes: dict[tuple[bytes, int], list[Frame]] = defaultdict(list)
    for generated in busy.frames:
        frame = generated.frame
        assert generated.key == frame.connection
        lanes[frame.connection, frame.direction].append(frame)
    assert len(lanes) > 2 * BUSY.peers, "nobody connected anew"
    for frames in lanes.values():
        assert [frame.sequence for frame in frames] == list(range(1, len(frames) + 1))
        hello = rpc_pb2.RPC.FromString(frames[0].payload)
        assert hello.subscriptions[0].topicid == "/ceramic/local-demo"
        assert [bool(frame.payload) for frame in frames] == [True] * (len(frames) - 1) + [False]
    assert {connection for connection, _ in lanes} == {frame.key for frame in busy.frames}
    assert all((connection, side) in lanes for connection, _ in lanes for side in (Frame.IN, Frame.OUT))


def test_frames_keep_their_contract(busy: Run) -> None:
    assert not [frame for frame in busy.frames if isinstance(read_frame(frame.value), Rejected)]


def test_hellos_in_frames_are_those_that_were_sent(busy: Run) -> None:
    agreed = 0
    for generated in busy.frames:
        frame = generated.frame
        if frame.sequence != 1 or isinstance(parse_hello(frame.hello_in), Rejected):
            continue
        control = rpc_pb2.RPC.FromString(frame.payload).control
        sent = control.extensions.topicTableExtension.SerializeToString()
        assert sent == (frame.hello_in if frame.direction == Frame.IN else frame.hello_out)
        agreed += bool(sent)
    assert agreed


def test_control_traffic_goes_both_ways(busy: Run) -> None:
    found: Counter[tuple[int, str]] = Counter()
    for generated in busy.frames:
        frame = generated.frame
        try:
            rpc = rpc_pb2.RPC.FromString(frame.payload)
        except DecodeError:
            continue
        found.update((frame.direction, field.name) for field, _ in rpc.control.ListFields())
        found.update((frame.direction, "leave") for option in rpc.subscriptions if not option.subscribe)
        found.update((frame.direction, "publish") for _ in rpc.publish)
    names = ("ihave", "iwant", "graft", "prune", "idontwant", "extensions", "leave", "publish")
    assert not [(side, name) for side in (Frame.IN, Frame.OUT) for name in names if not found[side, name]]


def test_stop_ends_with_all_copies_and_closing_frames() -> None:
    traffic = Traffic(BUSY, START, RATE)
    frames = []
    for frame in traffic.frames():
        frames.append(frame)
        if len(frames) == 500:
            traffic.stop()
    closing = Counter(frame.key for frame in frames if not frame.frame.payload)
    assert closing
    assert closing == dict.fromkeys((frame.key for frame in frames), 2)


def test_duration_ends_the_traffic() -> None:
    frames = list(Traffic(BUSY, START, RATE).frames(duration_ns=500_000_000))
    assert 400_000_000 < frames[-1].due_ns < 500_000_000 + BUSY.max_delay_ns + 10_000_000


# ---------------------------------------------------------------- the ledger and the bytes


def test_the_ledger_counts_the_copies_that_are_there(busy: Run) -> None:
    good: Counter[str] = Counter()
    other: Counter[str] = Counter()
    for seen in copies(busy.frames):
        entry = busy.by_id[seen.id]
        assert seen.message.topic == entry.topic
        (good if is_true(seen, entry) and entry.outcome == "message" else other)[seen.id] += 1
    for message, entry in busy.by_id.items():
        assert good[message] == entry.good_copies, entry
        assert other[message] == entry.forged_copies + entry.bad_copies, entry
        assert not (entry.forged_copies and entry.bad_copies)
        assert (entry.first_good_at is not None) == (entry.good_copies > 0)
    assert set(good) | set(other) == set(busy.by_id)


def test_good_signatures_verify_and_no_other_does(busy: Run) -> None:
    outcomes: Counter[tuple[str, str]] = Counter()
    for seen in copies(busy.frames):
        entry = busy.by_id[seen.id]
        true = is_true(seen, entry)
        at_fault = entry.stage == "signature" or not true
        verdict, reason, _ = check(seen.message, "strict")
        assert (verdict is Verdict.VALID) == (not at_fault), (entry, reason)
        if not at_fault:
            outcomes["good", reason] += 1
        elif true:
            assert reason == entry.reason or entry.reason == "against_policy"
            outcomes["bad", entry.reason or ""] += 1
        else:
            assert reason == entry.forged_reason
            outcomes["forged", reason] += 1
        if seen.verdict:
            expected = Verdict.AGAINST_POLICY if reason == "missing_signature" else verdict
            assert seen.verdict == expected
    assert {kind for kind, _ in outcomes} == {"good", "bad", "forged"}
    assert {"against_policy", "missing_signature", "bad_signature"} <= {reason for _, reason in outcomes}


def test_a_forged_copy_comes_before_every_true_one(busy: Run) -> None:
    true_seen: set[str] = set()
    forged = 0
    for seen in copies(busy.frames):
        if is_true(seen, busy.by_id[seen.id]):
            true_seen.add(seen.id)
        else:
            forged += 1
            assert seen.id not in true_seen
    assert forged > 100
    assert all(entry.good_copies for entry in busy.by_id.values() if entry.forged_copies)


def test_copies_of_a_message_are_the_same_bytes_through_different_peers(busy: Run) -> None:
    wires: dict[str, set[bytes]] = defaultdict(set)
    peers: dict[str, list[bytes]] = defaultdict(list)
    for seen in copies(busy.frames):
        if is_true(seen, busy.by_id[seen.id]):
            wires[seen.id].add(seen.message.SerializeToString())
            peers[seen.id].append(seen.frame.remote_peer)
    assert all(len(wire) == 1 for wire in wires.values())
    assert all(len(set(through)) == len(through) <= BUSY.copies for through in peers.values())
    assert {len(through) for through in peers.values()} == {1, 2, 3}


def test_some_copies_come_bundled(busy: Run) -> None:
    bundles = Counter(len(rpc_pb2.RPC.FromString(frame.frame.payload).publish) for frame in parsing(busy.frames))
    assert bundles[1] > bundles[2] > bundles[3] > 0


def parsing(frames: Iterable[GeneratedFrame]) -> Iterator[GeneratedFrame]:
    for frame in frames:
        try:
            rpc_pb2.RPC.FromString(frame.frame.payload)
        except DecodeError:
            continue
        if not frame.frame.declared_length:
            yield frame


def test_separators_of_updates_can_be_had_from_topic_or_model_as_the_ledger_says(busy: Run) -> None:
    sources: Counter[tuple[str | None, str]] = Counter()
    for seen in copies(busy.frames):
        entry = busy.by_id[seen.id]
        if entry.type != "UPDATE" or not is_true(seen, entry):
            continue
        content = fields_of(seen.message.data)
        head, sep, place = seen.message.topic.partition("/sep/")
        expected: tuple[str, str] | None = None
        if sep:
            key, _, value = place.rpartition("/")
            expected, source = (key, value), "topic"
        elif isinstance(content.get("model"), str):
            expected, source = ("model", str(content["model"])), "model"
        else:
            source = None
        found = entry.separator
        assert (None if found is None else (found.key, found.value)) == expected
        assert entry.separator_source == source
        assert head.rstrip("/") in (f"/ceramic/{entry.network}", "/ceramic")
        sources[source, expected[0] if expected else ""] += 1
    assert {("topic", "model"), ("topic", "controller"), ("topic", ODD_KEY), ("model", "model")} <= set(sources)
    assert sources[None, ""]


def test_messages_say_what_the_ledger_says(busy: Run) -> None:
    plain = 0
    for seen in copies(busy.frames):
        entry = busy.by_id[seen.id]
        if entry.outcome != "message" or not is_true(seen, entry):
            continue
        content = fields_of(seen.message.data)
        assert (
            content["typ"]
            == {"UPDATE": 0, "QUERY": 1, "RESPONSE": 2, "KEEPALIVE": 3, "BATCH_UPDATE": 3}[str(entry.type)]
        )
        if entry.type == "KEEPALIVE":
            assert content["ts"] == entry.ts
        elif entry.type == "BATCH_UPDATE":
            assert (content["sep"], content["batch"]) == (entry.sep, entry.batch)
        elif entry.era != "2020":
            if entry.type == "RESPONSE":
                assert (content["id"], content["tips"]) == (entry.query_id, entry.tips)
            else:
                sent = str(content.get("stream", content.get("doc")))
                assert sent.rpartition("/")[2] == entry.stream
            if entry.type == "QUERY":
                assert content["id"] == entry.query_id
            if entry.type == "UPDATE":
                assert content.get("model") == entry.model
                plain += content["tip"] == entry.tip
    assert plain


def test_every_era_and_type_is_there(busy: Run) -> None:
    shapes: set[str] = set()
    for seen in copies(busy.frames):
        entry = busy.by_id[seen.id]
        if entry.outcome != "message" or not is_true(seen, entry):
            continue
        content = fields_of(seen.message.data)
        keys = frozenset(content) - {"typ", "anchorService", "x", "model"}
        shapes.add(f"{entry.type} {','.join(sorted(keys))}")
        if entry.type == "QUERY" and "," in str(content["id"]):
            shapes.add("decimal query id")
    assert shapes == {
        "UPDATE cid,doctype,id",
        "UPDATE doc,tip",
        "UPDATE doc,stream,tip",
        "UPDATE stream,tip",
        "QUERY doctype,id",
        "QUERY doc,id",
        "QUERY doc,id,stream",
        "QUERY id,stream",
        "decimal query id",
        "RESPONSE cid,doctype,id",
        "RESPONSE id,tips",
        "KEEPALIVE ts",
        "KEEPALIVE ts,ver",
        "KEEPALIVE ipfsVer,ts,ver",
        "BATCH_UPDATE batch,sep",
    }


def test_a_query_has_several_responses_and_tips_are_announced_again(busy: Run) -> None:
    entries = busy.ledger.messages.values()
    answers = Counter(entry.query_id for entry in entries if entry.type == "RESPONSE" and entry.query_id)
    assert max(answers.values()) > 1
    tips = Counter((entry.stream, entry.tip) for entry in entries if entry.type == "UPDATE")
    assert max(tips.values()) > 1


def test_a_second_network_is_named_by_its_topic(busy: Run) -> None:
    networks = Counter(entry.network for entry in busy.ledger.messages.values())
    assert set(networks) == {"local-demo", "local-demo-2"}
    assert networks["local-demo"] > 10 * networks["local-demo-2"]


def test_few_separators_have_most_updates() -> None:
    ledger = run(TrafficOptions(separators=200, streams=5000), 6000).ledger
    found = Counter(
        (entry.separator.key, entry.separator.value) for entry in ledger.messages.values() if entry.separator
    )
    ranked = [number for _, number in found.most_common()]
    assert len(ranked) > 100
    assert sum(ranked[:10]) > 0.4 * sum(ranked)
    assert ranked[0] > 3 * ranked[9]


def test_a_stream_has_one_separator_by_whatever_way(busy: Run) -> None:
    known: dict[str, tuple[str, str]] = {}
    for entry in busy.ledger.messages.values():
        if entry.stream and entry.separator:
            separator = (entry.separator.key, entry.separator.value)
            assert known.setdefault(entry.stream, separator) == separator
    assert known


def test_bad_frames_are_in_the_ledger_with_their_bytes_and_reason(busy: Run) -> None:
    frames = {(f.frame.connection.hex(), f.frame.direction, f.frame.sequence): f.frame for f in busy.frames}
    stages = Counter(entry.stage for entry in busy.ledger.frames)
    assert set(stages) == {"rpc", "hello"}
    for entry in busy.ledger.frames:
        assert (entry.connection, entry.sequence) != (None, None)
        frame = frames[entry.connection or "", Frame.IN, entry.sequence or 0]
        at_fault = frame.hello_in if entry.stage == "hello" else frame.payload
        assert sha256(at_fault).hexdigest() == entry.sha256
        assert frame.observed_at == entry.observed_at
    listed = {(e.connection, e.sequence) for e in busy.ledger.frames if e.reason == "rpc_malformed"}
    unread = {
        (f.frame.connection.hex(), f.frame.sequence)
        for f in busy.frames
        if f.frame.payload and not f.frame.declared_length and not any(True for _ in parsing([f]))
    }
    assert listed == unread
    cut = {(e.connection, e.sequence) for e in busy.ledger.frames if e.reason == "rpc_oversized"}
    assert cut == {(f.frame.connection.hex(), f.frame.sequence) for f in busy.frames if f.frame.declared_length}


def test_reasons_are_those_that_readers_give(busy: Run) -> None:
    for entry in busy.ledger.messages.values():
        if entry.stage == "message":
            assert entry.reason in MESSAGE_REASONS
    assert {entry.reason for entry in busy.ledger.frames} <= {*FRAME_REASONS, *HELLO_REASONS}


# ---------------------------------------------------------------- policies


def test_an_unsigned_network_has_neither_authors_nor_signatures() -> None:
    found = run(TrafficOptions(signed=False, garbage=0.1, garbage_kinds=("random_data", "nan")), 800)
    seen_ids = set()
    for seen in copies(found.frames):
        assert {field.name for field, _ in seen.message.ListFields()} == {"data", "topic"}
        assert check(seen.message, "none")[:2] == (Verdict.UNSIGNED, "")
        assert seen.verdict in (Verdict.NOT_CHECKED, Verdict.UNSIGNED)
        seen_ids.add(seen.id)
    assert seen_ids == set(found.by_id)
    assert sum(e.good_copies + e.bad_copies for e in found.ledger.messages.values()) == len(list(copies(found.frames)))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("origin", ["LIVE", "REPLAY"])
def test_what_breaks_the_policy_is_bad_in_live_traffic_only(signed: bool, origin: str) -> None:
    live = origin == "LIVE"
    options = TrafficOptions(
        signed=signed, origin="LIVE" if live else "REPLAY", garbage=0.3, garbage_kinds=("wrong_auth",), impostors=0.0
    )
    found = run(options, 400)
    odd = [e for e in found.ledger.messages.values() if (e.author is None) == signed]
    assert len(odd) > 50
    assert {e.outcome for e in odd} == {"quarantine" if live else "message"}
    assert {e.stage for e in odd} == {"signature" if live else None}
    judged = [(check(s.message, options.policy).verdict, s.verdict) for s in copies(found.frames)]
    good = {Verdict.VALID, Verdict.UNSIGNED}
    assert any(verdict not in good for verdict, _ in judged) == (live or signed)  # forged ones are bad anywhere
    assert all((said in good) == (verdict in good) for verdict, said in judged if said)


def test_origin_is_in_every_frame() -> None:
    found = run(TrafficOptions(origin="REPLAY"), 50)
    assert {frame.frame.origin for frame in found.frames} == {Frame.REPLAY}


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("seed", [-1, 2**63 + 1])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed"):
        TrafficOptions(seed=seed)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="rate"):
        Traffic(TrafficOptions(), START, 0)


def test_the_smallest_world_works() -> None:
    found = run(TrafficOptions(peers=1, authors=1, copies=1, streams=1, separators=1), 300)
    assert {len(e.tips or {}) for e in found.ledger.messages.values()} <= {0, 1}
    assert max(e.good_copies for e in found.ledger.messages.values()) == 1


def test_a_million_streams_and_20_000_separators_start_at_once() -> None:
    def generate(streams: int, separators: int) -> None:
        options = TrafficOptions(streams=streams, separators=separators)
        assert list(Traffic(options, START, RATE).frames(messages=200))

    generate(1_000, 20)  # makes the keys that all share
    few = count_steps(lambda: generate(1_000, 20))
    many = count_steps(lambda: generate(1_000_000, 20_000))
    assert many < 20 * few, "streams and separators are made before they are needed"


# ---------------------------------------------------------------- files


def written(ledger: Ledger) -> bytes:
    stream = io.BytesIO()
    ledger.write(stream)
    return stream.getvalue()


def test_a_ledger_is_json_lines_and_can_be_read_back(busy: Run) -> None:
    text = written(busy.ledger)
    lines = [json.loads(line) for line in text.splitlines()]
    assert Counter(line["entry"] for line in lines) == {
        "message": len(busy.ledger.messages),
        "frame": len(busy.ledger.frames),
    }
    again = read_ledger(io.BytesIO(text))
    assert again.messages == busy.ledger.messages
    assert again.frames == busy.ledger.frames


def test_a_line_that_is_no_entry_is_named() -> None:
    with pytest.raises(LedgerError, match="line 1"):
        read_ledger([b'{"entry":"message"}\n'])


def test_ledgers_of_two_sources_add_up() -> None:
    one, two = run(messages=100).ledger, generate_bad_inputs("nan", 20, 1).ledger
    list(bad := generate_bad_inputs("nan", 20, 1))
    total = len(one) + len(bad.ledger)
    one.add(two)
    one.add(bad.ledger)
    assert len(one) == total
    before = sum(entry.good_copies for entry in one.messages.values())
    one.add(run(messages=100).ledger)
    assert sum(entry.good_copies for entry in one.messages.values()) == 2 * before


def test_a_capture_of_the_traffic_replays_as_the_same_traffic(tmp_path: Path) -> None:
    options = BUSY.for_capture()
    found = run(options, 800)
    path = tmp_path / "made.rpc.gz"
    with gzip.open(path, "wb") as stream:
        records = write_traffic(cast(BinaryIO, stream), found.frames)
    replayed: list[Frame] = []
    survey = survey_file(path)
    assert survey.select_network("another") == "local-demo"
    assert survey.records == records
    assert survey.connections == len({frame.key for frame in found.frames})
    assert replay(path, replayed.append, now=time.monotonic, sleep=time.sleep) == len(found.frames)
    ours = Counter((f.frame.remote_peer, f.frame.direction, f.frame.sequence, f.frame.payload) for f in found.frames)
    theirs = Counter((f.remote_peer, f.direction, f.sequence, f.payload) for f in replayed)
    assert ours == theirs
    assert {f.frame.declared_length for f in found.frames} == {f.declared_length for f in replayed} != {0}
    assert {f.frame.hello_in for f in found.frames} == {f.hello_in for f in replayed}


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("kind", BAD_KINDS)
def test_bad_input_is_as_much_as_asked_for_and_repeatable(kind: BadKind) -> None:
    bad = generate_bad_inputs(kind, 40, 3, start_ns=START)
    frames = list(bad)
    assert frames == list(generate_bad_inputs(kind, 40, 3, start_ns=START))
    assert frames != list(generate_bad_inputs(kind, 40, 4, start_ns=START)) or kind == "many_messages"
    assert all(before.due_ns <= after.due_ns for before, after in pairwise(frames))
    if kind == "forged_first":
        assert [(e.outcome, e.good_copies, e.forged_copies) for e in bad.ledger.messages.values()] == [
            ("message", 1, 1)
        ] * 40
    elif kind == "wrong_hello":
        assert len({e.connection for e in bad.ledger.frames}) == 40
        assert len(bad.ledger) == 80
    else:
        assert len(bad.ledger) == 40
        assert {e.outcome for e in bad.ledger.messages.values()} <= {"quarantine"}


@pytest.mark.parametrize("kind", BAD_KINDS)
def test_bad_input_leaves_no_gap_in_its_connections(kind: BadKind) -> None:
    lanes: dict[tuple[bytes, int], list[int]] = defaultdict(list)
    records = 0
    for generated in generate_bad_inputs(kind, 30, 5, start_ns=START):
        frame = read_frame(generated.value)
        if isinstance(frame, Rejected):
            records += 1
        else:
            lanes[frame.connection, frame.direction].append(frame.sequence)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in lanes.values())
    assert records == (30 if kind == "random_record" else 0)


def test_bad_input_is_bad_for_the_reason_in_its_ledger() -> None:
    for kind in ("random_data", "invalid_json", "nan"):
        bad = generate_bad_inputs(kind, 200, 1, start_ns=START)
        for seen in copies(bad):
            assert not is_json(seen.message.data)
            assert check(seen.message, "strict").verdict is Verdict.VALID
        assert {e.reason for e in bad.ledger.messages.values()} == {"invalid_json"}
    for seen in copies(generate_bad_inputs("typ_true", 200, 1, start_ns=START)):
        typ = json.loads(seen.message.data)["typ"]
        assert type(typ) is not int or typ not in (0, 1, 2, 3, 4)
    for generated in generate_bad_inputs("wrong_hello", 100, 1, start_ns=START):
        assert isinstance(parse_hello(generated.frame.hello_in), Rejected)
    for reason in ("rpc_malformed", "rpc_oversized"):
        kinds: tuple[BadKind, ...] = (
            ("random_rpc", "truncated_rpc") if reason == "rpc_malformed" else ("oversized_rpc",)
        )
        for bad_kind in kinds:
            bad = generate_bad_inputs(bad_kind, 50, 1, start_ns=START)
            payloads = {sha256(f.frame.payload).hexdigest(): f for f in bad}
            assert {e.reason for e in bad.ledger.frames} == {reason}
            for entry in bad.ledger.frames:
                frame = payloads[entry.sha256]
                assert frame.frame.declared_length > 4 * 2**20 if reason == "rpc_oversized" else not [*parsing([frame])]


def is_json(data: bytes) -> bool:
    """JSON by RFC 8259, which has no NaN."""

    def no_constant(text: str) -> float:
        raise ValueError(text)

    try:
        json.loads(data.decode("utf-8", "replace"), parse_constant=no_constant)
    except ValueError:
        return False
    return True


def test_one_rpc_holds_100_000_messages() -> None:
    bad = generate_bad_inputs("many_messages", 100_000, 1, start_ns=START)
    sizes = Counter(len(rpc_pb2.RPC.FromString(frame.frame.payload).publish) for frame in bad)
    assert sizes[100_000] == 1
    assert len(bad.ledger.messages) == 100_000
    with pytest.raises(ValueError, match="number"):
        generate_bad_inputs("many_messages", 500_000, 1, start_ns=START)


def test_bad_input_and_good_traffic_do_not_get_into_each_other(busy: Run) -> None:
    connections = {frame.key for frame in busy.frames}
    for kind in BAD_KINDS:
        bad = generate_bad_inputs(kind, 20, 1, options=BUSY, start_ns=START)
        mixed = list(heapq.merge(busy.frames, bad, key=lambda frame: frame.due_ns))
        assert len(mixed) > len(busy.frames) + 20 * (kind != "many_messages")
        assert not connections & {frame.key for frame in generate_bad_inputs(kind, 20, 1, options=BUSY, start_ns=START)}
        assert not busy.ledger.messages.keys() & bad.ledger.messages.keys()


def test_no_more_than_two_authors_sign_garbage() -> None:
    """A breaker that stops at bad messages of three authors must not see them in made-up garbage."""
    authors = set()
    for kind in ("random_data", "nan", "bad_id", "bad_shape"):
        bad = generate_bad_inputs(kind, 50, 9, options=BUSY, start_ns=START)
        list(bad)
        authors |= {entry.author for entry in bad.ledger.messages.values()}
    authors |= {e.author for e in run(messages=500).ledger.messages.values() if e.stage == "message"}
    assert len(authors) == 2


# ---------------------------------------------------------------- speed


def test_speed_is_reported(record_property: Callable[[str, object], None]) -> None:
    """Told, not asserted: machines differ. 5,000 frames/s of one core are wanted."""
    list(Traffic(TrafficOptions(), START, RATE).frames(messages=500))  # the RSA key, the streams
    traffic = Traffic(TrafficOptions(), START, RATE)
    began = time.process_time()
    number = sum(1 for _ in traffic.frames(messages=MESSAGES))
    speed = number / (time.process_time() - began)
    record_property("frames_per_second", round(speed))
    print(f"{speed:,.0f} frames/s of one core, signed")
