//! Records of `kiln.frames` to the messages that the query `updates` reads: UPDATE and BATCH_UPDATE.

use crate::call::{estimate_row, Call};
use crate::columns::{Bigint, Binary, Int, Text};
use crate::decoder::{Copy, Core, Decoder};
use crate::frame::{Frame, ORIGINS};
use crate::hash::blake2b_16;
use crate::table;

table! {
    /// A row for each copy: what makes a `DecodedMessage`. `row`: of its record; `same`: digest that is equal for copies
    /// whose rows of `updates` have equal identities.
    Updates {
        row: Int, same: Binary, message_index: Int, message_id: Text, network: Text, origin: Text, topic: Text,
        topic_source: Text, separator_key: Text, separator_value: Text, given_verdict: Int, verdict: Int,
        remote_peer: Text, observed_at: Bigint, envelope: Binary, r#type: Text, stream: Text, tip: Text, model: Text,
        sep: Text, batch: Text, own: Int,
    }
}

impl Core {
    /// Decodes the records of a call.
    pub fn updates(&mut self, call: &mut Call) -> Updates {
        let mut updates = Updates::default();
        let Core { config, streams, tables, signatures, peers, sampler } = self;
        let mut decoder = Decoder { config, streams, tables, signatures, peers };
        while let Some(row) = call.next_row() {
            let (frame, copies) = match call.read(row, sampler, |value| decoder.read_copies(value)) {
                Some(read) => read,
                None => continue,
            };
            let remote = decoder.peers.format(frame.remote_peer);
            for copy in copies.iter().filter(|copy| matches!(copy.content.kind, "UPDATE" | "BATCH_UPDATE")) {
                updates.push(&frame, row, &remote, copy, config.unsigned_horizon);
                call.row_bytes += estimate_row(&copy.topic);
            }
        }
        updates
    }
}

impl Updates {
    fn push(&mut self, frame: &Frame, row: usize, remote: &[u8], copy: &Copy, horizon: i64) {
        let (content, separator) = (&copy.content, copy.topic.separator.as_ref());
        let is_own = copy.message.from == frame.local_peer && !frame.local_peer.is_empty();
        self.rows += 1;
        self.row.push(row as i32);
        self.same.push(compute_same(frame, copy, is_own, horizon));
        self.message_index.push(copy.index);
        self.message_id.push(&copy.id);
        self.network.push(copy.topic.network);
        self.origin.push(ORIGINS[usize::from(frame.origin)]);
        self.topic.push_optional(copy.topic.name);
        self.topic_source.push_optional(copy.topic.source);
        self.separator_key.push_optional(separator.map(|each| each.key));
        self.separator_value.push_optional(separator.map(|each| each.value.as_ref()));
        self.given_verdict.push(i32::from(copy.given));
        self.verdict.push(i32::from(copy.verdict));
        self.remote_peer.push(remote);
        self.observed_at.push(frame.observed_at());
        self.envelope.push(copy.message.envelope);
        self.r#type.push(content.kind);
        self.stream.push_optional(content.stream.as_deref());
        self.tip.push_optional(content.tip.as_deref());
        self.model.push_optional(content.model.as_deref());
        self.sep.push_optional(content.sep.as_deref());
        self.batch.push_optional(content.batch.as_deref());
        self.own.push(i32::from(is_own));
    }
}

/// Computes the digest of all that the identities of the rows depend on. The rows also have the peer and the time of
/// the copy, of which that of the first copy counts.
fn compute_same(frame: &Frame, copy: &Copy, is_own: bool, horizon: i64) -> [u8; 16] {
    let (content, separator) = (&copy.content, copy.topic.separator.as_ref());
    // an unsigned message may be sent again, and has another identity in each span of time
    let span = if copy.is_lasting() { i64::MIN } else { frame.observed_at().div_euclid(horizon) };
    let mut bytes = Vec::with_capacity(512);
    bytes.extend([frame.origin, copy.verdict, u8::from(is_own)]);
    bytes.extend(span.to_le_bytes());
    for text in [
        Some(content.kind),
        Some(copy.topic.network),
        separator.map(|each| each.key),
        separator.map(|each| each.value.as_ref()),
        content.stream.as_deref(),
        content.tip.as_deref(),
        content.model.as_deref(),
        content.sep.as_deref(),
        content.batch.as_deref(),
    ] {
        let size = text.map_or(u64::MAX, |text| text.len() as u64);
        bytes.extend(size.to_le_bytes());
        bytes.extend(text.unwrap_or_default().as_bytes());
    }
    bytes.extend(&copy.id);
    blake2b_16(&bytes)
}
