//! SHA-256 (FIPS 180-4) and BLAKE2b with 16 bytes of output (RFC 7693), for message ids and identities.

const SHA256_ROUNDS: [u32; 64] = [
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98,
    0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8,
    0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
    0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
    0xc67178f2,
];
const SHA256_START: [u32; 8] =
    [0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19];

pub fn sha256(data: &[u8]) -> [u8; 32] {
    let mut state = SHA256_START;
    let mut blocks = data.chunks_exact(64);
    for block in &mut blocks {
        mix_sha256_block(&mut state, block);
    }
    let rest = blocks.remainder();
    let mut padded = [0u8; 128];
    padded[..rest.len()].copy_from_slice(rest);
    padded[rest.len()] = 0x80;
    let size = if rest.len() < 56 { 64 } else { 128 };
    padded[size - 8..size].copy_from_slice(&((data.len() as u64) * 8).to_be_bytes());
    for block in padded[..size].chunks_exact(64) {
        mix_sha256_block(&mut state, block);
    }
    let mut digest = [0u8; 32];
    for (bytes, word) in digest.chunks_exact_mut(4).zip(state) {
        bytes.copy_from_slice(&word.to_be_bytes());
    }
    digest
}

/// FIPS 180-4, section 6.2.2.
fn mix_sha256_block(state: &mut [u32; 8], block: &[u8]) {
    let mut schedule = [0u32; 64];
    for (word, bytes) in schedule.iter_mut().zip(block.chunks_exact(4)) {
        *word = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    for t in 16..64 {
        let (x, y) = (schedule[t - 15], schedule[t - 2]);
        let low = x.rotate_right(7) ^ x.rotate_right(18) ^ (x >> 3);
        let high = y.rotate_right(17) ^ y.rotate_right(19) ^ (y >> 10);
        schedule[t] = schedule[t - 16].wrapping_add(low).wrapping_add(schedule[t - 7]).wrapping_add(high);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (constant, word) in SHA256_ROUNDS.iter().zip(schedule) {
        let high = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let choice = (e & f) ^ (!e & g);
        let first = h.wrapping_add(high).wrapping_add(choice).wrapping_add(*constant).wrapping_add(word);
        let low = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let second = low.wrapping_add((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d.wrapping_add(first);
        d = c;
        c = b;
        b = a;
        a = first.wrapping_add(second);
    }
    for (word, mixed) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *word = word.wrapping_add(mixed);
    }
}

const BLAKE2B_BYTES: usize = 16;
const BLAKE2B_BLOCK: usize = 128;
const BLAKE2B_START: [u64; 8] = [
    0x6a09e667f3bcc908,
    0xbb67ae8584caa73b,
    0x3c6ef372fe94f82b,
    0xa54ff53a5f1d36f1,
    0x510e527fade682d1,
    0x9b05688c2b3e6c1f,
    0x1f83d9abfb41bd6b,
    0x5be0cd19137e2179,
];
const BLAKE2B_ORDER: [[usize; 16]; 12] = [
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
    [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
    [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
    [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
    [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
    [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
    [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
    [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
    [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
];

/// BLAKE2b with 16 bytes of output and no key: `blake2b(data, digest_size=16)` of Python's hashlib.
pub fn blake2b_16(data: &[u8]) -> [u8; BLAKE2B_BYTES] {
    let mut state = BLAKE2B_START;
    state[0] ^= 0x0101_0000 ^ BLAKE2B_BYTES as u64;
    let blocks = (data.len().max(1) + BLAKE2B_BLOCK - 1) / BLAKE2B_BLOCK; // no data is one block of zeros
    for index in 0..blocks {
        let end = data.len().min((index + 1) * BLAKE2B_BLOCK);
        let part = &data[index * BLAKE2B_BLOCK..end];
        let mut block = [0u8; BLAKE2B_BLOCK];
        block[..part.len()].copy_from_slice(part);
        mix_blake2b_block(&mut state, &block, end as u64, index + 1 == blocks);
    }
    let mut digest = [0u8; BLAKE2B_BYTES];
    digest[..8].copy_from_slice(&state[0].to_le_bytes());
    digest[8..].copy_from_slice(&state[1].to_le_bytes());
    digest
}

/// RFC 7693, section 3.2.
fn mix_blake2b_block(state: &mut [u64; 8], block: &[u8; BLAKE2B_BLOCK], count: u64, is_last: bool) {
    let mut words = [0u64; 16];
    for (word, bytes) in words.iter_mut().zip(block.chunks_exact(8)) {
        *word = u64::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7]]);
    }
    let mut v = [0u64; 16];
    v[..8].copy_from_slice(&state[..]);
    v[8..].copy_from_slice(&BLAKE2B_START);
    v[12] ^= count;
    if is_last {
        v[14] = !v[14];
    }
    for order in &BLAKE2B_ORDER {
        let word = |index: usize| words[order[index]];
        mix_blake2b_words(&mut v, [0, 4, 8, 12], word(0), word(1));
        mix_blake2b_words(&mut v, [1, 5, 9, 13], word(2), word(3));
        mix_blake2b_words(&mut v, [2, 6, 10, 14], word(4), word(5));
        mix_blake2b_words(&mut v, [3, 7, 11, 15], word(6), word(7));
        mix_blake2b_words(&mut v, [0, 5, 10, 15], word(8), word(9));
        mix_blake2b_words(&mut v, [1, 6, 11, 12], word(10), word(11));
        mix_blake2b_words(&mut v, [2, 7, 8, 13], word(12), word(13));
        mix_blake2b_words(&mut v, [3, 4, 9, 14], word(14), word(15));
    }
    for (index, word) in state.iter_mut().enumerate() {
        *word ^= v[index] ^ v[index + 8];
    }
}

#[inline(always)]
fn mix_blake2b_words(v: &mut [u64; 16], [a, b, c, d]: [usize; 4], x: u64, y: u64) {
    v[a] = v[a].wrapping_add(v[b]).wrapping_add(x);
    v[d] = (v[d] ^ v[a]).rotate_right(32);
    v[c] = v[c].wrapping_add(v[d]);
    v[b] = (v[b] ^ v[c]).rotate_right(24);
    v[a] = v[a].wrapping_add(v[b]).wrapping_add(y);
    v[d] = (v[d] ^ v[a]).rotate_right(16);
    v[c] = v[c].wrapping_add(v[d]);
    v[b] = (v[b] ^ v[c]).rotate_right(63);
}
