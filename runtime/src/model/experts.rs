//! The block of experts in a decoder: router, the linears of the chosen experts, their weighted sum, and experts that all tokens
//! share.
//!
//! Invariant: gates and ups are matrices of their own in a program, whatever the file makes of them. Called by `layers`.

use super::builder::Part;
use super::layers::Decoder;
use super::reader::{Key, Reader};
use crate::error::LoadError;
use crate::program::{FusedNorm, LinearEnd, LinearPart, Op, Router, RowDim};
use crate::weights::{HostTensor, Matrix};

const EXPERTS: [Key; 3] = [
    Key { hf: "num_local_experts", gguf: "expert_count" },
    Key { hf: "num_experts", gguf: "expert_count" },
    Key { hf: "n_routed_experts", gguf: "expert_count" },
];
/// The keys of `EXPERTS`, for architectures that have experts.
pub(super) const EXPERT_KEYS: [&str; 4] = ["num_local_experts", "num_experts", "n_routed_experts", "expert_count"];
const TOP_K: Key = Key { hf: "num_experts_per_tok", gguf: "expert_used_count" };

/// How a Hugging Face file keeps experts; GGUF files keep gates, ups and downs as one tensor of all experts each.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpertLayout {
    /// Matrices of their own.
    Separate,
    /// gpt-oss: gates and ups are rows that alternate; without quantisation the matrices of all experts are transposed.
    Alternating,
}

/// What layers of experts have.
pub(super) struct ExpertsSpec {
    pub num_experts: u32,
    /// Rows of an expert's gates.
    pub intermediate: u32,
    pub router: Router,
    pub layout: ExpertLayout,
    /// Whether router and experts have biases.
    pub bias: bool,
    /// Whether a bias that is no logit's takes part in the choice.
    pub correction: bool,
    /// Rows of the gates of what all tokens share.
    pub shared: Option<u32>,
}

/// How many experts there are, and how many a token has; none where there are none.
pub(super) fn read_counts(reader: &Reader<'_>) -> Result<Option<(u32, u32)>, LoadError> {
    let mut given: Option<(Key, u32)> = None;
    for key in EXPERTS {
        let Some(count) = reader.u32(key)?.filter(|&count| count > 0) else { continue };
        if let Some((other, first)) = given.filter(|(_, first)| *first != count) {
            return Err(reader.error(key, format!("{count}, but {} is {first}", reader.name(other))));
        }
        given = given.or(Some((key, count)));
    }
    let Some((key, experts)) = given else { return Ok(None) };
    let top_k = reader.size(TOP_K)?;
    if top_k > experts {
        return Err(reader.error(key, format!("{experts} experts, of which a token has {top_k}")));
    }
    Ok(Some((experts, top_k)))
}

