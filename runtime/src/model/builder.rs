//! A program and its weights in the making: tensors are found by house name and bound where an op reads them.
//!
//! Invariant: a tensor's shape is checked against the program where it is bound, and a tensor of the file that nothing
//! reads is an error: a bias or norm that this build ignored would change the answer. Called by `layers`.

use std::collections::HashSet;

use super::config::DecoderConfig;
use super::multimodal::Layout;
use super::names::Name;
use super::ordered::Orders;
use super::rope::RopeTable;
use super::{LoadOptions, Model, ModelInfo, QuantisationRules};
use crate::error::LoadError;
use crate::ids::{Slot, WeightId};
use crate::program::{LinearPart, Op, Program, RopePairing, Rotary, RowDim, SlotInfo, WeightInfo, check::check};
use crate::weights::{Checkpoint, Container, HostTensor, Matrix, WeightFormat};

/// Tensors that say nothing new, by the end of their names.
const IGNORED: &[&str] = &["rotary_emb.inv_freq", "rope_factors_long.weight", "rope_factors_short.weight"];

/// What a GGUF file of the Llama 3 kind divides each frequency by.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// A program and its tensors in the making.
pub(super) struct Builder<'a> {
    architecture: &'static str,
    pub checkpoint: &'a Checkpoint,
    names: &'static [&'static [Name]],
    pub program: Program,
    weights: Vec<HostTensor>,
    /// Names in the file.
    bound: HashSet<String>,
    /// Elements of tensors of the file.
    num_parameters: u64,
    orders: Orders,
    quantisation: &'a QuantisationRules,
    layout: Layout,
}

/// One matrix of a linear, by house name.
pub(super) struct Part<'a> {
    pub name: &'a str,
    pub out_features: u32,
    /// `None`: if the file has one.
    pub bias: Option<bool>,
}

