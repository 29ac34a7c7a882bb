//! Checkpoints made here from the layouts' descriptions: what their matrices hold, and how each contradiction is refused.

use serde_json::json;

use super::*;
use crate::weights::WeightFormat;
use crate::weights::testing::TempDir;

/// The tensors of a checkpoint in the making.
#[derive(Clone, Default)]
struct Files(Vec<(String, &'static str, Vec<usize>, Vec<u8>)>);

impl Files {
    fn bytes(mut self, name: &str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> Self {
        self.0.retain(|(other, ..)| other != name);
        self.0.push((name.into(), dtype, shape.to_vec(), bytes));
        self
    }

    fn words(self, name: &str, shape: &[usize], words: impl IntoIterator<Item = u32>) -> Self {
        let bytes = words.into_iter().flat_map(u32::to_le_bytes).collect();
        self.bytes(name, "I32", shape, bytes)
    }

    fn halves(self, name: &str, shape: &[usize], values: impl IntoIterator<Item = f32>) -> Self {
        let bytes = values.into_iter().flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect();
        self.bytes(name, "F16", shape, bytes)
    }

    fn floats(self, name: &str, shape: &[usize], values: impl IntoIterator<Item = f32>) -> Self {
        self.bytes(name, "F32", shape, values.into_iter().flat_map(f32::to_le_bytes).collect())
    }

    fn without(mut self, name: &str) -> Self {
        self.0.retain(|(other, ..)| other != name);
        self
    }

    /// Opens them beside a configuration. The directory is gone afterwards; what is mapped stays.
    fn open(&self, settings: Value) -> Result<Checkpoint, LoadError> {
        static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let dir = TempDir::new(&format!("scheme-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, dtype, shape, bytes) in &self.0 {
            let begin = data.len();
            data.extend(bytes);
            header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}));
        }
        let header = Value::Object(header).to_string();
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        std::fs::write(dir.join("model.safetensors"), file).unwrap();
        let config = json!({"model_type": "llama", "quantization_config": settings});
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        Checkpoint::open(&dir)
    }

    fn matrix(&self, settings: Value, shape: &[usize]) -> Result<Matrix, LoadError> {
        self.open(settings)?.matrix("m", shape)
    }

    fn refusal(&self, settings: Value, shape: &[usize]) -> String {
        match self.matrix(settings.clone(), shape) {
            Err(error) => error.to_string(),
            Ok(matrix) => panic!("{settings} must be refused, is {:?}", matrix.tensor.format),
        }
    }
}

/// Codes without a pattern that a wrong place could keep.
fn code(n: usize, k: usize, bits: u32) -> u32 {
    let mixed = (n as u32 * 0x9e37 + k as u32 * 0x85eb + 77).wrapping_mul(0x2c1b_3c6d);
    mixed >> (32 - bits)
}

/// Neighbours in words, the first lowest.
fn packed(codes: impl IntoIterator<Item = u32>, bits: u32) -> Vec<u32> {
    let codes: Vec<u32> = codes.into_iter().collect();
    let words = codes.chunks((32 / bits) as usize);
    words.map(|codes| codes.iter().enumerate().fold(0, |word, (i, code)| word | code << (i as u32 * bits))).collect()
}

fn grid(rows: usize, cols: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..cols).map(move |col| (row, col)))
}

fn scale(n: usize, group: usize) -> f32 {
    (1 + n % 5 + 2 * group) as f32 / 64.0
}

const ROWS: usize = 48;
const COLS: usize = 128;
const SHAPE: &[usize] = &[ROWS, COLS];

/// GPTQ with 48 outputs and groups of 32 inputs, whose stored zero points are `zero(n, group)`.
fn gptq(bits: u32, zero: impl Fn(usize, usize) -> u32) -> Files {
    let per_word = (32 / bits) as usize;
    // Words along the inputs: packed for each output, then put side by side.
    let columns: Vec<Vec<u32>> = (0..ROWS).map(|n| packed((0..COLS).map(|k| code(n, k, bits)), bits)).collect();
    let zeros = (0..4).flat_map(|group| packed((0..ROWS).map(|n| zero(n, group)), bits)).collect::<Vec<_>>();
    Files::default()
        .words("m.qweight", &[COLS / per_word, ROWS], grid(COLS / per_word, ROWS).map(|(word, n)| columns[n][word]))
        .words("m.qzeros", &[4, ROWS / per_word], zeros)
        .halves("m.scales", &[4, ROWS], grid(4, ROWS).map(|(group, n)| scale(n, group)))
}

