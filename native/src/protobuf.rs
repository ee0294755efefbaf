//! Protobuf as programs write it: minimal varints, no groups.
//!
//! Python's library accepts more, such as padded varints. Such bytes are not mine, because their size on the wire is
//! not the size that the library computes.

use crate::{require, Mine, NotMine};

/// Value of a field on the wire.
pub enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// four or eight bytes, which no field of Kiln's messages has
    Fixed,
}

/// Reader of the fields of one message, in the order of the wire.
pub struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
}

const MAX_TAG_BYTES: usize = 5; // of a tag or a length
const MAX_VARINT_BYTES: usize = 10;

impl<'a> Fields<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Fields { bytes, at: 0 }
    }

    /// Reads number and value of the next field; `None` at the end.
    #[inline]
    pub fn next(&mut self) -> Mine<Option<(u32, Value<'a>)>> {
        if self.at == self.bytes.len() {
            return Ok(None);
        }
        let tag = self.read_varint(MAX_TAG_BYTES)?;
        require(tag >= 8 && tag <= u64::from(u32::MAX))?;
        let value = match tag & 7 {
            0 => Value::Varint(self.read_varint(MAX_VARINT_BYTES)?),
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let size = self.read_varint(MAX_TAG_BYTES)?;
                Value::Bytes(self.take(usize::try_from(size).map_err(|_| NotMine)?)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            _ => return Err(NotMine),
        };
        Ok(Some(((tag >> 3) as u32, value)))
    }

    #[inline]
    fn read_varint(&mut self, max_bytes: usize) -> Mine<u64> {
        let mut value = 0u64;
        for index in 0..max_bytes {
            let byte = *self.bytes.get(self.at).ok_or(NotMine)?;
            self.at += 1;
            require(index < 9 || byte <= 1)?; // the tenth byte has one bit
            value |= u64::from(byte & 0x7f) << (7 * index);
            if byte < 0x80 {
                require(byte != 0 || index == 0)?; // padded
                return Ok(value);
            }
        }
        Err(NotMine)
    }

    fn take(&mut self, size: usize) -> Mine<&'a [u8]> {
        let end = self.at.checked_add(size).ok_or(NotMine)?;
        let taken = self.bytes.get(self.at..end).ok_or(NotMine)?;
        self.at = end;
        Ok(taken)
    }
}

/// Reads UTF-8 text.
pub fn read_text(raw: &[u8]) -> Mine<&str> {
    std::str::from_utf8(raw).map_err(|_| NotMine)
}

/// Reads a number of 32 bits; the library would truncate a larger one.
pub fn read_u32(value: u64) -> Mine<u32> {
    u32::try_from(value).map_err(|_| NotMine)
}

/// Reads a boolean, or an enum of two values. The library takes other numbers too.
pub fn read_bit(value: u64) -> Mine<u8> {
    require(value <= 1)?;
    Ok(value as u8)
}

/// Sets a field that may come once: the library merges or replaces the values of a repeated one.
pub fn set_once<T>(field: &mut Option<T>, value: T) -> Mine<()> {
    require(field.is_none())?;
    *field = Some(value);
    Ok(())
}
