//! Multi-head latent attention in a decoder: what all heads share of keys and values is cached, one row per token; each head's own
//! matrices are multiplied into its query and its result ("absorbed"), for every start and length alike.
//!
//! Invariant: a cached row is `[rotary key | latent]`, a query `[turned | absorbed]`, so that RoPE turns the first elements of both,
//! and the row is the value too: what attention gives for its rotary part meets zero columns. Called by `layers`. Source: DeepSeek-AI
//! 2024, "DeepSeek-V2", 2.1 (absorption: at its end).

use super::builder::{Builder, Part};
use super::layers::{Decoder, LayerSpec};
use crate::error::LoadError;
use crate::ids::{Layer, Slot, WeightId};
use crate::program::{FusedNorm, LinearEnd, LinearPart, Op, Plane, RowDim, StateSpec, View};
use crate::weights::{HostTensor, WeightFormat};

/// Sizes of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LatentSpec {
    /// Elements that queries are made of; none: of the layer's input.
    pub q_rank: Option<u32>,
    /// Elements that a token's keys and values are made of.
    pub rank: u32,
    /// Elements of a head's query and key that do not turn.
    pub plain: u32,
    /// Those that turn; keys share them.
    pub rotary: u32,
    /// Elements of a head's value.
    pub value: u32,
}

impl Decoder<'_> {
    /// Norm, query, latent and rotary key, store, attend, values, project, add.
    pub(super) fn latent_attention(&mut self, i: u32, layer: &LayerSpec, latent: LatentSpec) -> Result<(), LoadError> {
        let LatentSpec { rank, rotary, value, .. } = latent;
        let (heads, row) = (self.config.heads, rank + rotary);
        let house = |name: &str| format!("layers.{i}.attn.{name}");
        let slot = |name: &str| format!("l{i}.{name}");
        let FusedNorm { weight, eps, normed } = self.norm(&house("norm"), &slot("attn_in"))?;
        self.builder.push(Op::RmsNorm { x: self.residual, weight, eps, out: normed });
        let q = self.latent_query(i, normed, latent)?;

        let parts = self.builder.latent_parts(&house("kv_a"), latent, self.config.hidden)?;
        let kv = self.builder.slot(&slot("kv"), RowDim::Tokens, row);
        self.builder.push(Op::Linear { x: normed, parts, out: kv });
        let view = |offset, width| View { slot: kv, offset, width };
        let weight = self.builder.weight(&house("kv_a_norm"), &[rank])?;
        self.builder.push(Op::NormHeads { x: view(rotary, rank), weight, eps });
        let turn = layer.rope.map(|rope| self.ropes[rope]);
        if let Some(turn) = turn {
            self.builder.push(Op::Rope { x: view(0, rotary), rotary: turn, head_dim: rotary });
        }
        let plane = Plane { heads: 1, dim: row, dtype: self.options.kv_dtype };
        self.builder.program.states.push(StateSpec::shared(plane));
        let state = Layer(i);
        self.builder.push(Op::StoreKv { k: view(0, row), v: None, layer: state });

        let (keys, values) = self.builder.head_matrices(i, heads, latent)?;
        let absorbed = self.builder.slot(&slot("absorbed"), RowDim::Tokens, heads * row);
        self.builder.push(Op::MoeLinear { x: q, route: None, parts: vec![keys], out: absorbed });
        let q = View { slot: absorbed, offset: 0, width: heads * row };
        if let Some(turn) = turn {
            self.builder.push(Op::Rope { x: q, rotary: turn, head_dim: row });
        }
        let mixed = self.builder.slot(&slot("attn"), RowDim::Tokens, heads * row);
        let (scale, window, soft_cap) = (self.spec.attention_scale, layer.window, self.spec.attention_cap);
        let (layer, head_dim, sinks) = (state, row, None);
        self.builder.push(Op::Attention { q, layer, heads, head_dim, scale, window, soft_cap, sinks, out: mixed });
        let out = self.builder.slot(&slot("values"), RowDim::Tokens, heads * value);
        self.builder.push(Op::MoeLinear { x: mixed, route: None, parts: vec![values], out });
        let part = Part { name: &house("o"), out_features: self.config.hidden, bias: Some(false) };
        self.add_linear(out, &format!("layers.{i}.attn"), &slot("attn_out"), &part)
    }

    /// `[tokens, heads * (plain + rotary)]`.
    fn latent_query(&mut self, i: u32, x: Slot, latent: LatentSpec) -> Result<Slot, LoadError> {
        let house = |name: &str| format!("layers.{i}.attn.{name}");
        let width = self.config.heads * (latent.plain + latent.rotary);
        let Some(rank) = latent.q_rank else {
            let part = Part { name: &house("q"), out_features: width, bias: Some(false) };
            let part = self.builder.part(&part, self.config.hidden)?;
            let q = self.builder.slot(&format!("l{i}.q"), RowDim::Tokens, width);
            self.builder.push(Op::Linear { x, parts: vec![part], out: q });
            return Ok(q);
        };
        let part = Part { name: &house("q_a"), out_features: rank, bias: Some(false) };
        let part = self.builder.part(&part, self.config.hidden)?;
        let q_a = self.builder.slot(&format!("l{i}.q_a"), RowDim::Tokens, rank);
        self.builder.push(Op::Linear { x, parts: vec![part], out: q_a });
        let weight = self.builder.weight(&house("q_a_norm"), &[rank])?;
        let normed = self.builder.slot(&format!("l{i}.q_a_normed"), RowDim::Tokens, rank);
        let norm = Some(FusedNorm { weight, eps: self.config.rms_eps, normed });
        let part = Part { name: &house("q_b"), out_features: width, bias: Some(false) };
        let parts = vec![self.builder.part(&part, rank)?];
        let q = self.builder.slot(&format!("l{i}.q"), RowDim::Tokens, width);
        self.builder.push(Op::FusedLinear { x: q_a, norm, parts, end: LinearEnd::Store, out: q });
        Ok(q)
    }
}

