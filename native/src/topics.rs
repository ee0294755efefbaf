//! Topic names and separators: schemas/wire/topics.py.

use crate::ids::is_base36;
use crate::{require, Mine, NotMine};
use std::borrow::Cow;

const MAX_KEY: usize = 1_024; // characters
const MAX_VALUE: usize = 1_024;
/// Letters at which a value has its prefix already: `k`, and the CIDs in base32.
const VALUE_PREFIXES: [&str; 4] = ["k", "bae", "baf", "bag"];

/// A separator: key and value.
#[derive(Debug, PartialEq)]
pub struct Separator<'a> {
    pub key: &'a str,
    pub value: Cow<'a, str>,
}

/// A topic of Ceramic's.
#[derive(Debug, PartialEq)]
pub struct CeramicTopic<'a> {
    pub network: &'a str,
    pub separator: Option<Separator<'a>>,
}

/// Parses a topic name; `None` if it is no topic of Ceramic's.
pub fn parse_topic(name: &str) -> Option<CeramicTopic<'_>> {
    let body = name.strip_prefix("/ceramic/")?;
    let (network, rest) = body.split_once('/').unwrap_or((body, ""));
    if network.is_empty() {
        return None;
    }
    let mut separator = None;
    if let Some((key, value)) = rest.strip_prefix("sep/").and_then(|rest| rest.rsplit_once('/')) {
        if !key.is_empty() && key.chars().count() <= MAX_KEY {
            separator = normalize_value(value).ok().map(|value| Separator { key, value });
        }
    }
    Some(CeramicTopic { network, separator })
}

/// Parses the `sep` of a BATCH_UPDATE.
pub fn parse_separator(text: &str) -> Mine<Separator<'_>> {
    let (key, value) = text.rsplit_once('/').ok_or(NotMine)?;
    require(!key.is_empty() && key.len() <= MAX_KEY)?;
    Ok(Separator { key, value: normalize_value(value)? })
}

/// Adds the prefix of a value that has none.
fn normalize_value(text: &str) -> Mine<Cow<'_, str>> {
    let has_prefix = VALUE_PREFIXES.iter().any(|prefix| text.starts_with(prefix));
    let value = if has_prefix { Cow::Borrowed(text) } else { Cow::Owned(format!("k{}", text)) };
    require(value.len() > 1 && value.len() <= MAX_VALUE && is_base36(value.as_bytes()))?;
    Ok(value)
}
