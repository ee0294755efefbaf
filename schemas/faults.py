"""Every fault that Kiln writes to quarantine: the stage that rejected the bytes, the reason, and what an operator does.

FAULTS is the closed set. A module that rejects bytes defines its own reasons (``kiln.schemas.wire.pubsub.REASONS``, for
example); tests/unit/schemas/test_faults.py checks that this set has the same reasons. The runbook's table is
`markdown()`; write the table with `python -m kiln.schemas.faults docs/RUNBOOK.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NamedTuple


class Fault(NamedTuple):
    """A kind of row in the table `quarantine`."""

    stage: str
    """the step that rejected the bytes, snake_case"""
    reason: str
    """snake_case; one reason may occur at several stages"""
    meaning: str
    """description of the rejected bytes, in sentences"""
    what_to_do: str
    """what an operator does about the fault, in sentences"""


_HELLO_WRITER: Final = (
    "The frame's messages are still read. Fix the program that wrote the frame: it must leave the hello empty if it "
    "refused the hello."
)
_NOTHING: Final = "Nothing. If the number of rows grows, find the sending peer."
_WRITER: Final = "Find the program that writes to the topic. Only Kiln may write to it."
_FRAME_WRITER: Final = "Fix the program that wrote the frame."
_CLIENT: Final = (
    "Nothing if a single client is at fault. If many authors send such messages, the message format may have changed."
)
_OTHER_CLIENT: Final = (
    "Nothing. The client that created the message is at fault: a message id consists of author and sequence number."
)
_RETENTION: Final = (
    "Keep the bridge running, or raise `kafka.retention`: records that wait longer "
    "are lost. For an existing topic, change the retention with Kafka's own tools."
)
_GARBAGE: Final = (
    "Nothing if the message is garbage. If there are many such messages, another protocol may use the topic."
)
_BATCH_TYP: Final = "Check whether the network uses another number for batches, and set `batch.typ` to it."
_POLICY: Final = "Check whether `policy.networks` and `policy.topics` match the policies that the network uses."
_FORGED: Final = (
    "If a single peer sends such messages, identify it; nothing else is needed. If "
    "many peers send them, someone is forging messages."
)
_ANNOUNCER: Final = "Nothing. The node that announced the batch is at fault."
_GIVER: Final = "Check the IPFS node, and the peers from which it fetches blocks."
_NO_STREAM: Final = "Nothing. If the number of rows grows, find the peer that announces such streams."
_PUBLISHER: Final = (
    "Nothing. Either the publisher is at fault, or it publishes items of another kind under a key that you follow."
)
_BUG: Final = "Report the fault with `detail` and `data`."
_FIXED: Final = "Once a version of Kiln can process the record,"
_REBUILD: Final = (
    f"{_BUG} {_FIXED} rebuild the rows of the record's time: `kiln backfill run`, then `kiln backfill swap`."
)
_DECODER: Final = (
    "The message is in the table `messages`, without `decoded`. Fix the decoder, restart Kiln, and rebuild the rows: "
    "`kiln backfill run`, then `kiln backfill swap`. Nothing if the message is garbage."
)
_DHT_SENDER: Final = "Nothing. The sender of the datagram is at fault."

FAULTS: Final = (
    # ---- frames
    Fault(
        "frame",
        "frame_malformed",
        "A record of `kiln.frames` is not a valid Frame, or has no value.",
        "Find the program that writes to the topic. Only the bridge, `kiln replay` and `kiln quarantine replay` may "
        "write to it.",
    ),
    Fault(
        "frame",
        "frame_invalid",
        "A Frame violates the contract: `connection` is not 16 bytes long, `direction` or `origin` is unknown, "
        "`sequence` is 0, a number exceeds 2^63 - 1, a time is outside the years 2000 to 2099, `network` is not 1 "
        "to 256 characters long, or a field exceeds its maximum length. `detail` names the field; `data` is the "
        "whole Frame.",
        _FRAME_WRITER,
    ),
    # ---- Kiln's own faults: one record, or one message, at which a query failed
    Fault(
        "decode",
        "processing_failed",
        "Kiln itself failed while decoding a message or a frame. The other messages of the frame are read.",
        f"{_BUG} {_FIXED} run `kiln quarantine replay --reason processing_failed`.",
    ),
    Fault(
        "archive",
        "processing_failed",
        "The query `archive`, or a backfill, failed on one frame or on one row of a frame. All other rows are in "
        "the tables.",
        f"{_REBUILD} If the frame is not in the table `frames`, run with `--source kafka`, while Kafka still has it.",
    ),
    Fault(
        "updates",
        "processing_failed",
        "The query `updates` failed on one message. The message is in no batch.",
        _REBUILD,
    ),
    # ---- hellos: a row for each frame of the connection
    Fault(
        "hello",
        "hello_malformed",
        "The topic table in a hello (the first RPC of a peer) is not a valid protobuf message.",
        _HELLO_WRITER,
    ),
    Fault(
        "hello",
        "hello_too_many_bundles",
        "The topic table in a hello has more than 256 bundle hashes.",
        _HELLO_WRITER,
    ),
    Fault(
        "hello",
        "hello_hash_length",
        "A bundle hash in a hello is not 4 bytes long.",
        _HELLO_WRITER,
    ),
    Fault(
        "hello",
        "hello_repeats",
        "A hello contains the same bundle hash twice, so the two peers would build different tables.",
        _HELLO_WRITER,
    ),
    # ---- RPCs
    Fault(
        "rpc",
        "rpc_malformed",
        "The bytes are not a valid gossipsub RPC.",
        "Nothing if a single peer sends them. If many peers do, they may use a new protocol: check `protocol` in "
        "the table `frames`.",
    ),
    Fault(
        "rpc",
        "rpc_oversized",
        "The RPC exceeds `bridge.max_rpc_bytes` (4 MiB), so the bridge stored only its first 64 KiB. "
        "`declared_length` in the table `frames` has the true length.",
        _NOTHING,
    ),
    Fault(
        "rpc",
        "rpc_too_many_messages",
        "The RPC has more than 5,000 messages. Kiln read only the first 5,000. This row represents all the others, "
        "whose bytes are in the table `frames`.",
        _NOTHING,
    ),
    Fault(
        "rpc",
        "rpc_too_many_verdicts",
        "The frame has more verdicts than its RPC has messages, so the verdicts cannot be matched to messages. Kiln "
        "validated the messages again. `data` is the verdicts.",
        _FRAME_WRITER,
    ),
    Fault(
        "rpc",
        "rpc_too_costly",
        "There are three cases. Validating the first messages of the RPC used up the CPU budget of one RPC: this row "
        "represents the later messages that the bridge had not validated, and that were not read. Or the RPC has more "
        "than 50,000 messages, subscriptions and ids: none of its messages was read, and `data` is the RPC. Or it has "
        "more than 20,000 subscriptions and control entries: only the first 20,000 have rows. The table `frames` has "
        "all bytes.",
        "Find the sending peer: ordinary signatures are far cheaper to validate. If a single peer sends such RPCs, do "
        "nothing else.",
    ),
    # ---- topics
    Fault("topic", "topic_missing", "The message has neither a topic nor a topic index.", _NOTHING),
    Fault("topic", "topic_not_utf8", "The topic's name is not UTF-8.", _NOTHING),
    Fault("topic", "topic_too_long", "The topic's name is longer than 4,096 characters.", _NOTHING),
    Fault(
        "topic",
        "no_table_agreed",
        "The message has a topic index, but the two hellos share no bundle, or one hello is missing or was refused.",
        "Nothing. The peer uses indices that were not agreed on.",
    ),
    Fault(
        "topic",
        "index_out_of_range",
        "The topic index is 0, or is outside the table that the two hellos define.",
        _NOTHING,
    ),
    Fault(
        "topic",
        "unknown_bundle_hash",
        "The topic index refers to a bundle that both sides announced but whose topics Kiln does not know, or to a "
        "bundle that comes after it.",
        "Find out which topics the bundle contains; `detail` has its hash. Add them to `topic_table.bundles`, "
        "restart Kiln, and run `kiln quarantine replay --reason unknown_bundle_hash`.",
    ),
    # ---- signatures
    Fault(
        "signature",
        "bad_signature",
        "The signature is not the author's signature of these bytes. Someone forged the message, or a peer altered "
        "it on the way.",
        _FORGED,
    ),
    Fault(
        "signature",
        "bad_key",
        "The author (`from`) is not a peer id, contains no usable key, or is not the peer id of the key in the "
        "message.",
        _FORGED,
    ),
    Fault(
        "signature",
        "key_algorithm",
        "The key's bytes name a different algorithm than its type. Such keys are crafted to be expensive to parse, "
        "so Kiln reads the algorithm first and does not parse the rest. The bridge bans any peer that sends one on "
        "a topic that the bridge follows.",
        "Find the sending peer: `remote_peer` in the table `frames`.",
    ),
    Fault(
        "signature",
        "missing_signature",
        "The message is unsigned, but the network's policy is `strict`.",
        _POLICY,
    ),
    Fault(
        "signature",
        "missing_from",
        "The message is signed but names no author.",
        _OTHER_CLIENT,
    ),
    Fault(
        "signature",
        "missing_seqno",
        "The message is signed but has no sequence number.",
        _OTHER_CLIENT,
    ),
    Fault(
        "signature",
        "invalid_seqno",
        "The message is signed, but its sequence number is longer than 64 bytes.",
        _OTHER_CLIENT,
    ),
    Fault(
        "signature",
        "unexpected_auth",
        "The message has an author, a sequence number, a signature or a key, but the network's policy is `none`.",
        _POLICY,
    ),
    Fault(
        "signature",
        "against_policy",
        "The bridge validated the message when the frame arrived, and rejected it under the network's policy.",
        _POLICY,
    ),
    # ---- messages
    Fault(
        "message",
        "invalid_json",
        "The message is not JSON.",
        _GARBAGE,
    ),
    Fault("message", "not_an_object", "The message is JSON, but not an object.", _GARBAGE),
    Fault(
        "message", "data_too_large", "The message has more than 1 MiB of data, which is not parsed as JSON.", _GARBAGE
    ),
    Fault(
        "message",
        "unknown_typ",
        "`typ` is missing, is not a number, or is not the number of a message type.",
        "Check whether the network has a new message type.",
    ),
    Fault(
        "message",
        "unknown_shape",
        "`typ` is a number of KEEPALIVE or BATCH_UPDATE, but the message has the fields of neither.",
        _BATCH_TYP,
    ),
    Fault(
        "message",
        "ambiguous_shape",
        "`typ` is a number of KEEPALIVE or BATCH_UPDATE, and the message has the fields of both.",
        _BATCH_TYP,
    ),
    Fault(
        "message",
        "missing_stream",
        "The message lacks a required StreamID: it has no `stream`, no `doc`, and no `id` with a `doctype`.",
        _CLIENT,
    ),
    Fault(
        "message", "bad_stream", "The stream's id is not a StreamID. A CommitID does not count as a StreamID.", _CLIENT
    ),
    Fault(
        "message",
        "unknown_doctype",
        "A message in the format of 2020 has a `doctype` other than `tile` and `caip10-link`, so its StreamID is "
        "unknown.",
        _CLIENT,
    ),
    Fault("message", "missing_tip", "The message lacks a required tip.", _CLIENT),
    Fault("message", "bad_tip", "The tip is not a CID.", _CLIENT),
    Fault("message", "bad_model", "`model` is present but is not a StreamID.", _CLIENT),
    Fault("message", "missing_id", "A QUERY or RESPONSE has no `id`.", _CLIENT),
    Fault("message", "bad_id", "`id` of a QUERY or RESPONSE is not a string.", _CLIENT),
    Fault("message", "missing_tips", "A RESPONSE has no tips.", _CLIENT),
    Fault(
        "message", "bad_tips", "`tips` of a RESPONSE is not an object, or one of its keys is not a StreamID.", _CLIENT
    ),
    Fault(
        "message",
        "conflicting_tips",
        "`tips` of a RESPONSE contains the same StreamID in two spellings, with different tips.",
        _CLIENT,
    ),
    Fault("message", "bad_ts", "`ts` of a KEEPALIVE is outside the range of a date.", _CLIENT),
    Fault("message", "bad_version", "`ver` or `ipfsVer` of a KEEPALIVE is not a string.", _CLIENT),
    Fault("message", "bad_separator", "`sep` of a BATCH_UPDATE is not `<key>/<value in base36>`.", _CLIENT),
    Fault("message", "bad_batch", "`batch` of a BATCH_UPDATE is not a CID.", _CLIENT),
    Fault(
        "message",
        "unusable_batch",
        "`batch` of a BATCH_UPDATE is a CID that no batch block can have. The CID of a batch block is a CIDv1 with "
        "sha2-256 and the codec dag-cbor, cbor or raw.",
        _CLIENT,
    ),
    # ---- separators
    Fault(
        "separator",
        "contradicts_genesis",
        "The separator that an update claims, by its topic or its `model`, differs from the one in the genesis of "
        "its stream. If the genesis was known in time, the update is batched under the separator of the genesis. If "
        "the genesis arrived later, the update had already been released under its claim, and `data` is the record "
        "of `kiln.wanted` of the first update with that claim.",
        "Nothing. The view `misplaced` shows who announces streams on the wrong topic. The view `false_claims` "
        "shows the batches that contain such updates.",
    ),
    Fault(
        "separator",
        "contradicts_topic",
        "A BATCH_UPDATE for one separator was received on the topic of another separator. The block of the batch is "
        "still fetched.",
        "Nothing. The view `misplaced` shows who publishes batches on the wrong topic.",
    ),
    # ---- files of history
    Fault(
        "history",
        "line_malformed",
        "A line or a record of a file is not in the file's format. `detail` has the file and the line.",
        "Nothing if other programs write to the same file. A file with two formats is read in the format of its "
        "first recognized line, so split such a file.",
    ),
    Fault(
        "history",
        "line_too_long",
        "A line of a file is longer than 16 MiB, or the message in it is longer than 4 MiB. For a line over 16 MiB, "
        "`data` has the first 64 KiB; the rest is in the file.",
        "Check the line in the file. No gossip message is that long.",
    ),
    Fault(
        "history",
        "no_message",
        "A line of a service log belongs to another service, or to an event that carries no message.",
        "Nothing. Such lines are expected.",
    ),
    Fault(
        "history",
        "metadata_only",
        "An event of a go-libp2p-pubsub trace. A trace never contains message data. If the event is about a "
        "received copy, the copy is in the table `copies`, and `data` is a gossipsub message with only the author, "
        "the seqno and the topic. Otherwise, `data` is the event.",
        "Nothing. For messages with their data, read a capture file of Kiln or the output of Kubo's `pubsub/sub`.",
    ),
    Fault(
        "history",
        "file_ends_early",
        "A file ends within a line or an event. Everything before that point is read.",
        "If the file is still being written, or was not copied completely, read the whole file later.",
    ),
    Fault(
        "history",
        "file_damaged",
        "A capture file or a trace cannot be read beyond this point: its lengths are invalid, or a capture file ends "
        "within a record or is damaged in its compression. Everything before that point is read. However, nothing is "
        "read from a capture that names more connections and subscriptions than fit into 256 MiB.",
        "Find an intact copy of the file, and read that copy.",
    ),
    # ---- the user's decoder; the message itself is in the table `messages`
    Fault(
        "decoder",
        "decoder_failed",
        "The decoder of `network.decoder` raised an error, which is in `detail`; `data` has the message.",
        _DECODER,
    ),
    Fault(
        "decoder",
        "decoder_too_slow",
        "The decoder of `network.decoder` took longer than 1 s. After five such messages in a task, Kiln does not "
        "call the decoder again in that task.",
        _DECODER,
    ),
    Fault(
        "decoder",
        "decoder_output",
        "The decoder of `network.decoder` returned something other than a dict, a dict that JSON cannot represent, or "
        "more than 1 MiB of JSON.",
        _DECODER,
    ),
    # ---- BEP 50
    Fault("bep50", "not_krpc", "A datagram with an item is not a message of the DHT.", _DHT_SENDER),
    Fault("bep50", "no_item", "The message in the datagram does not contain a complete mutable item.", _DHT_SENDER),
    Fault(
        "bep50",
        "beyond_limits",
        "The item's salt, value or sequence number is one that no node is allowed to store.",
        _DHT_SENDER,
    ),
    Fault("bep50", "bad_signature", "The item's signature is not valid for its key and salt.", _DHT_SENDER),
    Fault("bep50", "not_bencoded", "The item's value is not a single canonical bencoded value.", _PUBLISHER),
    Fault("bep50", "not_an_announcement", "The item's value is not a dictionary, or has another `typ`.", _PUBLISHER),
    Fault("bep50", "bad_batch", "`batch` of an announcement is not a single CID.", _PUBLISHER),
    Fault("bep50", "bad_prev", "`prev` of an announcement is not a sequence of CIDs.", _PUBLISHER),
    Fault("bep50", "bad_separator", "`sep` of an announcement is not `<key>/<value in base36>`.", _PUBLISHER),
    Fault("bep50", "bad_ts", "`ts` of an announcement is not a number of milliseconds.", _PUBLISHER),
    Fault("bep50", "bad_n", "`n` of an announcement is not a count.", _PUBLISHER),
    Fault(
        "bep50",
        "wrong_salt",
        "The item's salt belongs to a separator other than the one that the announcement claims.",
        _PUBLISHER,
    ),
    Fault("bep50", "wrong_topic", "The datagram's topic is not the target of the item's key and salt.", _PUBLISHER),
    Fault("bep50", "bad_network", "The frame's network has a name that cannot be part of a topic.", _FRAME_WRITER),
    Fault(
        "bep50",
        "gap",
        "A new item of a followed publisher does not list the batch that was the publisher's newest when Kiln last "
        "received one of its items. Kiln has missed the announcements in between: an item lists at most 23 batches "
        "before its own, and fewer if the separator is long. `detail` has the publisher, the separator and both "
        "CIDs; `data` is the item's value.",
        "Keep the bridge running: it was offline for too long, or the publisher announced too much at once. If the "
        "publisher lost its state, nothing is missing. Kiln may still receive the missed tips from other nodes.",
    ),
    # ---- blocks wanted out of IPFS
    Fault(
        "wanted",
        "wanted_gone",
        "Kafka deleted records of `kiln.wanted` before the fetcher finished them. Their updates are in no batch.",
        _RETENTION,
    ),
    Fault("wanted", "wanted_malformed", "A record of `kiln.wanted` cannot be read, or requests nothing.", _WRITER),
    Fault(
        "fetch",
        "cid_malformed",
        "The bytes in the stream's id, or in the announcement of the batch, are not a CID.",
        _NO_STREAM,
    ),
    Fault(
        "fetch",
        "cid_hash_unsupported",
        "The CID uses a hash function other than sha2-256, so the block cannot be verified.",
        _NO_STREAM,
    ),
    Fault(
        "fetch",
        "cid_codec_unsupported",
        "The CID of the stream's genesis uses a codec other than DAG-CBOR and DAG-JOSE. No init event has such a CID.",
        _NO_STREAM,
    ),
    Fault("fetch", "genesis_malformed", "The block that the StreamID names cannot be read as an event.", _NO_STREAM),
    Fault(
        "fetch",
        "genesis_not_init",
        "The block that the StreamID names is not an init event: it has no header, or it comes after another event.",
        _NO_STREAM,
    ),
    Fault(
        "fetch",
        "genesis_unavailable",
        "No peer provided the genesis of an update's stream within `ipfs.give_up_after`. The update is in no batch.",
        "See [Updates wait, blocks do not come](#updates-wait-blocks-do-not-come). Once peers have the block, run "
        "`kiln quarantine replay --reason genesis_unavailable`.",
    ),
    Fault(
        "fetch",
        "block_unavailable",
        "No peer provided the block of another node's batch within `ipfs.give_up_after`. The record on "
        "`kiln.blocks` also has the reason.",
        "The node that announced the batch must serve the block. Once it does, run `kiln quarantine replay --reason "
        "block_unavailable`.",
    ),
    Fault(
        "fetch",
        "announcer_over_limit",
        "The bridge did not request this block, because the same author or peer has announced too many blocks that "
        "are not fetched yet.",
        "If you trust the announcer, check that it serves its blocks, and then run `kiln quarantine replay --reason "
        "announcer_over_limit`.",
    ),
    Fault("fetch", "block_malformed", "The block of another node's batch does not contain a batch.", _ANNOUNCER),
    Fault(
        "fetch",
        "block_too_large",
        "The block of a batch or of a genesis is over 2 MiB, the maximum that bitswap carries.",
        _ANNOUNCER,
    ),
    Fault("fetch", "block_hash_mismatch", "The block does not match the hash in its CID.", _GIVER),
    Fault(
        "fetch",
        "fetch_fault",
        "Kiln itself failed while reading the block.",
        "Report the fault with the trace in `logs/bridge.log`.",
    ),
    Fault(
        "receive",
        "other_separator",
        "A batch of another node lists a tip of a stream whose genesis names a separator other than the batch's. "
        "Kiln does not write the tip to the table `tips`. `data` is the tip's CID.",
        _ANNOUNCER,
    ),
    # ---- Kiln's own records
    Fault(
        "batch",
        "update_malformed",
        "The query `batch` cannot read a record of `kiln.updates`.",
        _WRITER,
    ),
    Fault(
        "batch",
        "processing_failed",
        "The query `batch` failed on one record of `kiln.updates`. The update is in no batch.",
        _REBUILD,
    ),
    Fault(
        "publisher",
        "batches_gone",
        "Kafka deleted records of `kiln.batches` before the publisher read them, so these batches were never "
        "published.",
        _RETENTION,
    ),
    Fault(
        "publisher",
        "batch_malformed",
        "The publisher cannot read a record of `kiln.batches`, so the batch is not published.",
        _WRITER,
    ),
    Fault(
        "sink",
        "record_malformed",
        "The query `sink` cannot read a record of one of its topics.",
        _WRITER,
    ),
    Fault(
        "sink",
        "processing_failed",
        "The query `sink` failed on one record of one of its topics, or on one row of it.",
        f"{_REBUILD} This applies to records of `kiln.updates` and `kiln.batches`. Rows of the other topics cannot be "
        "rebuilt; `data` keeps the record.",
    ),
    Fault(
        "sink",
        "entry_malformed",
        "A stream in the block of another node's batch cannot be read. The other streams of the block are in the "
        "table `tips`.",
        _ANNOUNCER,
    ),
)
"""Every (stage, reason) that any part of Kiln writes, in the order in which a message passes the stages."""

BEGIN: Final = "<!-- made from schemas/faults.py -->"
END: Final = "<!-- end of what is made from schemas/faults.py -->"


def markdown() -> str:
    """Render FAULTS for the runbook, between its markers: a table for each shared remedy, then the others."""
    by_remedy: dict[str, list[Fault]] = {}
    for fault in FAULTS:
        by_remedy.setdefault(fault.what_to_do, []).append(fault)
    lines = [BEGIN, ""]
    for remedy, faults in by_remedy.items():
        if len(faults) > 1:
            lines += [f"**{remedy}**", "", "| stage | reason | what it is |", "| --- | --- | --- |"]
            lines += [f"| {fault.stage} | `{fault.reason}` | {fault.meaning} |" for fault in faults]
            lines.append("")
    lines += ["**The others:**", "", "| stage | reason | what it is | what to do |", "| --- | --- | --- | --- |"]
    for remedy, faults in by_remedy.items():
        if len(faults) == 1:
            lines += [f"| {fault.stage} | `{fault.reason}` | {fault.meaning} | {remedy} |" for fault in faults]
    return "\n".join([*lines, "", END])


def insert_tables(page: str) -> str:
    """Replace the tables in a page.

    Raises:
        ValueError: The page has no markers.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have {BEGIN!r} and {END!r} once each")
    before, _, rest = page.partition(BEGIN)
    return before + markdown() + rest.partition(END)[2]


if __name__ == "__main__":
    runbook = Path(sys.argv[1])
    runbook.write_text(insert_tables(runbook.read_text(encoding="utf-8")), encoding="utf-8")
