//! Sound files are read as written; broken ones are typed errors that name field and place, never a panic.

use std::path::Path;

use proptest::prelude::*;

use super::cursor::Cursor;
use super::header::{Header, parse};
use super::testing::GgufWriter;
use super::*;
use crate::weights::testing::TempDir;
use crate::weights::{Checkpoint, Container, WeightFormat};

fn read(bytes: &[u8]) -> Result<Header, LoadError> {
    parse(Path::new("test.gguf"), bytes)
}

fn f32s(values: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

fn every_value() -> Vec<(&'static str, MetaValue)> {
    vec![
        ("int", MetaValue::Int(-7)),
        ("uint", MetaValue::Uint(u64::MAX)),
        ("float", MetaValue::Float(1e-5)),
        ("bool", MetaValue::Bool(true)),
        ("str", MetaValue::Str("kittiwake ☃".to_string())),
        ("ints", MetaValue::Ints(vec![3, 3, 3])),
        ("floats", MetaValue::Floats(vec![0.5, -2.0])),
        ("bools", MetaValue::Bools(vec![true, false])),
        ("strs", MetaValue::Strs(vec!["a".to_string(), String::new(), "ż".to_string()])),
    ]
}

fn small_file() -> GgufWriter {
    let values = every_value();
    let writer = values.iter().fold(GgufWriter::new(), |writer, (key, value)| writer.value(key, value));
    let writer = writer.tensor("a", WeightFormat::F32, &[2, 3], &f32s(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    writer.tensor("b", WeightFormat::Q8_0, &[1, 32], &[0; 34])
}

/// The same with a block of each format that a file may have.
fn file_of_every_format() -> GgufWriter {
    let formats = WeightFormat::all().filter(|format| format.ggml_type().is_some());
    formats.fold(small_file(), |writer, format| {
        let bytes = vec![0x5a; format.block_bytes()];
        writer.tensor(&format!("in {format}"), format, &[1, format.block_len()], &bytes)
    })
}

/// The problem of the error that reading `writer`'s file must give, with its field.
fn problem(writer: GgufWriter) -> (String, String) {
    match read(&writer.finish()) {
        Err(LoadError::Malformed { field, problem, .. }) => (field, problem),
        other => panic!("expected Malformed, got {other:?}"),
    }
}

fn write(dir: &Path, name: &str, writer: &GgufWriter) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, writer.finish()).unwrap();
    path
}

#[test]
fn values_and_tensors_come_back() {
    for version in [2, 3] {
        let writer = GgufWriter { version, ..small_file() };
        let bytes = writer.finish();
        let header = read(&bytes).unwrap();
        assert_eq!(header.values, every_value().into_iter().map(|(key, value)| (key.to_string(), value)).collect());
        let [a, b] = &header.tensors[..] else { panic!("two tensors") };
        assert_eq!((a.name.as_str(), a.format, &a.shape[..]), ("a", WeightFormat::F32, &[2, 3][..]));
        assert_eq!(&bytes[a.start..][..24], &f32s(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])[..]);
        assert_eq!((b.name.as_str(), b.format, &b.shape[..]), ("b", WeightFormat::Q8_0, &[1, 32][..]));
        assert_eq!(b.start + 34, bytes.len());
    }
}

#[test]
fn integers_of_every_width() {
    let header = GgufWriter::new()
        .raw_value("u8", 0, &[255])
        .raw_value("i8", 1, &[255])
        .raw_value("u16", 2, &[1, 2])
        .raw_value("i16", 3, &[0, 0x80])
        .u32("u32", u32::MAX)
        .raw_value("i32", 5, &(-5i32).to_le_bytes())
        .raw_value("u64", 10, &7u64.to_le_bytes())
        .raw_value("f32", 6, &0.25f32.to_le_bytes());
    let values = read(&header.finish()).unwrap().values;
    for (key, value) in
        [("u8", 255), ("i8", -1), ("u16", 513), ("i16", -32768), ("u32", 0xffff_ffff), ("i32", -5), ("u64", 7)]
    {
        assert_eq!(values[key], MetaValue::Int(value), "{key}");
    }
    assert_eq!(values["f32"], MetaValue::Float(0.25));
}

