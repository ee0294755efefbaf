//! One Frame to its messages and control entries: `decode_parts` of pipelines/archive/rows.py.

use crate::call::Call;
use crate::content::Content;
use crate::frame::{Frame, IN, MAX_PEER, REPLAY};
use crate::hash::{blake2b_16, sha256};
use crate::ids::{format_peer, push_content_id, push_message_id, GossipId, StreamReader};
use crate::rpc::{Message, Rpc, WireTopic, MAX_TOPIC};
use crate::signatures::Signatures;
use crate::topics::{parse_topic, CeramicTopic, Separator};
use crate::{require, Mine, NotMine};
use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, HashSet};
use std::hash::Hasher;
use std::rc::Rc;

/// Verdicts of the bridge: `Verdict` of schemas/wire/identity.py.
pub const NOT_CHECKED: u8 = 0;
pub const VALID: u8 = 1;
pub const INVALID: u8 = 2;
pub const UNSIGNED: u8 = 3;
pub const AGAINST_POLICY: u8 = 4;
pub const VERDICT_NAMES: [&str; 4] = ["not_checked", "valid", "invalid", "unsigned"];

const MAX_PEER_TEXTS: usize = 65_536;
const MAX_TOPIC_TABLES: usize = 1_024;

/// Everything that decoding depends on in addition to the bytes: `DecodeConfig`.
#[derive(Clone, Copy)]
pub struct Config {
    pub batch_typ: i64,
    pub unsigned_horizon: i64, // µs
    pub is_ceramic: bool,
}

/// Decoder of the records of one task after another.
pub struct Core {
    pub config: Config,
    pub streams: StreamReader,
    pub peers: PeerTexts,
    pub tables: TopicTables,
    pub signatures: Signatures,
    pub sampler: Sampler,
}

/// Choice of the records that Python decodes too. It depends on a seed, so that no peer can choose its records.
pub struct Sampler {
    pub seed: u64,
    pub one_in: u64,
}

impl Sampler {
    pub fn selects(&self, record: &[u8]) -> bool {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.seed);
        hasher.write(record);
        hasher.finish() % self.one_in == 0
    }
}

/// Texts of peer ids, which nearly all records repeat.
#[derive(Default)]
pub struct PeerTexts(HashMap<Vec<u8>, Rc<[u8]>>);

impl PeerTexts {
    /// Formats a peer id of at most `MAX_PEER` bytes.
    pub fn format(&mut self, raw: &[u8]) -> Rc<[u8]> {
        if let Some(text) = self.0.get(raw) {
            return text.clone();
        }
        let text: Rc<[u8]> = format_peer(raw).into();
        if self.0.len() >= MAX_PEER_TEXTS {
            self.0.clear();
        }
        self.0.insert(raw.to_vec(), text.clone());
        text
    }
}

/// Topic tables by pairs of hellos, as Python has negotiated them. `None`: a hello was refused, which is a fault of each
/// frame, so that Python decodes them.
#[derive(Default)]
pub struct TopicTables(HashMap<Vec<u8>, Option<Vec<String>>>);

impl TopicTables {
    fn build_key(hello_in: &[u8], hello_out: &[u8]) -> Vec<u8> {
        [&(hello_in.len() as u64).to_le_bytes(), hello_in, hello_out].concat()
    }

    pub fn learn(&mut self, hello_in: &[u8], hello_out: &[u8], topics: Option<Vec<String>>) {
        if self.0.len() >= MAX_TOPIC_TABLES {
            self.0.clear();
        }
        self.0.insert(Self::build_key(hello_in, hello_out), topics);
    }

    /// The topics of a connection by index, the first at 0.
    pub fn find(&self, frame: &Frame) -> Mine<&[String]> {
        if frame.hello_in.is_empty() && frame.hello_out.is_empty() {
            return Ok(&[]);
        }
        match self.0.get(&Self::build_key(frame.hello_in, frame.hello_out)) {
            Some(Some(topics)) => Ok(topics),
            _ => Err(NotMine),
        }
    }

    /// Finds the first record of each pair of hellos that was not learnt, as many as there is room for.
    pub fn find_unknown(&self, call: &Call) -> Vec<usize> {
        let (mut unknown, mut pairs) = (vec![], HashSet::new());
        for row in call.rows() {
            if let Ok(frame) = Frame::read(call.records.value(row).unwrap_or_default()) {
                let pair = (frame.hello_in, frame.hello_out);
                let is_new = pair != (&[], &[]) && pairs.len() < MAX_TOPIC_TABLES && pairs.insert(pair);
                if is_new && !self.0.contains_key(&Self::build_key(frame.hello_in, frame.hello_out)) {
                    unknown.push(row);
                }
            }
        }
        unknown
    }
}

