//! Records of `kiln.frames` to rows of `frames`, `copies`, `messages`, `subscriptions` and `controls`.

use crate::call::{estimate_row, Call};
use crate::columns::{Bigint, Binary, Bool, Int, List, Text, TextMap, Timestamp};
use crate::decoder::{Copy, Core, Decoder, Parts, Topic, VERDICT_NAMES};
use crate::frame::{Frame, BEP50, DIRECTIONS, ORIGINS};
use crate::ids::push_hex;
use crate::table;
use std::rc::Rc;

table! { Frames {
    network: Text, connection: Binary, direction: Text, local_peer: Text, remote_peer: Text, protocol: Text,
    observed_at: Timestamp, sequence: Bigint, payload: Binary, hello_in: Binary, hello_out: Binary, verdicts: Binary,
    origin: Text, remote_address: Binary, declared_length: Bigint, kafka_partition: Int, kafka_offset: Bigint,
    kafka_timestamp: Timestamp, agent: Text, end_reason: Text, dialled: Bool,
} }
table! { Copies {
    network: Text, message_id: Text, remote_peer: Text, observed_at: Timestamp, verdict: Text, kafka_partition: Int,
    kafka_offset: Bigint, message_index: Int,
} }
table! { Messages {
    message_id: Text, network: Text, origin: Text, topic: Text, topic_source: Text, r#type: Text, from_peer: Text,
    seqno: Binary, stream: Text, tip: Text, model: Text, sep: Text, batch_cid: Text, query_id: Text, tips: TextMap,
    ts: Bigint, ver: Text, ipfs_ver: Text, data: Binary, verdict: Text, remote_peer: Text, observed_at: Timestamp,
    kafka_partition: Int, kafka_offset: Bigint, message_index: Int, decoded: Text,
} }
table! { Subscriptions {
    network: Text, origin: Text, connection: Binary, direction: Text, local_peer: Text, remote_peer: Text,
    observed_at: Timestamp, subscribe: Bool, topic: Text, topic_source: Text, topic_index: Bigint, raw: Binary,
    wire_bytes: Int, kafka_partition: Int, kafka_offset: Bigint, entry_index: Int,
} }
table! { Controls {
    network: Text, origin: Text, connection: Binary, direction: Text, local_peer: Text, remote_peer: Text,
    observed_at: Timestamp, kind: Text, topic: Text, topic_source: Text, topic_index: Bigint, message_ids: List,
    message_id_count: Int, peer_count: Int, backoff: Bigint, raw: Binary, wire_bytes: Int, kafka_partition: Int,
    kafka_offset: Bigint, entry_index: Int,
} }
table! {
    /// Identity of each row of `frames`. `row`: of its record; `key`: of `FrameRanges`.
    FrameKeys { row: Int, key: Binary, sequence: Bigint, }
}
table! {
    /// Digests and position of each row of `messages`, and the row of its record.
    Identities { row: Int, early: Binary, late: Binary, position: Text, }
}
/// Rows of some consecutive records. Of `messages` there is a row for each copy, and all tables have the rows of frames
/// that came twice.
#[derive(Default)]
pub struct ArchiveRows {
    pub frames: Frames,
    pub copies: Copies,
    pub messages: Messages,
    pub subscriptions: Subscriptions,
    pub controls: Controls,
    pub frame_keys: FrameKeys,
    pub identities: Identities,
}

