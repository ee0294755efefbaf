"""Every fault that Kiln writes to quarantine: the stage that refused the bytes, the reason, and what a reader does.

FAULTS is the closed set. A module that refuses bytes defines its own reasons (``kiln.schemas.wire.pubsub.REASONS``, for
example); tests/unit/test_faults.py holds those reasons and this set equal. The runbook's table is `markdown()`; write
the table with `python -m kiln.schemas.faults docs/RUNBOOK.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NamedTuple


class Fault(NamedTuple):
    """A kind of row in the table `quarantine`."""

    stage: str
    """the step that refused the bytes, snake_case"""
    reason: str
    """snake_case; one reason may occur at several stages"""
    meaning: str
    """what was refused, in sentences"""
    what_to_do: str
    """what an operator does about the fault, in sentences"""


_HELLO_WRITER: Final = "Fix the program that wrote the frame: the program must leave a refused hello empty."
_NOTHING: Final = "Nothing. If the rows grow, find the peer that sends them."
_WRITER: Final = "Find the program that writes to the topic: only Kiln may write there."
_FRAME_WRITER: Final = "Fix the program that wrote the frame."
_CLIENT: Final = "Nothing if one client is at fault. If many authors send them, messages may have a new form."
_OTHER_CLIENT: Final = "Nothing. The client that made the message is at fault."
_RETENTION: Final = (
    "Keep the bridge up, or raise `kafka.retention`: what waits for longer is lost. For a topic that is there, use "
    "Kafka's own tools."
)
_GARBAGE: Final = "Nothing if the message is garbage. If many come, another protocol may use the topic."
_BATCH_TYP: Final = "Check whether the network uses another number for batches: `batch.typ`."
_POLICY: Final = "Check whether `policy.networks` and `policy.topics` name the policies that the network uses."
_FORGED: Final = "Nothing if one peer sends them: identify the peer. If many peers send them, there is a forger."
_ANNOUNCER: Final = "Nothing. The node that announced the batch is at fault."
_GIVER: Final = "Check the IPFS node, and the peers that give blocks to the IPFS node."
_NO_STREAM: Final = "Nothing. If the rows grow, find the peer that announces such streams."
_PUBLISHER: Final = (
    "Nothing. The publisher is at fault, or publishes items of another kind under a key that you follow."
)
_BUG: Final = (
    "Report the fault with `detail`, which names the error and the line of code, and with `data`. Once a version of "
    "Kiln processes the record, run `kiln quarantine replay --reason processing_failed`."
)
_DHT_SENDER: Final = "Nothing. The sender of the datagram is at fault."

FAULTS: Final = (
    # ---- frames
    Fault(
        "frame",
        "frame_malformed",
        "A record of `kiln.frames` is no Frame, or has no value.",
        "Find the program that writes to the topic. Only the bridge, `kiln replay` and `kiln quarantine replay` may "
        "write there.",
    ),
    Fault(
        "frame",
        "frame_invalid",
        "A Frame breaks the contract: `connection` is not 16 bytes, `direction` or `origin` is unknown, `sequence` is "
        "0, a number is over 2^63 - 1, a time is not in the years 2000 to 2099, `network` has not 1 to 256 characters, "
        "or a field is longer than its bound. `detail` names the field; `data` is the whole Frame.",
        _FRAME_WRITER,
    ),
    # ---- Kiln's own faults: one record, or one message, at which a query failed
    Fault(
        "decode",
        "processing_failed",
        "Kiln itself failed while it decoded a message, or a frame. The other messages of the frame are read.",
        _BUG,
    ),
    Fault(
        "archive",
        "processing_failed",
        "The query `archive`, or a backfill, failed at one frame, or at one row of a frame. All others are in the "
        "tables.",
        _BUG,
    ),
    Fault(
        "updates",
        "processing_failed",
        "The query `updates` failed at one message. The message is in no batch.",
        _BUG,
    ),
    # ---- hellos: a row for each frame of the connection
    Fault(
        "hello",
        "hello_malformed",
        "The topic table in a hello is no protobuf message. The frame's messages are read all the same.",
        _HELLO_WRITER,
    ),
    Fault(
        "hello",
        "hello_too_many_bundles",
        "The topic table in a hello has more than 256 bundle hashes. The frame's messages are read all the same.",
        _HELLO_WRITER,
    ),
    Fault(
        "hello",
        "hello_hash_length",
        "A bundle hash in a hello is not 4 bytes long. The frame's messages are read all the same.",
        _HELLO_WRITER,
    ),
    Fault(
        "hello",
        "hello_repeats",
        "A hello has one bundle hash twice, so the two peers would build different tables. The frame's messages are "
        "read all the same.",
        _HELLO_WRITER,
    ),
    # ---- RPCs
    Fault(
        "rpc",
        "rpc_malformed",
        "The bytes are no gossipsub RPC.",
        "Nothing if one peer sends them. If many peers send them, the peers may speak a new protocol: look at "
        "`protocol` in the table `frames`.",
    ),
    Fault(
        "rpc",
        "rpc_oversized",
        "The RPC was over `bridge.max_rpc_bytes` (4 MiB), so the bridge stored only the RPC's first 64 KiB. "
        "`declared_length` in the table `frames` has the true length.",
        _NOTHING,
    ),
    Fault(
        "rpc",
        "rpc_too_many_messages",
        "The RPC has more than 5,000 messages. Kiln read the first 5,000. This one row stands for all the others; the "
        "table `frames` has their bytes.",
        _NOTHING,
    ),
    Fault(
        "rpc",
        "rpc_too_many_verdicts",
        "The frame has more verdicts than its RPC has messages, so the verdicts cannot be matched. "
        "Kiln checked the messages again. `data` is the verdicts.",
        _FRAME_WRITER,
    ),
    Fault(
        "rpc",
        "rpc_too_costly",
        "Checking the first messages of the RPC cost all the CPU that one RPC may cost. The other messages that the "
        "bridge had not checked were not read. This one row stands for all of them; the table `frames` has their "
        "bytes. Or the RPC has more than 50,000 messages, subscriptions and ids, and no message of it was read: `data` "
        "is the RPC. Or it has more than 20,000 subscriptions and control entries, of which the first have rows.",
        "Nothing if one peer sends them: find the peer. Ordinary signatures do not cost so much.",
    ),
    # ---- topics
    Fault("topic", "topic_missing", "The message has neither a topic nor a topic index.", _NOTHING),
    Fault("topic", "topic_not_utf8", "The topic's name is not UTF-8.", _NOTHING),
    Fault("topic", "topic_too_long", "The topic's name is longer than 4,096 characters.", _NOTHING),
    Fault(
        "topic",
        "no_table_agreed",
        "The message has a topic index, and the two hellos share no bundle, or one hello is missing or was refused.",
        "Nothing. The peer uses indices that were not agreed on.",
    ),
    Fault(
        "topic",
        "index_out_of_range",
        "The topic index is 0, or is beyond the table that the two hellos make.",
        _NOTHING,
    ),
    Fault(
        "topic",
        "unknown_bundle_hash",
        "The topic index points into a bundle that both sides announced and whose topics Kiln does not know, or into a "
        "bundle after such a bundle.",
        "Find out which topics the bundle holds: `detail` has the bundle's hash. Put the topics into "
        "`topic_table.bundles`, start Kiln again, and run `kiln quarantine replay --reason unknown_bundle_hash`.",
    ),
    # ---- signatures
    Fault(
        "signature",
        "bad_signature",
        "The signature is not the author's signature over these bytes. Somebody forged the message, or a peer altered "
        "the message on the way.",
        _FORGED,
    ),
    Fault(
        "signature",
        "bad_key",
        "The author (`from`) is no peer id, holds no usable key, or is not the peer id of the key in the message.",
        _FORGED,
    ),
    Fault(
        "signature",
        "key_algorithm",
        "The bytes of the key name another algorithm than the key's type. Such keys are made to be expensive to read; "
        "Kiln reads the algorithm first, and the rest not at all. The bridge bans who sends one on a topic it follows.",
        "Find the peer that sends them: `remote_peer` in the table `frames`.",
    ),
    Fault(
        "signature",
        "missing_signature",
        "The message is unsigned, and the network's policy is `strict`.",
        _POLICY,
    ),
    Fault(
        "signature",
        "missing_from",
        "The message is signed and names no author. A message's id is made of author and sequence number.",
        _OTHER_CLIENT,
    ),
    Fault(
        "signature",
        "missing_seqno",
        "The message is signed and has no sequence number. A message's id is made of author and sequence number.",
        _OTHER_CLIENT,
    ),
    Fault(
        "signature",
        "invalid_seqno",
        "The message is signed and its sequence number is longer than 64 bytes.",
        _OTHER_CLIENT,
    ),
    Fault(
        "signature",
        "unexpected_auth",
        "The message has an author, a sequence number, a signature or a key, and the network's policy is `none`.",
        _POLICY,
    ),
    Fault(
        "signature",
        "against_policy",
        "The bridge checked the message when the frame came, and refused the message under the network's policy.",
        _POLICY,
    ),
    # ---- messages
    Fault(
        "message",
        "invalid_json",
        "The message is not JSON.",
        _GARBAGE,
    ),
    Fault("message", "not_an_object", "The message is JSON and no object.", _GARBAGE),
    Fault("message", "data_too_large", "The message has more than 1 MiB of data, which is not read as JSON.", _GARBAGE),
    Fault(
        "message",
        "unknown_typ",
        "`typ` is missing, is no number, or is the number of no type of message.",
        "Check whether the network has a new type of message.",
    ),
    Fault(
        "message",
        "unknown_shape",
        "`typ` is that of KEEPALIVE and BATCH_UPDATE, and the message has the fields of neither.",
        _BATCH_TYP,
    ),
    Fault(
        "message",
        "ambiguous_shape",
        "`typ` is that of KEEPALIVE and BATCH_UPDATE, and the message has the fields of both.",
        _BATCH_TYP,
    ),
    Fault(
        "message",
        "missing_stream",
        "The message has no StreamID where one must be: no `stream`, no `doc`, and no `id` with a `doctype`.",
        _CLIENT,
    ),
    Fault("message", "bad_stream", "The stream's id is no StreamID. A CommitID is no StreamID.", _CLIENT),
    Fault(
        "message",
        "unknown_doctype",
        "A message of 2020 has a `doctype` other than `tile` and `caip10-link`, so the message's StreamID is not "
        "known.",
        _CLIENT,
    ),
    Fault("message", "missing_tip", "The message has no tip where one must be.", _CLIENT),
    Fault("message", "bad_tip", "The tip is no CID.", _CLIENT),
    Fault("message", "bad_model", "`model` is there and is no StreamID.", _CLIENT),
    Fault("message", "missing_id", "A QUERY or RESPONSE has no `id`.", _CLIENT),
    Fault("message", "bad_id", "`id` of a QUERY or RESPONSE is no text.", _CLIENT),
    Fault("message", "missing_tips", "A RESPONSE has no tips.", _CLIENT),
    Fault("message", "bad_tips", "`tips` of a RESPONSE is no object, or a key of `tips` is no StreamID.", _CLIENT),
    Fault(
        "message",
        "conflicting_tips",
        "`tips` of a RESPONSE spells one StreamID in two ways, with different tips.",
        _CLIENT,
    ),
    Fault("message", "bad_ts", "`ts` of a KEEPALIVE is outside the range of a date.", _CLIENT),
    Fault("message", "bad_version", "`ver` or `ipfsVer` of a KEEPALIVE is no text.", _CLIENT),
    Fault("message", "bad_separator", "`sep` of a BATCH_UPDATE is not `<key>/<value in base36>`.", _CLIENT),
    Fault("message", "bad_batch", "`batch` of a BATCH_UPDATE is no CID.", _CLIENT),
    Fault(
        "message",
        "unusable_batch",
        "`batch` of a BATCH_UPDATE is a CID that names no batch block. Only a CIDv1 by sha2-256 of dag-cbor, cbor or "
        "raw names one.",
        _CLIENT,
    ),
    # ---- separators
    Fault(
        "separator",
        "contradicts_genesis",
        "An update claims a separator, by its topic or its `model`, and the genesis of the stream names another "
        "separator. The update goes on under the separator of the genesis. Where the genesis came later, the update "
        "had gone on under its claim. `data` is then the record of `kiln.wanted` of the first update with that claim.",
        "Nothing. The view `misplaced` shows who announces streams on the wrong topic. The view `false_claims` shows "
        "the batches that hold such updates.",
    ),
    # ---- files of history
    Fault(
        "history",
        "line_malformed",
        "A line, or a record, of a file is not of the file's format. `detail` has the file and the line.",
        "Nothing if other programs write into the same file. A file of two formats is read as the format of its first "
        "line that is known: divide the file.",
    ),
    Fault(
        "history",
        "line_too_long",
        "A line of a file is over 16 MiB, or the message in the line is over 4 MiB. Of a line over 16 MiB, `data` has "
        "the first 64 KiB; the file has the rest.",
        "Check the line in the file. No gossip message is as long.",
    ),
    Fault(
        "history",
        "no_message",
        "A line of a service log is of another service, or of an event that carries no message.",
        "Nothing. The line is as it should be.",
    ),
    Fault(
        "history",
        "metadata_only",
        "An event of a go-libp2p-pubsub trace. A trace never has the data of messages. Where the event is of a "
        "received copy, the copy is in the table `copies`, and `data` is the author, the seqno and the topic as a "
        "gossipsub message. Else `data` is the event.",
        "Nothing. For messages with their data, read a capture file of Kiln or the output of `pubsub/sub` of Kubo.",
    ),
    Fault(
        "history",
        "file_ends_early",
        "A file ends inside a line, an event or its compressed stream. What came before is read.",
        "If the file is still written, or was not copied to its end, read the whole file later.",
    ),
    Fault(
        "history",
        "file_damaged",
        "A file cannot be read beyond this place: its compression or its lengths are wrong, or a capture file ends "
        "inside a record. What came before is read. Nothing is read of a capture that names more connections and "
        "subscriptions than 256 MiB hold.",
        "Find a whole copy of the file, and read that copy.",
    ),
    # ---- BEP 50
    Fault("bep50", "not_krpc", "A datagram with an item is no message of the DHT.", _DHT_SENDER),
    Fault("bep50", "no_item", "The datagram's message holds no whole mutable item.", _DHT_SENDER),
    Fault(
        "bep50",
        "beyond_limits",
        "The item's salt, value or sequence number is one that no node may store.",
        _DHT_SENDER,
    ),
    Fault("bep50", "bad_signature", "The item is not signed by its key under its salt.", _DHT_SENDER),
    Fault("bep50", "not_bencoded", "The item's value is not one canonical bencoded value.", _PUBLISHER),
    Fault("bep50", "not_an_announcement", "The item's value is no dictionary, or has another `typ`.", _PUBLISHER),
    Fault("bep50", "bad_batch", "`batch` of an announcement is not one CID.", _PUBLISHER),
    Fault("bep50", "bad_prev", "`prev` of an announcement is not a row of CIDs.", _PUBLISHER),
    Fault("bep50", "bad_separator", "`sep` of an announcement is not `<key>/<value in base36>`.", _PUBLISHER),
    Fault("bep50", "bad_ts", "`ts` of an announcement is no number of ms.", _PUBLISHER),
    Fault("bep50", "bad_n", "`n` of an announcement is no count.", _PUBLISHER),
    Fault(
        "bep50",
        "wrong_salt",
        "The item's salt is the salt of another separator than the announcement claims.",
        _PUBLISHER,
    ),
    Fault("bep50", "wrong_topic", "The datagram's topic is not the target of the item's key and salt.", _PUBLISHER),
    Fault("bep50", "bad_network", "The frame's network is a name that no topic can hold.", _FRAME_WRITER),
    Fault(
        "bep50",
        "gap",
        "A new item of a followed publisher does not name the batch that was the publisher's newest when Kiln last "
        "received one of its items. Kiln has missed the announcements between the two: an item names at "
        "most 23 batches before its own, and fewer where the separator is long. `detail` has the publisher, the "
        "separator and both CIDs; `data` is the item's value.",
        "Keep the bridge up: the bridge was away for too long, or the publisher announced too much at once. If the "
        "publisher lost its state, nothing is missing. Other nodes may still tell the tips.",
    ),
    # ---- blocks wanted out of IPFS
    Fault(
        "wanted",
        "wanted_gone",
        "Kafka let records of `kiln.wanted` go before the fetcher was done with them. Their updates are in no batch. "
        "`detail` has the partition, the offsets, and how many records are lost; there are no bytes.",
        _RETENTION,
    ),
    Fault("wanted", "wanted_malformed", "A record of `kiln.wanted` cannot be read, or asks for nothing.", _WRITER),
    Fault(
        "fetch",
        "cid_malformed",
        "The bytes in the stream's id, or in the batch's announcement, are no CID.",
        _NO_STREAM,
    ),
    Fault(
        "fetch",
        "cid_hash_unsupported",
        "The CID has another hash than sha2-256, so the block cannot be verified.",
        _NO_STREAM,
    ),
    Fault(
        "fetch",
        "cid_codec_unsupported",
        "The CID of the stream's genesis has another codec than DAG-CBOR and DAG-JOSE. No init event has such a CID.",
        _NO_STREAM,
    ),
    Fault("fetch", "genesis_malformed", "The block in the StreamID cannot be read as an event.", _NO_STREAM),
    Fault(
        "fetch",
        "genesis_not_init",
        "The block in the StreamID is no init event: the event has no header, or comes after another event.",
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
        "No peer provided the block of another node's batch within `ipfs.give_up_after`. The record on `kiln.blocks` "
        "has the reason too.",
        "The node that announced the batch must serve the block. Once the node does, run "
        "`kiln quarantine replay --reason block_unavailable`.",
    ),
    Fault("fetch", "block_malformed", "The block of another node's batch holds no batch.", _ANNOUNCER),
    Fault(
        "fetch",
        "block_too_large",
        "The block of a batch or of a genesis is over 2 MiB, which is the most that bitswap carries.",
        _ANNOUNCER,
    ),
    Fault("fetch", "block_hash_mismatch", "The block is not the block that the CID names.", _GIVER),
    Fault(
        "fetch",
        "fetch_fault",
        "Kiln itself failed while Kiln read the block.",
        "Report the fault with the trace in `logs/bridge.log`.",
    ),
    Fault(
        "receive",
        "other_separator",
        "A batch of another node lists a tip of a stream whose genesis names another separator than the batch's. Kiln "
        "keeps the tip out of the table `tips`. `data` is the tip's CID.",
        _ANNOUNCER,
    ),
    # ---- Kiln's own records
    Fault(
        "batch",
        "update_malformed",
        "The query `batch` cannot read a record of `kiln.updates`. `detail` has the record's partition and offset.",
        _WRITER,
    ),
    Fault(
        "batch",
        "processing_failed",
        "The query `batch` failed at one record of `kiln.updates`, which is in no batch. `detail` has the record's "
        "partition and offset.",
        _BUG,
    ),
    Fault(
        "publisher",
        "batches_gone",
        "Kafka let records of `kiln.batches` go before the publisher read them, so their batches were never published. "
        "`detail` has the partition and the offsets; there are no bytes.",
        _RETENTION,
    ),
    Fault(
        "publisher",
        "batch_malformed",
        "The publisher cannot read a record of `kiln.batches`, so the batch is not published. `detail` has the "
        "record's partition and offset.",
        _WRITER,
    ),
    Fault(
        "sink",
        "record_malformed",
        "The query `sink` cannot read a record of another topic. `detail` has the topic, the partition and the offset.",
        _WRITER,
    ),
    Fault(
        "sink",
        "processing_failed",
        "The query `sink` failed at one record of another topic, or at one row of it. `detail` has the topic, the "
        "partition and the offset.",
        _BUG,
    ),
    Fault(
        "sink",
        "entry_malformed",
        "A stream in the block of another node's batch cannot be read. The other streams of the block are in `tips`.",
        _ANNOUNCER,
    ),
)
"""Every (stage, reason) that any part of Kiln writes, in the order in which a message passes the stages."""

BEGIN: Final = "<!-- made from schemas/faults.py -->"
END: Final = "<!-- end of what is made from schemas/faults.py -->"


def markdown() -> str:
    """FAULTS as a table for people, between the markers that the runbook has around the table."""
    lines = [BEGIN, "", "| stage | reason | what it is | what to do |", "| --- | --- | --- | --- |"]
    lines += [f"| {fault.stage} | `{fault.reason}` | {fault.meaning} | {fault.what_to_do} |" for fault in FAULTS]
    return "\n".join([*lines, "", END])


def insert_table(page: str) -> str:
    """Replace the table in a page.

    Raises:
        ValueError: The page has no markers.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have {BEGIN!r} and {END!r} once each")
    before, _, rest = page.partition(BEGIN)
    return before + markdown() + rest.partition(END)[2]


if __name__ == "__main__":
    runbook = Path(sys.argv[1])
    runbook.write_text(insert_table(runbook.read_text(encoding="utf-8")), encoding="utf-8")
