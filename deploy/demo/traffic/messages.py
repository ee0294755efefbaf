"""Generator of gossip messages in the formats of all Ceramic versions: valid or invalid, signed or not.

`MessageFactory` makes complete messages with ledger entries. `generate_contents` makes only topics and data, for nodes
that sign messages themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from hashlib import sha256
from random import Random
from typing import Final, Literal, NamedTuple

import msgspec
import orjson
from libipld import encode_multibase

from kiln.deploy.demo.traffic.ledger import MessageEntry, SeparatorSource
from kiln.deploy.demo.traffic.options import GarbageKind, TrafficOptions
from kiln.deploy.demo.traffic.population import Population, SyntheticAuthor, SyntheticStream
from kiln.schemas.kafka.records import SeparatorRecord
from kiln.schemas.wire.cid import cid_text, write_varint
from kiln.schemas.wire.identity import BAD_SIGNATURE, MISSING_SIGNATURE, UNEXPECTED_AUTH, Verdict
from kiln.schemas.wire.pubsub import (
    Era,
    MessageType,
    compute_query_id,
    format_query_id,
    write_batch_update,
    write_keepalive,
    write_query,
    write_response,
    write_response_2020,
    write_update,
)
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, format_separator, format_topic

TYPES: Final[tuple[MessageType, ...]] = ("UPDATE", "QUERY", "RESPONSE", "KEEPALIVE", "BATCH_UPDATE")
MESSAGE_STAGE: Final = "message"
SIGNATURE_STAGE: Final = "signature"
# The reason if the verdict of the bridge is AGAINST_POLICY, because Frame.verdicts has no further detail.
AGAINST_POLICY: Final = "against_policy"
# Pubsub before 0.14.1 had one topic for all networks.
TOPIC_2020: Final = "/ceramic"

_VERSIONS: Final = ("2.9.0", "2.20.0", "2.31.0", "2.35.0", "3.2.0", "6.9.0")
_KUBO_VERSIONS: Final = ("0.17.0", "0.19.1", "0.21.0")
# Characters that a JSON text can start with, and the first byte of a byte order mark.
_JSON_STARTS: Final = frozenset(b' \t\r\n{["-0123456789tfn\xef')

Tally = Literal["good_copies", "forged_copies", "bad_copies"]


class MessageContent(NamedTuple):
    """Data of a message, and the message's entry in the ledger. The entry still lacks message id, origin and author.

    If the data cannot be decoded, the entry has the expected reason.
    """

    data: bytes
    entry: MessageEntry


class SyntheticCopy(NamedTuple):
    """One copy of a message on the wire, with its ledger entry."""

    publish: bytes
    """field `publish` of the RPC, with tag and length"""
    verdict: Verdict
    """verdict of a bridge that checks the message"""
    entry: MessageEntry
    tally: Tally
    """count in the entry that this copy increases"""
    gossip_id: bytes
    """message id of gossipsub, as in IHAVE"""
    pinned: Verdict | None = None
    """Verdict in every frame with this copy, because the expected reason depends on it. If `None`, a frame has either
    `verdict` or NOT_CHECKED."""


class _OpenQuery(NamedTuple):
    stream: str
    era: Era
    query_id: str | None


def field(number: int, value: bytes) -> bytes:
    """Encode a length-delimited protobuf field."""
    return write_varint(number << 3 | 2) + write_varint(len(value)) + value


class MessageFactory:
    """Makes messages. All random choices come from one `Random`, so another order of calls gives other messages."""

    def __init__(self, options: TrafficOptions, population: Population, random: Random) -> None:
        self._options = options
        self._population = population
        self._random = random
        self._topic = format_topic(options.network, None)
        self._asked: deque[_OpenQuery] = deque(maxlen=32)
        self._announced: deque[MessageContent] = deque(maxlen=1024)
        # Unsigned messages with equal bytes are one message, so they must agree in network and topic.
        self._other_network = options.other_network if options.signed else 0.0
        self._odd_topics = 0.01 if options.signed else 0.0

    # ---------------------------------------------------------------- content

    def content(self, kind: MessageType, now_ns: int) -> MessageContent:
        """Make a valid message of a type. If there is no QUERY to answer yet, a QUERY is made instead of a RESPONSE."""
        match kind:
            case "UPDATE":
                content = self._update()
                self._announced.append(content)
            case "RESPONSE" if self._asked:
                content = self._response()
            case "KEEPALIVE":
                content = self._keepalive(now_ns)
            case "BATCH_UPDATE":
                content = self._batch_update()
            case _:
                content = self._query()
        if self._random.random() < self._options.other_clients:
            return content._replace(data=self._rewritten(content.data))
        return content

    def announced_again(self, now_ns: int) -> MessageContent:
        """Return the content of an earlier UPDATE to send again; if there is none, make a new UPDATE."""
        return self._random.choice(self._announced) if self._announced else self.content("UPDATE", now_ns)

    def _era(self) -> Era:
        options, u = self._options, self._random.random()
        if u < options.era_2020:
            return "2020"
        if u < options.era_2020 + options.era_doc:
            return "doc"
        return "doc+stream" if u < options.era_2020 + options.era_doc + options.era_doc_stream else "stream"

    def _pick(self, era: Era) -> SyntheticStream:
        if era in ("2020", "doc"):
            return self._population.pick_old_stream(self._random.random())
        return self._population.pick_stream(self._random.random())

    def _place(self, era: Era = "stream", separator: Separator | None = None) -> tuple[str, str]:
        network = self._options.network
        if era == "2020":
            return network, TOPIC_2020
        if self._random.random() < self._other_network:
            network = self._options.second_network
        elif separator is None:
            # CIP-120 writes the network topic with a slash at its end.
            return network, self._topic + "/" if self._random.random() < self._odd_topics else self._topic
        return network, format_topic(network, separator)

    def _tip(self) -> bytes:
        u, digest = self._random.random(), self._random.randbytes(32)
        if u < 0.02:
            return b"\x12\x20" + digest  # version 0
        return (b"\x01\x71\x12\x20" if u < 0.25 else b"\x01\x85\x01\x12\x20") + digest

    def _update(self) -> MessageContent:
        random, options, era = self._random, self._options, self._era()
        stream = self._pick(era)
        raw = self._tip()
        tip, sent = cid_text(raw), stream.text
        sent_tip = tip
        if era not in ("2020", "doc") and random.random() < options.other_clients:
            sent = random.choice(("ceramic://", "/ceramic/")) + sent
        if not tip.startswith("Q") and random.random() < options.other_clients:
            sent_tip = encode_multibase(random.choice("zkfu"), raw)
        own, model = stream.separator, None
        if own is not None and own.key == "model" and random.random() < options.with_model:
            model = own.value
        on_own_topic = own is not None and random.random() < options.on_separator_topic
        network, topic = self._place(era, own if on_own_topic else None)
        source: SeparatorSource | None = "topic" if on_own_topic else "model" if model else None
        entry = MessageEntry(
            network=network,
            topic=topic,
            era=era,
            type="UPDATE",
            stream=stream.text,
            tip=tip,
            model=model,
            separator=SeparatorRecord(own.key, own.value) if own is not None and source else None,
            separator_source=source,
        )
        return MessageContent(write_update(sent, sent_tip, model, era), entry)

    def _query(self) -> MessageContent:
        era = self._era()
        stream = self._pick(era)
        query_id: str | None = None
        if era != "2020":
            decimal = era == "doc" and self._random.random() < 0.5
            query_id = format_query_id(compute_query_id(stream.text, era), decimal=decimal)
        # CIP-120 lets a QUERY come on the topic of a separator too; some streams are queried on it.
        aside = stream.separator if stream.text[-1] in "0369" else None
        network, topic = self._place(era, aside)
        self._asked.append(_OpenQuery(stream.text, era, query_id))
        entry = MessageEntry(network=network, topic=topic, era=era, type="QUERY", stream=stream.text, query_id=query_id)
        return MessageContent(write_query(stream.text, query_id, era), entry)

    def _response(self) -> MessageContent:
        asked = self._random.choice(self._asked)
        tip = cid_text(self._tip())
        network, topic = self._place(asked.era)
        if asked.query_id is None:
            data = write_response_2020(asked.stream, tip)
        else:
            data = write_response(asked.query_id, {asked.stream: tip})
        return MessageContent(
            data,
            MessageEntry(
                network=network,
                topic=topic,
                era=asked.era,
                type="RESPONSE",
                query_id=asked.query_id,
                tips={asked.stream: tip},
            ),
        )

    def _keepalive(self, now_ns: int) -> MessageContent:
        random, ts = self._random, now_ns // 1_000_000
        shape = random.randrange(3)
        ver = random.choice(_VERSIONS) if shape else None
        data = write_keepalive(ts, ver, random.choice(_KUBO_VERSIONS) if shape == 2 else None)
        network, topic = self._place()
        return MessageContent(data, MessageEntry(network=network, topic=topic, era="stream", type="KEEPALIVE", ts=ts))

    def _batch_update(self) -> MessageContent:
        separator = self._population.pick_separator(self._random.random())
        batch = cid_text(b"\x01\x71\x12\x20" + self._random.randbytes(32))
        network, topic = self._place("stream", separator if self._random.random() < 0.5 else None)
        data = write_batch_update(separator, batch)
        sep = format_separator(separator)
        entry = MessageEntry(network=network, topic=topic, era="stream", type="BATCH_UPDATE", sep=sep, batch=batch)
        return MessageContent(data, entry)

    def _rewritten(self, data: bytes) -> bytes:
        """Rewrite JSON as other clients may write it: sorted, with unknown keys, indented, or with repeated keys."""
        match self._random.randrange(4):
            case 0:
                return orjson.dumps(orjson.loads(data), option=orjson.OPT_SORT_KEYS)
            case 1:
                return data[:-1] + b',"anchorService":"https://cas.invalid","x":[1,null]}'
            case 2:
                return orjson.dumps(orjson.loads(data), option=orjson.OPT_INDENT_2)
            case _:
                return b"\xef\xbb\xbf" + data.replace(b'{"typ":', b'{"typ":7,"typ" : ', 1)

    # ---------------------------------------------------------------- garbage

    def garbage(self, kind: GarbageKind) -> MessageContent:
        """Make a message with invalid data. `kind` must be one of DATA_GARBAGE."""
        data, reason = self._bad_data(kind)
        entry = MessageEntry(
            network=self._options.network,
            topic=self._topic,
            outcome="quarantine",
            stage=MESSAGE_STAGE,
            reason=reason,
        )
        return MessageContent(data, entry)

    def _bad_data(self, kind: GarbageKind) -> tuple[bytes, str]:
        random = self._random
        match kind:
            case "random_data":
                data = random.randbytes(random.randrange(1, 400))
                while data[0] in _JSON_STARTS:
                    data = random.randbytes(len(data))
                return data, "invalid_json"
            case "invalid_json":
                data = self._plain_update()
                choice = random.randrange(4)
                if choice == 0:
                    return data[: random.randrange(1, len(data))], "invalid_json"
                if choice == 1:
                    return data.replace(b'"', b"'"), "invalid_json"
                return data[:-1] + (b",}" if choice == 2 else b"}}"), "invalid_json"
            case "nan":
                number = random.choice((b"NaN", b"Infinity", b"-Infinity"))
                start = random.choice((b'{"typ":3,"ts":', b'{"typ":'))
                return start + number + b',"n":%d}' % random.getrandbits(48), "invalid_json"
            case "typ_true":
                typ = random.choice((b"true", b"false", b"null", b'"0"', b"[0]", b"{}", b"-1", b"0.5", b"17"))
                return self._plain_update().replace(b'"typ":0', b'"typ":' + typ, 1), "unknown_typ"
            case "bad_id":
                return self._bad_id()
            case "bad_shape":
                return self._bad_shape()
            case _:
                raise ValueError(f"garbage of kind {kind} has valid data. Pass one of {', '.join(DATA_GARBAGE)}")

    def _plain_update(self) -> bytes:
        return write_update(self._pick("stream").text, cid_text(b"\x01\x85\x01\x12\x20" + self._random.randbytes(32)))

    def _bad_id(self) -> tuple[bytes, str]:
        random = self._random
        digest = random.randbytes(32)
        tip, stream = cid_text(b"\x01\x71\x12\x20" + digest), self._pick("stream").text
        parsed = StreamID.parse(stream)
        commit = StreamID(parsed.type, parsed.genesis + b"\x01\x71\x12\x20" + digest).text  # a CommitID
        match random.randrange(9):
            case 0:
                return write_update(commit, tip), "bad_stream"
            case 1:
                return write_update(stream[:-5], tip), "bad_stream"
            case 2:
                return write_update(digest.hex(), tip), "bad_stream"
            case 3:
                return write_update(stream, commit), "bad_tip"  # StreamIDs and CommitIDs are no CIDs
            case 4:
                return write_update(stream, tip[:-5]), "bad_tip"
            case 5:
                return write_update(stream, tip, digest.hex()), "bad_model"
            case 6:
                return write_response(digest.hex(), {digest.hex(): tip}), "bad_tips"
            case 7:
                return orjson.dumps({"typ": 3, "sep": f"model/{digest.hex().upper()}", "batch": tip}), "bad_separator"
            case _:
                return orjson.dumps({"typ": 3, "sep": f"model/{stream}", "batch": "no" + digest.hex()}), "bad_batch"

    def _bad_shape(self) -> tuple[bytes, str]:
        random = self._random
        stream, tip = self._pick("stream").text, cid_text(b"\x01\x71\x12\x20" + random.randbytes(32))
        match random.randrange(7):
            case 0:
                return orjson.dumps({"typ": 0, "tip": tip}), "missing_stream"
            case 1:
                return orjson.dumps({"typ": 0, "stream": stream, "cid": tip}), "missing_tip"
            case 2:
                return orjson.dumps({"typ": 1, "stream": stream, "n": tip}), "missing_id"
            case 3:
                return orjson.dumps({"typ": 3, "sep": f"model/{stream}", "n": tip}), "unknown_shape"
            case 4:
                return orjson.dumps({"typ": 3, "sep": f"model/{stream}", "batch": tip, "ts": 1}), "ambiguous_shape"
            case 5:
                return orjson.dumps({"typ": 0, "stream": stream, "tip": tip, "model": None}), "bad_model"
            case _:
                return orjson.dumps([0, stream, tip]), "not_an_object"

    # ---------------------------------------------------------------- on the wire

    def usual(self, content: MessageContent, author: SyntheticAuthor, now_ns: int) -> SyntheticCopy:
        """Make a message that is signed if the network requires signatures, else unsigned."""
        return self._signed(content, author, now_ns) if self._options.signed else self._unsigned(content)

    def forged(
        self, content: MessageContent, author: SyntheticAuthor, now_ns: int
    ) -> tuple[SyntheticCopy, SyntheticCopy]:
        """Make two copies of a signed message: a forged one, with other data and the same signature, and the true one.

        The forged copy is sent first.
        """
        seqno = self._seqno(author, now_ns)
        seal = _seal(author, _body(author, content.data, seqno, content.entry.topic))
        entry = self._entry(content, author, seqno)
        entry.forged_reason = BAD_SIGNATURE
        altered, true = (
            field(2, _body(author, data, seqno, content.entry.topic) + seal)
            for data in (self._plain_update(), content.data)
        )
        gossip_id = author.peer + seqno
        return (
            SyntheticCopy(altered, Verdict.INVALID, entry, "forged_copies", gossip_id),
            SyntheticCopy(true, Verdict.VALID, entry, _tally(entry), gossip_id),
        )

    def impostor(
        self, content: MessageContent, victim: SyntheticAuthor, signer: SyntheticAuthor, now_ns: int
    ) -> SyntheticCopy:
        """Make a message in the name of `victim`, but signed by another author."""
        seqno = self._seqno(victim, now_ns)
        body = _body(victim, content.data, seqno, content.entry.topic)
        entry = self._entry(content, victim, seqno)
        entry.outcome, entry.stage, entry.reason = "quarantine", SIGNATURE_STAGE, BAD_SIGNATURE
        publish = field(2, body + field(5, signer.signature(body)))
        return SyntheticCopy(publish, Verdict.INVALID, entry, "bad_copies", victim.peer + seqno)

    def wrong_auth(self, content: MessageContent, author: SyntheticAuthor, now_ns: int) -> SyntheticCopy:
        """Make an unsigned message if the network requires signatures, else a signed one."""
        signed = not self._options.signed
        copy = self._signed(content, author, now_ns) if signed else self._unsigned(content)
        if self._options.policy == "either":
            return copy
        seen = self._random.random() < self._options.checked
        entry = copy.entry
        entry.outcome, entry.stage = "quarantine", SIGNATURE_STAGE
        entry.reason = AGAINST_POLICY if seen else UNEXPECTED_AUTH if signed else MISSING_SIGNATURE
        pinned = Verdict.AGAINST_POLICY if seen else Verdict.NOT_CHECKED
        return copy._replace(verdict=Verdict.AGAINST_POLICY, tally="bad_copies", pinned=pinned)

    def _signed(self, content: MessageContent, author: SyntheticAuthor, now_ns: int) -> SyntheticCopy:
        seqno = self._seqno(author, now_ns)
        body = _body(author, content.data, seqno, content.entry.topic)
        entry = self._entry(content, author, seqno)
        return SyntheticCopy(
            field(2, body + _seal(author, body)), Verdict.VALID, entry, _tally(entry), author.peer + seqno
        )

    def _unsigned(self, content: MessageContent) -> SyntheticCopy:
        entry = self._entry(content)
        publish = field(2, field(2, content.data) + field(4, content.entry.topic.encode()))
        return SyntheticCopy(publish, Verdict.UNSIGNED, entry, _tally(entry), bytes.fromhex(entry.sha256))

    def _seqno(self, author: SyntheticAuthor, now_ns: int) -> bytes:
        return self._random.randbytes(8) if author.random_seqno else author.next_seqno(now_ns)

    def _entry(
        self, content: MessageContent, author: SyntheticAuthor | None = None, seqno: bytes = b""
    ) -> MessageEntry:
        digest = sha256(content.data).hexdigest()
        return msgspec.structs.replace(
            content.entry,
            message_id=f"sha256/{digest}" if author is None else f"{author.text}/{seqno.hex()}",
            origin=self._options.origin,
            author=None if author is None else author.text,
            seqno=None if author is None else seqno.hex(),
            sha256=digest,
        )


def _body(author: SyntheticAuthor, data: bytes, seqno: bytes, topic: str) -> bytes:
    """Serialize a message without signature and key. These are the bytes to sign."""
    return field(1, author.peer) + field(2, data) + field(3, seqno) + field(4, topic.encode())


def _seal(author: SyntheticAuthor, body: bytes) -> bytes:
    """Serialize the fields that follow the body: the signature, and the key if the peer id does not contain it."""
    seal = field(5, author.signature(body))
    return seal + field(6, author.key_field) if author.key_field else seal


def _tally(entry: MessageEntry) -> Tally:
    return "good_copies" if entry.reason is None else "bad_copies"


# Kinds of garbage in the data of a message, not in its envelope or in an RPC.
DATA_GARBAGE: Final[tuple[GarbageKind, ...]] = (
    "random_data",
    "invalid_json",
    "nan",
    "typ_true",
    "bad_id",
    "bad_shape",
)


class TopicData(NamedTuple):
    """A message to publish: the name of its topic, and its bytes."""

    topic: str
    data: bytes


def list_topics(options: TrafficOptions, most_separators: int | None = None) -> tuple[str, ...]:
    """List the network's topic, then the topics of at most `most_separators` separators, the most popular first."""
    population = Population(options)
    count = options.separators if most_separators is None else min(options.separators, most_separators)
    separators = (population.separator(rank) for rank in range(count))
    return tuple(dict.fromkeys(format_topic(options.network, separator) for separator in (None, *separators)))


