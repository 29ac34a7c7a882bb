//! Each format against blocks packed here from known values, by the layout's description and not by its decoder.

use super::*;
use crate::weights::Checkpoint;

fn f16_bytes(value: f32) -> [u8; 2] {
    half::f16::from_f32(value).to_le_bytes()
}

fn decode(format: WeightFormat, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / format.block_bytes() * format.block_len()];
    format.dequantize(bytes, &mut out);
    out
}

/// Values below `below` without a pattern that a wrong index could keep.
fn noise(n: usize, below: u32, mut state: u32) -> Vec<u8> {
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 16) % below) as u8
    };
    (0..n).map(|_| next()).collect()
}

#[test]
fn the_table_is_in_the_order_of_the_enum() {
    for (index, format) in WeightFormat::all().enumerate() {
        assert_eq!(format as usize, index);
        if let Some(id) = format.ggml_type() {
            assert_eq!(WeightFormat::from_ggml_type(id), Some(format));
        }
    }
    assert_eq!(WeightFormat::from_ggml_type(9), None);
    assert_eq!(WeightFormat::Int4.ggml_type(), None);
    assert_eq!(WeightFormat::from_safetensors_dtype("BF16"), Some(WeightFormat::Bf16));
    assert_eq!(WeightFormat::from_safetensors_dtype("Q8_0"), None);
    assert_eq!(WeightFormat::Q6K.to_string(), "Q6_K");
}

#[test]
fn bytes_of_checks_rows_and_overflow() {
    assert_eq!(WeightFormat::Q4K.bytes_of(&[3, 512]), Some(3 * 2 * 144));
    assert_eq!(WeightFormat::Q8_0.bytes_of(&[64, 16]), None, "a block does not cross rows");
    assert_eq!(WeightFormat::F32.bytes_of(&[usize::MAX / 2]), None);
    assert_eq!(WeightFormat::F16.bytes_of(&[usize::MAX, 2]), None);
}

#[test]
#[should_panic(expected = "bytes and elements of Q8_0 differ")]
fn lengths_must_belong_together() {
    WeightFormat::Q8_0.dequantize(&[0; 35], &mut [0.0; 32]);
}

#[test]
fn floats_of_any_alignment() {
    let bytes = [&[9][..], &1.5f32.to_le_bytes(), &(-0.0f32).to_le_bytes()].concat();
    let values = decode(WeightFormat::F32, &bytes[1..]);
    assert_eq!(values.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), [1.5f32.to_bits(), 0x8000_0000]);
    assert_eq!(decode(WeightFormat::F16, &[0x00, 0x3c, 0x01, 0x00]), [1.0, 2f32.powi(-24)]);
    assert_eq!(decode(WeightFormat::Bf16, &[0x80, 0x3f, 0x49, 0x40]), [1.0, 3.140625]);
}

#[test]
fn q8_0_is_signed() {
    let q: Vec<i8> = (0..32).map(|j| (j * 37 % 256 - 128) as i8).collect();
    let block = [&f16_bytes(-0.5)[..], bytemuck::cast_slice(&q)].concat();
    assert_eq!(decode(WeightFormat::Q8_0, &block), q.iter().map(|&q| f32::from(q) * -0.5).collect::<Vec<_>>());
}

/// Nibbles of 32 elements: byte j holds element j (low) and element j + 16 (high).
fn nibbles(q: &[u8]) -> Vec<u8> {
    (0..16).map(|j| (q[j] & 0xf) | ((q[j + 16] & 0xf) << 4)).collect()
}

/// The fifth bits of 32 elements, element j in bit j.
fn fifth_bits(q: &[u8]) -> [u8; 4] {
    q.iter().enumerate().fold(0u32, |bits, (j, &q)| bits | u32::from(q >> 4) << j).to_le_bytes()
}