fn gptq_settings(bits: u32, more: Value) -> Value {
    let mut settings = json!({"quant_method": "gptq", "bits": bits, "group_size": 32});
    settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    settings
}

/// `(code - zero) * scale` of everything.
fn expected(bits: u32, zero: impl Fn(usize, usize) -> u32) -> Vec<f32> {
    let value = |(n, k): (usize, usize)| (code(n, k, bits) as f32 - zero(n, k / 32) as f32) * scale(n, k / 32);
    grid(ROWS, COLS).map(value).collect()
}

#[test]
fn gptq_symmetric_is_q4_0_and_q8_0_whatever_zero_is_stored() {
    for (bits, format) in [(4, WeightFormat::Q4_0), (8, WeightFormat::Q8_0)] {
        let middle = 1 << (bits - 1);
        for stored in [middle - 1, middle, 3] {
            for checkpoint_format in ["gptq", "gptq_v2"] {
                let settings = gptq_settings(bits, json!({"sym": true, "checkpoint_format": checkpoint_format}));
                let matrix = gptq(bits, |_, _| stored).matrix(settings, SHAPE).unwrap();
                assert_eq!(matrix.tensor.format, format);
                assert_eq!(matrix.tensor.to_f32(), expected(bits, |_, _| middle));
                assert_eq!(matrix.names, ["m.qweight", "m.scales", "m.qzeros"]);
            }
        }
        let files = gptq(bits, |n, _| n as u32 % 3);
        assert!(
            files.refusal(gptq_settings(bits, json!({})), SHAPE).contains("'m.qzeros': expected equal zero points")
        );
        let without = gptq(bits, |_, _| 0).without("m.qzeros");
        assert_eq!(without.matrix(gptq_settings(bits, json!({})), SHAPE).unwrap().tensor.format, format);
    }
}

/// Stored less 1 in format 1, up to 16 in 4 bits; where all are 7 or 8 the file's own word for it does not count.
#[test]
fn gptq_asymmetric_takes_the_zero_points_of_its_format() {
    let asymmetric = |format: &str| json!({"sym": false, "checkpoint_format": format});
    let any = |n: usize, group: usize| (n + 5 * group) as u32 % 16;
    for (format, added) in [("gptq", 1), ("gptq_v2", 0)] {
        let matrix = gptq(4, any).matrix(gptq_settings(4, asymmetric(format)), SHAPE).unwrap();
        assert_eq!(matrix.tensor.format, WeightFormat::Int4);
        assert_eq!(matrix.tensor.to_f32(), expected(4, |n, group| any(n, group) + added));
        for (stored, zero) in [(7, 8), (8, 8), (3, 3 + added)] {
            let matrix = gptq(4, |_, _| stored).matrix(gptq_settings(4, asymmetric(format)), SHAPE).unwrap();
            assert_eq!(matrix.tensor.to_f32(), expected(4, |_, _| zero), "{format} stores {stored}");
        }
        let eight = |n: usize, group: usize| (n * 5 + group) as u32;
        let matrix = gptq(8, eight).matrix(gptq_settings(8, asymmetric(format)), SHAPE).unwrap();
        assert_eq!(matrix.tensor.format, WeightFormat::Int8);
        assert_eq!(matrix.tensor.to_f32(), expected(8, |n, group| eight(n, group) + added));
    }
    let full = gptq(8, |n, _| 255 - n as u32 % 2).refusal(gptq_settings(8, asymmetric("gptq")), SHAPE);
    assert!(full.contains("'m.qzeros': expected zero points below 256"), "{full}");
}