impl Builder<'_> {
    /// The matrix of rotary key and latent, whose rows are the other way round in files.
    fn latent_parts(&mut self, house: &str, latent: LatentSpec, hidden: u32) -> Result<Vec<LinearPart>, LoadError> {
        let (rank, rotary) = (latent.rank as usize, latent.rotary as usize);
        let tensor = self.read(&self.stem(house), &[latent.rank + latent.rotary, hidden])?;
        let parts = [("rotary", rank..rank + rotary), ("latent", 0..rank)].map(|(name, rows)| {
            let weight = self.add_made(&format!("{house}.{name}"), tensor.row_range(rows));
            LinearPart { weight, bias: None }
        });
        Ok(parts.to_vec())
    }

    /// What makes a head's query meet cached rows, `[heads, rotary + rank, plain + rotary]`, and its value of what attention gives,
    /// `[heads, value, rotary + rank]`.
    fn head_matrices(&mut self, i: u32, heads: u32, latent: LatentSpec) -> Result<(LinearPart, LinearPart), LoadError> {
        let [k_house, v_house, both] = ["k_b", "v_b", "kv_b"].map(|name| format!("layers.{i}.attn.{name}"));
        let LatentSpec { rank, plain, value, .. } = latent;
        let is_split = !self.checkpoint.container.is_hf()
            && self.checkpoint.tensors.contains_key(&self.file_name(&k_house, "weight"));
        let (keys, values) = if is_split {
            // Keys are stored as they are absorbed.
            let keys = self.read(&self.stem(&k_house), &[heads, rank, plain])?;
            let values = self.read(&self.stem(&v_house), &[heads, value, rank])?;
            (Stored::of(&keys), Stored::of(&values))
        } else {
            let tensor = self.read(&self.stem(&both), &[heads * (plain + value), rank])?;
            Stored::of(&tensor).split_heads(latent)
        };
        let keys = self.add_made(&k_house, keys.absorbing(&k_house, latent));
        let values = self.add_made(&v_house, values.valuing(&v_house, latent));
        let part = |weight: WeightId| LinearPart { weight, bias: None };
        Ok((part(keys), part(values)))
    }
}

/// Matrices of all heads, and what they were stored as.
struct Stored {
    values: Vec<f32>,
    format: WeightFormat,
}

impl Stored {
    fn of(tensor: &HostTensor) -> Self {
        Self { values: tensor.to_f32(), format: tensor.format }
    }

    /// `[heads, rank, plain]` and `[heads, value, rank]` of `[heads, plain + value, rank]`.
    fn split_heads(&self, latent: LatentSpec) -> (Self, Self) {
        let [rank, plain, value] = [latent.rank, latent.plain, latent.value].map(|n| n as usize);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for head in self.values.chunks_exact((plain + value) * rank) {
            let (head_keys, head_values) = head.split_at(plain * rank);
            keys.extend((0..rank * plain).map(|at| head_keys[at % plain * rank + at / plain]));
            values.extend_from_slice(head_values);
        }
        (Self { values: keys, ..*self }, Self { values, ..*self })
    }

    /// Rows for the rotary part, which pass a query's on as it is, then those of the latent.
    fn absorbing(&self, name: &str, latent: LatentSpec) -> HostTensor {
        let [rank, plain, rotary] = [latent.rank, latent.plain, latent.rotary].map(|n| n as usize);
        let mut out = Vec::new();
        for head in self.values.chunks_exact(rank * plain) {
            out.extend((0..rotary * (plain + rotary)).map(|at| {
                let is_same = at % (plain + rotary) == plain + at / (plain + rotary);
                f32::from(u8::from(is_same))
            }));
            for row in head.chunks_exact(plain) {
                out.extend_from_slice(row);
                out.extend(std::iter::repeat_n(0.0, rotary));
            }
        }
        self.tensor(name, [rotary + rank, plain + rotary], &out)
    }

    /// Rows that leave the rotary part out.
    fn valuing(&self, name: &str, latent: LatentSpec) -> HostTensor {
        let [rank, rotary, value] = [latent.rank, latent.rotary, latent.value].map(|n| n as usize);
        let mut out = Vec::new();
        for row in self.values.chunks_exact(rank) {
            out.extend(std::iter::repeat_n(0.0, rotary));
            out.extend_from_slice(row);
        }
        self.tensor(name, [value, rotary + rank], &out)
    }

    /// In the numbers of the file where they are plain ones: what was quantised is not rounded again.
    fn tensor(&self, name: &str, [rows, cols]: [usize; 2], values: &[f32]) -> HostTensor {
        let shape = vec![values.len() / (rows * cols), rows, cols];
        match self.format {
            WeightFormat::Bf16 => {
                let bytes: Vec<u8> = values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
                HostTensor::owned(name, self.format, shape, bytes)
            }
            WeightFormat::F16 => {
                let bytes: Vec<u8> = values.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect();
                HostTensor::owned(name, self.format, shape, bytes)
            }
            _ => HostTensor::from_f32(name, shape, values),
        }
    }
}