#[test]
fn four_and_five_bit_blocks_of_32() {
    let (d, m) = (0.25f32, -3.0f32);
    let (d_bytes, m_bytes) = (f16_bytes(d), f16_bytes(m));
    let expect = |q: &[u8], value: &dyn Fn(f32) -> f32| q.iter().map(|&q| value(f32::from(q))).collect::<Vec<_>>();
    for seed in 0..8 {
        let four = noise(32, 16, seed);
        let five = noise(32, 32, seed);
        let q4_0 = [&d_bytes[..], &nibbles(&four)].concat();
        assert_eq!(decode(WeightFormat::Q4_0, &q4_0), expect(&four, &|q| d * (q - 8.0)));
        let q4_1 = [&d_bytes[..], &m_bytes, &nibbles(&four)].concat();
        assert_eq!(decode(WeightFormat::Q4_1, &q4_1), expect(&four, &|q| d * q + m));
        let q5_0 = [&d_bytes[..], &fifth_bits(&five), &nibbles(&five)].concat();
        assert_eq!(decode(WeightFormat::Q5_0, &q5_0), expect(&five, &|q| d * (q - 16.0)));
        let q5_1 = [&d_bytes[..], &m_bytes, &fifth_bits(&five), &nibbles(&five)].concat();
        assert_eq!(decode(WeightFormat::Q5_1, &q5_1), expect(&five, &|q| d * q + m));
    }
}

/// The 12 bytes of eight 6-bit scales and minimums.
fn pack_scales(scales: &[u8], mins: &[u8]) -> [u8; 12] {
    let mut bytes = [0; 12];
    for i in 0..4 {
        bytes[i] = scales[i] | (scales[i + 4] >> 4) << 6;
        bytes[i + 4] = mins[i] | (mins[i + 4] >> 4) << 6;
        bytes[i + 8] = (scales[i + 4] & 0xf) | (mins[i + 4] & 0xf) << 4;
    }
    bytes
}

#[test]
fn k_blocks_with_scales_and_minimums() {
    let (d, dmin) = (0.03125f32, 0.5f32);
    for seed in 0..8 {
        let (scales, mins) = (noise(8, 64, seed), noise(8, 64, seed + 100));
        let head = [&f16_bytes(d)[..], &f16_bytes(dmin), &pack_scales(&scales, &mins)].concat();
        let expect = |q: &[u8]| -> Vec<f32> {
            let value =
                |(j, &q): (usize, &u8)| d * f32::from(scales[j / 32]) * f32::from(q) - dmin * f32::from(mins[j / 32]);
            q.iter().enumerate().map(value).collect()
        };
        // 64 elements share 32 bytes: the first 32 in the low nibbles, the next in the high ones.
        let low_bits = |q: &[u8]| -> Vec<u8> {
            q.chunks(64).flat_map(|q| (0..32).map(|l| (q[l] & 0xf) | (q[l + 32] & 0xf) << 4)).collect()
        };
        let four = noise(256, 16, seed);
        assert_eq!(decode(WeightFormat::Q4K, &[&head[..], &low_bits(&four)].concat()), expect(&four));

        let five = noise(256, 32, seed);
        let mut high = [0u8; 32];
        for (j, &q) in five.iter().enumerate() {
            high[j % 32] |= (q >> 4) << (j / 32);
        }
        assert_eq!(decode(WeightFormat::Q5K, &[&head[..], &high, &low_bits(&five)].concat()), expect(&five));
    }
}

#[test]
fn q6_k_blocks() {
    let d = 0.015625f32;
    for seed in 0..8 {
        let q = noise(256, 64, seed);
        let scales: Vec<i8> = noise(16, 256, seed + 50).into_iter().map(|scale| scale as i8).collect();
        let (mut low, mut high) = ([0u8; 128], [0u8; 64]);
        for (i, &q) in q.iter().enumerate() {
            let (half, rest) = (i / 128, i % 128);
            low[half * 64 + rest % 64] |= (q & 0xf) << (rest / 64 * 4);
            high[half * 32 + rest % 32] |= (q >> 4) << (rest / 32 * 2);
        }
        let block = [&low[..], &high, bytemuck::cast_slice(&scales), &f16_bytes(d)].concat();
        let value = |(i, &q): (usize, &u8)| d * f32::from(scales[i / 16]) * (f32::from(q) - 32.0);
        assert_eq!(decode(WeightFormat::Q6K, &block), q.iter().enumerate().map(value).collect::<Vec<_>>());
    }
}

