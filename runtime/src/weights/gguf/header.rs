//! The header of one GGUF file (v2 and v3, little endian): metadata, and where each tensor lies.
//!
//! ```text
//! "GGUF" | version u32 | num_tensors u64 | num_values u64 | values | tensor infos | padding | tensor data
//! value: key | type u32 | payload          tensor info: name | num_dims u32 | dims u64[] | type u32 | offset u64
//! ```
//! Invariant: a header that parses is sound. Each tensor's range is aligned, inside the file and apart from the others,
//! and memory is used in proportion to the bytes read, whatever the counts say.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;

use super::cursor::Cursor;
use super::metadata::MetaValue;
use crate::error::LoadError;
use crate::weights::WeightFormat;

/// The specification's limit.
const MAX_KEY_BYTES: usize = 65_535;
/// ggml's limit is 63.
const MAX_NAME_BYTES: usize = 255;
/// A string of its own: an embedded tokenizer.json or chat template is one.
const MAX_STRING_BYTES: usize = 32 << 20;
/// A string of an array: tokens and merges.
const MAX_ELEMENT_BYTES: usize = 1 << 20;
/// Ten times the largest vocabulary's merges.
const MAX_ARRAY_LEN: usize = 1 << 24;
/// ggml's limit.
const MAX_DIMS: u32 = 4;
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: usize = 32;

const MAGIC: [u8; 4] = *b"GGUF";
const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;

/// The least bytes that a value (key length, type, one byte) and a tensor info (name length, dims, one dim, type,
/// offset) can take.
const MIN_VALUE_BYTES: usize = 8 + 4 + 1;
const MIN_INFO_BYTES: usize = 8 + 4 + 8 + 4 + 8;

/// What a header says.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) values: HashMap<String, MetaValue>,
    pub(super) tensors: Vec<TensorInfo>,
}

/// Where a tensor lies.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    pub(super) format: WeightFormat,
    /// Slowest first.
    pub(super) shape: Vec<usize>,
    /// Bytes from the start of the file.
    pub(super) start: usize,
    len: usize,
    /// Where the header states its offset, for errors.
    offset_at: usize,
}

/// Reads the header of a whole file's `bytes`.
///
/// # Errors
/// `Malformed` with field and offset, `Unsupported` for versions, byte orders and tensor types that we do not have.
pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Header, LoadError> {
    let cursor = &mut Cursor::new(path, bytes);
    read_version(cursor, path)?;
    // The counts stand side by side; what each may be is bounded by the bytes after both.
    let num_tensors = cursor.count("tensor count", MIN_INFO_BYTES, usize::MAX)?;
    let num_values = cursor.count("metadata count", MIN_VALUE_BYTES, usize::MAX)?;

    let mut values = HashMap::new();
    let mut alignment = DEFAULT_ALIGNMENT;
    for _ in 0..num_values {
        let at = cursor.position();
        let key = cursor.string("metadata key", MAX_KEY_BYTES)?;
        let value = read_value(cursor, &format!("metadata {key:?}"))?;
        if key == ALIGNMENT_KEY {
            alignment = read_alignment(cursor, at, &value)?;
        }
        match values.entry(key) {
            Entry::Vacant(entry) => entry.insert(value),
            Entry::Occupied(entry) => {
                return Err(cursor.malformed("metadata key", at, format!("{:?} is there twice", entry.key())));
            }
        };
    }

    let mut tensors = Vec::with_capacity(cursor.capacity::<TensorInfo>(num_tensors));
    for _ in 0..num_tensors {
        tensors.push(read_tensor_info(cursor, path, alignment)?);
    }
    place_tensors(cursor, &mut tensors, alignment, bytes.len())?;
    Ok(Header { values, tensors })
}

fn read_version(cursor: &mut Cursor<'_>, path: &Path) -> Result<(), LoadError> {
    let unsupported = |what, name: String, supported: &str| LoadError::Unsupported {
        path: path.to_path_buf(),
        what,
        name,
        supported: supported.to_string(),
    };
    let magic = cursor.array::<4>("magic")?;
    if magic != MAGIC {
        let problem = format!(
            "expected \"GGUF\" (a safetensors model is given by its directory), got \"{}\"",
            magic.escape_ascii()
        );
        return Err(cursor.malformed("magic", 0, problem));
    }
    let version = cursor.u32("version")?;
    if VERSIONS.contains(&version) {
        Ok(())
    } else if VERSIONS.contains(&version.swap_bytes()) {
        Err(unsupported("GGUF byte order", "big endian".to_string(), "little endian"))
    } else {
        Err(unsupported("GGUF version", version.to_string(), "2, 3"))
    }
}

