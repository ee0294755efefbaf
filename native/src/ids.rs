//! Peer ids, message ids, StreamIDs and CIDs in the texts that nearly all traffic has.

use crate::base_text::{
    decode_bits, decode_number, encode_base32, encode_number, BASE16, BASE32, BASE36, BASE58, BASE64URL,
};
use crate::{require, Mine, NotMine};
use std::borrow::Cow;

const MAX_SEQNO: usize = 64;
const MAX_DIGEST: u64 = 128;
const MAX_STREAM_TEXT: usize = 640;
const MAX_CID_TEXT: usize = 200; // Python reads longer ones
const EVENT_ID: u64 = 5;
const STREAM_CODEC: [u8; 2] = [0xce, 0x01];
const SHA2_256: [u8; 2] = [0x12, 0x20]; // code and length of a multihash

pub fn push_hex(raw: &[u8], text: &mut Vec<u8>) {
    for byte in raw {
        text.extend([BASE16[usize::from(byte >> 4)], BASE16[usize::from(byte & 15)]]);
    }
}

/// Formats a peer id of at most `MAX_PEER` bytes: `peer_text` of schemas/wire/identity.py.
pub fn format_peer(raw: &[u8]) -> Vec<u8> {
    encode_number(raw, BASE58)
}

// ---------------------------------------------------------------- message ids

/// Formats the id of a signed message, from the text of its author.
pub fn push_message_id(author: &[u8], seqno: &[u8], text: &mut Vec<u8>) -> Mine<()> {
    require(seqno.len() <= MAX_SEQNO)?;
    text.extend(author);
    text.push(b'/');
    push_hex(seqno, text);
    Ok(())
}

/// Formats the id of an unsigned message.
pub fn push_content_id(digest: &[u8], text: &mut Vec<u8>) {
    text.extend(b"sha256/");
    push_hex(digest, text);
}

/// An id in a control message: `format_gossip_id` of schemas/wire/message_id.py, for the forms of go-libp2p, js-libp2p
/// and networks without signatures.
pub enum GossipId<'a> {
    Content(&'a [u8]),
    Signed { author: Cow<'a, [u8]>, seqno: &'a [u8] },
}

impl<'a> GossipId<'a> {
    pub fn read(raw: &'a [u8]) -> Mine<Self> {
        if raw.len() == 32 {
            return Ok(GossipId::Content(raw));
        }
        require(raw.len() > 36)?;
        match raw[..4] {
            // js-libp2p: PublicKey ‖ seqno, where the peer id is made of the key
            [0x08, 0..=3, 0x12, size @ 32..=38] if raw.len() > 4 + usize::from(size) => {
                let (key, seqno) = raw.split_at(4 + usize::from(size));
                let author = [&[0, 4 + size], key].concat();
                Ok(GossipId::Signed { author: Cow::Owned(author), seqno })
            }
            [0x00, size @ 31..=62, _, _] if raw.len() >= 2 + usize::from(size) => {
                let (author, seqno) = raw.split_at(2 + usize::from(size));
                Ok(GossipId::Signed { author: Cow::Borrowed(author), seqno })
            }
            [0x12, 0x20, _, _] => {
                let (author, seqno) = raw.split_at(34);
                Ok(GossipId::Signed { author: Cow::Borrowed(author), seqno })
            }
            _ => Err(NotMine),
        }
    }
}

// ---------------------------------------------------------------- CIDs

/// Reads a varint of at most 9 bytes, and the position after it.
fn read_varint(bytes: &[u8], start: usize) -> Mine<(u64, usize)> {
    let mut value = 0;
    for (index, byte) in bytes.iter().enumerate().skip(start).take(9) {
        value |= u64::from(byte & 0x7f) << (7 * (index - start));
        if *byte < 0x80 {
            require(*byte != 0 || index == start)?;
            return Ok((value, index + 1));
        }
    }
    Err(NotMine)
}

/// Checks that one CID takes all bytes: `find_cid_end` of schemas/wire/cid.py.
fn check_cid(bytes: &[u8]) -> Mine<()> {
    if bytes.starts_with(&SHA2_256) {
        return require(bytes.len() == 34);
    }
    let (version, at) = read_varint(bytes, 0)?;
    require(version == 1)?;
    let (_, at) = read_varint(bytes, at)?; // codec
    let (_, at) = read_varint(bytes, at)?; // hash
    let (size, at) = read_varint(bytes, at)?;
    require(size <= MAX_DIGEST && bytes.len() == at + size as usize)
}

/// True for the text that most CIDs have, which is canonical: CIDv1 in base32 of DAG-CBOR or DAG-JOSE with sha2-256.
fn is_usual_cid(text: &str) -> bool {
    let bytes = text.as_bytes();
    let is_base32 = |bytes: &[u8]| bytes.iter().all(|byte| byte.is_ascii_lowercase() || (b'2'..=b'7').contains(byte));
    if text.starts_with("bafyrei") {
        // the last letter has two bits that fill no byte
        bytes.len() == 59
            && (b'a'..=b'h').contains(&bytes[7])
            && is_base32(&bytes[8..58])
            && b"aeimquy4".contains(&bytes[58])
    } else {
        let is_jose = text.starts_with("bagcqcera") && bytes.len() == 61;
        is_jose && is_base32(&bytes[9..60]) && b"aq".contains(&bytes[60])
    }
}