def generate_contents(
    options: TrafficOptions, clock_ns: Callable[[], int], on: Collection[str] | None = None
) -> Iterator[TopicData]:
    """Generate messages of every type and era without end.

    Equal options and times give equal messages. At another start time, the messages differ, but not the streams and
    separators. Of `options.garbage_kinds`, only the kinds in DATA_GARBAGE are generated. There are no forged messages,
    copies or connections.

    Args:
        options: Options of the traffic.
        clock_ns: Returns the Unix time in ns. It is called once at the start and once per message.
        on: Allowed topics, by default `list_topics(options)`. Messages for other topics, such as `/ceramic` in 2020,
            get the topic of the network.
    """
    random = Random(f"content/{options.seed}/{clock_ns()}")
    messages = MessageFactory(options, Population(options), random)
    known = frozenset(list_topics(options) if on is None else on)
    network = format_topic(options.network, None)
    garbage = tuple(kind for kind in options.garbage_kinds if kind in DATA_GARBAGE)
    garbage_share = options.garbage if garbage else 0.0
    while True:
        now = clock_ns()
        u = random.random()
        content: MessageContent
        if u < garbage_share:
            content = messages.garbage(random.choice(garbage))
        elif u < garbage_share + options.reannounced:
            content = messages.announced_again(now)
        else:
            content = messages.content(random.choices(TYPES, options.mix)[0], now)
        yield TopicData(content.entry.topic if content.entry.topic in known else network, content.data)