/// A value's type; discriminants are the file's.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    Str = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Str,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn read(cursor: &mut Cursor<'_>, field: &str) -> Result<Self, LoadError> {
        let at = cursor.position();
        let id = cursor.u32(field)?;
        let known = Self::ALL.into_iter().find(|&kind| kind as u32 == id);
        known.ok_or_else(|| cursor.malformed(field, at, format!("unknown value type {id}")))
    }

    /// The least bytes that a value takes.
    fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::Str | Self::U64 | Self::I64 | Self::F64 => 8,
            Self::Array => 12,
        }
    }
}

fn read_value(cursor: &mut Cursor<'_>, field: &str) -> Result<MetaValue, LoadError> {
    let kind = ValueType::read(cursor, field)?;
    Ok(match kind {
        ValueType::Array => read_array(cursor, field)?,
        ValueType::Str => MetaValue::Str(cursor.string(field, MAX_STRING_BYTES)?),
        ValueType::Bool => MetaValue::Bool(read_bool(cursor, field)?),
        ValueType::F32 | ValueType::F64 => MetaValue::Float(read_float(cursor, kind, field)?),
        ValueType::U64 => {
            let value = cursor.u64(field)?;
            i64::try_from(value).map_or(MetaValue::Uint(value), MetaValue::Int)
        }
        _ => MetaValue::Int(read_int(cursor, kind, field)?),
    })
}

fn read_array(cursor: &mut Cursor<'_>, field: &str) -> Result<MetaValue, LoadError> {
    let at = cursor.position();
    let kind = ValueType::read(cursor, field)?;
    if kind == ValueType::Array {
        return Err(cursor.malformed(field, at, "arrays of arrays are not supported"));
    }
    let len = cursor.count(field, kind.min_bytes(), MAX_ARRAY_LEN)?;
    Ok(match kind {
        ValueType::Str => {
            MetaValue::Strs(read_elements(cursor, len, |cursor| cursor.string(field, MAX_ELEMENT_BYTES))?)
        }
        ValueType::Bool => MetaValue::Bools(read_elements(cursor, len, |cursor| read_bool(cursor, field))?),
        ValueType::F32 | ValueType::F64 => {
            MetaValue::Floats(read_elements(cursor, len, |cursor| Ok(read_float(cursor, kind, field)? as f32))?)
        }
        _ => MetaValue::Ints(read_elements(cursor, len, |cursor| read_int(cursor, kind, field))?),
    })
}

fn read_elements<'a, T>(
    cursor: &mut Cursor<'a>,
    len: usize,
    mut read: impl FnMut(&mut Cursor<'a>) -> Result<T, LoadError>,
) -> Result<Vec<T>, LoadError> {
    let mut elements = Vec::with_capacity(cursor.capacity::<T>(len));
    for _ in 0..len {
        elements.push(read(cursor)?);
    }
    Ok(elements)
}

fn read_bool(cursor: &mut Cursor<'_>, field: &str) -> Result<bool, LoadError> {
    let at = cursor.position();
    match cursor.array(field)? {
        [0] => Ok(false),
        [1] => Ok(true),
        [other] => Err(cursor.malformed(field, at, format!("a bool is 0 or 1, got {other}"))),
    }
}

fn read_float(cursor: &mut Cursor<'_>, kind: ValueType, field: &str) -> Result<f64, LoadError> {
    Ok(match kind {
        ValueType::F32 => f64::from(f32::from_le_bytes(cursor.array(field)?)),
        _ => f64::from_le_bytes(cursor.array(field)?),
    })
}

fn read_int(cursor: &mut Cursor<'_>, kind: ValueType, field: &str) -> Result<i64, LoadError> {
    let at = cursor.position();
    Ok(match kind {
        ValueType::U8 => i64::from(u8::from_le_bytes(cursor.array(field)?)),
        ValueType::I8 => i64::from(i8::from_le_bytes(cursor.array(field)?)),
        ValueType::U16 => i64::from(u16::from_le_bytes(cursor.array(field)?)),
        ValueType::I16 => i64::from(i16::from_le_bytes(cursor.array(field)?)),
        ValueType::U32 => i64::from(cursor.u32(field)?),
        ValueType::I32 => i64::from(i32::from_le_bytes(cursor.array(field)?)),
        ValueType::I64 => i64::from_le_bytes(cursor.array(field)?),
        ValueType::U64 => {
            let value = cursor.u64(field)?;
            i64::try_from(value)
                .map_err(|_| cursor.malformed(field, at, format!("{value} does not fit into 63 bits")))?
        }
        ValueType::F32 | ValueType::F64 | ValueType::Bool | ValueType::Str | ValueType::Array => {
            unreachable!("the caller reads integers")
        }
    })
}