/// Cause for which a record is left to Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Left {
    NotMine = 0,
    Panicked = 1,
}

/// A topic as the tables have it.
pub struct Topic<'a> {
    pub name: Option<&'a str>,
    pub source: Option<&'static str>,
    pub index: Option<i64>,
    pub network: &'a str,
    pub separator: Option<Separator<'a>>,
}

/// A valid message.
pub struct Copy<'a> {
    pub index: i32,
    pub message: Message<'a>,
    pub topic: Topic<'a>,
    pub id: Vec<u8>,
    /// verdict of the bridge
    pub given: u8,
    /// the same, or our own
    pub verdict: u8,
    pub author: Option<Rc<[u8]>>,
    pub content: Content<'a>,
}

impl Copy<'_> {
    /// True if copies are identified as long as digests are stored: `is_lasting` of pipelines/decode/decoder.py.
    pub fn is_lasting(&self) -> bool {
        self.verdict == VALID && self.message.is_signed
    }

    /// Computes the digests of `compute_identities` in the empty scope; one for a lasting message.
    pub fn compute_identities(&self, observed_at: i64, horizon: i64) -> ([u8; 16], Option<[u8; 16]>) {
        let start = [b"\n", self.topic.network.as_bytes(), b"\n", &self.id].concat();
        if self.is_lasting() {
            return (blake2b_16(&start), None);
        }
        let digest = |span: i64| blake2b_16(&[&start[..], format!("\n{}", span).as_bytes()].concat());
        let late = (observed_at + horizon / 2).div_euclid(horizon);
        (digest(observed_at.div_euclid(horizon)), Some(digest(late)))
    }
}

/// What a frame holds.
#[derive(Default)]
pub struct Parts<'a> {
    pub rpc: Rpc<'a>,
    pub copies: Vec<Copy<'a>>,
    /// topics of the subscriptions, then of the control entries
    pub topics: Vec<Topic<'a>>,
    /// texts of `rpc.ids`, one after another, and their ends
    pub id_texts: Vec<u8>,
    pub id_ends: Vec<usize>,
}

impl Parts<'_> {
    /// The text of an id of `rpc.ids`.
    pub fn id(&self, index: usize) -> &[u8] {
        let start = if index == 0 { 0 } else { self.id_ends[index - 1] };
        &self.id_texts[start..self.id_ends[index]]
    }
}

/// Decoder of the frames of one record batch.
pub struct Decoder<'c> {
    pub config: &'c Config,
    pub streams: &'c StreamReader,
    pub tables: &'c TopicTables,
    pub signatures: &'c Signatures,
    pub peers: &'c mut PeerTexts,
}

impl<'c: 'a, 'a> Decoder<'c> {
    /// Decodes a frame with its messages and control part.
    pub fn read_parts(&mut self, record: &'a [u8]) -> Mine<(Frame<'a>, Parts<'a>)> {
        let (frame, mut parts) = (Frame::read(record)?, Parts::default());
        if !has_rpc_to_read(&frame)? {
            return Ok((frame, parts));
        }
        let table = self.tables.find(&frame)?;
        parts.rpc = Rpc::read(frame.payload)?;
        if frame.direction == IN {
            parts.copies = self.read_messages(&frame, table, &parts.rpc.messages, |_| true)?;
        }
        let subscribed = parts.rpc.subscriptions.iter().map(|entry| entry.topic);
        for topic in subscribed.chain(parts.rpc.controls.iter().map(|entry| entry.topic)) {
            parts.topics.push(resolve_topic(topic, table, frame.network, self.config)?);
        }
        for raw in &parts.rpc.ids {
            self.push_gossip_id(raw, &mut parts.id_texts)?;
            parts.id_ends.push(parts.id_texts.len());
        }
        Ok((frame, parts))
    }

