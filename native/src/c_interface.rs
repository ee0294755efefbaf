//! The functions that Python calls, and Arrow's C data interface between both. All unsafe code of the core is here.
//!
//! Nothing unwinds into Python: a panic in a record leaves that record to Python, and any other one the whole call.
//! Source: Apache Arrow, "The Arrow C data interface".

use crate::archive::ArchiveRows;
use crate::call::Call;
use crate::columns::{Buffer, Finished, Records};
use crate::decoder::{Config, Core, PeerTexts, Sampler, TopicTables};
use crate::hash;
use crate::ids::StreamReader;
use crate::signatures::Signatures;
use std::ffi::{c_void, CString};
use std::mem::take;
use std::os::raw::c_char;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::{null, null_mut};
use std::slice;

#[repr(C)]
pub struct ArrowSchema {
    format: *const c_char,
    name: *const c_char,
    metadata: *const c_char,
    flags: i64,
    n_children: i64,
    children: *mut *mut ArrowSchema,
    dictionary: *mut ArrowSchema,
    release: Option<unsafe extern "C" fn(*mut ArrowSchema)>,
    private_data: *mut c_void,
}

#[repr(C)]
pub struct ArrowArray {
    length: i64,
    null_count: i64,
    offset: i64,
    n_buffers: i64,
    n_children: i64,
    buffers: *mut *const c_void,
    children: *mut *mut ArrowArray,
    dictionary: *mut ArrowArray,
    release: Option<unsafe extern "C" fn(*mut ArrowArray)>,
    private_data: *mut c_void,
}

const NULLABLE: i64 = 2; // a flag of ArrowSchema

// ---------------------------------------------------------------- functions

/// Version of these functions: the binding refuses a library of another one.
const ABI: i32 = 3;
const PANICKED: i64 = -1;

/// Digest of the sources and of the columns, which the build passes in.
const SOURCES: Option<&str> = option_env!("KILN_CORE_SOURCES");

#[no_mangle]
pub extern "C" fn kiln_abi() -> i32 {
    ABI
}

/// Copies the digest of the sources into 64 bytes.
///
/// # Safety
/// `digest` has room for 64 bytes.
#[no_mangle]
pub unsafe extern "C" fn kiln_sources(digest: *mut u8) {
    let text = SOURCES.unwrap_or_default().as_bytes();
    slice::from_raw_parts_mut(digest, 64).fill(b' ');
    slice::from_raw_parts_mut(digest, text.len().min(64)).copy_from_slice(&text[..text.len().min(64)]);
}

/// Creates a core, which `kiln_free` frees.
#[no_mangle]
pub extern "C" fn kiln_new(
    batch_typ: i64,
    unsigned_horizon: i64,
    is_ceramic: i32,
    seed: u64,
    sample_one_in: u64,
) -> *mut Core {
    std::panic::set_hook(Box::new(|_| {})); // Python logs the record; a peer must not fill the log with messages
    Box::into_raw(Box::new(Core {
        config: Config { batch_typ, unsigned_horizon: unsigned_horizon.max(1), is_ceramic: is_ceramic != 0 },
        streams: StreamReader::new(),
        peers: PeerTexts::default(),
        tables: TopicTables::default(),
        signatures: Signatures::default(),
        sampler: Sampler { seed, one_in: sample_one_in.max(1) },
    }))
}

/// # Safety
/// `core` is of `kiln_new`, as below, and is not used again.
#[no_mangle]
pub unsafe extern "C" fn kiln_free(core: *mut Core) {
    drop(Box::from_raw(core));
}