fn read_alignment(cursor: &Cursor<'_>, at: usize, value: &MetaValue) -> Result<usize, LoadError> {
    match value {
        MetaValue::Int(value) if u32::try_from(*value).is_ok_and(u32::is_power_of_two) => Ok(*value as usize),
        _ => Err(cursor.malformed(ALIGNMENT_KEY, at, format!("expected a power of two, got {value:?}"))),
    }
}

/// `start` is the offset within the tensor data until `place_tensors` has seen where that begins.
fn read_tensor_info(cursor: &mut Cursor<'_>, path: &Path, alignment: usize) -> Result<TensorInfo, LoadError> {
    let name = cursor.string("tensor name", MAX_NAME_BYTES)?;
    let field = format!("tensor {name:?}");

    let dims_at = cursor.position();
    let num_dims = cursor.u32(&field)?;
    if num_dims == 0 || num_dims > MAX_DIMS {
        return Err(cursor.malformed(&field, dims_at, format!("{num_dims} dimensions, 1 to {MAX_DIMS} are allowed")));
    }
    let mut shape = Vec::with_capacity(num_dims as usize);
    for _ in 0..num_dims {
        let at = cursor.position();
        let dim = cursor.u64(&field)?;
        match usize::try_from(dim) {
            Ok(dim) if dim > 0 => shape.push(dim),
            _ => return Err(cursor.malformed(&field, at, format!("dimension {dim} is out of range"))),
        }
    }
    shape.reverse(); // the file has the fastest first

    let id = cursor.u32(&field)?;
    let format = WeightFormat::from_ggml_type(id).ok_or_else(|| LoadError::Unsupported {
        path: path.to_path_buf(),
        what: "tensor type",
        name: format!("{} of {name:?}", ggml_type_name(id)),
        supported: WeightFormat::ggml_names(),
    })?;
    let len = format.bytes_of(&shape).ok_or_else(|| {
        let problem = format!("shape {shape:?} overflows or its rows are not whole {format} blocks");
        cursor.malformed(&field, dims_at, problem)
    })?;

    let offset_at = cursor.position();
    let offset = cursor.u64(&field)?;
    match usize::try_from(offset) {
        Ok(start) if start.is_multiple_of(alignment) => Ok(TensorInfo { name, format, shape, start, len, offset_at }),
        _ => Err(cursor.malformed(&field, offset_at, format!("offset {offset} is not a multiple of {alignment}"))),
    }
}

/// Turns offsets into places in the file and checks that they lie in it and apart.
fn place_tensors(
    cursor: &Cursor<'_>,
    tensors: &mut [TensorInfo],
    alignment: usize,
    file_len: usize,
) -> Result<(), LoadError> {
    let data_start = cursor.position().checked_next_multiple_of(alignment);
    for tensor in tensors.iter_mut() {
        let start = data_start.and_then(|data_start| data_start.checked_add(tensor.start));
        match start.filter(|start| start.checked_add(tensor.len).is_some_and(|end| end <= file_len)) {
            Some(start) => tensor.start = start,
            None => {
                let problem = format!("{} bytes at offset {} pass the end of the file", tensor.len, tensor.start);
                return Err(cursor.malformed(&format!("tensor {:?}", tensor.name), tensor.offset_at, problem));
            }
        }
    }
    tensors.sort_by_key(|tensor| tensor.start);
    for pair in tensors.windows(2) {
        if pair[0].start + pair[0].len > pair[1].start {
            let problem = format!("overlaps tensor {:?}", pair[0].name);
            return Err(cursor.malformed(&format!("tensor {:?}", pair[1].name), pair[1].offset_at, problem));
        }
    }
    Ok(())
}

/// ggml's name of a tensor type, for errors about types that we do not have.
fn ggml_type_name(id: u32) -> String {
    let name = match id {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        _ => return format!("type {id}"),
    };
    name.to_string()
}