#[test]
fn two_bit_blocks_with_scales_and_minimums_of_half_groups() {
    let (d, dmin) = (0.0625f32, 0.25f32);
    for seed in 0..8 {
        let q = noise(256, 4, seed);
        let scales = noise(16, 256, seed + 50);
        let block = [&scales[..], &low_pairs(&q), &f16_bytes(d), &f16_bytes(dmin)].concat();
        let value = |(i, &q): (usize, &u8)| {
            d * f32::from(scales[i / 16] & 0xf) * f32::from(q) - dmin * f32::from(scales[i / 16] >> 4)
        };
        assert_eq!(decode(WeightFormat::Q2K, &block), q.iter().enumerate().map(value).collect::<Vec<_>>());
    }
}

/// The low bit pairs of 256 elements: 32 bytes hold four runs of 32.
fn low_pairs(q: &[u8]) -> [u8; 64] {
    let mut low = [0; 64];
    for (i, &q) in q.iter().enumerate() {
        low[i / 128 * 32 + i % 32] |= (q & 3) << (i % 128 / 32 * 2);
    }
    low
}

#[test]
fn three_bit_blocks() {
    let d = -0.03125f32;
    for seed in 0..8 {
        let (q, scales) = (noise(256, 8, seed), noise(16, 64, seed + 50));
        let (mut high, mut packed) = ([0u8; 32], [0u8; 12]);
        for (i, &q) in q.iter().enumerate() {
            high[i % 32] |= (q >> 2) << (i / 32);
        }
        for (i, &scale) in scales.iter().enumerate() {
            packed[i % 8] |= (scale & 0xf) << (i / 8 * 4);
            packed[8 + i % 4] |= (scale >> 4) << (i / 4 * 2);
        }
        let block = [&high[..], &low_pairs(&q), &packed, &f16_bytes(d)].concat();
        let value = |(i, &q): (usize, &u8)| d * (f32::from(scales[i / 16]) - 32.0) * (f32::from(q) - 4.0);
        assert_eq!(decode(WeightFormat::Q3K, &block), q.iter().enumerate().map(value).collect::<Vec<_>>());
    }
}

#[test]
fn uneven_four_bit_blocks() {
    let d = 0.5f32;
    for seed in 0..8 {
        let q = noise(256, 16, seed);
        let values = |q: &[u8], scale: f32| -> Vec<f32> {
            q.iter().map(|&q| scale * f32::from(IQ4_VALUES[usize::from(q)])).collect()
        };
        let nl = [&f16_bytes(d)[..], &nibbles(&q[..32])].concat();
        assert_eq!(decode(WeightFormat::Iq4Nl, &nl), values(&q[..32], d));

        let scales = noise(8, 64, seed + 50);
        let (mut high, mut low) = (0u16, [0u8; 4]);
        for (i, &scale) in scales.iter().enumerate() {
            high |= u16::from(scale >> 4) << (2 * i);
            low[i / 2] |= (scale & 0xf) << (i % 2 * 4);
        }
        let codes: Vec<u8> = q.chunks(32).flat_map(nibbles).collect();
        let xs = [&f16_bytes(d)[..], &high.to_le_bytes(), &low, &codes].concat();
        let groups = q.chunks(32).zip(&scales);
        let expected: Vec<f32> = groups.flat_map(|(q, &scale)| values(q, d * (f32::from(scale) - 32.0))).collect();
        assert_eq!(decode(WeightFormat::Iq4Xs, &xs), expected);
    }
}

