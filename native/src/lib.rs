//! Native core of the queries `archive`, `updates` and `batch`: record batches of `kiln.frames` or `kiln.updates` in,
//! record batches of rows out.
//!
//! Python defines what a record means (`kiln.pipelines.decode`, `kiln.schemas.kafka`). The core reads the records that nearly all traffic
//! consists of, into the same rows, and hands every other record back: it is *not mine*. So each reader in here may be
//! stricter than its Python counterpart, and must never be more lenient.
//!
//! Built by one call of rustc 1.63 (Debian 12) or later, without cargo and without crates.
#![deny(unsafe_code)]
#![allow(unknown_lints, unexpected_cfgs)] // `kiln_faults`: panics on demand, for tests

mod archive;
mod base_text;
mod batch;
#[allow(unsafe_code)]
mod c_interface;
mod call;
mod columns;
mod content;
mod decoder;
mod frame;
mod hash;
mod ids;
mod json;
mod protobuf;
mod rpc;
mod signatures;
mod topics;
mod updates;

/// A record, or a part of one, that Python must decode.
#[derive(Debug, PartialEq, Eq)]
pub struct NotMine;

/// Result of reading bytes that may be for Python.
pub type Mine<T> = Result<T, NotMine>;

/// Hands the record to Python unless a condition holds.
pub fn require(condition: bool) -> Mine<()> {
    if condition {
        Ok(())
    } else {
        Err(NotMine)
    }
}
