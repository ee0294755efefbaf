//! Signatures that the bridge has not checked. Python checks them, and the core learns its verdicts.

use crate::call::Call;
use crate::columns::{Binary, Text};
use crate::decoder::{resolve_topic, Core, Topic, NOT_CHECKED};
use crate::frame::{Frame, IN, ORIGINS};
use crate::rpc::{Message, Rpc};
use crate::{require, table, Mine};
use std::collections::{HashMap, HashSet};

/// Bytes of the messages whose verdicts are stored, and of those that one call returns.
const MAX_BYTES: usize = 16 << 20;
const ED25519_PEER: [u8; 6] = [0x00, 0x24, 0x08, 0x01, 0x12, 0x20];
const ED25519_PEER_BYTES: usize = 38;

table! {
    /// Messages with a signature to check. `key`: for `Signatures::learn`.
    Unchecked { key: Binary, envelope: Binary, network: Text, origin: Text, topic: Text, }
}

struct SignedMessage<'a> {
    key: Vec<u8>,
    origin: u8,
    topic: Topic<'a>,
    message: Message<'a>,
}

/// Python's verdicts: true for a valid signature.
#[derive(Default)]
pub struct Signatures {
    verdicts: HashMap<Vec<u8>, bool>,
    bytes: usize,
}

/// Everything that the verdict on a message depends on.
fn build_key(origin: u8, topic: &Topic, message: &Message) -> Vec<u8> {
    let name = topic.name.unwrap_or_default();
    let mut key = Vec::with_capacity(32 + topic.network.len() + name.len() + message.envelope.len());
    key.push(origin);
    for text in [topic.network, name] {
        key.extend((text.len() as u64).to_le_bytes());
        key.extend(text.as_bytes());
    }
    key.extend(message.envelope);
    key
}

/// True for an author with an ed25519 key. Those of one RPC cost less than `MAX_RPC_COST`, at which Python stops to
/// check, because `Rpc::read` bounds its bytes. Other keys cost more, and are rare.
fn has_ed25519_author(message: &Message) -> bool {
    message.from.len() == ED25519_PEER_BYTES && message.from.starts_with(&ED25519_PEER)
}

impl Signatures {
    pub fn learn(&mut self, key: &[u8], is_valid: bool) {
        self.bytes += key.len();
        self.verdicts.insert(key.to_vec(), is_valid);
    }

    pub fn are_valid(&self, origin: u8, topic: &Topic, message: &Message) -> bool {
        has_ed25519_author(message) && self.verdicts.get(&build_key(origin, topic, message)) == Some(&true)
    }
}

impl Core {
    /// Finds the signatures to check before the records of a call are decoded, each once.
    pub fn find_unchecked(&mut self, call: &Call) -> Unchecked {
        if self.signatures.bytes > MAX_BYTES {
            self.signatures = Signatures::default();
        }
        let (mut unchecked, mut keys, mut bytes) = (Unchecked::default(), HashSet::new(), 0);
        for row in call.rows() {
            let value = call.records.value(row).unwrap_or_default();
            for SignedMessage { key, origin, topic, message } in self.list_unchecked(value).unwrap_or_default() {
                if bytes < MAX_BYTES && !self.signatures.verdicts.contains_key(&key) && !keys.contains(&key) {
                    bytes += key.len() + message.envelope.len();
                    unchecked.rows += 1;
                    unchecked.key.push(&key);
                    unchecked.envelope.push(message.envelope);
                    unchecked.network.push(topic.network);
                    unchecked.origin.push(ORIGINS[usize::from(origin)]);
                    unchecked.topic.push_optional(topic.name);
                    keys.insert(key);
                }
            }
        }
        unchecked
    }

    fn list_unchecked<'a>(&'a self, record: &'a [u8]) -> Mine<Vec<SignedMessage<'a>>> {
        let frame = Frame::read(record)?;
        let is_checked = !frame.verdicts.is_empty() && !frame.verdicts.contains(&NOT_CHECKED);
        require(frame.direction == IN && frame.has_rpc() && !is_checked)?;
        let table = self.tables.find(&frame)?;
        let mut unchecked = vec![];
        for (index, message) in Rpc::read(frame.payload)?.messages.into_iter().enumerate() {
            let is_unchecked = frame.verdicts.get(index).map_or(true, |verdict| *verdict == NOT_CHECKED);
            if is_unchecked && message.is_signed {
                require(has_ed25519_author(&message))?;
                let topic = resolve_topic(message.topic, table, frame.network, &self.config)?;
                require(topic.name.is_some())?;
                let key = build_key(frame.origin, &topic, &message);
                unchecked.push(SignedMessage { key, origin: frame.origin, topic, message });
            }
        }
        Ok(unchecked)
    }
}