    /// Decodes a frame with the messages that the bridge did not refuse.
    pub fn read_copies(&mut self, record: &'a [u8]) -> Mine<(Frame<'a>, Vec<Copy<'a>>)> {
        let (frame, mut copies) = (Frame::read(record)?, vec![]);
        if has_rpc_to_read(&frame)? && frame.direction == IN {
            let table = self.tables.find(&frame)?;
            let rpc = Rpc::read(frame.payload)?;
            let is_read = |given| !matches!(given, INVALID | AGAINST_POLICY);
            copies = self.read_messages(&frame, table, &rpc.messages, is_read)?;
        }
        Ok((frame, copies))
    }

    /// Decodes the received messages of whose verdicts a condition holds.
    fn read_messages(
        &mut self,
        frame: &Frame<'a>,
        table: &'a [String],
        messages: &[Message<'a>],
        is_read: impl Fn(u8) -> bool,
    ) -> Mine<Vec<Copy<'a>>> {
        require(messages.is_empty() || frame.verdicts.len() <= messages.len())?;
        let mut copies = Vec::with_capacity(messages.len());
        for (index, message) in messages.iter().enumerate() {
            let given = frame.verdicts.get(index).copied().unwrap_or(NOT_CHECKED);
            if is_read(given) {
                copies.push(self.read_copy(frame, table, index, *message, given)?);
            }
        }
        Ok(copies)
    }

    /// Decodes a message. `given`: the bridge's verdict on it.
    fn read_copy(
        &mut self,
        frame: &Frame<'a>,
        table: &'a [String],
        index: usize,
        message: Message<'a>,
        given: u8,
    ) -> Mine<Copy<'a>> {
        require(message.from.len() <= MAX_PEER)?;
        let topic = resolve_topic(message.topic, table, frame.network, self.config)?;
        require(topic.name.is_some())?;
        let verdict = match given {
            VALID | UNSIGNED => given,
            NOT_CHECKED if message.is_signed && self.signatures.are_valid(frame.origin, &topic, &message) => VALID,
            NOT_CHECKED if frame.origin == REPLAY && !message.is_signed => UNSIGNED,
            _ => return Err(NotMine), // it is refused, or its signature is
        };
        let mut id = Vec::with_capacity(80);
        if message.is_signed {
            push_message_id(&self.peers.format(message.from), message.seqno, &mut id)?;
        } else {
            push_content_id(&sha256(message.data), &mut id);
        }
        let author = if verdict == VALID { Some(self.peers.format(message.from)) } else { None };
        let content = if self.config.is_ceramic {
            Content::read(message.data, self.streams, self.config.batch_typ)?
        } else {
            Content { kind: "DATA", ..Content::default() }
        };
        Ok(Copy { index: index as i32, message, topic, id, given, verdict, author, content })
    }

    fn push_gossip_id(&mut self, raw: &[u8], text: &mut Vec<u8>) -> Mine<()> {
        match GossipId::read(raw)? {
            GossipId::Content(digest) => push_content_id(digest, text),
            GossipId::Signed { author, seqno } => push_message_id(&self.peers.format(&author), seqno, text)?,
        }
        Ok(())
    }
}

/// True for a frame whose RPC is to be read.
fn has_rpc_to_read(frame: &Frame) -> Mine<bool> {
    if frame.direction != IN {
        // only a message that our node publishes has a verdict there, and it is a message of its own
        require(frame.verdicts.iter().all(|verdict| *verdict == NOT_CHECKED))?;
    } else if !frame.has_rpc() {
        // a datagram with a message, or the fault of an RPC that was cut
        require(frame.payload.is_empty() && frame.declared_length == 0)?;
    }
    Ok(frame.has_rpc())
}

pub fn resolve_topic<'a>(
    wire: WireTopic<'a>,
    table: &'a [String],
    network: &'a str,
    config: &Config,
) -> Mine<Topic<'a>> {
    let (name, source, index) = match wire {
        WireTopic { name: Some(name), .. } => (Some(name), Some("name"), None),
        WireTopic { index: Some(index), .. } => {
            let name = (index as usize).checked_sub(1).and_then(|at| table.get(at)).ok_or(NotMine)?;
            (Some(name.as_str()), Some("index"), Some(i64::from(index)))
        }
        _ => (None, None, None),
    };
    require(name.map_or(true, |name| name.len() <= MAX_TOPIC))?;
    let parsed = if config.is_ceramic { name.and_then(parse_topic) } else { None };
    let CeramicTopic { network, separator } = parsed.unwrap_or(CeramicTopic { network, separator: None });
    Ok(Topic { name, source, index, network, separator })
}