/// Learns the topic table of a pair of hellos. `topics`: the names one after another, of which `ends` has the ends;
/// `count` -1: a hello was refused.
///
/// # Safety
/// The pointers are to so many bytes and numbers.
#[no_mangle]
pub unsafe extern "C" fn kiln_learn(
    core: *mut Core,
    hello_in: *const u8,
    in_size: usize,
    hello_out: *const u8,
    out_size: usize,
    topics: *const u8,
    ends: *const u32,
    count: i64,
) {
    let mut names = vec![];
    let mut start = 0;
    for index in 0..usize::try_from(count).unwrap_or(0) {
        let end = *ends.add(index) as usize;
        names.push(String::from_utf8_lossy(slice::from_raw_parts(topics.add(start), end - start)).into_owned());
        start = end;
    }
    let hello_in = slice::from_raw_parts(hello_in, in_size);
    let hello_out = slice::from_raw_parts(hello_out, out_size);
    let topics = if count < 0 { None } else { Some(names) };
    // a table that is not learnt leaves its records to Python
    let _ = catch_unwind(AssertUnwindSafe(|| (*core).tables.learn(hello_in, hello_out, topics)));
}

/// Decodes the records from `start` on, as many as one call takes. Returns the row after the last one, or -1 if the core
/// panicked, with no output.
///
/// Out: frames, copies, messages, subscriptions, controls, frame keys, identities, left, samples.
///
/// # Safety
/// `input` is a record batch of (partition int32, offset int64, stamp int64, value binary), the first three without
/// nulls, and there is room for nine record batches.
#[no_mangle]
pub unsafe extern "C" fn kiln_archive(
    core: *mut Core,
    input: *const ArrowArray,
    start: i64,
    arrays: *mut ArrowArray,
    schemas: *mut ArrowSchema,
) -> i64 {
    decode(core, input, start, arrays, schemas, |core, call| {
        let ArchiveRows { frames, copies, messages, subscriptions, controls, frame_keys, identities } =
            core.archive(call);
        vec![
            frames.finish(),
            copies.finish(),
            messages.finish(),
            subscriptions.finish(),
            controls.finish(),
            frame_keys.finish(),
            identities.finish(),
            take(&mut call.left).finish(),
            take(&mut call.samples).finish(),
        ]
    })
}

/// Decodes the records from `start` on, as `kiln_archive`. Out: updates, left, samples.
///
/// # Safety
/// As `kiln_archive`, with room for three record batches.
#[no_mangle]
pub unsafe extern "C" fn kiln_updates(
    core: *mut Core,
    input: *const ArrowArray,
    start: i64,
    arrays: *mut ArrowArray,
    schemas: *mut ArrowSchema,
) -> i64 {
    decode(core, input, start, arrays, schemas, |core, call| {
        vec![core.updates(call).finish(), take(&mut call.left).finish(), take(&mut call.samples).finish()]
    })
}

/// Decodes records of `kiln.updates` from `start` on, as `kiln_archive`. Out: log records, owners, epochs, left, samples.
///
/// # Safety
/// As `kiln_archive`, with room for five record batches.
#[no_mangle]
pub unsafe extern "C" fn kiln_batch(
    core: *mut Core,
    input: *const ArrowArray,
    start: i64,
    arrays: *mut ArrowArray,
    schemas: *mut ArrowSchema,
) -> i64 {
    decode(core, input, start, arrays, schemas, |core, call| {
        let (records, owners, epochs) = core.batch(call);
        let (left, samples) = (take(&mut call.left), take(&mut call.samples));
        vec![records.finish(), owners.finish(), epochs.finish(), left.finish(), samples.finish()]
    })
}

/// Finds the records whose topic tables are to be learnt before a call of `kiln_archive` or `kiln_updates` with the same
/// start. Returns how many there are: their rows are in `rows`, at most `room` of them. -1 if the core panicked.
///
/// # Safety
/// As `kiln_archive`, with room for so many rows.
#[no_mangle]
pub unsafe extern "C" fn kiln_unknown_tables(
    core: *const Core,
    input: *const ArrowArray,
    start: i64,
    rows: *mut i32,
    room: usize,
) -> i64 {
    let found = catch_unwind(AssertUnwindSafe(|| {
        let records = import_records(&*input);
        (*core).tables.find_unknown(&Call::new(&records, start as usize))
    }));
    match found {
        Ok(found) => {
            for (at, row) in found.iter().take(room).enumerate() {
                rows.add(at).write(*row as i32);
            }
            found.len().min(room) as i64
        }
        Err(_) => PANICKED,
    }
}

