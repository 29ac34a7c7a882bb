//! Writes small GGUF files for tests, sound ones and broken ones: every count and field can be made to lie.

use super::MetaValue;
use crate::weights::WeightFormat;

/// A GGUF file in the making.
#[derive(Clone, Debug)]
pub(crate) struct GgufWriter {
    pub(crate) version: u32,
    /// Padding of the tensor data; say it to readers with `general.alignment` if it is not 32.
    pub(crate) alignment: usize,
    /// Instead of the true counts.
    pub(crate) num_tensors: Option<u64>,
    pub(crate) num_values: Option<u64>,
    pub(crate) values: Vec<u8>,
    pub(crate) values_written: u64,
    pub(crate) infos: Vec<u8>,
    pub(crate) infos_written: u64,
    pub(crate) data: Vec<u8>,
}

impl GgufWriter {
    pub(crate) fn new() -> Self {
        Self {
            version: 3,
            alignment: 32,
            num_tensors: None,
            num_values: None,
            values: Vec::new(),
            values_written: 0,
            infos: Vec::new(),
            infos_written: 0,
            data: Vec::new(),
        }
    }

    /// A value with its type id and payload as given.
    pub(crate) fn raw_value(mut self, key: &str, type_id: u32, payload: &[u8]) -> Self {
        push_string(&mut self.values, key.as_bytes());
        self.values.extend(type_id.to_le_bytes());
        self.values.extend(payload);
        self.values_written += 1;
        self
    }

    pub(crate) fn u32(self, key: &str, value: u32) -> Self {
        self.raw_value(key, 4, &value.to_le_bytes())
    }

    pub(crate) fn value(self, key: &str, value: &MetaValue) -> Self {
        let array = |element_type: u32, elements: Vec<Vec<u8>>| {
            let mut payload = element_type.to_le_bytes().to_vec();
            payload.extend((elements.len() as u64).to_le_bytes());
            payload.extend(elements.concat());
            payload
        };
        let string = |text: &String| {
            let mut payload = Vec::new();
            push_string(&mut payload, text.as_bytes());
            payload
        };
        let (type_id, payload) = match value {
            MetaValue::Int(value) => (11, value.to_le_bytes().to_vec()),
            MetaValue::Uint(value) => (10, value.to_le_bytes().to_vec()),
            MetaValue::Float(value) => (12, value.to_le_bytes().to_vec()),
            MetaValue::Bool(value) => (7, vec![u8::from(*value)]),
            MetaValue::Str(value) => (8, string(value)),
            MetaValue::Ints(values) => (9, array(11, values.iter().map(|v| v.to_le_bytes().to_vec()).collect())),
            MetaValue::Floats(values) => (9, array(6, values.iter().map(|v| v.to_le_bytes().to_vec()).collect())),
            MetaValue::Bools(values) => (9, array(7, values.iter().map(|&v| vec![u8::from(v)]).collect())),
            MetaValue::Strs(values) => (9, array(8, values.iter().map(string).collect())),
        };
        self.raw_value(key, type_id, &payload)
    }

    /// A tensor info with every field as given (`dims` fastest first, as in the file) and no data.
    pub(crate) fn raw_tensor(mut self, name: &str, dims: &[u64], type_id: u32, offset: u64) -> Self {
        push_string(&mut self.infos, name.as_bytes());
        self.infos.extend((dims.len() as u32).to_le_bytes());
        self.infos.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        self.infos.extend(type_id.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
        self.infos_written += 1;
        self
    }

    /// A tensor of `shape` (slowest first) after the ones before it.
    pub(crate) fn tensor(mut self, name: &str, format: WeightFormat, shape: &[usize], bytes: &[u8]) -> Self {
        assert_eq!(format.bytes_of(shape), Some(bytes.len()));
        let offset = self.data.len().next_multiple_of(self.alignment);
        self.data.resize(offset, 0);
        self.data.extend(bytes);
        let dims: Vec<u64> = shape.iter().rev().map(|&dim| dim as u64).collect();
        self.raw_tensor(name, &dims, format.ggml_type().expect("a format of GGUF files"), offset as u64)
    }

    /// Bytes after the last tensor's, for tensors that were written raw.
    pub(crate) fn data(mut self, bytes: &[u8]) -> Self {
        self.data.extend(bytes);
        self
    }

    pub(crate) fn finish(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(self.num_tensors.unwrap_or(self.infos_written).to_le_bytes());
        file.extend(self.num_values.unwrap_or(self.values_written).to_le_bytes());
        file.extend(&self.values);
        file.extend(&self.infos);
        file.resize(file.len().next_multiple_of(self.alignment), 0);
        file.extend(&self.data);
        file
    }
}

fn push_string(bytes: &mut Vec<u8>, text: &[u8]) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text);
}