impl<'a> Builder<'a> {
    pub fn new(
        checkpoint: &'a Checkpoint,
        options: &'a LoadOptions,
        architecture: &'static str,
        names: &'static [&'static [Name]],
    ) -> Self {
        let program = Program { name: architecture.into(), ..Program::default() };
        Self {
            architecture,
            checkpoint,
            names,
            program,
            weights: Vec::new(),
            bound: HashSet::new(),
            num_parameters: 0,
            orders: Orders::default(),
            quantisation: &options.quantisation,
            layout: Layout::of(checkpoint),
        }
    }

    pub fn push(&mut self, op: Op) {
        self.program.ops.push(op);
    }

    pub fn slot(&mut self, name: &str, rows: RowDim, width: u32) -> Slot {
        self.program.slots.push(SlotInfo { name: name.into(), rows, width });
        Slot(self.program.slots.len() as u32 - 1)
    }

    pub fn width(&self, slot: Slot) -> u32 {
        self.program.slots[slot.index()].width
    }

    /// The name in the file of `layers.3.attn.q` and the like, with `.weight` or `.bias`.
    pub fn file_name(&self, house: &str, suffix: &str) -> String {
        format!("{}.{suffix}", self.stem(house))
    }

    /// As `file_name`, for names that have nothing behind them in Hugging Face files.
    pub fn bare_name(&self, house: &str, suffix: &str) -> String {
        if self.checkpoint.container.is_hf() { self.stem(house) } else { self.file_name(house, suffix) }
    }

    /// The name in the file of `layers.3.attn.q` and the like, as its table has it.
    pub fn stem(&self, house: &str) -> String {
        let layer = house.strip_prefix("layers.").and_then(|rest| rest.split('.').next()).unwrap_or_default();
        let row = self.names.iter().copied().flatten().find(|name| name.house.replace("{i}", layer) == house);
        let row = row.unwrap_or_else(|| panic!("'{house}' is not in the architecture's name tables"));
        match self.checkpoint.container {
            Container::Gguf(_) => row.gguf.replace("{i}", layer),
            Container::HuggingFace { .. } => self.layout.stem(row.hf.replace("{i}", layer)),
        }
    }

    pub fn tensor_error(&self, tensor: &str, expected: impl Into<String>, got: impl Into<String>) -> LoadError {
        let (path, tensor) = (self.checkpoint.path.clone(), tensor.into());
        LoadError::Tensor { path, tensor, expected: expected.into(), got: got.into() }
    }

    /// Rows of the embedding; a config that says another number is wrong.
    pub fn vocab_size(&self, house: &str, config: &DecoderConfig) -> Result<u32, LoadError> {
        let name = self.file_name(house, "weight");
        let shape = match self.checkpoint.tensors.get(&name) {
            Some(tensor) => tensor.shape.as_slice(),
            None if self.checkpoint.dummy => &[config.vocab_size.unwrap_or(0) as usize],
            None => return Err(self.tensor_error(&name, "a matrix", "nothing")),
        };
        let rows = shape.first().and_then(|&rows| u32::try_from(rows).ok()).unwrap_or(0);
        let expected = config.vocab_size.unwrap_or(rows);
        if rows == 0 || rows != expected {
            return Err(self.tensor_error(&name, format!("{expected} rows (vocab_size)"), format!("{shape:?}")));
        }
        Ok(rows)
    }

    /// Binds `<name>.weight` of the file.
    pub fn weight(&mut self, house: &str, shape: &[u32]) -> Result<WeightId, LoadError> {
        self.bind(house, self.file_name(house, "weight"), shape)
    }

    /// Binds a tensor of the file under a house name; a matrix, whatever tensors the file keeps it in.
    pub fn bind(&mut self, house: &str, file_name: String, shape: &[u32]) -> Result<WeightId, LoadError> {
        if let Some(stem) = file_name.strip_suffix(".weight").filter(|_| shape.len() > 1) {
            let Matrix { tensor, input_order, names } = self.matrix(stem, shape)?;
            let id = self.add(house, tensor);
            if let Some(order) = input_order {
                self.set_order(house, id, order);
            }
            self.bound.extend(names);
            return Ok(id);
        }
        let tensor = self.find(&file_name, shape)?;
        self.bound.insert(file_name);
        Ok(self.add(house, tensor))
    }

    /// The weight of a module, whatever tensors the file keeps it in.
    pub fn matrix(&self, stem: &str, shape: &[u32]) -> Result<Matrix, LoadError> {
        if self.checkpoint.dummy {
            let name = format!("{stem}.weight");
            return Ok(Matrix { tensor: self.find(&name, shape)?, input_order: None, names: vec![name] });
        }
        self.checkpoint.matrix(stem, &shape.iter().map(|&d| d as usize).collect::<Vec<_>>())
    }

    fn set_order(&mut self, house: &str, matrix: WeightId, order: Vec<u32>) {
        let mut orders = std::mem::take(&mut self.orders);
        orders.insert(matrix, order, |order| {
            // Exact: no model has 2^24 columns.
            let values: Vec<f32> = order.iter().map(|&column| column as f32).collect();
            self.add_computed(&format!("{house}.order"), HostTensor::from_f32("order", vec![values.len()], &values))
        });
        self.orders = orders;
    }

    /// Binds one matrix `[rows, cols]` per expert as `[experts, rows, cols]`: a tensor of the file, or one of each expert.
    pub fn expert_weight(&mut self, house: &str, [experts, rows, cols]: [u32; 3]) -> Result<WeightId, LoadError> {
        let name = self.file_name(house, "weight");
        if !name.contains("{e}") {
            return self.weight(house, &[experts, rows, cols]);
        }
        let mut parts: Vec<HostTensor> = Vec::new();
        for expert in 0..experts {
            let stem = self.stem(house).replace("{e}", &expert.to_string());
            let tensor = self.read(&stem, &[rows, cols])?;
            if let Some(first) = parts.first().filter(|first| first.format != tensor.format) {
                let expected = format!("{}, as '{}' has", first.format, first.name);
                return Err(self.tensor_error(&stem, expected, tensor.format.name()));
            }
            parts.push(tensor);
        }
        Ok(self.add_made(house, HostTensor::stacked(name, parts)))
    }

    /// Matrices of the file that weights are made of: `add_made` adds those.
    pub fn read(&mut self, stem: &str, shape: &[u32]) -> Result<HostTensor, LoadError> {
        let Matrix { tensor, input_order, names } = self.matrix(stem, shape)?;
        if input_order.is_some() {
            let expected = "columns in the order of its inputs";
            return Err(self.tensor_error(stem, expected, "another order (desc_act), which this matrix may not have"));
        }
        self.bound.extend(names);
        self.num_parameters += num_elements(&tensor);
        Ok(tensor)
    }

    /// Binds a norm's weight; some files store it without the 1 that belongs to it.
    pub fn norm_weight(&mut self, house: &str, len: u32, offset: f32) -> Result<WeightId, LoadError> {
        if offset == 0.0 {
            return self.weight(house, &[len]);
        }
        let name = self.file_name(house, "weight");
        let values = self.find(&name, &[len])?.to_f32();
        let values: Vec<f32> = values.iter().map(|value| value + offset).collect();
        let tensor = HostTensor::from_f32(name.clone(), vec![len as usize], &values);
        self.bound.insert(name);
        Ok(self.add(house, tensor))
    }

    /// A tensor of the file, of this shape.
    pub fn find(&self, file_name: &str, shape: &[u32]) -> Result<HostTensor, LoadError> {
        let expected: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
        let tensor = match self.checkpoint.tensors.get(file_name) {
            Some(tensor) => tensor.clone(),
            None if self.checkpoint.dummy => made_up(file_name, expected.clone(), self.weights.len() as u64),
            None => return Err(self.tensor_error(file_name, format!("shape {expected:?}"), "nothing")),
        };
        if tensor.shape != expected {
            return Err(self.tensor_error(file_name, format!("shape {expected:?}"), format!("{:?}", tensor.shape)));
        }
        if shape.len() == 1 && tensor.format.block_len() != 1 {
            return Err(self.tensor_error(file_name, "a vector of floats", format!("{:?}", tensor.format)));
        }
        Ok(tensor)
    }

    /// Adds a weight that is a tensor of the file.
    pub fn add(&mut self, house: &str, tensor: HostTensor) -> WeightId {
        self.num_parameters += num_elements(&tensor);
        self.add_made(house, tensor)
    }

    /// Adds a weight made of what `read` gave.
    pub fn add_made(&mut self, house: &str, tensor: HostTensor) -> WeightId {
        self.add_computed(house, tensor.quantised(self.quantisation.of(house)))
    }

    fn add_computed(&mut self, house: &str, tensor: HostTensor) -> WeightId {
        let shape = tensor.shape.iter().map(|&d| d as u32).collect();
        self.program.weights.push(WeightInfo { name: house.into(), shape });
        self.weights.push(tensor);
        WeightId(self.weights.len() as u32 - 1)
    }

    /// Nothing reads the layers past the last: they serve something else.
    pub fn ignore_layers(&mut self, first: u32, count: u32) {
        let layers: Vec<String> = (first..first + count).map(|layer| format!("model.layers.{layer}.")).collect();
        let in_file = self.checkpoint.tensors.keys().chain(self.checkpoint.quantised.names());
        let unread = in_file.filter(|name| layers.iter().any(|layer| name.starts_with(layer)));
        self.bound.extend(unread.cloned());
    }

    /// Nothing reads this tensor of the file, and that is right.
    pub fn ignore(&mut self, file_name: String) {
        self.bound.insert(file_name);
    }

    /// Binds the frequencies of a rotary embedding; a GGUF file of the Llama 3 kind has a divisor for each.
    pub fn rotary(&mut self, house: &str, table: &RopeTable, pairing: RopePairing) -> Result<Rotary, LoadError> {
        let mut inv_freq = table.inv_freq.clone();
        if let Some(factors) = self.checkpoint.tensors.get(ROPE_FACTORS) {
            if factors.shape != [inv_freq.len()] {
                let expected = format!("shape [{}]", inv_freq.len());
                return Err(self.tensor_error(ROPE_FACTORS, expected, format!("{:?}", factors.shape)));
            }
            let factors = factors.to_f32();
            if let Some(bad) = factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
                return Err(self.tensor_error(ROPE_FACTORS, "positive numbers", bad.to_string()));
            }
            inv_freq.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
            self.bound.insert(ROPE_FACTORS.into());
        }
        if let Some(bad) = inv_freq.iter().chain([&table.amplitude]).find(|value| !value.is_finite()) {
            let (path, problem) = (self.checkpoint.path.clone(), format!("the settings make a frequency {bad}"));
            return Err(LoadError::Config { path, key: "rope".into(), problem });
        }
        let inv_freq = self.add_computed(house, HostTensor::from_f32(house, vec![inv_freq.len()], &inv_freq));
        Ok(Rotary { inv_freq, amplitude: table.amplitude, pairing })
    }

    /// The matrix of a linear over `in_features`, with its bias.
    pub fn part(&mut self, part: &Part<'_>, in_features: u32) -> Result<LinearPart, LoadError> {
        let weight = self.weight(part.name, &[part.out_features, in_features])?;
        let bias = self.file_name(part.name, "bias");
        let has_bias = part.bias.unwrap_or_else(|| self.checkpoint.tensors.contains_key(&bias));
        let bias = has_bias.then(|| self.bind(&format!("{}.bias", part.name), bias, &[part.out_features]));
        Ok(LinearPart { weight, bias: bias.transpose()? })
    }

    /// Checks that everything was read, and the program.
    pub fn finish(mut self, vocab: u32, config: &DecoderConfig) -> Result<Model, LoadError> {
        let in_file = self.checkpoint.tensors.keys().chain(self.checkpoint.quantised.names());
        let mut names: Vec<&String> = in_file.collect();
        names.sort_unstable();
        let is_ignored = |name: &str| IGNORED.iter().any(|end| name.ends_with(end)) || self.layout.is_of_images(name);
        let is_known = |name: &str| self.bound.contains(name) || is_ignored(name);
        let architecture = self.architecture;
        if let Some(name) = names.into_iter().find(|name| !is_known(name)) {
            return Err(LoadError::Unsupported {
                path: self.checkpoint.path.clone(),
                what: "tensor",
                name: name.clone(),
                supported: format!("the tensors of {architecture}"),
            });
        }
        self.orders.gather_inputs(&mut self.program).map_err(|matrix| {
            let expected = "columns in the order of its inputs, or in that of the matrices that read the same ones";
            self.tensor_error(&self.weights[matrix.index()].name, expected, "another order (desc_act)")
        })?;
        check(&self.program, &self.checkpoint.path)?;
        let info = ModelInfo {
            architecture,
            vocab_size: vocab,
            max_position: config.max_position,
            num_parameters: self.num_parameters,
            num_layers: config.num_layers,
            hidden: config.hidden,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        Ok(Model { program: self.program, weights: self.weights, info })
    }
}

fn num_elements(tensor: &HostTensor) -> u64 {
    tensor.shape.iter().product::<usize>() as u64
}

/// A tensor for `--load-format dummy`: bf16, matrices uniform in ±0.05 (by a 64-bit LCG, the same every time), vectors 1.
fn made_up(name: &str, shape: Vec<usize>, seed: u64) -> HostTensor {
    let (len, is_vector) = (shape.iter().product::<usize>(), shape.len() == 1);
    let mut state = seed;
    let values = (0..len).flat_map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let uniform = (state >> 40) as f32 / (1u32 << 24) as f32;
        half::bf16::from_f32(if is_vector { 1.0 } else { 0.1 * uniform - 0.05 }).to_le_bytes()
    });
    HostTensor::owned(name, WeightFormat::Bf16, shape, values.collect::<Vec<u8>>())
}
