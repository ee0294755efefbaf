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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str) -> Option<(String, Option<String>)> {
        parse_topic(name).map(|topic| {
            let separator = topic.separator.map(|each| format!("{}/{}", each.key, each.value));
            (topic.network.to_string(), separator)
        })
    }

    #[test]
    fn topics_name_network_and_separator() {
        assert_eq!(parse("/ceramic/x"), Some(("x".into(), None)));
        assert_eq!(parse("/ceramic/x/sep/a/b/k2"), Some(("x".into(), Some("a/b/k2".into()))));
        assert_eq!(parse("/ceramic/x/sep/model/2z"), Some(("x".into(), Some("model/k2z".into()))));
        for no_separator in ["/ceramic/x/sep/k2", "/ceramic/x/sep//k2", "/ceramic/x/sep/m/bafy", "/ceramic/x/sep/m/K2"]
        {
            assert_eq!(parse(no_separator), Some(("x".into(), None)));
        }
        for foreign in ["", "/ceramic", "/ceramic/", "/ceramic//x", "x"] {
            assert_eq!(parse(foreign), None);
        }
    }
}
