//! Gossipsub RPCs: messages, subscriptions and control entries, as schemas/wire/control.py lists them.

use crate::frame::MAX_MESSAGES;
use crate::protobuf::{read_bit, read_text, read_u32, set_once, Fields, Value, Value::Bytes, Value::Varint};
use crate::{require, Mine, NotMine};

/// Bytes of an RPC. A smaller one never has more than `rpc_items.MAX_ITEMS` items, of at least two bytes each.
const MAX_PAYLOAD: usize = 100_000;
const MAX_IDS: usize = 5_000;
const MAX_ENTRIES: usize = 20_000;
const MAX_RAW: usize = 64 * 1024;
/// Bytes of a topic name; Python counts characters.
pub const MAX_TOPIC: usize = 4_096;

/// A topic on the wire: its name, its index, both or neither.
#[derive(Clone, Copy, Default)]
pub struct WireTopic<'a> {
    pub name: Option<&'a str>,
    pub index: Option<u32>,
}

#[derive(Clone, Copy, Default)]
pub struct Message<'a> {
    pub from: &'a [u8],
    pub data: &'a [u8],
    pub seqno: &'a [u8],
    pub topic: WireTopic<'a>,
    pub is_signed: bool,
    /// the message on the wire
    pub envelope: &'a [u8],
}

impl<'a> Message<'a> {
    /// Reads a message. Unknown fields are covered by the signature, which the bridge has checked.
    fn read(bytes: &'a [u8]) -> Mine<Self> {
        let (mut fields, mut message, mut name) = (Fields::new(bytes), Message::default(), None);
        while let Some((number, value)) = fields.next()? {
            match (number, value) {
                (1, Bytes(raw)) => message.from = raw,
                (2, Bytes(raw)) => message.data = raw,
                (3, Bytes(raw)) => message.seqno = raw,
                (4, Bytes(raw)) => name = Some(raw),
                (5, Bytes(_)) => message.is_signed = true,
                (6, Bytes(_)) => {} // key
                (7, Varint(index)) => message.topic.index = Some(read_u32(index)?),
                (1..=7, _) => return Err(NotMine),
                _ => {}
            }
        }
        message.topic.name = name.map(read_text).transpose()?;
        message.envelope = bytes;
        Ok(message)
    }
}

pub struct Subscription<'a> {
    pub subscribe: bool,
    pub topic: WireTopic<'a>,
    /// the entry, if it has unknown fields or more about its topic than `topic`
    pub raw: Option<&'a [u8]>,
    pub wire_bytes: i32,
}

/// Kinds of control entries, in the order of their rows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    IHave,
    IWant,
    Graft,
    Prune,
    IDontWant,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::IHave => "IHAVE",
            Kind::IWant => "IWANT",
            Kind::Graft => "GRAFT",
            Kind::Prune => "PRUNE",
            Kind::IDontWant => "IDONTWANT",
        }
    }
}

pub struct ControlEntry<'a> {
    pub kind: Kind,
    pub topic: WireTopic<'a>,
    /// range of the message ids in `Rpc.ids`
    pub ids: Option<std::ops::Range<usize>>,
    pub peer_count: Option<i32>,
    pub backoff: Option<i64>,
    pub wire_bytes: i32,
}

/// An RPC without extensions, and without unknown fields outside of messages and subscriptions.
#[derive(Default)]
pub struct Rpc<'a> {
    pub messages: Vec<Message<'a>>,
    pub subscriptions: Vec<Subscription<'a>>,
    pub controls: Vec<ControlEntry<'a>>,
    pub ids: Vec<&'a [u8]>,
}

impl<'a> Rpc<'a> {
    pub fn read(payload: &'a [u8]) -> Mine<Self> {
        require(payload.len() <= MAX_PAYLOAD)?;
        let (mut rpc, mut fields, mut control) = (Rpc::default(), Fields::new(payload), None);
        while let Some((number, value)) = fields.next()? {
            match (number, value) {
                (1, Bytes(raw)) => rpc.subscriptions.push(read_subscription(raw)?),
                (2, Bytes(raw)) => rpc.messages.push(Message::read(raw)?),
                (3, Bytes(raw)) => set_once(&mut control, raw)?,
                _ => return Err(NotMine),
            }
        }
        rpc.read_control(control.unwrap_or_default())?;
        require(rpc.messages.len() <= MAX_MESSAGES && rpc.ids.len() <= MAX_IDS)?;
        require(rpc.subscriptions.len() + rpc.controls.len() < MAX_ENTRIES)?;
        Ok(rpc)
    }