/// The values of the specification: 0 and 0.5 are subnormal, the others 1.m * 2^(e - 1).
#[test]
fn mxfp4_blocks_with_every_power() {
    let magnitudes = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let q = noise(32, 16, 3);
    for e in 0..=u8::MAX {
        let block = [&[e][..], &nibbles(&q)].concat();
        let power = 2f64.powi(i32::from(e) - 127);
        let value = |&q: &u8| {
            let sign = if q & 8 == 0 { 1.0 } else { -1.0 };
            (sign * f64::from(magnitudes[usize::from(q & 7)]) * power) as f32
        };
        assert_eq!(decode(WeightFormat::Mxfp4, &block), q.iter().map(value).collect::<Vec<_>>(), "{e}");
    }
}

#[test]
fn blocks_with_a_zero_point() {
    for (seed, zero) in (0..=16).enumerate() {
        let (four, eight) = (noise(32, 16, seed as u32), noise(32, 256, seed as u32));
        let expect = |q: &[u8], scale: f32, zero: u8| -> Vec<f32> {
            q.iter().map(|&q| scale * (f32::from(q) - f32::from(zero))).collect()
        };
        let int4 = [&f16_bytes(-0.25)[..], &[zero], &nibbles(&four)].concat();
        assert_eq!(decode(WeightFormat::Int4, &int4), expect(&four, -0.25, zero));
        let (scale, zero) = (0.1f32, zero * 15);
        let int8 = [&scale.to_le_bytes()[..], &[zero], &eight].concat();
        assert_eq!(decode(WeightFormat::Int8, &int8), expect(&eight, scale, zero));
    }
}

/// Every byte against the definition: (-1)^s * 2^(e - 7) * 1.mmm, subnormals 2^-6 * 0.mmm, only 0x7f and 0xff are NaN.
#[test]
fn fp8_e4m3_has_all_its_values() {
    let scale = 0.75f32;
    for first in (0..=u8::MAX).step_by(32) {
        let q: Vec<u8> = (0..32).map(|j| first + j).collect();
        let values = decode(WeightFormat::Fp8E4m3, &[&scale.to_le_bytes()[..], &q].concat());
        for (&q, value) in q.iter().zip(values) {
            let (e, m) = (i32::from(q >> 3 & 15), f32::from(q & 7) / 8.0);
            let magnitude = if e == 0 { 2f32.powi(-6) * m } else { 2f32.powi(e - 7) * (1.0 + m) };
            let expected = scale * if q & 0x80 == 0 { magnitude } else { -magnitude };
            assert!(if q & 0x7f == 0x7f { value.is_nan() } else { value == expected }, "{q:#x}: {value}");
        }
    }
    let largest = decode(WeightFormat::Fp8E4m3, &[&1f32.to_le_bytes()[..], &[0x7e; 32]].concat());
    assert_eq!(largest, [448.0; 32]);
}

/// Bit for bit what ggml's Python package makes of the same bytes: see tests/fixtures.
#[test]
fn rows_agree_with_the_gguf_package() {
    let dir = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/gguf"));
    let mut seen = std::collections::HashSet::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let floats = decode(WeightFormat::F32, &std::fs::read(path.with_extension("bin")).unwrap());
        let checkpoint = Checkpoint::open(&path.with_extension("gguf")).unwrap();
        for row in golden["rows"].as_array().unwrap() {
            let number = |key: &str| row[key].as_u64().unwrap() as usize;
            let tensor = &checkpoint.tensors[row["tensor"].as_str().unwrap()];
            assert_eq!(tensor.format.name(), row["type"]);
            let mut got = vec![0.0; number("len")];
            tensor.dequantize_rows(number("row")..number("row") + 1, &mut got);
            let expected = &floats[number("offset_f32")..][..number("len")];
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&got), bits(expected), "{}: {row}", path.display());
            seen.insert(tensor.format);
        }
    }
    let in_files = WeightFormat::all().filter(|format| format.ggml_type().is_some());
    assert_eq!(seen.len(), in_files.count(), "every format is in the fixtures: {seen:?}");
}