/// Reads a CID into its bytes: `cid_bytes` of schemas/wire/cid.py.
pub fn decode_cid(text: &str) -> Mine<Vec<u8>> {
    let bytes = text.as_bytes();
    require(!bytes.is_empty() && bytes.len() <= MAX_CID_TEXT)?;
    let raw = match bytes[0] {
        b'Q' => decode_number(bytes, BASE58)?,
        b'z' => decode_number(&bytes[1..], BASE58)?,
        b'f' => decode_bits(&bytes[1..], BASE16, 4)?,
        b'b' => decode_bits(&bytes[1..], BASE32, 5)?,
        b'k' if is_base36(bytes) && bytes.get(1) != Some(&b'0') => decode_number(&bytes[1..], BASE36)?,
        b'u' => decode_bits(&bytes[1..], BASE64URL, 6)?,
        _ => return Err(NotMine),
    };
    require(!raw.is_empty())?;
    check_cid(&raw)?;
    require((bytes[0] == b'Q') == raw.starts_with(&SHA2_256))?;
    Ok(raw)
}

/// Reads a CID into its usual text: `cid_text(cid_bytes(text))`.
pub fn read_cid<'a>(text: &Cow<'a, str>) -> Mine<Cow<'a, str>> {
    if is_usual_cid(text) {
        return Ok(text.clone());
    }
    let raw = decode_cid(text)?;
    if raw.starts_with(&SHA2_256) {
        return ascii(encode_number(&raw, BASE58)).map(Cow::Owned);
    }
    let mut usual = vec![b'b'];
    encode_base32(&raw, &mut usual);
    ascii(usual).map(Cow::Owned)
}

/// Reads the CID of a batch block: a usual one, in DAG-CBOR.
pub fn read_block_cid<'a>(text: &Cow<'a, str>) -> Mine<Cow<'a, str>> {
    require(is_usual_cid(text) && text.starts_with("bafy"))?;
    Ok(text.clone())
}

fn ascii(text: Vec<u8>) -> Mine<String> {
    String::from_utf8(text).map_err(|_| NotMine)
}

// ---------------------------------------------------------------- StreamIDs

fn encode_base36(raw: &[u8]) -> Vec<u8> {
    let mut text = vec![b'k'];
    text.extend(encode_number(raw, BASE36));
    text
}

/// True for lower-case base36 with its prefix.
pub fn is_base36(text: &[u8]) -> bool {
    text.first() == Some(&b'k') && text.iter().all(|byte| byte.is_ascii_digit() || byte.is_ascii_lowercase())
}

/// Reader of StreamIDs: `stream_text` of schemas/wire/streamid.py. Bytes of one length sort like their texts, so a text
/// between the least and the greatest StreamID of a usual kind is one too.
pub struct StreamReader {
    usual: Vec<(Vec<u8>, Vec<u8>)>,
}

const USUAL_PREFIX: usize = 8; // letters that the texts of a kind share

impl StreamReader {
    pub fn new() -> Self {
        let mut usual = vec![];
        for kind in 0..EVENT_ID as u8 {
            for genesis in [&b"\x01\x71\x12\x20"[..], b"\x01\x85\x01\x12\x20"] {
                let text = |digit: u8| encode_base36(&[&STREAM_CODEC[..], &[kind], genesis, &[digit; 32]].concat());
                usual.push((text(0), text(255)));
            }
        }
        StreamReader { usual }
    }

    /// Reads a StreamID into its text in base36.
    pub fn read<'a>(&self, text: &Cow<'a, str>) -> Mine<Cow<'a, str>> {
        Ok(match text {
            Cow::Borrowed(text) => Cow::Borrowed(self.check(text)?),
            Cow::Owned(text) => Cow::Owned(self.check(text)?.to_string()),
        })
    }

    fn check<'t>(&self, text: &'t str) -> Mine<&'t str> {
        require(text.len() <= MAX_STREAM_TEXT)?;
        let without_scheme = text.strip_prefix("ceramic://").or_else(|| text.strip_prefix("/ceramic/"));
        let body = without_scheme.unwrap_or(text);
        let bytes = body.as_bytes();
        require(is_base36(bytes))?;
        let is_usual = |(least, greatest): &(Vec<u8>, Vec<u8>)| {
            bytes.len() == least.len()
                && bytes[..USUAL_PREFIX] == least[..USUAL_PREFIX]
                && &least[..] <= bytes
                && bytes <= &greatest[..]
        };
        if self.usual.iter().any(is_usual) {
            return Ok(body);
        }
        require(bytes.len() >= 2 && bytes[1] != b'0')?;
        let raw = decode_number(&bytes[1..], BASE36)?;
        require(raw.starts_with(&STREAM_CODEC))?;
        let (kind, at) = read_varint(&raw, STREAM_CODEC.len())?;
        require(kind != EVENT_ID && at < raw.len())?;
        check_cid(&raw[at..])?;
        Ok(body)
    }
}

/// Reads the StreamID of a message of 2020.
pub fn read_stream_2020(doctype: &str, document: &str) -> Mine<String> {
    let kind = match doctype {
        "tile" => 0u8,
        "caip10-link" => 1,
        _ => return Err(NotMine),
    };
    let cid = document.strip_prefix("/ceramic/").or_else(|| document.strip_prefix("ceramic://")).ok_or(NotMine)?;
    ascii(encode_base36(&[&STREAM_CODEC[..], &[kind], &decode_cid(cid)?[..]].concat()))
}