#[test]
fn gptq_in_the_order_of_activations_sorts_its_inputs() {
    // Input k is in group (7 k) % 4: 32 inputs each, no two neighbours alike.
    let group = |k: usize| (7 * k) % 4;
    let files = gptq(4, |_, _| 7).words("m.g_idx", &[COLS], (0..COLS).map(|k| group(k) as u32));
    let settings = gptq_settings(4, json!({"desc_act": true}));
    let matrix = files.matrix(settings.clone(), SHAPE).unwrap();
    let order = matrix.input_order.expect("groups are no neighbours");
    let values = matrix.tensor.to_f32();
    for (n, column) in grid(ROWS, COLS) {
        let k = order[column] as usize;
        let value = (code(n, k, 4) as f32 - 8.0) * scale(n, group(k));
        assert_eq!(values[n * COLS + column], value, "[{n}, {k}]");
    }
    let message = files.refusal(gptq_settings(4, json!({})), SHAPE);
    assert!(message.contains("'m.g_idx': expected groups of neighbours, as desc_act is false"), "{message}");
    let index = |group: &dyn Fn(usize) -> u32| files.clone().words("m.g_idx", &[COLS], (0..COLS).map(group));
    assert_eq!(index(&|k| k as u32 / 32).matrix(settings.clone(), SHAPE).unwrap().input_order, None);
    for (files, message) in [
        (files.clone().without("m.g_idx"), "'m.g_idx': expected the group of each input"),
        (index(&|k| k as u32 % 5), "expected groups below 4, got 4"),
        (index(&|_| u32::MAX), "expected groups below 4, got -1"),
        (index(&|k| u32::from(k % 3 == 0)), "expected groups of a multiple of 32 inputs"),
        (files.clone().words("m.g_idx", &[COLS / 2], vec![0; COLS / 2]), "expected I32 [128], got I32 [64]"),
    ] {
        let got = files.refusal(settings.clone(), SHAPE);
        assert!(got.contains(message), "{message}: {got}");
    }
    // One group of all inputs has no order to speak of.
    let whole = files.words("m.g_idx", &[COLS], vec![0; COLS]).halves("m.scales", &[1, ROWS], vec![0.5; ROWS]);
    let whole = whole.words("m.qzeros", &[1, ROWS / 8], vec![0x7777_7777; ROWS / 8]);
    let settings = gptq_settings(4, json!({"desc_act": true, "group_size": -1}));
    assert_eq!(whole.matrix(settings, SHAPE).unwrap().input_order, None);
}

#[test]
fn gptq_overrides_are_taken_in_order() {
    let four = gptq(4, |_, _| 7);
    let eight = gptq(8, |_, _| 127);
    let dynamic = |dynamic: Value| gptq_settings(4, json!({"dynamic": dynamic}));
    let matrix = eight.matrix(dynamic(json!({"-:n": {}, "+:m$": {"bits": 8}, "m": {"bits": 4}})), SHAPE).unwrap();
    assert_eq!(matrix.tensor.format, WeightFormat::Q8_0);
    assert!(four.matrix(dynamic(json!({"-:(?!m)": {}, "^x": {"bits": 8}})), SHAPE).is_ok(), "from the start only");
    let message = four.refusal(dynamic(json!({"-:[a-m]": {}})), SHAPE);
    assert!(message.contains("'m.weight': expected shape [48, 128], as the module is not quantised"), "{message}");
    let message = four.refusal(dynamic(json!({"(": {}})), SHAPE);
    assert!(message.contains("quantization_config.dynamic.(: "), "{message}");
}

/// A bias of zeros is AutoGPTQ's, and stands for nothing; another one is the model's to read.
#[test]
fn gptq_takes_a_bias_of_zeros_away() {
    let names = |bias: f32| {
        let files = gptq(4, |_, _| 7).halves("m.bias", &[ROWS], vec![bias; ROWS]);
        files.matrix(gptq_settings(4, json!({})), SHAPE).unwrap().names
    };
    assert!(names(0.0).contains(&"m.bias".to_string()));
    assert!(!names(0.5).contains(&"m.bias".to_string()));
}

