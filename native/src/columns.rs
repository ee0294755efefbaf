//! Record batches: the records that come in, and the rows that go out. `c_interface` passes both through Arrow's C data
//! interface.

/// The columns partition, offset, stamp and value of a record batch of RECORDS.
pub struct Records<'a> {
    pub partitions: &'a [i32],
    pub offsets: &'a [i64],
    pub stamps: &'a [i64],
    /// ends[row]..ends[row + 1] is the value of a row in `bytes`
    pub ends: &'a [i32],
    pub bytes: &'a [u8],
    /// a bit for each row from `first_bit` on; `None`: no value is null
    pub validity: Option<&'a [u8]>,
    pub first_bit: usize,
}

impl<'a> Records<'a> {
    pub fn len(&self) -> usize {
        self.partitions.len()
    }

    /// The value of a record; `None` if it has none.
    pub fn value(&self, row: usize) -> Option<&'a [u8]> {
        let bit = row + self.first_bit;
        match self.validity {
            Some(bits) if (bits[bit >> 3] >> (bit & 7)) & 1 == 0 => None,
            _ => Some(&self.bytes[self.ends[row] as usize..self.ends[row + 1] as usize]),
        }
    }
}

/// Memory of a column, as Arrow lays it out.
pub enum Buffer {
    Absent,
    Bytes(Vec<u8>),
    Ints(Vec<i32>),
    Bigints(Vec<i64>),
}

/// A finished column or record batch.
pub struct Finished {
    /// Arrow's format string
    pub format: &'static str,
    pub name: String,
    pub is_nullable: bool,
    pub rows: usize,
    pub nulls: usize,
    pub buffers: Vec<Buffer>,
    pub children: Vec<Finished>,
}

/// Column whose rows are built one by one.
pub trait Column {
    fn finish(self, name: &str) -> Finished;
}

#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    rows: usize,
    zeros: usize,
}

impl Bits {
    #[inline]
    fn push(&mut self, is_set: bool) {
        if self.rows & 7 == 0 {
            self.bytes.push(0);
        }
        if is_set {
            self.bytes[self.rows >> 3] |= 1 << (self.rows & 7);
        } else {
            self.zeros += 1;
        }
        self.rows += 1;
    }

    /// Finishes a column with these bits of validity.
    fn finish(self, format: &'static str, name: &str, mut data: Vec<Buffer>, children: Vec<Finished>) -> Finished {
        let validity = if self.zeros == 0 { Buffer::Absent } else { Buffer::Bytes(self.bytes) };
        data.insert(0, validity);
        let name = name.to_string();
        Finished { format, name, is_nullable: true, rows: self.rows, nulls: self.zeros, buffers: data, children }
    }
}

/// Column of strings (Arrow's format `u`) or of bytes (`z`).
pub struct Variable<const FORMAT: char> {
    ends: Vec<i32>,
    bytes: Vec<u8>,
    validity: Bits,
}

/// Strings. What is pushed must be UTF-8: names that were checked, or ASCII that was made here.
pub type Text = Variable<'u'>;
pub type Binary = Variable<'z'>;

impl<const FORMAT: char> Default for Variable<FORMAT> {
    fn default() -> Self {
        Variable { ends: vec![0], bytes: vec![], validity: Bits::default() }
    }
}

impl<const FORMAT: char> Variable<FORMAT> {
    #[inline]
    pub fn push(&mut self, value: impl AsRef<[u8]>) {
        self.bytes.extend_from_slice(value.as_ref());
        self.end_row(true);
    }

    #[inline]
    pub fn push_optional(&mut self, value: Option<impl AsRef<[u8]>>) {
        match value {
            Some(value) => self.push(value),
            None => self.end_row(false),
        }
    }

    fn end_row(&mut self, is_valid: bool) {
        // a panic, and so Python's: the records of a call are bounded long before that
        self.ends.push(i32::try_from(self.bytes.len()).expect("a column of less than 2 GiB"));
        self.validity.push(is_valid);
    }
}

impl<const FORMAT: char> Column for Variable<FORMAT> {
    fn finish(self, name: &str) -> Finished {
        let format = if FORMAT == 'u' { "u" } else { "z" };
        self.validity.finish(format, name, vec![Buffer::Ints(self.ends), Buffer::Bytes(self.bytes)], vec![])
    }
}

/// Column of 32-bit numbers.
#[derive(Default)]
pub struct Int {
    values: Vec<i32>,
    validity: Bits,
}

impl Int {
    #[inline]
    pub fn push(&mut self, value: i32) {
        self.push_optional(Some(value));
    }