/// Finds the signatures to check before a call of `kiln_archive` or `kiln_updates` with the same start, once the topic
/// tables are learnt. Returns -1 if the core panicked, with no output. Out: `Unchecked`.
///
/// # Safety
/// As `kiln_archive`, with room for one record batch.
#[no_mangle]
pub unsafe extern "C" fn kiln_unchecked(
    core: *mut Core,
    input: *const ArrowArray,
    start: i64,
    arrays: *mut ArrowArray,
    schemas: *mut ArrowSchema,
) -> i64 {
    decode(core, input, start, arrays, schemas, |core, call| vec![core.find_unchecked(call).finish()])
}

/// Learns Python's verdict on a signature, by its key in `Unchecked`.
///
/// # Safety
/// `key` has `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn kiln_learn_signature(core: *mut Core, key: *const u8, size: usize, is_valid: i32) {
    let key = slice::from_raw_parts(key, size);
    let _ = catch_unwind(AssertUnwindSafe(|| (*core).signatures.learn(key, is_valid != 0)));
}

/// SHA-256 of some bytes, for tests.
///
/// # Safety
/// `data` has `size` bytes, and `digest` has room for 32.
#[no_mangle]
pub unsafe extern "C" fn kiln_sha256(data: *const u8, size: usize, digest: *mut u8) {
    slice::from_raw_parts_mut(digest, 32).copy_from_slice(&hash::sha256(slice::from_raw_parts(data, size)));
}

/// BLAKE2b of some bytes, for tests.
///
/// # Safety
/// `data` has `size` bytes, and `digest` has room for 16.
#[no_mangle]
pub unsafe extern "C" fn kiln_blake2b(data: *const u8, size: usize, digest: *mut u8) {
    slice::from_raw_parts_mut(digest, 16).copy_from_slice(&hash::blake2b_16(slice::from_raw_parts(data, size)));
}

// ---------------------------------------------------------------- record batches in

/// Borrows the columns of RECORDS. The caller keeps the record batch alive.
unsafe fn import_records(batch: &ArrowArray) -> Records<'_> {
    let (rows, first) = (batch.length as usize, batch.offset as usize);
    let column = |index: usize| &**batch.children.add(index);
    let values = column(3);
    let first_value = first + values.offset as usize;
    let ends: &[i32] =
        if rows == 0 { &[0] } else { slice::from_raw_parts(buffer::<i32>(values, 1).add(first_value), rows + 1) };
    let size = ends[rows] as usize;
    let bits = buffer::<u8>(values, 0);
    Records {
        partitions: import_numbers(column(0), first, rows),
        offsets: import_numbers(column(1), first, rows),
        stamps: import_numbers(column(2), first, rows),
        ends,
        bytes: if size == 0 { &[] } else { slice::from_raw_parts(buffer(values, 2), size) },
        validity: if bits.is_null() || values.null_count == 0 {
            None
        } else {
            Some(slice::from_raw_parts(bits, (first_value + rows + 7) / 8))
        },
        first_bit: first_value,
    }
}

unsafe fn buffer<T>(column: &ArrowArray, index: usize) -> *const T {
    *column.buffers.add(index) as *const T
}

unsafe fn import_numbers<T>(column: &ArrowArray, first: usize, rows: usize) -> &[T] {
    if rows == 0 {
        return &[];
    }
    slice::from_raw_parts(buffer::<T>(column, 1).add(column.offset as usize + first), rows)
}

// ---------------------------------------------------------------- record batches out