#[test]
fn getters_name_file_and_key() {
    let header = read(&small_file().u32("big", u32::MAX).finish()).unwrap();
    let metadata = Metadata { path: "dir/m.gguf".into(), values: header.values };
    assert_eq!(metadata.u32("absent").unwrap(), None);
    assert_eq!(metadata.u32("ints").unwrap(), Some(3), "uniform arrays are one value");
    assert_eq!(metadata.u64("uint").unwrap(), Some(u64::MAX));
    assert_eq!(metadata.f32("float").unwrap(), Some(1e-5));
    assert_eq!(metadata.bool("bool").unwrap(), Some(true));
    assert_eq!(metadata.require_str("str").unwrap(), "kittiwake ☃");
    assert_eq!(metadata.require_strs("strs").unwrap().len(), 3);
    assert_eq!(metadata.ints("ints").unwrap(), Some(&[3i64, 3, 3][..]));
    assert_eq!(metadata.f32s("floats").unwrap(), Some(&[0.5f32, -2.0][..]));

    for (error, expected) in [
        (metadata.u32("int").unwrap_err(), "dir/m.gguf: int: -7 is negative"),
        (metadata.u32("uint").unwrap_err(), "dir/m.gguf: uint: 18446744073709551615 does not fit into 32 bits"),
        (metadata.u32("str").unwrap_err(), "dir/m.gguf: str: expected an integer, got a string"),
        (metadata.f32("int").unwrap_err(), "dir/m.gguf: int: expected a float, got an integer"),
        (metadata.str("strs").unwrap_err(), "dir/m.gguf: strs: expected a string, got an array of strings"),
        (metadata.require_u32("absent").unwrap_err(), "dir/m.gguf: absent: missing"),
    ] {
        assert_eq!(error.to_string(), expected);
    }
    assert!(metadata.f32("floats").unwrap_err().to_string().contains("array of different"));
    assert!(metadata.bool("bools").unwrap_err().to_string().contains("array of different"));
}

