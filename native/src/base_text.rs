//! Text forms of bytes: multibase encodings and base58.

use crate::{require, Mine, NotMine};

pub const BASE58: &[u8] = b"123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz";
pub const BASE36: &[u8] = b"0123456789abcdefghijklmnopqrstuvwxyz";
pub const BASE32: &[u8] = b"abcdefghijklmnopqrstuvwxyz234567";
pub const BASE16: &[u8] = b"0123456789abcdef";
pub const BASE64URL: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Encodes bytes as a number in a base; a leading zero byte is a leading zero digit. Takes quadratic time, so callers
/// bound the bytes.
pub fn encode_number(raw: &[u8], alphabet: &[u8]) -> Vec<u8> {
    let base = alphabet.len() as u32;
    let zeros = count_leading(raw, 0);
    let mut digits: Vec<u8> = Vec::with_capacity(raw.len() * 2); // the lowest first
    for byte in &raw[zeros..] {
        let mut carry = u32::from(*byte);
        for digit in digits.iter_mut() {
            carry += u32::from(*digit) << 8;
            *digit = (carry % base) as u8;
            carry /= base;
        }
        while carry > 0 {
            digits.push((carry % base) as u8);
            carry /= base;
        }
    }
    let mut text = vec![alphabet[0]; zeros];
    text.extend(digits.iter().rev().map(|digit| alphabet[usize::from(*digit)]));
    text
}

/// Reverses `encode_number`.
pub fn decode_number(text: &[u8], alphabet: &[u8]) -> Mine<Vec<u8>> {
    let base = alphabet.len() as u32;
    let zeros = count_leading(text, alphabet[0]);
    let mut raw: Vec<u8> = Vec::with_capacity(text.len()); // the lowest byte first
    for letter in &text[zeros..] {
        let mut carry = find_digit(*letter, alphabet)?;
        for byte in raw.iter_mut() {
            carry += u32::from(*byte) * base;
            *byte = (carry & 0xff) as u8;
            carry >>= 8;
        }
        while carry > 0 {
            raw.push((carry & 0xff) as u8);
            carry >>= 8;
        }
    }
    raw.resize(raw.len() + zeros, 0);
    raw.reverse();
    Ok(raw)
}

/// Encodes bytes in groups of five bits, without padding.
pub fn encode_base32(raw: &[u8], text: &mut Vec<u8>) {
    let (mut rest, mut bits) = (0u32, 0);
    for byte in raw {
        rest = (rest << 8) | u32::from(*byte);
        bits += 8;
        while bits >= 5 {
            bits -= 5;
            text.push(BASE32[(rest >> bits) as usize & 31]);
            rest &= (1 << bits) - 1;
        }
    }
    if bits > 0 {
        text.push(BASE32[(rest << (5 - bits)) as usize & 31]);
    }
}

/// Decodes text whose letters have `width` bits each. Bits that fill no byte must be zero, and fewer than a letter's.
pub fn decode_bits(text: &[u8], alphabet: &[u8], width: u32) -> Mine<Vec<u8>> {
    let mut digits = [u8::MAX; 256];
    for (digit, letter) in alphabet.iter().enumerate() {
        digits[usize::from(*letter)] = digit as u8;
    }
    let (mut rest, mut bits, mut raw) = (0u32, 0, Vec::with_capacity(text.len()));
    for letter in text {
        let digit = digits[usize::from(*letter)];
        require(digit != u8::MAX)?;
        rest = (rest << width) | u32::from(digit);
        bits += width;
        if bits >= 8 {
            bits -= 8;
            raw.push((rest >> bits) as u8);
            rest &= (1 << bits) - 1;
        }
    }
    require(bits < width && rest == 0)?;
    Ok(raw)
}

fn count_leading(bytes: &[u8], value: u8) -> usize {
    bytes.iter().take_while(|byte| **byte == value).count()
}

fn find_digit(letter: u8, alphabet: &[u8]) -> Mine<u32> {
    alphabet.iter().position(|each| *each == letter).map(|digit| digit as u32).ok_or(NotMine)
}