    #[inline]
    pub fn push_optional(&mut self, value: Option<i32>) {
        self.validity.push(value.is_some());
        self.values.push(value.unwrap_or_default());
    }
}

impl Column for Int {
    fn finish(self, name: &str) -> Finished {
        self.validity.finish("i", name, vec![Buffer::Ints(self.values)], vec![])
    }
}

/// Column of 64-bit numbers (Arrow's format `l`), or of timestamps in µs, UTC (`t`).
#[derive(Default)]
pub struct Long<const FORMAT: char> {
    values: Vec<i64>,
    validity: Bits,
}

pub type Bigint = Long<'l'>;
pub type Timestamp = Long<'t'>;

impl<const FORMAT: char> Long<FORMAT> {
    #[inline]
    pub fn push(&mut self, value: i64) {
        self.push_optional(Some(value));
    }

    #[inline]
    pub fn push_optional(&mut self, value: Option<i64>) {
        self.validity.push(value.is_some());
        self.values.push(value.unwrap_or_default());
    }
}

impl<const FORMAT: char> Column for Long<FORMAT> {
    fn finish(self, name: &str) -> Finished {
        let format = if FORMAT == 'l' { "l" } else { "tsu:UTC" };
        self.validity.finish(format, name, vec![Buffer::Bigints(self.values)], vec![])
    }
}

#[derive(Default)]
pub struct Bool {
    values: Bits,
    validity: Bits,
}

impl Bool {
    pub fn push_optional(&mut self, value: Option<bool>) {
        self.values.push(value.unwrap_or(false));
        self.validity.push(value.is_some());
    }
}

impl Column for Bool {
    fn finish(self, name: &str) -> Finished {
        self.validity.finish("b", name, vec![Buffer::Bytes(self.values.bytes)], vec![])
    }
}

/// Column of lists of strings.
pub struct List {
    items: Text,
    ends: Vec<i32>,
    validity: Bits,
}

impl Default for List {
    fn default() -> Self {
        List { items: Text::default(), ends: vec![0], validity: Bits::default() }
    }
}

impl List {
    pub fn push_optional<'t>(&mut self, items: Option<impl Iterator<Item = &'t [u8]>>) {
        self.validity.push(items.is_some());
        for item in items.into_iter().flatten() {
            self.items.push(item);
        }
        self.ends.push(self.items.validity.rows as i32);
    }
}

impl Column for List {
    fn finish(self, name: &str) -> Finished {
        self.validity.finish("+l", name, vec![Buffer::Ints(self.ends)], vec![self.items.finish("item")])
    }
}

/// Column of maps from string to string.
pub struct TextMap {
    keys: Text,
    values: Text,
    ends: Vec<i32>,
    validity: Bits,
}

impl Default for TextMap {
    fn default() -> Self {
        TextMap { keys: Text::default(), values: Text::default(), ends: vec![0], validity: Bits::default() }
    }
}

impl TextMap {
    pub fn push_optional<T: AsRef<str>>(&mut self, pairs: Option<&[(T, T)]>) {
        for (key, value) in pairs.unwrap_or_default() {
            self.keys.push(key.as_ref());
            self.values.push(value.as_ref());
        }
        self.ends.push(self.keys.validity.rows as i32);
        self.validity.push(pairs.is_some());
    }
}

impl Column for TextMap {
    fn finish(self, name: &str) -> Finished {
        let rows = self.keys.validity.rows;
        let mut key = self.keys.finish("key");
        key.is_nullable = false;
        let mut entries = finish_batch(rows, vec![key, self.values.finish("value")]);
        entries.name = "entries".to_string();
        self.validity.finish("+m", name, vec![Buffer::Ints(self.ends)], vec![entries])
    }
}

/// Finishes a record batch.
pub fn finish_batch(rows: usize, columns: Vec<Finished>) -> Finished {
    let (name, buffers) = (String::new(), vec![Buffer::Absent]);
    Finished { format: "+s", name, is_nullable: false, rows, nulls: 0, buffers, children: columns }
}

/// Declares a table by its columns. Each row must be counted in `rows`, and pushed to each column.
#[macro_export]
macro_rules! table {
    ($(#[$doc:meta])* $name:ident { $($column:ident: $kind:ty,)* }) => {
        $(#[$doc])*
        #[derive(Default)]
        pub struct $name { pub rows: usize, $(pub $column: $kind,)* }
        impl $name {
            pub fn finish(self) -> $crate::columns::Finished {
                use $crate::columns::Column;
                // `type` is a keyword in Rust
                let columns = vec![$(self.$column.finish(stringify!($column).trim_start_matches("r#")),)*];
                $crate::columns::finish_batch(self.rows, columns)
            }
        }
    };
}