#[test]
fn scales_that_f16_does_not_hold_widen_the_codes() {
    let fine = |n: usize, group: usize| scale(n, group) + 1e-6;
    let files = gptq(4, |_, _| 7).floats("m.scales", &[4, ROWS], grid(4, ROWS).map(|(group, n)| fine(n, group)));
    let matrix = files.matrix(gptq_settings(4, json!({})), SHAPE).unwrap();
    assert_eq!(matrix.tensor.format, WeightFormat::Int8);
    let value = |(n, k): (usize, usize)| (code(n, k, 4) as f32 - 8.0) * fine(n, k / 32);
    assert_eq!(matrix.tensor.to_f32(), grid(ROWS, COLS).map(value).collect::<Vec<_>>());
    let bad = gptq(4, |_, _| 7).halves("m.scales", &[4, ROWS], vec![f32::NAN; 4 * ROWS]);
    assert!(bad.refusal(gptq_settings(4, json!({})), SHAPE).contains("'m.scales': expected finite numbers, got NaN"));
}

/// Backends ask for rows in panels of their own.
#[test]
fn rows_are_the_same_in_any_pieces() {
    let group = |k: usize| ((7 * k) % 4) as u32;
    let ordered = gptq(4, |_, _| 7).words("m.g_idx", &[COLS], (0..COLS).map(group));
    for files in [gptq(8, |_, _| 127), ordered] {
        let bits = if files.0[0].2[0] == COLS / 8 { 4 } else { 8 };
        let tensor = files.matrix(gptq_settings(bits, json!({"desc_act": bits == 4})), SHAPE).unwrap().tensor;
        let whole = tensor.rows(0..ROWS).into_owned();
        let pieces = [0..1, 1..17, 17..40, 40..ROWS].map(|rows| tensor.rows(rows).into_owned());
        assert_eq!(pieces.concat(), whole);
    }
}

fn awq() -> Files {
    // Nibble p of a word holds the output [0, 2, 4, 6, 1, 3, 5, 7][p] of eight.
    let interleaved = |codes: &dyn Fn(usize) -> u32| -> Vec<u32> {
        let places = (0..ROWS / 8).flat_map(|word| [0, 2, 4, 6, 1, 3, 5, 7].map(|n| word * 8 + n));
        packed(places.map(codes), 4)
    };
    Files::default()
        .words("m.qweight", &[COLS, ROWS / 8], (0..COLS).flat_map(|k| interleaved(&|n| code(n, k, 4))))
        .words("m.qzeros", &[4, ROWS / 8], (0..4).flat_map(|group| interleaved(&|n| (n + group) as u32 % 16)))
        .halves("m.scales", &[4, ROWS], grid(4, ROWS).map(|(group, n)| scale(n, group)))
}

#[test]
fn awq_is_interleaved_and_adds_nothing() {
    let settings = json!({"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"});
    let matrix = awq().matrix(settings, SHAPE).unwrap();
    assert_eq!(matrix.tensor.format, WeightFormat::Int4);
    assert_eq!(matrix.tensor.to_f32(), expected(4, |n, group| (n + group) as u32 % 16));
    let refusal = |key: &str, value: Value| {
        let mut settings = json!({"quant_method": "awq", "bits": 4, "group_size": 32});
        settings[key] = value;
        awq().refusal(settings, SHAPE)
    };
    assert!(refusal("version", json!("gemv")).contains("version of AWQ 'gemv' is not supported (supported: gemm)"));
    assert!(refusal("bits", json!(8)).contains("number of bits '8'"));
    assert!(refusal("group_size", json!(64)).contains("'m.scales': expected floats [2, 48], got F16 [4, 48]"));
    let message = refusal("group_size", json!(16));
    assert!(message.contains("quantization_config.group_size: 16: groups of a multiple of 32"), "{message}");
    assert!(refusal("modules_to_not_convert", json!(["m"])).contains("modules_to_not_convert has 'm'"));
}

fn group_settings(weights: Value, format: &str) -> Value {
    let group = json!({"targets": ["Linear"], "weights": weights});
    json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "ignore": ["n"]})
}