#[test]
fn versions_and_byte_orders() {
    let unsupported = |version| match read(&GgufWriter { version, ..small_file() }.finish()) {
        Err(LoadError::Unsupported { what, name, .. }) => (what, name),
        other => panic!("expected Unsupported, got {other:?}"),
    };
    assert_eq!(unsupported(1), ("GGUF version", "1".to_string()));
    assert_eq!(unsupported(4), ("GGUF version", "4".to_string()));
    assert_eq!(unsupported(3u32.swap_bytes()), ("GGUF byte order", "big endian".to_string()));
    let mut bytes = small_file().finish();
    bytes[..4].copy_from_slice(b"PK\x03\x04");
    assert!(read(&bytes).unwrap_err().to_string().contains(r#"magic at byte 0: expected "GGUF""#));
}

#[test]
fn tensor_types_that_we_do_not_have_are_named() {
    let file = GgufWriter::new().raw_tensor("blk.0.ffn_up.weight", &[256], 17, 0).finish();
    let message = read(&file).unwrap_err().to_string();
    assert!(message.contains("IQ2_XS of \"blk.0.ffn_up.weight\"") && message.contains("Q4_K"), "{message}");
}

/// Dimensions whose product wraps, zero and too many dimensions, negative counts, huge strings, bad alignments.
#[test]
fn fault_21_gguf_dimension_product_wraps() {
    let tensor = |dims: &[u64], type_id| problem(GgufWriter::new().raw_tensor("t", dims, type_id, 0));
    let field = "tensor \"t\"".to_string();
    for dims in [&[1u64 << 63][..], &[1 << 63, 2], &[1 << 32, 1 << 32], &[1 << 62, 4], &[3, u64::MAX]] {
        let (at, problem) = tensor(dims, 0);
        assert_eq!(at, field, "{dims:?}");
        assert!(["overflows", "pass the end"].iter().any(|word| problem.contains(word)), "{dims:?}: {problem}");
    }
    assert_eq!(tensor(&[0], 0), (field.clone(), "dimension 0 is out of range".to_string()));
    assert_eq!(tensor(&[4, 0], 0).1, "dimension 0 is out of range");
    assert_eq!(tensor(&[], 0).1, "0 dimensions, 1 to 4 are allowed");
    assert_eq!(tensor(&[1; 5], 0).1, "5 dimensions, 1 to 4 are allowed");
    assert!(tensor(&[33], 8).1.contains("not whole Q8_0 blocks"));

    for count in [u64::MAX, 1 << 63, 1 << 40] {
        let (at, problem) = problem(GgufWriter { num_tensors: Some(count), ..small_file() });
        assert_eq!(at, "tensor count");
        assert!(problem.contains("do not fit"), "{problem}");
        assert_eq!(self::problem(GgufWriter { num_values: Some(count), ..small_file() }).0, "metadata count");
        let string = problem_of_payload(8, &[&count.to_le_bytes()[..], b"abc"].concat());
        assert!(string.contains("do not fit"), "{string}");
        let array = problem_of_payload(9, &[&0u32.to_le_bytes()[..], &count.to_le_bytes(), &[1, 2, 3]].concat());
        assert!(array.contains("do not fit"), "{array}");
    }
    for alignment in [0, 3, 48] {
        let (at, problem) = problem(GgufWriter::new().u32("general.alignment", alignment));
        assert_eq!(at, "general.alignment");
        assert!(problem.contains("power of two"), "{problem}");
    }
    assert!(
        problem_of_payload(9, &[&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &[0; 64]].concat())
            .contains("arrays of arrays")
    );
}

fn problem_of_payload(type_id: u32, payload: &[u8]) -> String {
    problem(GgufWriter::new().raw_value("key", type_id, payload)).1
}

#[test]
fn counts_reserve_no_more_than_the_bytes_left() {
    let cursor = Cursor::new(Path::new("x"), &[0; 100]);
    assert_eq!(cursor.capacity::<u64>(usize::MAX), 12);
    assert_eq!(cursor.capacity::<String>(usize::MAX), 100 / size_of::<String>());
    assert_eq!(cursor.capacity::<u64>(3), 3);
}

#[test]
fn strings_and_keys_are_capped_and_utf8() {
    assert!(problem_of_payload(8, &[&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat()).contains("not UTF-8"));
    assert!(problem(GgufWriter::new().u32(&"k".repeat(65_536), 1)).1.contains("more than the 65535"));
    let name = "n".repeat(256);
    assert!(problem(GgufWriter::new().raw_tensor(&name, &[1], 0, 0)).1.contains("more than the 255"));
    let element = "e".repeat((1 << 20) + 1);
    let long = GgufWriter::new().value("key", &MetaValue::Strs(vec![element]));
    assert!(problem(long).1.contains("more than the 1048576"));
    assert!(problem_of_payload(7, &[2]).contains("a bool is 0 or 1"));
    assert!(problem_of_payload(13, &[0; 8]).contains("unknown value type 13"));
}

#[test]
fn duplicates_are_errors() {
    assert!(problem(GgufWriter::new().u32("key", 1).u32("key", 1)).1.contains("twice"));
    let dir = TempDir::new("gguf-duplicates");
    let twice =
        GgufWriter::new().tensor("t", WeightFormat::F32, &[1], &[0; 4]).tensor("t", WeightFormat::F32, &[1], &[0; 4]);
    let error = Checkpoint::open(&write(&dir, "m.gguf", &twice)).unwrap_err();
    assert!(error.to_string().contains("tensor \"t\" at byte") && error.to_string().contains("twice"), "{error}");
}

#[test]
fn offsets_are_aligned_inside_and_apart() {
    let place = |a: u64, b: u64| {
        GgufWriter::new().raw_tensor("a", &[8], 0, a).raw_tensor("b", &[8], 0, b).data(&[0; 64]).finish()
    };
    assert!(read(&place(0, 32)).is_ok());
    assert!(read(&place(32, 0)).is_ok(), "any order");
    let message = |a, b| read(&place(a, b)).unwrap_err().to_string();
    assert!(message(0, 0).contains("overlaps"));
    assert!(message(0, 33).contains("not a multiple of 32"));
    assert!(message(0, 64).contains("pass the end"));
    assert!(message(0, u64::MAX - 31).contains("pass the end"));
    let unaligned = GgufWriter { alignment: 1, ..GgufWriter::new() }.u32("general.alignment", 1);
    let unaligned =
        unaligned.tensor("a", WeightFormat::F16, &[1], &[1, 2]).tensor("b", WeightFormat::F32, &[1], &f32s(&[2.5]));
    let dir = TempDir::new("gguf-alignment");
    let checkpoint = Checkpoint::open(&write(&dir, "m.gguf", &unaligned)).unwrap();
    assert_eq!(checkpoint.tensors["b"].to_f32(), [2.5]);
}

#[test]
fn split_sets_open_from_any_file() {
    let dir = TempDir::new("gguf-split");
    let part = |index: u32, value: f32| {
        GgufWriter::new()
            .raw_value("split.no", 2, &(index as u16).to_le_bytes())
            .raw_value("split.count", 2, &2u16.to_le_bytes())
            .u32("split.tensors.count", 2)
            .tensor(&format!("t{index}"), WeightFormat::F32, &[1], &f32s(&[value]))
    };
    let first = write(&dir, "m-00001-of-00002.gguf", &part(0, 1.5).u32("only.first", 1));
    let missing = Checkpoint::open(&first).unwrap_err();
    assert!(matches!(&missing, LoadError::Io { path, .. } if path.ends_with("m-00002-of-00002.gguf")), "{missing}");
    let second = write(&dir, "m-00002-of-00002.gguf", &part(1, 2.5));
    for given in [&first, &second] {
        let checkpoint = Checkpoint::open(given).unwrap();
        assert_eq!(checkpoint.tensors["t0"].to_f32(), [1.5]);
        assert_eq!(checkpoint.tensors["t1"].to_f32(), [2.5]);
        let Container::Gguf(metadata) = checkpoint.container else { panic!("GGUF") };
        assert_eq!((metadata.u32("only.first").unwrap(), &metadata.path), (Some(1), &first));
    }
    let message = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
    let renamed = write(&dir, "other.gguf", &part(0, 0.0));
    assert!(message(&renamed).contains("must be named *-00001-of-00002.gguf"));
    write(&dir, "m-00002-of-00002.gguf", &GgufWriter::new());
    assert!(message(&first).contains("split.no: expected file 1 of 2"));
    write(&dir, "m-00002-of-00002.gguf", &part(1, 2.5).tensor("t0", WeightFormat::F32, &[1], &[0; 4]));
    assert!(message(&first).contains("twice"));
}

#[test]
fn a_file_cut_at_any_byte_is_an_error() {
    let bytes = small_file().finish();
    for len in 0..bytes.len() {
        assert!(matches!(read(&bytes[..len]), Err(LoadError::Malformed { .. })), "cut at {len}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn mutated_files_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = file_of_every_format().finish();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(header) = read(&bytes) {
            for tensor in header.tensors {
                let len = tensor.format.bytes_of(&tensor.shape).unwrap();
                prop_assert!(tensor.start + len <= bytes.len());
                let mut values = vec![0.0; tensor.shape.iter().product()];
                tensor.format.dequantize(&bytes[tensor.start..tensor.start + len], &mut values);
            }
        }
    }

    #[test]
    fn mutated_words_never_panic(at in 0usize..420, word in prop_oneof![
        Just(0u64), Just(1), Just(u64::MAX), Just(1 << 63), Just(1 << 31), Just((1 << 63) - 1), any::<u64>(),
    ]) {
        let mut bytes = small_file().finish();
        let at = at.min(bytes.len() - 8);
        bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        let _ = read(&bytes);
    }
}
