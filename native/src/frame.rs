//! Frames: `read_frame` of schemas/kafka/frames.py.

use crate::protobuf::{read_bit, read_text, Fields, Value::Bytes, Value::Varint};
use crate::{require, Mine, NotMine};

pub const IN: u8 = 0;
pub const REPLAY: u8 = 1;
pub const BEP50: &str = "bep50";
pub const DIRECTIONS: [&str; 2] = ["IN", "OUT"];
pub const ORIGINS: [&str; 2] = ["LIVE", "REPLAY"];

/// Messages of one RPC that are read.
pub const MAX_MESSAGES: usize = 5_000;
/// Bytes of a peer id.
pub const MAX_PEER: usize = 64;
const CONNECTION_BYTES: usize = 16;
const MAX_NETWORK: usize = 256;
const MAX_PROTOCOL: usize = 256;
const MAX_HELLO: usize = 4_096; // Python reads longer ones, which no peer sends
const MAX_ADDRESS: usize = 1_024;
const MAX_NOTE: usize = 256;
const MAX_RPC: usize = 4 << 20;
const MIN_NANOS: i64 = 946_684_800_000_000_000; // the year 2000
const MAX_NANOS: i64 = 4_102_444_799_999_999_999; // the end of 2099

#[derive(Default)]
pub struct Frame<'a> {
    pub network: &'a str,
    pub connection: &'a [u8],
    pub direction: u8,
    pub local_peer: &'a [u8],
    pub remote_peer: &'a [u8],
    pub protocol: &'a str,
    observed_at: i64, // ns
    pub payload: &'a [u8],
    pub hello_in: &'a [u8],
    pub hello_out: &'a [u8],
    pub sequence: i64,
    pub verdicts: &'a [u8],
    pub origin: u8,
    pub remote_address: &'a [u8],
    pub declared_length: i64,
    pub agent: &'a str,
    pub end_reason: &'a str,
    pub dialled: Option<bool>,
}

impl<'a> Frame<'a> {
    /// Reads a Frame that Python accepts. Unknown fields are ignored, as there.
    pub fn read(bytes: &'a [u8]) -> Mine<Self> {
        let (mut fields, mut frame) = (Fields::new(bytes), Frame::default());
        while let Some((number, value)) = fields.next()? {
            match (number, value) {
                (1, Bytes(raw)) => frame.network = read_text(raw)?,
                (2, Bytes(raw)) => frame.connection = raw,
                (3, Varint(value)) => frame.direction = read_bit(value)?,
                (4, Bytes(raw)) => frame.local_peer = raw,
                (5, Bytes(raw)) => frame.remote_peer = raw,
                (6, Bytes(raw)) => frame.protocol = read_text(raw)?,
                (7, Varint(value)) => frame.observed_at = value as i64,
                (8, Bytes(raw)) => frame.payload = raw,
                (9, Bytes(raw)) => frame.hello_in = raw,
                (10, Bytes(raw)) => frame.hello_out = raw,
                (11, Varint(value)) => frame.sequence = read_bigint(value)?,
                (12, Bytes(raw)) => frame.verdicts = raw,
                (13, Varint(value)) => frame.origin = read_bit(value)?,
                (14, Bytes(raw)) => frame.remote_address = raw,
                (15, Varint(value)) => frame.declared_length = read_bigint(value)?,
                (16, Bytes(raw)) => frame.agent = read_text(raw)?,
                (17, Bytes(raw)) => frame.end_reason = read_text(raw)?,
                (18, Varint(value)) => frame.dialled = Some(read_bit(value)? == 1),
                (1..=18, _) => return Err(NotMine),
                _ => {}
            }
        }
        frame.check()?;
        Ok(frame)
    }

    /// Checks the limits. They count bytes where Python counts characters.
    fn check(&self) -> Mine<()> {
        require(
            self.connection.len() == CONNECTION_BYTES
                && self.sequence > 0
                && (1..=MAX_NETWORK).contains(&self.network.len())
                && (MIN_NANOS..=MAX_NANOS).contains(&self.observed_at)
                && self.remote_peer.len() <= MAX_PEER
                && self.local_peer.len() <= MAX_PEER
                && self.payload.len() <= MAX_RPC
                && self.protocol.len() <= MAX_PROTOCOL
                && self.hello_in.len() <= MAX_HELLO
                && self.hello_out.len() <= MAX_HELLO
                && self.remote_address.len() <= MAX_ADDRESS
                && self.agent.len() <= MAX_NOTE
                && self.end_reason.len() <= MAX_NOTE
                && self.verdicts.len() <= MAX_MESSAGES,
        )
    }

    /// Capture time, µs.
    pub fn observed_at(&self) -> i64 {
        self.observed_at / 1_000
    }

    /// True if the payload is a gossipsub RPC, whole.
    pub fn has_rpc(&self) -> bool {
        self.protocol != BEP50 && self.declared_length == 0
    }
}

fn read_bigint(value: u64) -> Mine<i64> {
    i64::try_from(value).map_err(|_| NotMine)
}