/// Exports what `read` makes of a call for the records from `start` on. Returns the row after the last one, or -1 after
/// a panic, with no output.
unsafe fn decode(
    core: *mut Core,
    input: *const ArrowArray,
    start: i64,
    arrays: *mut ArrowArray,
    schemas: *mut ArrowSchema,
    read: impl FnOnce(&mut Core, &mut Call) -> Vec<Finished>,
) -> i64 {
    let decoded = catch_unwind(AssertUnwindSafe(|| {
        let records = import_records(&*input);
        let mut call = Call::new(&records, start as usize);
        let batches = read(&mut *core, &mut call);
        (call.end, batches)
    }));
    let (end, batches) = match decoded {
        Ok(decoded) => decoded,
        Err(_) => return PANICKED,
    };
    for (index, batch) in batches.into_iter().enumerate() {
        let (schema, array) = export(batch);
        schemas.add(index).write(schema);
        arrays.add(index).write(array);
    }
    end as i64
}

/// What an exported array owns, until Arrow releases it.
struct OwnedArray {
    _memory: Vec<Buffer>,
    buffers: Vec<*const c_void>,
    children: Vec<*mut ArrowArray>,
}

/// What an exported schema owns.
struct OwnedSchema {
    format: CString,
    name: CString,
    children: Vec<*mut ArrowSchema>,
}

fn export(column: Finished) -> (ArrowSchema, ArrowArray) {
    let (mut schemas, mut arrays) = (vec![], vec![]);
    for child in column.children {
        let (schema, array) = export(child);
        schemas.push(Box::into_raw(Box::new(schema)));
        arrays.push(Box::into_raw(Box::new(array)));
    }
    let mut schema = Box::new(OwnedSchema {
        format: CString::new(column.format).unwrap_or_default(),
        name: CString::new(column.name).unwrap_or_default(),
        children: schemas,
    });
    let mut array = Box::new(OwnedArray {
        buffers: column.buffers.iter().map(find_start).collect(),
        _memory: column.buffers,
        children: arrays,
    });
    let exported_schema = ArrowSchema {
        format: schema.format.as_ptr(),
        name: schema.name.as_ptr(),
        metadata: null(),
        flags: if column.is_nullable { NULLABLE } else { 0 },
        n_children: schema.children.len() as i64,
        children: schema.children.as_mut_ptr(),
        dictionary: null_mut(),
        release: Some(release_schema),
        private_data: Box::into_raw(schema) as *mut c_void,
    };
    let exported_array = ArrowArray {
        length: column.rows as i64,
        null_count: column.nulls as i64,
        offset: 0,
        n_buffers: array.buffers.len() as i64,
        n_children: array.children.len() as i64,
        buffers: array.buffers.as_mut_ptr(),
        children: array.children.as_mut_ptr(),
        dictionary: null_mut(),
        release: Some(release_array),
        private_data: Box::into_raw(array) as *mut c_void,
    };
    (exported_schema, exported_array)
}

fn find_start(buffer: &Buffer) -> *const c_void {
    match buffer {
        Buffer::Absent => null(),
        Buffer::Bytes(bytes) => bytes.as_ptr() as *const c_void,
        Buffer::Ints(numbers) => numbers.as_ptr() as *const c_void,
        Buffer::Bigints(numbers) => numbers.as_ptr() as *const c_void,
    }
}

unsafe extern "C" fn release_array(array: *mut ArrowArray) {
    let owned = Box::from_raw((*array).private_data as *mut OwnedArray);
    for child in &owned.children {
        if let Some(release) = (**child).release {
            release(*child); // a child that Arrow has moved out has none
        }
        drop(Box::from_raw(*child));
    }
    (*array).release = None;
}

unsafe extern "C" fn release_schema(schema: *mut ArrowSchema) {
    let owned = Box::from_raw((*schema).private_data as *mut OwnedSchema);
    for child in &owned.children {
        if let Some(release) = (**child).release {
            release(*child);
        }
        drop(Box::from_raw(*child));
    }
    (*schema).release = None;
}
