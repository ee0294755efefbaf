//! Records of `kiln.updates` to what the query `batch` reads of them.

use crate::call::Call;
use crate::columns::{Bigint, Binary, Bool, Int, Text};
use crate::decoder::Core;
use crate::hash::blake2b_16;
use crate::ids::{decode_cid, StreamReader};
use crate::json::Parser;
use crate::{require, table, Mine};
use std::borrow::Cow;
use std::collections::HashMap;

// limits of schemas/kafka/records.py in characters, of which a text has at most as many as bytes
const MAX_NAME: usize = 4_096;
const MAX_PART: usize = 1_024;
const MAX_CODE: usize = 256;
const MAX_ID: usize = 8_192;
const MICROS: std::ops::RangeInclusive<i64> = 946_684_800_000_000..=4_102_444_799_999_999;
const NONE: i32 = -1;

table! {
    /// A row for each record that is not left to Python. `owner`, `epoch`: rows of `Owners` and `Epochs`; `NONE` for a
    /// tick and for an update without a separator, whose other columns are empty.
    LogRecords {
        row: Int, owner: Int, epoch: Int, observed_at: Bigint, leaf: Binary, message: Binary, author: Text,
        is_verified: Bool,
    }
}
table! { Owners { network: Text, origin: Text, separator_key: Text, separator_value: Text, } }
table! { Epochs { query: Text, batch: Bigint, } }

/// A record with a separator, and the bytes of the record that its owner and its epoch are in.
struct Update<'a> {
    network: Cow<'a, str>,
    origin: Cow<'a, str>,
    separator: Option<(Cow<'a, str>, Cow<'a, str>)>,
    owner: &'a [u8],
    is_verified: bool,
    leaf: Vec<u8>,
    author: Option<Cow<'a, str>>,
    message: [u8; 16],
    query: Cow<'a, str>,
    batch: i64,
    epoch: &'a [u8],
    observed_at: i64,
}

impl Core {
    /// Decodes the records of a call.
    pub fn batch(&mut self, call: &mut Call) -> (LogRecords, Owners, Epochs) {
        let (mut records, mut owners, mut epochs) = (LogRecords::default(), Owners::default(), Epochs::default());
        let (mut known_owners, mut known_epochs) = (HashMap::new(), HashMap::new());
        while let Some(row) = call.next_row() {
            let update = match call.read(row, &self.sampler, |value| Update::read_record(value, &self.streams)) {
                Some(update) => update,
                None => continue,
            };
            records.rows += 1;
            records.row.push(row as i32);
            let (update, (key, value)) = match update.and_then(|mut each| each.separator.take().map(|at| (each, at))) {
                Some(separated) => separated,
                None => {
                    records.push_none();
                    continue;
                }
            };
            records.owner.push(*known_owners.entry(update.owner).or_insert_with(|| {
                owners.rows += 1;
                owners.network.push(update.network.as_bytes());
                owners.origin.push(update.origin.as_bytes());
                owners.separator_key.push(key.as_bytes());
                owners.separator_value.push(value.as_bytes());
                owners.rows as i32 - 1
            }));
            records.epoch.push(*known_epochs.entry(update.epoch).or_insert_with(|| {
                epochs.rows += 1;
                epochs.query.push(update.query.as_bytes());
                epochs.batch.push(update.batch);
                epochs.rows as i32 - 1
            }));
            records.observed_at.push(update.observed_at);
            records.leaf.push(update.leaf);
            records.message.push(update.message);
            records.author.push_optional(update.author.as_ref().map(|each| each.as_bytes()));
            records.is_verified.push_optional(Some(update.is_verified));
        }
        (records, owners, epochs)
    }
}

impl LogRecords {
    fn push_none(&mut self) {
        self.owner.push(NONE);
        self.epoch.push(NONE);
        self.observed_at.push(0);
        self.leaf.push([]);
        self.message.push([]);
        self.author.push_optional(None::<&str>);
        self.is_verified.push_optional(Some(false));
    }
}

impl<'a> Update<'a> {
    /// Reads a record; `None` for a tick.
    fn read_record(value: &'a [u8], streams: &StreamReader) -> Mine<Option<Self>> {
        if value.is_empty() {
            return Ok(None);
        }
        Update::read(value, streams).map(Some)
    }

    /// Reads an `UpdateRecord` in the order and spelling in which `encode` of schemas/kafka/records.py writes it.
    fn read(value: &'a [u8], streams: &StreamReader) -> Mine<Self> {
        let mut json = Parser::new(value)?;
        json.expect(b"{\"network\":")?;
        let network = read_text(&mut json, MAX_NAME)?;
        json.expect(b",\"origin\":")?;
        let origin = read_text(&mut json, MAX_NAME)?;
        require(origin == "LIVE" || origin == "REPLAY")?;
        json.expect(b",\"separator\":")?;
        let separator = if json.expect(b"null").is_ok() {
            None
        } else {
            json.expect(b"{\"key\":")?;
            let key = read_text(&mut json, MAX_PART)?;
            json.expect(b",\"value\":")?;
            let separator = (key, read_text(&mut json, MAX_PART)?);
            json.expect(b"}")?;
            Some(separator)
        };
        let owner = &value[..json.at];
        json.expect(b",\"separator_source\":")?;
        let source = read_optional(&mut json, MAX_NAME)?;
        require(matches!(source.as_deref(), None | Some("genesis" | "topic" | "model")))?;
        json.expect(b",\"stream\":")?;
        let stream = streams.read(&json.read_string()?)?.into_owned();
        json.expect(b",\"tip\":")?;
        let tip = decode_cid(&json.read_string()?)?;
        json.expect(b",\"from\":")?;
        let author = read_optional(&mut json, MAX_ID)?;
        json.expect(b",\"message_id\":")?;
        let id = read_text(&mut json, MAX_ID)?;
        json.expect(b",\"epoch\":")?;
        let start = json.at;
        json.expect(b"{\"query\":")?;
        let query = read_text(&mut json, MAX_CODE)?;
        json.expect(b",\"batch\":")?;
        let batch = json.read_natural()?;
        let epoch = &value[start..json.at];
        json.expect(b"},\"frame\":{\"partition\":")?;
        json.read_natural()?;
        json.expect(b",\"offset\":")?;
        json.read_natural()?;
        json.expect(b",\"index\":")?;
        json.read_natural()?;
        json.expect(b"},\"observed_at\":")?;
        let observed_at = json.read_natural()?;
        require(MICROS.contains(&observed_at))?;
        json.expect(b"}")?;
        require(json.at == value.len())?;
        let message = blake2b_16([&network, "\n", &origin, "\n", &id].concat().as_bytes());
        let is_verified = source.as_deref() == Some("genesis");
        let leaf = [stream.as_bytes(), b"\n", &tip].concat();
        Ok(Update {
            network,
            origin,
            separator,
            owner,
            is_verified,
            leaf,
            author,
            message,
            query,
            batch,
            epoch,
            observed_at,
        })
    }
}

fn read_text<'a>(json: &mut Parser<'a>, limit: usize) -> Mine<Cow<'a, str>> {
    let text = json.read_string()?;
    require(!text.is_empty() && text.len() <= limit)?;
    Ok(text)
}

fn read_optional<'a>(json: &mut Parser<'a>, limit: usize) -> Mine<Option<Cow<'a, str>>> {
    if json.expect(b"null").is_ok() {
        return Ok(None);
    }
    let text = json.read_string()?;
    require(text.len() <= limit)?;
    Ok(Some(text))
}
