//! JSON (RFC 8259) as orjson reads it. Numbers beyond 64 bits, deep nesting and lone surrogates are not mine.

use crate::protobuf::read_text;
use crate::{require, Mine, NotMine};
use std::borrow::Cow;

const MAX_DEPTH: u32 = 64; // orjson: 1,024. Each level takes stack, and an overflow would end the worker.

/// A JSON value; of what no message uses, only its type.
#[derive(Debug, PartialEq)]
pub enum Json<'a> {
    Null,
    Bool,
    Int(i64),
    Float,
    Text(Cow<'a, str>),
    Array,
    Object(Object<'a>),
}

/// Members in the order of the text. A key may come several times.
#[derive(Debug, Default, PartialEq)]
pub struct Object<'a>(pub Vec<(Cow<'a, str>, Json<'a>)>);

impl<'a> Object<'a> {
    /// Reads a text that is one object.
    pub fn read(data: &'a [u8]) -> Mine<Self> {
        let mut parser = Parser::new(data)?;
        parser.skip_space();
        let value = parser.read_value(0)?;
        parser.skip_space();
        match value {
            Json::Object(object) if parser.at == data.len() => Ok(object),
            _ => Err(NotMine),
        }
    }

    /// The value of a key: of several equal ones the last.
    pub fn get(&self, key: &str) -> Option<&Json<'a>> {
        self.0.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value)
    }
}

pub struct Parser<'a> {
    text: &'a str,
    bytes: &'a [u8], // of `text`
    pub at: usize,
}

impl<'a> Parser<'a> {
    pub fn new(bytes: &'a [u8]) -> Mine<Self> {
        Ok(Parser { text: read_text(bytes)?, bytes, at: 0 })
    }

    fn peek(&self) -> Mine<u8> {
        self.bytes.get(self.at).copied().ok_or(NotMine)
    }

    fn take(&mut self) -> Mine<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Ok(byte)
    }

    fn skip_space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.bytes.get(self.at) {
            self.at += 1;
        }
    }

    pub fn expect(&mut self, word: &[u8]) -> Mine<()> {
        require(self.bytes[self.at..].starts_with(word))?;
        self.at += word.len();
        Ok(())
    }

    fn read_value(&mut self, depth: u32) -> Mine<Json<'a>> {
        require(depth <= MAX_DEPTH)?;
        match self.peek()? {
            b'"' => self.read_string().map(Json::Text),
            b'{' => self.read_object(depth).map(Json::Object),
            b'[' => self.skip_array(depth).map(|_| Json::Array),
            b't' => self.expect(b"true").map(|_| Json::Bool),
            b'f' => self.expect(b"false").map(|_| Json::Bool),
            b'n' => self.expect(b"null").map(|_| Json::Null),
            _ => self.read_number(),
        }
    }

    fn read_object(&mut self, depth: u32) -> Mine<Object<'a>> {
        self.expect(b"{")?;
        let mut object = Object(Vec::with_capacity(6)); // an UPDATE has four or five members
        self.skip_space();
        if self.peek()? == b'}' {
            self.at += 1;
            return Ok(object);
        }
        loop {
            self.skip_space();
            require(self.peek()? == b'"')?;
            let key = self.read_string()?;
            self.skip_space();
            self.expect(b":")?;
            self.skip_space();
            object.0.push((key, self.read_value(depth + 1)?));
            self.skip_space();
            match self.take()? {
                b',' => {}
                b'}' => return Ok(object),
                _ => return Err(NotMine),
            }
        }
    }

    fn skip_array(&mut self, depth: u32) -> Mine<()> {
        self.expect(b"[")?;
        self.skip_space();
        if self.peek()? == b']' {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.skip_space();
            self.read_value(depth + 1)?;
            self.skip_space();
            match self.take()? {
                b',' => {}
                b']' => return Ok(()),
                _ => return Err(NotMine),
            }
        }
    }

    fn read_number(&mut self) -> Mine<Json<'a>> {
        let (start, mut is_float) = (self.at, false);
        if self.peek()? == b'-' {
            self.at += 1;
        }
        match self.peek()? {
            b'0' => self.at += 1, // no digit may follow
            _ => self.skip_digits()?,
        }
        if let Some(b'.') = self.bytes.get(self.at) {
            is_float = true;
            self.at += 1;
            self.skip_digits()?;
        }
        if let Some(b'e' | b'E') = self.bytes.get(self.at) {
            is_float = true;
            self.at += 1;
            if let Some(b'+' | b'-') = self.bytes.get(self.at) {
                self.at += 1;
            }
            self.skip_digits()?;
        }
        let text = &self.text[start..self.at];
        if !is_float {
            return text.parse().map(Json::Int).map_err(|_| NotMine);
        }
        require(text.parse::<f64>().map_or(false, f64::is_finite))?;
        Ok(Json::Float)
    }

    /// Reads a number that is not negative, without a sign, a fraction or an exponent.
    pub fn read_natural(&mut self) -> Mine<i64> {
        require(self.peek()? != b'-')?;
        match self.read_number()? {
            Json::Int(number) => Ok(number),
            _ => Err(NotMine),
        }
    }

    fn skip_digits(&mut self) -> Mine<()> {
        let start = self.at;
        while let Some(b'0'..=b'9') = self.bytes.get(self.at) {
            self.at += 1;
        }
        require(self.at > start)
    }

    pub fn read_string(&mut self) -> Mine<Cow<'a, str>> {
        self.expect(b"\"")?;
        let plain = self.take_plain();
        if self.peek()? == b'"' {
            self.at += 1;
            return Ok(Cow::Borrowed(plain));
        }
        let mut text = plain.to_string();
        loop {
            match self.peek()? {
                b'"' => {
                    self.at += 1;
                    return Ok(Cow::Owned(text));
                }
                b'\\' => {
                    self.at += 1;
                    text.push(self.read_escape()?);
                }
                byte if byte < 0x20 => return Err(NotMine),
                _ => text.push_str(self.take_plain()),
            }
        }
    }

    /// Takes text up to a quote, a backslash or a control character, all of which are whole characters.
    fn take_plain(&mut self) -> &'a str {
        let (start, rest) = (self.at, &self.bytes[self.at..]);
        self.at += rest.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..=0x1f)).unwrap_or(rest.len());
        &self.text[start..self.at]
    }

    fn read_escape(&mut self) -> Mine<char> {
        Ok(match self.take()? {
            byte @ (b'"' | b'\\' | b'/') => char::from(byte),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let unit = self.read_hex()?;
                if !(0xd800..0xdc00).contains(&unit) {
                    return char::from_u32(unit).ok_or(NotMine);
                }
                self.expect(b"\\u")?;
                let low = self.read_hex()?;
                require((0xdc00..0xe000).contains(&low))?;
                return char::from_u32(0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00)).ok_or(NotMine);
            }
            _ => return Err(NotMine),
        })
    }

    fn read_hex(&mut self) -> Mine<u32> {
        let digits = self.bytes.get(self.at..self.at + 4).ok_or(NotMine)?;
        require(digits.iter().all(u8::is_ascii_hexdigit))?;
        self.at += 4;
        u32::from_str_radix(read_text(digits)?, 16).map_err(|_| NotMine)
    }
}
