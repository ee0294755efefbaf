"""All faults for which Kiln writes bytes to quarantine, with an explanation and a remedy for each.

A module that rejects bytes defines its own reasons, for example ``kiln.schemas.wire.pubsub.REASONS``. A test checks
that `FAULTS` has the same reasons. `python -m kiln.schemas.faults docs/RUNBOOK.md` writes the tables of the runbook.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NamedTuple


class Fault(NamedTuple):
    """A reason for which Kiln writes rows to the table `quarantine`, with its explanation and remedy."""

    stage: str
    """processing step that rejected the bytes, in snake_case"""
    reason: str
    """code in snake_case; the same reason may occur at several stages"""
    meaning: str
    """explanation of what is wrong with the bytes"""
    what_to_do: str
    """remedy, for the operator"""


_HELLO_WRITER: Final = (
    "The frame's messages are still read. Fix the program that wrote the frame: if a hello is invalid, its field "
    "(`hello_in` or `hello_out`) must be empty."
)
_NOTHING: Final = "Nothing. If the number of rows grows, find the sending peer."
_WRITER: Final = "Find the program that wrote the record, and stop it: only Kiln may write to its topics."
_FRAME_WRITER: Final = "Fix the program that wrote the frame."
_CLIENT: Final = (
    "Nothing if a single client is at fault. If many authors send such messages, the message format may have changed."
)
_OTHER_CLIENT: Final = (
    "Nothing. The client that created the message is at fault: gossipsub requires author and sequence number, because "
    "they are the message's id."
)
_RETENTION: Final = (
    "Keep the bridge running, or raise `kafka.retention`, the time for which Kafka keeps records. For an existing "
    "topic, change the retention with Kafka's own tools."
)
_GARBAGE: Final = (
    "Nothing if the message is garbage. If there are many such messages, another protocol may use the topic."
)
_BATCH_TYP: Final = "Check whether the network uses another number for batches, and set `batch.typ` to it."
_POLICY: Final = "Check that `policy.networks` and `policy.topics` match the signature policies of the network."
_FORGED: Final = (
    "Nothing if a single peer sends such messages. If many peers do (`remote_peer` in the table `frames`), someone is "
    "forging messages."
)
_ANNOUNCER: Final = "Nothing. The node that made the block, or announced it, is at fault."
_GIVER: Final = "Check the IPFS node, and the peers from which it fetches blocks: one of them serves wrong blocks."
_NO_STREAM: Final = "Nothing. If the number of rows grows, find the peer that announces such streams."
_PUBLISHER: Final = (
    "Nothing. Either the publisher is at fault, or it uses the same key for items that do not announce batches."
)
_BUG: Final = "Report a bug in Kiln, with `detail` and `data` of the row."
_FIXED: Final = "After an update of Kiln that fixes the bug,"
_REBUILD: Final = (
    f"{_BUG} {_FIXED} rebuild the rows for the time of the record: `kiln backfill run`, then `kiln backfill swap`."
)
_DECODER: Final = (
    "The row in the table `messages` lacks `decoded`. If the message is valid, fix the decoder, restart Kiln, and "
    "rebuild the rows: `kiln backfill run`, then `kiln backfill swap`."
)
_DHT_SENDER: Final = "Nothing. The sender of the datagram is at fault."

FAULTS: Final = (
    # ---- frames
    Fault(
        "frame",
        "frame_malformed",
        "A record of `kiln.frames` is not a valid Frame, or has no value.",
        "Find the program that wrote the record, and stop it: only the bridge, `kiln replay` and `kiln quarantine "
        "replay` may write to `kiln.frames`.",
    ),
    Fault(
        "frame",
        "frame_invalid",
        "A field of a Frame is invalid: `connection` is not 16 bytes long, `direction` or `origin` is unknown, "
        "`sequence` is 0, a number exceeds 2^63 - 1, a time is outside the years 2000 to 2099, `network` is not 1 "
        "to 256 characters long, or a field exceeds its maximum length. `detail` names the field; `data` is the "
        "whole Frame.",
        _FRAME_WRITER,
    ),
    # ---- bugs in Kiln, each of which affects one record or one message
    Fault(
        "decode",
        "processing_failed",
        "A bug in Kiln: decoding a message or a frame raised an exception. If a message failed, the other messages "
        "of its frame are still read.",
        f"{_BUG} {_FIXED} run `kiln quarantine replay --reason processing_failed`.",
    ),
    Fault(
        "archive",
        "processing_failed",
        "A bug in Kiln: the query `archive`, or a backfill, raised an exception for a frame or for one row of a "
        "frame. All other rows are in the tables.",
        f"{_REBUILD} If the frame is not in the table `frames`, add `--source kafka` while Kafka still has the frame.",
    ),
    Fault(
        "updates",
        "processing_failed",
        "A bug in Kiln: the query `updates` raised an exception for a message. The message is in no batch.",
        _REBUILD,
    ),
    # ---- hellos: each frame of a connection repeats its hellos, so each frame gives a row
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
        "The RPC has more than 5,000 messages. Kiln read only the first 5,000. This single row stands for all others, "
        "whose bytes are in the table `frames`.",
        _NOTHING,
    ),
    Fault(
        "rpc",
        "rpc_too_many_verdicts",
        "The frame has more signature verdicts than its RPC has messages, so they cannot be matched. Kiln checked the "
        "signatures again. `data` contains the verdicts.",
        _FRAME_WRITER,
    ),
    Fault(
        "rpc",
        "rpc_too_costly",
        "The RPC exceeds one of three limits on the work per RPC. (1) Checking signatures used up the CPU budget of an "
        "RPC. Of the later messages, Kiln read only those that the bridge had checked; this row stands for the others. "
        "(2) The RPC has more than 50,000 messages, subscriptions and ids: Kiln read no message, and `data` is the "
        "RPC. (3) The RPC has more than 20,000 subscriptions and control entries: only the first 20,000 have rows. The "
        "table `frames` has all bytes.",
        "Find the sending peer: `remote_peer` in the table `frames`. Honest peers stay far below these limits.",
    ),
    # ---- topics
    Fault("topic", "topic_missing", "The message has neither a topic nor a topic index.", _NOTHING),
    Fault("topic", "topic_not_utf8", "The topic's name is not UTF-8.", _NOTHING),
    Fault("topic", "topic_too_long", "The topic's name is longer than 4,096 characters.", _NOTHING),
    Fault(
        "topic",
        "no_table_agreed",
        "The message has a topic index, but the peers agreed on no topic table: their hellos share no bundle, or a "
        "hello is missing or invalid.",
        "Nothing. The peer that sent the message is at fault.",
    ),
    Fault(
        "topic",
        "index_out_of_range",
        "The topic index is 0, or beyond the end of the topic table on which the peers agreed.",
        _NOTHING,
    ),
    Fault(
        "topic",
        "unknown_bundle_hash",
        "Kiln cannot resolve the topic index. Both peers announced a topic bundle whose topics Kiln does not know, and "
        "the index lies in this bundle or in a later one.",
        "Find out which topics the bundle contains; `detail` has its hash. Add the bundle to `topic_table.bundles`, "
        "restart Kiln, and run `kiln quarantine replay --reason unknown_bundle_hash`.",
    ),
    # ---- signatures
    Fault(
        "signature",
        "bad_signature",
        "The signature of the message does not match its bytes and its author. Someone forged the message, or a peer "
        "altered it on the way.",
        _FORGED,
    ),
    Fault(
        "signature",
        "bad_key",
        "Kiln found no public key for checking the signature: the author (`from`) is not a peer id, contains no usable "
        "key, or does not match the key in the message.",
        _FORGED,
    ),
    Fault(
        "signature",
        "key_algorithm",
        "The algorithm in the bytes of a public key is not that of the key's type. Attackers craft such keys because "
        "parsing them is expensive, so Kiln does not parse them. A peer that sends such a key on a topic that the "
        "bridge follows is banned.",
        "Find the sending peer: `remote_peer` in the table `frames`.",
    ),
    Fault(
        "signature",
        "missing_signature",
        "The message is unsigned, but the network's signature policy is `strict`.",
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
        "The message has an author, a sequence number, a signature or a key, but the network's signature policy is "
        "`none`.",
        _POLICY,
    ),
    Fault(
        "signature",
        "against_policy",
        "The bridge rejected the message when the frame arrived, because it violates the network's signature policy.",
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
        "message",
        "data_too_large",
        "The message has more than 1 MiB of data, so Kiln did not parse it as JSON.",
        _GARBAGE,
    ),
    Fault(
        "message",
        "unknown_typ",
        "The field `typ` is missing, is not a number, or is not the number of a message type.",
        "Nothing if a single client is at fault. Otherwise, check whether the network has a new message type.",
    ),
    Fault(
        "message",
        "unknown_shape",
        "The field `typ` (3, 4 or `batch.typ`) means KEEPALIVE or BATCH_UPDATE, but the fields are those of neither.",
        _BATCH_TYP,
    ),
    Fault(
        "message",
        "ambiguous_shape",
        "The field `typ` (3, 4 or `batch.typ`) means KEEPALIVE or BATCH_UPDATE, and the message has the fields of "
        "both.",
        _BATCH_TYP,
    ),
    Fault(
        "message",
        "missing_stream",
        "The message lacks a required StreamID: it has no `stream`, no `doc`, and no `id` with a `doctype`.",
        _CLIENT,
    ),
    Fault("message", "bad_stream", "The id of the stream is not a StreamID. A CommitID is refused too.", _CLIENT),
    Fault(
        "message",
        "unknown_doctype",
        "A message in Ceramic's format of 2020 has a `doctype` other than `tile` and `caip10-link`, so its StreamID is "
        "unknown.",
        _CLIENT,
    ),
    Fault("message", "missing_tip", "The message lacks a required tip.", _CLIENT),
    Fault("message", "bad_tip", "The tip in the message is not a CID.", _CLIENT),
    Fault("message", "bad_model", "The message has a field `model` that is not a StreamID.", _CLIENT),
    Fault("message", "missing_id", "A QUERY or RESPONSE has no `id`.", _CLIENT),
    Fault("message", "bad_id", "The field `id` of a QUERY or RESPONSE is not a string.", _CLIENT),
    Fault("message", "missing_tips", "A RESPONSE has no field `tips`.", _CLIENT),
    Fault(
        "message",
        "bad_tips",
        "The field `tips` of a RESPONSE is not an object, or a key in it is not a StreamID.",
        _CLIENT,
    ),
    Fault(
        "message",
        "conflicting_tips",
        "The field `tips` of a RESPONSE contains the same StreamID in two spellings, with different tips.",
        _CLIENT,
    ),
    Fault("message", "bad_ts", "The field `ts` of a KEEPALIVE is outside the range of a JavaScript Date.", _CLIENT),
    Fault("message", "bad_version", "The field `ver` or `ipfsVer` of a KEEPALIVE is not a string.", _CLIENT),
    Fault("message", "bad_separator", "The field `sep` of a BATCH_UPDATE is not `<key>/<value in base36>`.", _CLIENT),
    Fault("message", "bad_batch", "The field `batch` of a BATCH_UPDATE is not a CID.", _CLIENT),
    Fault(
        "message",
        "unusable_batch",
        "The field `batch` of a BATCH_UPDATE is a CID that no batch block can have. The CID of a batch block is a "
        "CIDv1 with sha2-256 and the codec dag-cbor, cbor or raw.",
        _CLIENT,
    ),
    # ---- separators
    Fault(
        "separator",
        "contradicts_genesis",
        "An update claims a separator, by its topic or its field `model`, that is not the separator in the genesis of "
        "its stream. If Kiln knew the genesis in time, the update goes into a batch of the separator in the "
        "genesis. Otherwise, the update is in `kiln.updates` with the claimed separator, and `data` is the record of "
        "`kiln.wanted` with the first such update.",
        "Nothing. The view `misplaced` shows which authors announce streams on the wrong topic. The view "
        "`false_claims` shows the batches with updates that have false claims.",
    ),
    Fault(
        "separator",
        "contradicts_topic",
        "A BATCH_UPDATE for one separator was received on the topic of another separator. The block of the batch is "
        "still fetched.",
        "Nothing. The view `misplaced` shows which authors publish batches on the wrong topic.",
    ),
    # ---- captures and logs that a user reads as history
    Fault(
        "history",
        "line_malformed",
        "A line or record of a capture or log file is not in the file's format. `detail` has the file and the line.",
        "Nothing if other programs write to the same file. If a file contains two formats, split it: Kiln reads the "
        "whole file in the format of its first recognized line.",
    ),
    Fault(
        "history",
        "line_too_long",
        "A line of a log file is longer than 16 MiB, or its message is longer than 4 MiB. For a line over 16 MiB, "
        "`data` has the first 64 KiB.",
        "Check the line in the file, which `detail` names. No gossip message is that long.",
    ),
    Fault(
        "history",
        "no_message",
        "A line of a js-ceramic log has a service other than pubsub, or an `event` other than `received` and "
        "`published`, so it has no message.",
        "Nothing. Such lines are expected.",
    ),
    Fault(
        "history",
        "metadata_only",
        "The row is an event of a go-libp2p-pubsub trace. Such a trace contains no message data. If the event is about "
        "a received copy, the table `copies` has the copy, and `data` is a gossipsub message with author, seqno and "
        "topic. Otherwise, `data` is the event.",
        "Nothing. For messages with their data, read a capture file of Kiln or the output of Kubo's `pubsub/sub`.",
    ),
    Fault(
        "history",
        "file_ends_early",
        "A capture or log file ends within a line or an event. Kiln read everything before that point.",
        "If the file is still being written, or was not copied completely, read the complete file later.",
    ),
    Fault(
        "history",
        "file_damaged",
        "A capture file or a trace cannot be read beyond a point, because a length is invalid, a record is incomplete "
        "or the compression is damaged. Kiln read everything before that point. If the connections and subscriptions "
        "of a capture need more than 256 MiB of memory, Kiln read nothing.",
        "Find an intact copy of the file and read it, or split a capture that is too large.",
    ),
    # ---- the user's decoder
    Fault(
        "decoder",
        "decoder_failed",
        "Your decoder (`network.decoder`) raised an error, which is in `detail`. `data` has the message.",
        _DECODER,
    ),
    Fault(
        "decoder",
        "decoder_too_slow",
        "Your decoder (`network.decoder`) took longer than 1 s for a message. After five such messages in a Spark "
        "task, Kiln does not call the decoder again in that task.",
        _DECODER,
    ),
    Fault(
        "decoder",
        "decoder_output",
        "Your decoder (`network.decoder`) returned an object that is not a dict, a dict that JSON cannot represent, or "
        "more than 1 MiB of JSON.",
        _DECODER,
    ),
    # ---- BEP 50
    Fault("bep50", "not_krpc", "A captured BEP 50 datagram is not a message of the BitTorrent DHT.", _DHT_SENDER),
    Fault(
        "bep50",
        "no_item",
        "The DHT message in a datagram does not contain a complete mutable item (BEP 44).",
        _DHT_SENDER,
    ),
    Fault(
        "bep50",
        "beyond_limits",
        "The salt, value or sequence number of a DHT item exceeds the limits of BEP 44.",
        _DHT_SENDER,
    ),
    Fault("bep50", "bad_signature", "The signature of a DHT item is not valid for its key and salt.", _DHT_SENDER),
    Fault("bep50", "not_bencoded", "The value of a DHT item is not one canonical bencoded value.", _PUBLISHER),
    Fault(
        "bep50",
        "not_an_announcement",
        "The value of a DHT item does not announce a batch: it is not a dictionary, or has another `typ`.",
        _PUBLISHER,
    ),
    Fault("bep50", "bad_batch", "The field `batch` of a BEP 50 announcement is not a single CID.", _PUBLISHER),
    Fault("bep50", "bad_prev", "The field `prev` of a BEP 50 announcement is not a sequence of CIDs.", _PUBLISHER),
    Fault(
        "bep50",
        "bad_separator",
        "The field `sep` of a BEP 50 announcement is not `<key>/<value in base36>`.",
        _PUBLISHER,
    ),
    Fault("bep50", "bad_ts", "The field `ts` of a BEP 50 announcement is not a number of milliseconds.", _PUBLISHER),
    Fault("bep50", "bad_n", "The field `n` of a BEP 50 announcement is not a number of tips.", _PUBLISHER),
    Fault(
        "bep50",
        "wrong_salt",
        "The salt of a DHT item is not that of the separator in its announcement.",
        _PUBLISHER,
    ),
    Fault(
        "bep50",
        "wrong_topic",
        "The topic of a BEP 50 datagram is not the target of the item's key and salt.",
        _PUBLISHER,
    ),
    Fault("bep50", "bad_network", "The name of the frame's network cannot be part of a topic name.", _FRAME_WRITER),
    Fault(
        "bep50",
        "gap",
        "Kiln missed announcements of a followed publisher. An announcement lists up to 23 batches before its own, "
        "but the newest announcement does not list the last batch that Kiln knew. `detail` has the publisher, the "
        "separator, and the CIDs of the announced batch and of the last known one; `data` is the announcement.",
        "Keep the bridge running: it was offline for too long, or the publisher announced too many batches at once. "
        "If the publisher lost its state, Kiln missed nothing. Other nodes may still send the missed tips.",
    ),
    # ---- blocks to fetch from IPFS
    Fault(
        "wanted",
        "wanted_gone",
        "Kafka deleted records of `kiln.wanted` before the fetcher finished them. Their updates are in no batch.",
        _RETENTION,
    ),
    Fault("wanted", "wanted_malformed", "A record of `kiln.wanted` cannot be read, or requests no block.", _WRITER),
    Fault(
        "fetch",
        "cid_malformed",
        "The bytes in a StreamID, or in the announcement of a batch, are not a CID.",
        _NO_STREAM,
    ),
    Fault(
        "fetch",
        "cid_hash_unsupported",
        "The CID of a block uses a hash function other than sha2-256, so Kiln cannot verify the block.",
        _NO_STREAM,
    ),
    Fault(
        "fetch",
        "cid_codec_unsupported",
        "The CID in a StreamID has a codec other than DAG-CBOR and DAG-JOSE, so it is not the CID of a genesis.",
        _NO_STREAM,
    ),
    Fault(
        "fetch", "genesis_malformed", "The block whose CID is in a StreamID is not a valid Ceramic event.", _NO_STREAM
    ),
    Fault(
        "fetch",
        "genesis_not_init",
        "The block whose CID is in a StreamID is not an init event: it has no header, or refers to an earlier event.",
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
        "No peer provided the block of another node's batch within `ipfs.give_up_after`, or within a minute if no "
        "block of its author has arrived lately. Kiln also wrote this reason to `kiln.blocks`.",
        "The node that announced the batch must serve the block. Once it does, run `kiln quarantine replay --reason "
        "block_unavailable`.",
    ),
    Fault(
        "fetch",
        "announcer_over_limit",
        "The bridge did not request a block, because the same author or peer has announced too many blocks that the "
        "bridge has not fetched yet.",
        "If you trust the announcer, check that it serves its blocks, and then run `kiln quarantine replay --reason "
        "announcer_over_limit`.",
    ),
    Fault(
        "fetch",
        "block_malformed",
        "The block that another node announced as a batch does not contain a batch.",
        _ANNOUNCER,
    ),
    Fault(
        "fetch",
        "block_too_large",
        "The block of a batch or of a genesis is larger than 2 MiB, the maximum of bitswap.",
        _ANNOUNCER,
    ),
    Fault("fetch", "block_hash_mismatch", "A fetched block does not match the hash in its CID.", _GIVER),
    Fault(
        "fetch",
        "fetch_fault",
        "A bug in Kiln: reading a fetched block raised an exception.",
        "Report a bug in Kiln, with the stack trace in `logs/bridge.log`.",
    ),
    Fault(
        "receive",
        "other_separator",
        "Another node's batch contains a tip of a stream whose genesis names a separator other than the batch's. Kiln "
        "does not write the tip to the table `tips`. `data` is the tip's CID.",
        _ANNOUNCER,
    ),
    # ---- records of Kiln's topics
    Fault(
        "batch",
        "update_malformed",
        "A record of `kiln.updates` is invalid, and the query `batch` cannot read it.",
        _WRITER,
    ),
    Fault(
        "batch",
        "processing_failed",
        "A bug in Kiln: the query `batch` raised an exception for a record of `kiln.updates`, whose update is in no "
        "batch.",
        _REBUILD,
    ),
    Fault(
        "publisher",
        "batches_gone",
        "Kafka deleted records of `kiln.batches` before the bridge read them, so the bridge never published these "
        "batches.",
        _RETENTION,
    ),
    Fault(
        "publisher",
        "batch_malformed",
        "A record of `kiln.batches` is invalid, so the bridge cannot publish the batch.",
        _WRITER,
    ),
    Fault(
        "sink",
        "record_malformed",
        "A record of one of Kiln's topics is invalid, and the query `sink` cannot store it.",
        _WRITER,
    ),
    Fault(
        "sink",
        "processing_failed",
        "A bug in Kiln: the query `sink` raised an exception for a record of Kafka, or for a row that it made of it.",
        f"{_REBUILD} Of the rows that `sink` writes, a backfill rebuilds those from `kiln.updates` and `kiln.batches`. "
        "For other topics, `data` keeps the record.",
    ),
    Fault(
        "sink",
        "entry_malformed",
        "The block of another node's batch has an invalid entry for a stream. The tips of its other streams are in "
        "the table `tips`.",
        _ANNOUNCER,
    ),
)
"""All faults, in the order in which a message passes the stages. Each pair of stage and reason occurs once."""

BEGIN: Final = "<!-- made from schemas/faults.py -->"
END: Final = "<!-- end of what is made from schemas/faults.py -->"


def markdown() -> str:
    """Render the faults as Markdown for the runbook: a table per shared remedy, then a table of all other faults."""
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
    """Replace the tables of faults in the text of the runbook.

    Raises:
        ValueError: A marker is missing, or occurs more than once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the runbook must have each of the lines {BEGIN!r} and {END!r} once. Add or remove them")
    before, _, rest = page.partition(BEGIN)
    return before + markdown() + rest.partition(END)[2]


if __name__ == "__main__":
    runbook = Path(sys.argv[1])
    runbook.write_text(insert_tables(runbook.read_text(encoding="utf-8")), encoding="utf-8")