impl Core {
    pub fn archive(&mut self, call: &mut Call) -> ArchiveRows {
        let mut out = ArchiveRows::default();
        let Core { config, streams, tables, signatures, peers, sampler } = self;
        let mut decoder = Decoder { config, streams, tables, signatures, peers };
        while let Some(row) = call.next_row() {
            let (frame, parts) = match call.read(row, sampler, |value| decoder.read_parts(value)) {
                Some(read) => read,
                None => continue,
            };
            let records = call.records;
            let source = Source {
                row,
                partition: records.partitions[row],
                offset: records.offsets[row],
                stamp: records.stamps[row],
                local: decoder.peers.format(frame.local_peer),
                remote: decoder.peers.format(frame.remote_peer),
            };
            out.frames.push(&frame, &source);
            out.frame_keys.push(&frame, &source);
            out.push_control(&frame, &source, &parts);
            for copy in &parts.copies {
                out.copies.push(&frame, &source, copy);
                out.messages.push(&frame, &source, copy);
                out.identities.push(&frame, &source, copy, config.unsigned_horizon);
            }
            let topics = parts.topics.iter().chain(parts.copies.iter().map(|copy| &copy.topic));
            call.row_bytes += topics.map(estimate_row).sum::<usize>() + parts.id_texts.len();
        }
        out
    }
}

/// Position of a record, and the texts of the peers of its frame.
struct Source {
    row: usize,
    partition: i32,
    offset: i64,
    stamp: i64,
    local: Rc<[u8]>,
    remote: Rc<[u8]>,
}

impl Frames {
    /// `build_frame_row`.
    fn push(&mut self, frame: &Frame, source: &Source) {
        self.rows += 1;
        self.network.push(frame.network);
        self.connection.push(frame.connection);
        self.direction.push(DIRECTIONS[usize::from(frame.direction)]);
        if frame.protocol == BEP50 {
            self.local_peer.push(format_node(frame.local_peer));
            self.remote_peer.push(format_node(frame.remote_peer));
        } else {
            self.local_peer.push(&source.local);
            self.remote_peer.push(&source.remote);
        }
        self.protocol.push(frame.protocol);
        self.observed_at.push(frame.observed_at());
        self.sequence.push(frame.sequence);
        self.payload.push(frame.payload);
        self.hello_in.push(frame.hello_in);
        self.hello_out.push(frame.hello_out);
        self.verdicts.push(frame.verdicts);
        self.origin.push(ORIGINS[usize::from(frame.origin)]);
        self.remote_address.push(frame.remote_address);
        self.declared_length.push(frame.declared_length);
        self.kafka_partition.push(source.partition);
        self.kafka_offset.push(source.offset);
        self.kafka_timestamp.push(source.stamp);
        // the closing frame of a connection has a record of it
        let dialled = if frame.payload.is_empty() { frame.dialled } else { None };
        let note = |text: &'_ str| if dialled.is_none() || text.is_empty() { None } else { Some(text.to_string()) };
        self.agent.push_optional(note(frame.agent));
        self.end_reason.push_optional(note(frame.end_reason));
        self.dialled.push_optional(dialled);
    }
}

/// Formats a node id of the BitTorrent DHT.
fn format_node(raw: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(2 * raw.len());
    push_hex(raw, &mut text);
    text
}

impl FrameKeys {
    /// `build_range_key`.
    fn push(&mut self, frame: &Frame, source: &Source) {
        self.rows += 1;
        self.row.push(source.row as i32);
        self.key.push([frame.connection, &[frame.direction]].concat());
        self.sequence.push(frame.sequence);
    }
}

impl Copies {
    /// `build_copy_row`.
    fn push(&mut self, frame: &Frame, source: &Source, copy: &Copy) {
        self.rows += 1;
        self.network.push(copy.topic.network);
        self.message_id.push(&copy.id);
        self.remote_peer.push(&source.remote);
        self.observed_at.push(frame.observed_at());
        self.verdict.push(VERDICT_NAMES[usize::from(copy.given)]);
        self.kafka_partition.push(source.partition);
        self.kafka_offset.push(source.offset);
        self.message_index.push(copy.index);
    }
}

