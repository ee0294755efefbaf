//! Records of one call, one after another: what it reads, leaves to Python and has Python decode too.

use crate::columns::{Int, Records};
use crate::decoder::{Left, Sampler, Topic};
use crate::{table, Mine, NotMine};
use std::panic::{catch_unwind, AssertUnwindSafe};

/// Bytes of records that one call takes, so that no column reaches 2 GiB, and memory stays bounded.
const MAX_CALL_BYTES: usize = 32 << 20;
/// Bytes of rows, by estimate, after which a call ends: an entry of two bytes makes a row, and names a long topic.
const MAX_ROW_BYTES: usize = 128 << 20;
const ROW_BYTES: usize = 512; // of a row without its topic and what the record has

table! {
    /// Records for Python, with their cause.
    LeftRecords { row: Int, cause: Int, }
}
table! {
    /// Records that Python decodes too.
    Samples { row: Int, }
}

pub struct Call<'a> {
    pub records: &'a Records<'a>,
    /// row after the last record that was decoded
    pub end: usize,
    /// the most that `end` becomes
    pub limit: usize,
    /// bytes of the rows so far, by `estimate_row`
    pub row_bytes: usize,
    pub left: LeftRecords,
    pub samples: Samples,
}

impl<'a> Call<'a> {
    /// A call for the records from `start` on, as many as `MAX_CALL_BYTES` has; one at least.
    pub fn new(records: &'a Records<'a>, start: usize) -> Self {
        let (mut bytes, mut limit) = (0, start);
        while limit < records.len() {
            bytes += records.value(limit).map_or(0, <[u8]>::len);
            if bytes > MAX_CALL_BYTES && limit > start {
                break;
            }
            limit += 1;
        }
        let (left, samples) = (LeftRecords::default(), Samples::default());
        Call { records, end: start, limit, row_bytes: 0, left, samples }
    }

    /// The rows of all its records.
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.end..self.limit
    }

    /// Takes the next record; `None` once the call has enough.
    pub fn next_row(&mut self) -> Option<usize> {
        if self.end == self.limit || self.row_bytes >= MAX_ROW_BYTES {
            return None;
        }
        self.end += 1;
        Some(self.end - 1)
    }

    /// Reads a record; `None` if it is left to Python.
    pub fn read<T>(&mut self, row: usize, sampler: &Sampler, read: impl FnOnce(&'a [u8]) -> Mine<T>) -> Option<T> {
        let value = self.records.value(row).unwrap_or_default();
        panic_on_demand(value, b"PANIC");
        let guarded = catch_unwind(AssertUnwindSafe(|| {
            panic_on_demand(value, b"panic");
            read(value)
        }));
        let cause = match guarded {
            Ok(Ok(read)) => {
                if sampler.selects(value) {
                    self.samples.rows += 1;
                    self.samples.row.push(row as i32);
                }
                return Some(read);
            }
            Ok(Err(NotMine)) => Left::NotMine,
            Err(_) => Left::Panicked,
        };
        self.left.rows += 1;
        self.left.row.push(row as i32);
        self.left.cause.push(cause as i32);
        None
    }
}

/// Estimates the bytes of a row.
pub fn estimate_row(topic: &Topic) -> usize {
    ROW_BYTES + 2 * topic.name.map_or(0, str::len)
}

/// Panics if a record ends with a word. Only in a library that tests build.
#[inline]
fn panic_on_demand(_record: &[u8], _word: &[u8]) {
    #[cfg(kiln_faults)]
    assert!(!_record.ends_with(_word), "a panic for tests");
}