impl Decoder<'_> {
    pub(super) fn experts(&mut self, i: u32, experts: &ExpertsSpec) -> Result<(), LoadError> {
        let house = |name: &str| format!("layers.{i}.mlp.{name}");
        let (hidden, n, top_k) = (self.config.hidden, experts.intermediate, experts.router.top_k);
        let FusedNorm { weight, eps, normed } = self.norm(&house("norm"), &format!("l{i}.mlp_in"))?;
        self.builder.push(Op::RmsNorm { x: self.residual, weight, eps, out: normed });

        let part = Part { name: &house("router"), out_features: experts.num_experts, bias: Some(experts.bias) };
        let router = self.builder.part(&part, hidden)?;
        let slot = |name: &str| format!("l{i}.{name}");
        let logits = self.builder.slot(&slot("router"), RowDim::Tokens, experts.num_experts);
        self.builder.push(Op::Linear { x: normed, parts: vec![router], out: logits });
        let bias = experts.correction.then(|| {
            let name = self.builder.bare_name(&house("correction"), "bias");
            self.builder.bind(&house("correction"), name, &[experts.num_experts])
        });
        let route = self.builder.slot(&slot("route"), RowDim::Tokens, 2 * top_k);
        self.builder.push(Op::MoeRoute { logits, bias: bias.transpose()?, router: experts.router, out: route });

        let parts = self.gates_and_ups(i, experts)?;
        let product = self.builder.slot(&slot("gate_up"), RowDim::Tokens, top_k * 2 * n);
        self.builder.push(Op::MoeLinear { x: normed, route: Some(route), parts, out: product });
        let gated = self.builder.slot(&slot("gated"), RowDim::Tokens, top_k * n);
        let activation = self.spec.activation;
        self.builder.push(Op::GatedActivation { x: product, groups: top_k, activation, out: gated });
        let down = self.downs(i, experts)?;
        let back = self.builder.slot(&slot("down"), RowDim::Tokens, top_k * hidden);
        self.builder.push(Op::MoeLinear { x: gated, route: Some(route), parts: vec![down], out: back });
        self.builder.push(Op::MoeCombine { x: back, route, residual: self.residual });
        match experts.shared {
            Some(shared) => self.shared(i, normed, shared),
            None => Ok(()),
        }
    }

    /// A gated MLP that all tokens take part in.
    fn shared(&mut self, i: u32, x: crate::ids::Slot, n: u32) -> Result<(), LoadError> {
        let house = |name: &str| format!("layers.{i}.mlp.shared.{name}");
        let mut parts = Vec::new();
        for name in ["gate", "up"] {
            let part = Part { name: &house(name), out_features: n, bias: Some(false) };
            parts.push(self.builder.part(&part, self.config.hidden)?);
        }
        let product = self.builder.slot(&format!("l{i}.shared_gate_up"), RowDim::Tokens, 2 * n);
        let out = self.builder.slot(&format!("l{i}.shared_gated"), RowDim::Tokens, n);
        let end = LinearEnd::Gate { activation: self.spec.activation, product };
        self.builder.push(Op::FusedLinear { x, norm: None, parts, end, out });
        let part = Part { name: &house("down"), out_features: self.config.hidden, bias: Some(false) };
        let down = self.builder.part(&part, n)?;
        let product = self.builder.slot(&format!("l{i}.shared_out"), RowDim::Tokens, self.config.hidden);
        let end = LinearEnd::Add { product };
        self.builder.push(Op::FusedLinear { x: out, norm: None, parts: vec![down], end, out: self.residual });
        Ok(())
    }

    fn gates_and_ups(&mut self, i: u32, experts: &ExpertsSpec) -> Result<Vec<LinearPart>, LoadError> {
        let shape = [experts.num_experts, experts.intermediate, self.config.hidden];
        let house = |name: &str| format!("layers.{i}.mlp.experts.{name}");
        if experts.layout == ExpertLayout::Separate || !self.builder.checkpoint.container.is_hf() {
            return ["gate", "up"].into_iter().map(|name| self.separate(&house(name), shape, experts.bias)).collect();
        }
        let [count, n, hidden] = shape;
        let both = self.turned(&house("gate_up"), [count, 2 * n, hidden])?;
        let bias_name = format!("{}_bias", self.builder.stem(&house("gate_up")));
        let bias = self.builder.find(&bias_name, &[count, 2 * n])?.to_f32();
        self.builder.ignore(bias_name);
        let parts = ["gate", "up"].into_iter().enumerate().map(|(first, name)| {
            let weight = self.builder.add(&house(name), both.alternate_rows(first));
            let values: Vec<f32> = bias.iter().skip(first).step_by(2).copied().collect();
            let bias = HostTensor::from_f32(format!("{name}.bias"), vec![values.len()], &values);
            LinearPart { weight, bias: Some(self.builder.add(&format!("{}.bias", house(name)), bias)) }
        });
        Ok(parts.collect())
    }

    fn downs(&mut self, i: u32, experts: &ExpertsSpec) -> Result<LinearPart, LoadError> {
        let shape = [experts.num_experts, self.config.hidden, experts.intermediate];
        let house = format!("layers.{i}.mlp.experts.down");
        if experts.layout == ExpertLayout::Separate || !self.builder.checkpoint.container.is_hf() {
            return self.separate(&house, shape, experts.bias);
        }
        let tensor = self.turned(&house, shape)?;
        let weight = self.builder.add(&house, tensor);
        let bias_name = format!("{}_bias", self.builder.stem(&house));
        let bias = self.flat_bias(&house, bias_name, [shape[0], shape[1]])?;
        Ok(LinearPart { weight, bias: Some(bias) })
    }

    fn separate(&mut self, house: &str, shape: [u32; 3], has_bias: bool) -> Result<LinearPart, LoadError> {
        let weight = self.builder.expert_weight(house, shape)?;
        let bias_name = self.builder.file_name(house, "bias");
        let bias = has_bias.then(|| self.flat_bias(house, bias_name, [shape[0], shape[1]])).transpose()?;
        Ok(LinearPart { weight, bias })
    }

    /// The biases `[experts, rows]` as one vector.
    fn flat_bias(&mut self, house: &str, name: String, shape: [u32; 2]) -> Result<crate::ids::WeightId, LoadError> {
        let values = self.builder.find(&name, &shape)?.to_f32();
        let bias = HostTensor::from_f32(name.clone(), vec![values.len()], &values);
        self.builder.ignore(name);
        Ok(self.builder.add(&format!("{house}.bias"), bias))
    }

    /// A tensor of `[experts, rows, cols]` that the file keeps as `[experts, cols, rows]`, without `.weight` behind its name, or
    /// quantised.
    fn turned(&mut self, house: &str, [experts, rows, cols]: [u32; 3]) -> Result<HostTensor, LoadError> {
        let name = self.builder.stem(house);
        if !self.builder.checkpoint.tensors.contains_key(&name) && !self.builder.checkpoint.dummy {
            // Quantised (MXFP4): not transposed.
            let Matrix { tensor, names, .. } = self.builder.matrix(&name, &[experts, rows, cols])?;
            names.into_iter().for_each(|name| self.builder.ignore(name));
            return Ok(tensor);
        }
        let tensor = self.builder.find(&name, &[experts, cols, rows])?;
        if tensor.format.block_len() != 1 {
            return Err(self.builder.tensor_error(&name, "floats", tensor.format.name()));
        }
        self.builder.ignore(name);
        Ok(tensor.transposed_matrices())
    }
}