#[test]
fn compressed_tensors_packs_along_inputs_and_zero_points_along_outputs() {
    let zero = |n: usize, group: usize| (3 * n + group) as u32 % 16;
    let columns: Vec<Vec<u32>> = (0..4).map(|group| packed((0..ROWS).map(|n| zero(n, group)), 4)).collect();
    let shape = SHAPE.iter().flat_map(|&dim| (dim as i64).to_le_bytes()).collect();
    let files = Files::default()
        .words("m.weight_packed", &[ROWS, COLS / 8], packed(grid(ROWS, COLS).map(|(n, k)| code(n, k, 4)), 4))
        .halves("m.weight_scale", &[ROWS, 4], grid(ROWS, 4).map(|(n, group)| scale(n, group)))
        .words("m.weight_zero_point", &[ROWS / 8, 4], grid(ROWS / 8, 4).map(|(word, group)| columns[group][word]))
        .bytes("m.weight_shape", "I64", &[2], shape);
    let weights =
        |symmetric: bool| json!({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": symmetric});
    let settings = group_settings(weights(false), "pack-quantized");
    let matrix = files.matrix(settings.clone(), SHAPE).unwrap();
    assert_eq!(matrix.tensor.format, WeightFormat::Int4);
    assert_eq!(matrix.tensor.to_f32(), expected(4, zero));
    let matrix = files.matrix(group_settings(weights(true), "pack-quantized"), SHAPE).unwrap();
    assert_eq!(matrix.tensor.format, WeightFormat::Q4_0);
    assert_eq!(matrix.tensor.to_f32(), expected(4, |_, _| 8));

    let turned = [COLS, ROWS].iter().flat_map(|&dim| (dim as i64).to_le_bytes()).collect();
    let turned = files.clone().bytes("m.weight_shape", "I64", &[2], turned).refusal(settings.clone(), SHAPE);
    assert!(turned.contains("'m.weight_shape': expected [48, 128], got [128, 48]"), "{turned}");
    let missing = files.clone().without("m.weight_zero_point").refusal(settings.clone(), SHAPE);
    assert!(missing.contains("'m.weight_zero_point': expected I32 [6, 4], got nothing"), "{missing}");
    let mut ignored = settings.clone();
    ignored["ignore"] = json!(["re:m$"]);
    assert!(files.refusal(ignored, SHAPE).contains("as the module is ignored"));
    let mut untargeted = settings.clone();
    untargeted["config_groups"]["group_0"]["targets"] = json!(["other"]);
    assert!(files.refusal(untargeted, SHAPE).contains("as no target matches"));
    let message = files.refusal(group_settings(json!({"num_bits": 4, "type": "float"}), "nvfp4-pack-quantized"), SHAPE);
    assert!(message.contains("'floats of 4 bits in nvfp4-pack-quantized' is not supported"), "{message}");
}

#[test]
fn compressed_tensors_bytes_are_signed() {
    let bytes = grid(ROWS, COLS).map(|(n, k)| (code(n, k, 8) ^ 0x80) as u8).collect();
    let files = Files::default()
        .bytes("m.weight", "I8", SHAPE, bytes)
        .floats("m.weight_scale", &[ROWS, 1], (0..ROWS).map(|n| 0.1 + n as f32))
        .bytes("m.weight_zero_point", "I8", &[ROWS, 1], (0..ROWS).map(|n| (n as u8 * 5) ^ 0x80).collect());
    for symmetric in [true, false] {
        let weights = json!({"num_bits": 8, "strategy": "channel", "symmetric": symmetric});
        let matrix = files.matrix(group_settings(weights, "int-quantized"), SHAPE).unwrap();
        assert_eq!(matrix.tensor.format, WeightFormat::Int8);
        let value = |(n, k): (usize, usize)| {
            let zero = if symmetric { 128 } else { n as u32 * 5 };
            (code(n, k, 8) as f32 - zero as f32) * (0.1 + n as f32)
        };
        assert_eq!(matrix.tensor.to_f32(), grid(ROWS, COLS).map(value).collect::<Vec<_>>());
    }
}

/// No NaN, every other byte.
fn e4m3(n: usize, k: usize) -> u8 {
    let byte = code(n, k, 8) as u8;
    if byte & 0x7f == 0x7f { byte ^ 1 } else { byte }
}

fn e4m3_value(byte: u8) -> f32 {
    let (e, m) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
    let magnitude = if e == 0 { 2f32.powi(-6) * m } else { 2f32.powi(e - 7) * (1.0 + m) };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

#[test]
fn fp8_scales_multiply_by_matrix_output_or_block() {
    let base =
        Files::default().bytes("m.weight", "F8_E4M3", SHAPE, grid(ROWS, COLS).map(|(n, k)| e4m3(n, k)).collect());
    let scales = |count: usize| (0..count).map(|i| 0.3 + i as f32).collect::<Vec<f32>>();
    let blocks = json!({"quant_method": "fp8", "weight_block_size": [32, 64]});
    let plain = json!({"quant_method": "fp8"});
    type ScaleOf = fn(usize, usize) -> usize;
    let cases: [(&Value, &str, &[usize], ScaleOf); 6] = [
        (&plain, "m.weight_scale", &[], |_, _| 0),
        (&plain, "m.weight_scale_inv", &[], |_, _| 0),
        (&plain, "m.weight_scale", &[1], |_, _| 0),
        (&plain, "m.weight_scale", &[ROWS], |n, _| n),
        (&plain, "m.weight_scale", &[ROWS, 1], |n, _| n),
        (&blocks, "m.weight_scale_inv", &[2, 2], |n, k| n / 32 * 2 + k / 64),
    ];
    for (settings, name, shape, scale_of) in cases {
        let scales = scales(shape.iter().product());
        let files = base.clone().floats(name, shape, scales.clone()).floats("m.input_scale", &[], [1.0]);
        let files = files.floats("m.activation_scale", &[], [1.0]);
        let matrix = files.matrix(settings.clone(), SHAPE).unwrap();
        assert_eq!(matrix.names, ["m.weight", name, "m.input_scale", "m.activation_scale"]);
        let value = |(n, k): (usize, usize)| scales[scale_of(n, k)] * e4m3_value(e4m3(n, k));
        assert_eq!(matrix.tensor.to_f32(), grid(ROWS, COLS).map(value).collect::<Vec<_>>(), "{name} {shape:?}");
    }
    let large = base.clone().floats("m.weight_scale", &[1], [1e37]).refusal(plain.clone(), SHAPE);
    assert!(large.contains("'m.weight_scale': expected scales below 2^119"), "{large}");
    let misshapen = base.clone().floats("m.weight_scale_inv", &[2, 3], scales(6)).refusal(blocks.clone(), SHAPE);
    assert!(misshapen.contains("'m.weight_scale_inv': expected floats [2, 2], got F32 [2, 3]"), "{misshapen}");
    let mut bytes = base.0[0].3.clone();
    bytes[3 * COLS + 5] = 0xff;
    let nan = base.bytes("m.weight", "F8_E4M3", SHAPE, bytes).floats("m.weight_scale", &[1], [1.0]);
    assert!(nan.refusal(plain, SHAPE).contains("'m.weight': expected numbers, got NaN at [3, 5]"));
    let narrow = json!({"quant_method": "fp8", "weight_block_size": [128, 16]});
    assert!(nan.refusal(narrow, SHAPE).contains("weight_block_size: expected [outputs, a multiple of 32 inputs]"));
}

#[test]
fn mxfp4_pairs_are_neighbours() {
    let shape = &[2, 3, 64];
    let nibble = |row: usize, k: usize| code(row, k, 4) as u8;
    let exponent = |row: usize, block: usize| (120 + row + block) as u8;
    let files = Files::default()
        .bytes(
            "m_blocks",
            "U8",
            &[2, 3, 2, 16],
            grid(6, 32).map(|(row, pair)| nibble(row, 2 * pair) | nibble(row, 2 * pair + 1) << 4).collect(),
        )
        .bytes("m_scales", "U8", &[2, 3, 2], grid(6, 2).map(|(row, block)| exponent(row, block)).collect());
    let settings = json!({"quant_method": "mxfp4"});
    let matrix = files.matrix(settings.clone(), shape).unwrap();
    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let value = |(row, k): (usize, usize)| {
        let code = nibble(row, k);
        let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
        sign * magnitudes[usize::from(code & 7)] * 2f32.powi(i32::from(exponent(row, k / 32)) - 127)
    };
    assert_eq!(matrix.tensor.to_f32(), grid(6, 64).map(value).collect::<Vec<f32>>());
    assert_eq!((matrix.tensor.format, matrix.tensor.shape.as_slice()), (WeightFormat::Mxfp4, &shape[..]));
    assert!(files.refusal(settings.clone(), &[2, 3, 48]).contains("'m_blocks': expected a multiple of 32 inputs"));
    let nan = files.bytes("m_scales", "U8", &[2, 3, 2], vec![255; 12]).refusal(settings, shape);
    assert!(nan.contains("'m_scales': expected powers of two, got NaN (255)"), "{nan}");
}

#[test]
fn configurations_that_are_not_there_are_named() {
    let files = gptq(4, |_, _| 7);
    for (settings, message) in [
        (json!({}), "quantization_config.quant_method: missing"),
        (json!([1]), "quantization_config: expected an object"),
        (json!({"quant_method": "bitsandbytes"}), "quant_method 'bitsandbytes' is not supported (supported: gptq, awq"),
        (gptq_settings(3, json!({})), "number of bits '3' is not supported (supported: 4, 8)"),
        (gptq_settings(4, json!({"group_size": "all"})), "quantization_config.group_size: expected a whole number"),
        (gptq_settings(4, json!({"sym": 1})), "quantization_config.sym: expected true or false, got 1"),
        (gptq_settings(4, json!({"checkpoint_format": "marlin"})), "checkpoint_format 'marlin' is not supported"),
        (gptq_settings(4, json!({"group_size": 96})), "multiples of 8 outputs and of group_size 96 inputs"),
        (gptq_settings(8, json!({})), "'m.qweight': expected I32 [32, 48], got I32 [16, 48]"),
        (Value::Null, "tensor type 'I32 of \"m.qweight\" without a quantization_config' is not supported"),
    ] {
        let got = files.refusal(settings, SHAPE);
        assert!(got.contains(message), "{message}: {got}");
    }
    assert!(files.refusal(gptq_settings(4, json!({})), &[ROWS, 64]).contains("'m.qweight': expected I32 [8, 48]"));
    assert!(files.refusal(gptq_settings(4, json!({})), &[ROWS, 40]).contains("the last a multiple of 32"));
}

/// Floats in the place of codes would be another model's speed.
#[test]
fn made_up_weights_are_refused() {
    let dir = TempDir::new("scheme-dummy");
    let config = |config: Value| std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    config(json!({"model_type": "llama", "quantization_config": null}));
    assert!(Checkpoint::open_dummy(&dir).is_ok());
    config(json!({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}));
    let error = Checkpoint::open_dummy(&dir).unwrap_err().to_string();
    assert!(error.contains("quantization_config without weights '\"awq\"' is not supported"), "{error}");
}

/// Any value under any key, and any tensor away: an error or a matrix that can be read, never a panic.
#[test]
fn no_configuration_panics() {
    let byte =
        Files::default().bytes("m.weight", "I8", SHAPE, vec![1; ROWS * COLS]).floats("m.weight_scale", &[1], [1.0]);
    let all = [
        (gptq(4, |_, _| 7), gptq_settings(4, json!({"sym": true, "desc_act": false, "dynamic": {"m": {}}}))),
        (awq(), json!({"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["n"]})),
        (byte, group_settings(json!({"num_bits": 8, "strategy": "tensor"}), "int-quantized")),
    ];
    let odd =
        [json!(null), json!(-1), json!(0), json!(32), json!(1u64 << 40), json!(1e300), json!("m"), json!([["m"]])];
    for (files, settings) in all {
        assert!(files.matrix(settings.clone(), SHAPE).is_ok(), "{settings}");
        let without =
            files.0.iter().map(|(name, ..)| files.clone().without(name)).map(|files| (files, settings.clone()));
        let keys: Vec<String> = settings.as_object().unwrap().keys().cloned().collect();
        let changed = keys.iter().flat_map(|key| odd.iter().map(move |value| (key, value))).map(|(key, value)| {
            let mut settings = settings.clone();
            settings[key.as_str()] = value.clone();
            (files.clone(), settings)
        });
        for (files, settings) in without.chain(changed) {
            if let Ok(matrix) = files.matrix(settings, SHAPE) {
                assert_eq!(matrix.tensor.to_f32().len(), ROWS * COLS);
            }
        }
    }
}
