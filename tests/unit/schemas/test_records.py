"""kiln.schemas.kafka.records against schemas/kafka/*.schema.json: the two must agree in both directions."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from msgspec import structs

from kiln.schemas.kafka import records as r
from kiln.schemas.kafka.topics import MAX_RECORD
from kiln.schemas.times import MAX_MICROS, MIN_MICROS

FOLDER = Path(__file__).resolve().parents[3] / "schemas" / "kafka"
DECODE: dict[str, Callable[[bytes], r.Record]] = {
    "updates": r.decode_update,
    "batches": r.decode_batch,
    "publications": r.decode_publication,
    "streams": r.decode_stream,
    "quarantine": r.decode_quarantine,
    "wanted": r.decode_wanted,
    "blocks": r.decode_block,
}
SCHEMAS = {topic: json.loads((FOLDER / f"{topic}.schema.json").read_text()) for topic in DECODE}
VALID = {topic: Draft202012Validator(schema) for topic, schema in SCHEMAS.items()}

# JSON text is UTF-8: no lone surrogates
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
name = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
natural = st.integers(0, 2**63 - 1)
micros = st.integers(MIN_MICROS, MAX_MICROS)
origin = st.sampled_from(("LIVE", "REPLAY"))
separator = st.builds(r.SeparatorRecord, name, name)
update = st.builds(
    r.UpdateRecord,
    network=name,
    origin=origin,
    separator=st.none() | separator,
    separator_source=st.sampled_from((None, "genesis", "topic", "model")),
    stream=name,
    tip=name,
    from_=st.none() | text,
    message_id=name,
    epoch=st.builds(r.Epoch, name, natural),
    frame=st.builds(r.Coordinates, natural, natural, natural),
    observed_at=micros,
)
waiting = st.builds(structs.replace, update, separator=st.none())
claiming = st.builds(structs.replace, update, separator=separator)
claimed = st.none() | separator
tips = st.lists(st.builds(r.WaitedTip, origin, name), max_size=3).map(tuple)
RECORDS: dict[str, st.SearchStrategy[r.Record]] = {
    "updates": update,
    "batches": st.builds(r.BatchRecord, name, origin, separator, name, st.binary(max_size=20), micros, micros),
    "publications": st.builds(
        r.PublicationRecord,
        batch_cid=name,
        transport=name,
        published_at=micros,
        topic=st.none() | text,
        target=st.none() | text,
        peer_count=st.integers(1, 2**63 - 1),
    )
    | st.builds(
        r.PublicationRecord,
        batch_cid=name,
        transport=name,
        published_at=micros,
        topic=st.none() | text,
        target=st.none() | text,
        peer_count=st.none() | st.just(0),
        error=text,
    ),
    "streams": st.builds(r.StreamRecord, name, name, separator, micros, name, st.none(), tips)
    | st.builds(r.StreamRecord, name, name, st.none(), micros, name, name, tips),
    "quarantine": st.builds(r.QuarantineRecord, name, name, text, st.binary(max_size=20), micros),
    "wanted": st.builds(
        r.WantedRecord, name, name, st.just("batch"), micros, separator, st.none() | text, peer=st.none() | text
    )
    | st.builds(
        r.WantedRecord, name, name, st.just("genesis"), micros, st.none(), st.none() | text, waiting, claimed, claimed
    )
    | st.builds(
        r.WantedRecord, name, name, st.just("claim"), micros, st.none(), st.none() | text, claiming, claimed, claimed
    ),
    "blocks": st.builds(r.BlockRecord, name, name, micros, separator, st.binary(max_size=20))
    | st.builds(r.BlockRecord, name, name, micros, separator, st.none(), name),
}
topics = pytest.mark.parametrize("topic", DECODE)


def value_of(schema: dict[str, object], root: dict[str, object]) -> st.SearchStrategy[object]:
    """JSON values of a schema's fields, made from the schema, not from the Structs.

    A value keeps to all keywords but `oneOf`, which says what several fields may be together.
    """
    if "$ref" in schema:
        definitions = root["$defs"]
        assert isinstance(definitions, dict)
        return value_of(definitions[str(schema["$ref"]).removeprefix("#/$defs/")], root)
    if "anyOf" in schema:
        options = schema["anyOf"]
        assert isinstance(options, list)
        return st.one_of(*(value_of(option, root) for option in options))
    if "enum" in schema:
        allowed = schema["enum"]
        assert isinstance(allowed, list)
        return st.sampled_from(allowed)
    kinds = schema["type"]
    return st.one_of(*(_typed(kind, schema, root) for kind in (kinds if isinstance(kinds, list) else [str(kinds)])))


def _typed(kind: str, schema: dict[str, object], root: dict[str, object]) -> st.SearchStrategy[object]:
    if kind == "null":
        return st.none()
    if kind == "integer":
        low, high = schema["minimum"], schema["maximum"]
        assert isinstance(low, int)
        assert isinstance(high, int)
        return st.integers(low, high)
    if kind == "string":
        if schema.get("contentEncoding") == "base64":
            return st.binary(max_size=9).map(lambda data: base64.b64encode(data).decode())
        return name if schema.get("minLength") else text
    if kind == "array":
        items = schema["items"]
        assert isinstance(items, dict)
        return st.lists(value_of(items, root), max_size=3)
    assert kind == "object"
    properties = schema["properties"]
    required = schema["required"]
    assert isinstance(properties, dict)
    assert isinstance(required, list)
    known = {key: value_of(each, root) for key, each in properties.items()}
    strategy = st.fixed_dictionaries(
        {key: known[key] for key in required}, optional={key: known[key] for key in known if key not in required}
    )
    assert schema["additionalProperties"] is False
    return strategy


@topics
def test_the_schema_is_one_and_describes_every_key(topic: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[topic])
    assert SCHEMAS[topic]["title"] == f"kiln.{topic}"
    for key, schema in SCHEMAS[topic]["properties"].items():
        assert schema.get("description") or "$ref" in schema, key


def test_every_schema_file_has_a_record() -> None:
    assert {path.name.removesuffix(".schema.json") for path in FOLDER.glob("*.json")} == set(DECODE)


@topics
@given(data=st.data())
@settings(max_examples=60)
def test_what_is_written_validates_and_is_read_back(topic: str, data: st.DataObject) -> None:
    record = data.draw(RECORDS[topic])
    written = r.encode(record)
    VALID[topic].validate(json.loads(written))
    assert DECODE[topic](written) == record
    assert set(json.loads(written)) == set(SCHEMAS[topic]["properties"])  # every key, no other


def accepts(topic: str, document: object) -> bool:
    try:
        DECODE[topic](json.dumps(document).encode())
    except msgspec.ValidationError:
        return False
    return True


@topics
@given(data=st.data())
@settings(max_examples=60)
def test_what_validates_is_read_and_nothing_else(topic: str, data: st.DataObject) -> None:
    document = data.draw(value_of(SCHEMAS[topic], SCHEMAS[topic]))
    assert VALID[topic].is_valid(document) == accepts(topic, document)


def longest(
    schema: dict[str, object], document: object, root: dict[str, object]
) -> Iterator[tuple[list[str | int], int]]:
    """The path of each text in a document, and the longest that its schema allows there."""
    if "$ref" in schema:
        definitions = root["$defs"]
        assert isinstance(definitions, dict)
        yield from longest(definitions[str(schema["$ref"]).removeprefix("#/$defs/")], document, root)
    for option in schema.get("anyOf", ()):  # type: ignore[attr-defined]  # a list of schemas
        if document is not None:
            yield from longest(option, document, root)
    if isinstance(document, dict):
        for key, value in document.items():
            for path, limit in longest(schema.get("properties", {}).get(key, {}), value, root):  # type: ignore[attr-defined]  # schemas by key
                yield [key, *path], limit
    elif isinstance(document, str) and "enum" not in schema and "contentEncoding" not in schema and "type" in schema:
        assert isinstance(schema["maxLength"], int), schema
        yield [], schema["maxLength"]


@topics
@given(data=st.data())
@settings(max_examples=20)
def test_every_text_has_a_bound_and_beyond_it_both_sides_refuse(topic: str, data: st.DataObject) -> None:
    document = json.loads(r.encode(data.draw(RECORDS[topic])))
    path, limit = data.draw(st.sampled_from(list(longest(SCHEMAS[topic], document, SCHEMAS[topic]))))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "x" * limit
    assert VALID[topic].is_valid(document)
    assert accepts(topic, document)
    inner[path[-1]] = "x" * (limit + 1)
    assert not VALID[topic].is_valid(document)
    assert not accepts(topic, document)


@topics
@pytest.mark.parametrize("year", [1, 1970, 1999, 2100, 9999])
@given(data=st.data())
@settings(max_examples=5)
def test_every_time_is_in_one_range_and_both_sides_refuse_others(topic: str, year: int, data: st.DataObject) -> None:
    document = json.loads(r.encode(data.draw(RECORDS[topic])))
    times = [(each, key) for each in objects_in(document) for key in each if key.endswith("_at")]
    assert times
    record, key = data.draw(st.sampled_from(times))
    record[key] = (datetime(year, 1, 1, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert not VALID[topic].is_valid(document)
    assert not accepts(topic, document)


@given(st.integers(0, 3 * r.MAX_QUARANTINED), st.text(max_size=3000))
@settings(max_examples=10)
def test_quarantine_holds_all_bytes_in_records_that_a_topic_takes(size: int, detail: str) -> None:
    data = bytes(size)
    made = list(r.build_quarantine_records("frame", "frame_invalid", detail, data, 1))
    assert b"".join(each.data for each in made) == data
    assert max(len(r.encode(each)) for each in made) < MAX_RECORD
    assert len({each.detail for each in made}) == len(made)


@pytest.mark.parametrize("key", [b"x" * 2000, b"9" * 2_000_000])
def test_a_key_longer_than_a_cid_is_nothing(key: bytes) -> None:
    assert r.parse_quarantine_key(key) == (None, None, None, None)


@topics
@given(data=st.data())
@settings(max_examples=60)
def test_what_is_read_keeps_every_field(topic: str, data: st.DataObject) -> None:
    document = data.draw(value_of(SCHEMAS[topic], SCHEMAS[topic]).filter(VALID[topic].is_valid))
    assert isinstance(document, dict)
    back = json.loads(r.encode(DECODE[topic](json.dumps(document).encode())))
    assert {key: back[key] for key in document} == document


def objects_in(document: object) -> list[dict[str, object]]:
    if isinstance(document, list):
        return [inner for each in document for inner in objects_in(each)]
    if not isinstance(document, dict):
        return []
    return [document, *(inner for value in document.values() for inner in objects_in(value))]


@topics
@given(data=st.data())
@settings(max_examples=60)
def test_an_unknown_field_at_any_depth_fails_both_sides(topic: str, data: st.DataObject) -> None:
    document = json.loads(r.encode(data.draw(RECORDS[topic])))
    chosen = data.draw(st.sampled_from(objects_in(document)))
    field = data.draw(name.filter(lambda key: key not in chosen))
    chosen[field] = data.draw(st.none() | text | st.lists(st.booleans()))
    assert not VALID[topic].is_valid(document)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        DECODE[topic](json.dumps(document).encode())


CONTRADICTIONS: dict[str, list[dict[str, object]]] = {
    "publications": [
        {"peer_count": 0, "error": None},
        {"peer_count": 1, "error": "too old"},
        {"peer_count": None, "error": None},
    ],
    "streams": [{"separator": None, "without": None}, {"separator": {"key": "a", "value": "b"}, "without": "c"}],
    "wanted": [
        {"reason": "batch", "separator": None},
        {"reason": "genesis", "update": None},
        {"separator": None, "update": None},
        {"reason": "claim", "update": None},
        {"reason": "batch", "update": None, "separator": None, "topic": {"key": "model", "value": "ka"}},
    ],
    "blocks": [{"block": None, "reason": None}, {"block": "QQ==", "reason": "block_unavailable"}, {"separator": None}],
}


@pytest.mark.parametrize(
    ("topic", "change"), [(topic, change) for topic, changes in CONTRADICTIONS.items() for change in changes]
)
@given(data=st.data())
@settings(max_examples=20)
def test_fields_that_contradict_each_other_fail_both_sides(
    topic: str, change: dict[str, object], data: st.DataObject
) -> None:
    document = json.loads(r.encode(data.draw(RECORDS[topic]))) | change
    assert not VALID[topic].is_valid(document)
    assert not accepts(topic, document)


def test_a_program_cannot_make_a_record_that_nobody_would_read() -> None:
    with pytest.raises(ValueError, match="either the block or the reason"):
        r.BlockRecord("local-test", "cid", 1, r.SeparatorRecord("model", "ka"))


@topics
@given(data=st.data())
@settings(max_examples=40)
def test_a_document_with_a_key_missing_or_of_another_type_fails_both_sides(topic: str, data: st.DataObject) -> None:
    document = json.loads(r.encode(data.draw(RECORDS[topic])))
    key = data.draw(st.sampled_from(SCHEMAS[topic]["required"]))
    if data.draw(st.booleans()):
        del document[key]
    else:
        document[key] = data.draw(st.sampled_from([True, 1.5, [], 2**63]))
    assert not VALID[topic].is_valid(document)
    with pytest.raises(msgspec.ValidationError, match=key):
        DECODE[topic](json.dumps(document).encode())


@topics
@pytest.mark.parametrize("value", [b"", b"{", b"\xff", b"[]", b"null", b'"text"'])
def test_what_is_no_record_is_a_decode_error(topic: str, value: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        DECODE[topic](value)


@pytest.mark.parametrize("block", ["QQ", "Q===", "QQ==\n", "QQ_-", "é==="])
def test_both_sides_refuse_broken_base64(block: str) -> None:
    document = json.loads(r.encode(r.QuarantineRecord("frame", "frame_malformed", "", b"A", MIN_MICROS)))
    assert VALID["quarantine"].is_valid(document)
    document["data"] = block
    assert not VALID["quarantine"].is_valid(document)
    with pytest.raises(msgspec.ValidationError, match="data"):
        r.decode_quarantine(json.dumps(document).encode())


def test_an_update_looks_as_designed() -> None:
    record = r.UpdateRecord(
        network="testnet-clay",
        origin="REPLAY",
        separator=r.SeparatorRecord("model", "k2t6"),
        separator_source="topic",
        stream="k2t6stream",
        tip="bafytip",
        from_="12D3Koo",
        message_id="12D3Koo/01",
        epoch=r.Epoch("q", 3),
        frame=r.Coordinates(0, 42, 1),
        observed_at=1_700_000_000_000_001,
    )
    assert json.loads(r.encode(record)) == {
        "network": "testnet-clay",
        "origin": "REPLAY",
        "separator": {"key": "model", "value": "k2t6"},
        "separator_source": "topic",
        "stream": "k2t6stream",
        "tip": "bafytip",
        "from": "12D3Koo",
        "message_id": "12D3Koo/01",
        "epoch": {"query": "q", "batch": 3},
        "frame": {"partition": 0, "offset": 42, "index": 1},
        "observed_at": 1_700_000_000_000_001,
    }


def test_keys() -> None:
    by_model = r.SeparatorRecord("model", "k2t6")
    assert r.build_update_key("testnet-clay", by_model, "kstream") == b"testnet-clay/model/k2t6"
    assert r.build_batch_key("testnet-clay", by_model) == b"testnet-clay/model/k2t6"
    assert r.build_update_key("testnet-clay", None, "kstream") == b"kstream"


@given(st.integers(0, 2**31 - 1), natural, st.none() | st.integers(0, 2**31 - 1))
def test_quarantine_keys_of_coordinates_round_trip(partition: int, offset: int, index: int | None) -> None:
    key = r.build_quarantine_key(partition, offset, index)
    assert r.parse_quarantine_key(key) == (partition, offset, index, None)


@pytest.mark.parametrize("key", ["1/2/x", "²/1", "updates/1/2", f"{2**31}/1", f"1/{2**63}", "1/" + "9" * 5_000])
def test_a_quarantine_key_of_another_form_names_no_place(key: str) -> None:
    assert r.parse_quarantine_key(key.encode()) == (None, None, None, None)


@pytest.mark.parametrize("cid", ["bafyreigdyrzt5sfp7udm7hu76uh7y26nf3efuylqabf3oclgtqy55fbzdi", "7", ""])
def test_any_other_quarantine_key_is_taken_as_a_cid(cid: str) -> None:
    assert r.parse_quarantine_key(cid.encode()) == (None, None, None, cid)