impl Messages {
    /// `build_message_row`.
    fn push(&mut self, frame: &Frame, source: &Source, copy: &Copy) {
        let content = &copy.content;
        self.rows += 1;
        self.message_id.push(&copy.id);
        self.network.push(copy.topic.network);
        self.origin.push(ORIGINS[usize::from(frame.origin)]);
        self.topic.push_optional(copy.topic.name);
        self.topic_source.push_optional(copy.topic.source);
        self.r#type.push(content.kind);
        self.from_peer.push_optional(copy.author.as_deref());
        let has_author = copy.author.as_ref().map_or(false, |author| !author.is_empty());
        self.seqno.push_optional(if has_author { Some(copy.message.seqno) } else { None });
        self.stream.push_optional(content.stream.as_deref());
        self.tip.push_optional(content.tip.as_deref());
        self.model.push_optional(content.model.as_deref());
        self.sep.push_optional(content.sep.as_deref());
        self.batch_cid.push_optional(content.batch.as_deref());
        self.query_id.push_optional(content.query_id.as_deref());
        self.tips.push_optional(content.tips.as_deref());
        self.ts.push_optional(content.ts);
        self.ver.push_optional(content.ver.as_deref());
        self.ipfs_ver.push_optional(content.ipfs_ver.as_deref());
        self.data.push(copy.message.data);
        self.verdict.push(VERDICT_NAMES[usize::from(copy.verdict)]);
        self.remote_peer.push(&source.remote);
        self.observed_at.push(frame.observed_at());
        self.kafka_partition.push(source.partition);
        self.kafka_offset.push(source.offset);
        self.message_index.push(copy.index);
        self.decoded.push_optional(None::<&str>);
    }
}

impl Identities {
    fn push(&mut self, frame: &Frame, source: &Source, copy: &Copy, horizon: i64) {
        let (early, late) = copy.compute_identities(frame.observed_at(), horizon);
        self.rows += 1;
        self.row.push(source.row as i32);
        self.early.push(early);
        self.late.push_optional(late);
        self.position.push(format!("{}/{}/{}", source.partition, source.offset, copy.index));
    }
}

/// Pushes the columns that `subscriptions` and `controls` share.
macro_rules! push_entry {
    ($table:ident, $frame:ident, $source:ident, $topic:ident, $wire_bytes:expr, $index:ident) => {
        $table.rows += 1;
        $table.network.push($topic.network);
        $table.origin.push(ORIGINS[usize::from($frame.origin)]);
        $table.connection.push($frame.connection);
        $table.direction.push(DIRECTIONS[usize::from($frame.direction)]);
        $table.local_peer.push(&$source.local);
        $table.remote_peer.push(&$source.remote);
        $table.observed_at.push($frame.observed_at());
        $table.topic.push_optional($topic.name);
        $table.topic_source.push_optional($topic.source);
        $table.topic_index.push_optional($topic.index);
        $table.wire_bytes.push($wire_bytes);
        $table.kafka_partition.push($source.partition);
        $table.kafka_offset.push($source.offset);
        $table.entry_index.push($index as i32);
    };
}

impl ArchiveRows {
    /// `build_control_rows`.
    fn push_control(&mut self, frame: &Frame, source: &Source, parts: &Parts) {
        let (subscribed, controlled): (&[Topic], &[Topic]) = parts.topics.split_at(parts.rpc.subscriptions.len());
        let table = &mut self.subscriptions;
        for (index, (entry, topic)) in parts.rpc.subscriptions.iter().zip(subscribed).enumerate() {
            push_entry!(table, frame, source, topic, entry.wire_bytes, index);
            table.subscribe.push_optional(Some(entry.subscribe));
            table.raw.push_optional(entry.raw);
        }
        let table = &mut self.controls;
        for (index, (entry, topic)) in parts.rpc.controls.iter().zip(controlled).enumerate() {
            push_entry!(table, frame, source, topic, entry.wire_bytes, index);
            table.kind.push(entry.kind.name());
            table.raw.push_optional(None::<&[u8]>);
            table.message_ids.push_optional(entry.ids.clone().map(|ids| ids.map(|id| parts.id(id))));
            table.message_id_count.push_optional(entry.ids.as_ref().map(|ids| ids.len() as i32));
            table.peer_count.push_optional(entry.peer_count);
            table.backoff.push_optional(entry.backoff);
        }
    }
}
