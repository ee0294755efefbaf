//! Ceramic messages of every era: `read_message` of schemas/wire/pubsub.py.

use crate::ids::{read_block_cid, read_cid, read_stream_2020, StreamReader};
use crate::json::{Json, Object};
use crate::topics::parse_separator;
use crate::{require, Mine, NotMine};
use std::borrow::Cow;

const UPDATE: i64 = 0;
const QUERY: i64 = 1;
const RESPONSE: i64 = 2;
const KEEPALIVE: i64 = 3;
const BATCH_UPDATE_OTHER: i64 = 4;
const MAX_TIMESTAMP: i64 = 8_640_000_000_000_000; // ms
const MAX_TIPS: usize = 32; // each is compared with all others

type Text<'a> = Cow<'a, str>;

/// A message in the form of all eras: `PubsubMessage`.
#[derive(Debug, Default)]
pub struct Content<'a> {
    pub kind: &'static str,
    pub stream: Option<Text<'a>>,
    pub tip: Option<Text<'a>>,
    pub model: Option<Text<'a>>,
    pub sep: Option<String>,
    pub batch: Option<Text<'a>>,
    pub query_id: Option<Text<'a>>,
    pub tips: Option<Vec<(Text<'a>, Text<'a>)>>,
    pub ts: Option<i64>,
    pub ver: Option<Text<'a>>,
    pub ipfs_ver: Option<Text<'a>>,
}

impl<'a> Content<'a> {
    /// Reads the data of a message. `batch_typ`: the number of BATCH_UPDATE in the network.
    pub fn read(data: &'a [u8], streams: &StreamReader, batch_typ: i64) -> Mine<Self> {
        let message = Object::read(data)?;
        match get_number(&message, "typ")?.ok_or(NotMine)? {
            UPDATE => read_update(&message, streams),
            QUERY => read_query(&message, streams),
            RESPONSE => read_response(&message, streams),
            typ if typ == KEEPALIVE || typ == BATCH_UPDATE_OTHER || typ == batch_typ => {
                read_keepalive_or_batch(&message, typ)
            }
            _ => Err(NotMine),
        }
    }
}

fn get_text<'o, 'a>(message: &'o Object<'a>, key: &str) -> Mine<&'o Text<'a>> {
    match message.get(key) {
        Some(Json::Text(text)) => Ok(text),
        _ => Err(NotMine),
    }
}

/// Returns a text that may be absent, but not null.
fn get_optional_text<'a>(message: &Object<'a>, key: &str) -> Mine<Option<Text<'a>>> {
    match message.get(key) {
        None => Ok(None),
        Some(Json::Text(text)) => Ok(Some(text.clone())),
        _ => Err(NotMine),
    }
}

/// Returns a number; `None` if the value is none. Python takes 1.0 for 1.
fn get_number(message: &Object, key: &str) -> Mine<Option<i64>> {
    match message.get(key) {
        Some(Json::Int(number)) => Ok(Some(*number)),
        Some(Json::Float) => Err(NotMine),
        _ => Ok(None),
    }
}

fn is_2020(message: &Object) -> bool {
    message.get("doctype").is_some() && message.get("stream").is_none() && message.get("doc").is_none()
}

fn read_stream<'a>(message: &Object<'a>, streams: &StreamReader) -> Mine<Text<'a>> {
    if is_2020(message) {
        return read_stream_2020(get_text(message, "doctype")?, get_text(message, "id")?).map(Cow::Owned);
    }
    let is_absent = match message.get("stream") {
        None | Some(Json::Null) => true,
        Some(Json::Text(text)) => text.is_empty(),
        _ => return Err(NotMine),
    };
    streams.read(get_text(message, if is_absent { "doc" } else { "stream" })?)
}

fn read_update<'a>(message: &Object<'a>, streams: &StreamReader) -> Mine<Content<'a>> {
    let model = get_optional_text(message, "model")?.map(|model| streams.read(&model)).transpose()?;
    let tip = read_cid(get_text(message, if is_2020(message) { "cid" } else { "tip" })?)?;
    let stream = read_stream(message, streams)?;
    Ok(Content { kind: "UPDATE", stream: Some(stream), tip: Some(tip), model, ..Content::default() })
}

fn read_query<'a>(message: &Object<'a>, streams: &StreamReader) -> Mine<Content<'a>> {
    let stream = Some(read_stream(message, streams)?);
    let query_id = if is_2020(message) { None } else { Some(get_text(message, "id")?.clone()) };
    Ok(Content { kind: "QUERY", stream, query_id, ..Content::default() })
}

fn read_response<'a>(message: &Object<'a>, streams: &StreamReader) -> Mine<Content<'a>> {
    let members = match message.get("tips") {
        None => {
            require(is_2020(message))?;
            let tip = (read_stream(message, streams)?, read_cid(get_text(message, "cid")?)?);
            return Ok(Content { kind: "RESPONSE", tips: Some(vec![tip]), ..Content::default() });
        }
        Some(Json::Object(members)) => members,
        _ => return Err(NotMine),
    };
    require(members.0.len() <= MAX_TIPS)?;
    let mut tips: Vec<(Text, Text)> = Vec::with_capacity(members.0.len());
    for (key, value) in &members.0 {
        let stream = streams.read(key)?;
        require(tips.iter().all(|(other, _)| *other != stream))?; // Python decides which of them counts
        match value {
            Json::Text(tip) => tips.push((stream, read_cid(tip)?)),
            _ => return Err(NotMine),
        }
    }
    let query_id = Some(get_text(message, "id")?.clone());
    Ok(Content { kind: "RESPONSE", query_id, tips: Some(tips), ..Content::default() })
}

fn read_keepalive_or_batch<'a>(message: &Object<'a>, typ: i64) -> Mine<Content<'a>> {
    let ts = get_number(message, "ts")?;
    if let (Ok(sep), Ok(batch)) = (get_text(message, "sep"), get_text(message, "batch")) {
        require(ts.is_none())?;
        let separator = parse_separator(sep)?;
        let sep = Some(format!("{}/{}", separator.key, separator.value));
        let batch = Some(read_block_cid(batch)?);
        return Ok(Content { kind: "BATCH_UPDATE", sep, batch, ..Content::default() });
    }
    require(typ == KEEPALIVE && ts.map_or(false, |ts| (-MAX_TIMESTAMP..=MAX_TIMESTAMP).contains(&ts)))?;
    let (ver, ipfs_ver) = (get_optional_text(message, "ver")?, get_optional_text(message, "ipfsVer")?);
    Ok(Content { kind: "KEEPALIVE", ts, ver, ipfs_ver, ..Content::default() })
}