    fn read_control(&mut self, control: &'a [u8]) -> Mine<()> {
        let mut fields = Fields::new(control);
        while let Some((number, value)) = fields.next()? {
            match (number, value) {
                (1, Bytes(raw)) => self.read_entry(Kind::IHave, raw)?,
                (2, Bytes(raw)) => self.read_entry(Kind::IWant, raw)?,
                (3, Bytes(raw)) => self.read_entry(Kind::Graft, raw)?,
                (4, Bytes(raw)) => self.read_entry(Kind::Prune, raw)?,
                (5, Bytes(raw)) => self.read_entry(Kind::IDontWant, raw)?,
                _ => return Err(NotMine),
            }
        }
        self.controls.sort_by_key(|entry| entry.kind); // stable: each kind stays in the order of the wire
        Ok(())
    }

    fn read_entry(&mut self, kind: Kind, raw: &'a [u8]) -> Mine<()> {
        use Kind::{Graft, IDontWant, IHave, IWant, Prune};
        let (mut name, mut index, mut peer_count, mut backoff) = (None, None, 0, None);
        let first_id = self.ids.len();
        let mut fields = Fields::new(raw);
        while let Some((number, value)) = fields.next()? {
            match (kind, number, value) {
                (IHave | Graft | Prune, 1, Bytes(raw)) => set_once(&mut name, read_text(raw)?)?,
                (IHave, 2, Bytes(raw)) | (IWant | IDontWant, 1, Bytes(raw)) => self.ids.push(raw),
                (IHave, 3, Varint(value)) | (Graft, 2, Varint(value)) | (Prune, 4, Varint(value)) => {
                    set_once(&mut index, read_u32(value)?)?
                }
                (Prune, 2, Bytes(raw)) => {
                    check_exchanged_peer(raw)?;
                    peer_count += 1
                }
                (Prune, 3, Varint(value)) => set_once(&mut backoff, i64::try_from(value).unwrap_or(i64::MAX))?,
                _ => return Err(NotMine),
            }
        }
        require(name.is_none() || index.is_none())?; // Python stores the bytes of such an entry
        require(name.map_or(true, |name| name.len() <= MAX_TOPIC))?;
        let has_ids = matches!(kind, IHave | IWant | IDontWant);
        self.controls.push(ControlEntry {
            kind,
            topic: WireTopic { name, index },
            ids: if has_ids { Some(first_id..self.ids.len()) } else { None },
            peer_count: if kind == Prune { Some(peer_count) } else { None },
            backoff,
            wire_bytes: compute_wire_size(raw),
        });
        Ok(())
    }
}

/// Reads a subscription. Its fields must be in order: `raw` is what the library would write.
fn read_subscription(raw: &[u8]) -> Mine<Subscription<'_>> {
    let (mut subscribe, mut name, mut index) = (false, None, None);
    let (mut last, mut has_unknown) = (0, false);
    let mut fields = Fields::new(raw);
    while let Some((number, value)) = fields.next()? {
        require(number > last)?;
        last = number;
        match (number, value) {
            (1, Varint(value)) => subscribe = read_bit(value)? == 1,
            (2, Bytes(raw)) => name = Some(read_text(raw)?),
            (3, Varint(value)) => index = Some(read_u32(value)?),
            (1..=3, _) => return Err(NotMine),
            (_, Value::Bytes(_) | Value::Varint(_) | Value::Fixed) => has_unknown = true, // as of partial messages
        }
    }
    require(name.map_or(true, |name| name.len() <= MAX_TOPIC))?;
    let names_more = name.is_some() && index.is_some();
    Ok(Subscription {
        subscribe,
        topic: WireTopic { name, index: if name.is_none() { index } else { None } },
        raw: if names_more || has_unknown { Some(&raw[..raw.len().min(MAX_RAW)]) } else { None },
        wire_bytes: compute_wire_size(raw),
    })
}

/// Checks that a peer of a peer exchange has known fields alone, each once.
fn check_exchanged_peer(raw: &[u8]) -> Mine<()> {
    let (mut fields, mut id, mut record) = (Fields::new(raw), None, None);
    while let Some((number, value)) = fields.next()? {
        match (number, value) {
            (1, Bytes(_)) => set_once(&mut id, ())?,
            (2, Bytes(_)) => set_once(&mut record, ())?,
            _ => return Err(NotMine),
        }
    }
    Ok(())
}

/// Computes the bytes of an entry with its tag and length. Varints are minimal, so its own bytes are those on the wire.
fn compute_wire_size(content: &[u8]) -> i32 {
    let size = content.len() as i32; // less than MAX_PAYLOAD
    let bits = i32::BITS - size.leading_zeros();
    if size < 0x80 {
        size + 2
    } else {
        size + 1 + (bits as i32 + 6) / 7
    }
}
