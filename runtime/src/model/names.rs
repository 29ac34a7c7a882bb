//! Names of tensors that families share: house name, name in GGUF files, name in Hugging Face files.
//!
//! Invariant: a table has one row per tensor, `{i}` being the layer; an architecture lists the tables that it is made of.
//! Read by `builder`.

/// One tensor's names, without `.weight` or `.bias`; `{i}` is the layer, `{e}` an expert.
pub(super) struct Name {
    /// In programs and dumps.
    pub house: &'static str,
    /// In GGUF files.
    pub gguf: &'static str,
    /// In Hugging Face files.
    pub hf: &'static str,
}

/// Embedding, last norm, head.
#[rustfmt::skip]
pub(super) const ENDS: &[Name] = &[
    Name { house: "embed", gguf: "token_embd", hf: "model.embed_tokens" },
    Name { house: "norm", gguf: "output_norm", hf: "model.norm" },
    Name { house: "head", gguf: "output", hf: "lm_head" },
];

/// Attention with matrices of their own for q, k and v.
#[rustfmt::skip]
pub(super) const ATTENTION: &[Name] = &[
    Name { house: "layers.{i}.attn.norm", gguf: "blk.{i}.attn_norm", hf: "model.layers.{i}.input_layernorm" },
    Name { house: "layers.{i}.attn.q", gguf: "blk.{i}.attn_q", hf: "model.layers.{i}.self_attn.q_proj" },
    Name { house: "layers.{i}.attn.k", gguf: "blk.{i}.attn_k", hf: "model.layers.{i}.self_attn.k_proj" },
    Name { house: "layers.{i}.attn.v", gguf: "blk.{i}.attn_v", hf: "model.layers.{i}.self_attn.v_proj" },
    Name { house: "layers.{i}.attn.o", gguf: "blk.{i}.attn_output", hf: "model.layers.{i}.self_attn.o_proj" },
];

/// Norms of each head of q and k.
#[rustfmt::skip]
pub(super) const QK_NORMS: &[Name] = &[
    Name { house: "layers.{i}.attn.q_norm", gguf: "blk.{i}.attn_q_norm", hf: "model.layers.{i}.self_attn.q_norm" },
    Name { house: "layers.{i}.attn.k_norm", gguf: "blk.{i}.attn_k_norm", hf: "model.layers.{i}.self_attn.k_norm" },
];

/// Experts with matrices of their own and their router, as most families name them.
#[rustfmt::skip]
pub(super) const EXPERTS: &[Name] = &[
    Name { house: "layers.{i}.mlp.router", gguf: "blk.{i}.ffn_gate_inp", hf: "model.layers.{i}.mlp.gate" },
    Name { house: "layers.{i}.mlp.experts.gate", gguf: "blk.{i}.ffn_gate_exps", hf: "model.layers.{i}.mlp.experts.{e}.gate_proj" },
    Name { house: "layers.{i}.mlp.experts.up", gguf: "blk.{i}.ffn_up_exps", hf: "model.layers.{i}.mlp.experts.{e}.up_proj" },
    Name { house: "layers.{i}.mlp.experts.down", gguf: "blk.{i}.ffn_down_exps", hf: "model.layers.{i}.mlp.experts.{e}.down_proj" },
];

/// What goes into the choice of experts beside their logits, and experts that all tokens share.
#[rustfmt::skip]
pub(super) const SHARED_EXPERTS: &[Name] = &[
    Name { house: "layers.{i}.mlp.correction", gguf: "blk.{i}.exp_probs_b", hf: "model.layers.{i}.mlp.gate.e_score_correction_bias" },
    Name { house: "layers.{i}.mlp.shared.gate", gguf: "blk.{i}.ffn_gate_shexp", hf: "model.layers.{i}.mlp.shared_experts.gate_proj" },
    Name { house: "layers.{i}.mlp.shared.up", gguf: "blk.{i}.ffn_up_shexp", hf: "model.layers.{i}.mlp.shared_experts.up_proj" },
    Name { house: "layers.{i}.mlp.shared.down", gguf: "blk.{i}.ffn_down_shexp", hf: "model.layers.{i}.mlp.shared_experts.down_proj" },
];

/// The norm before a feed-forward block.
#[rustfmt::skip]
pub(super) const MLP_NORM: &[Name] = &[
    Name { house: "layers.{i}.mlp.norm", gguf: "blk.{i}.ffn_norm", hf: "model.layers.{i}.post_attention_layernorm" },
];

/// A gated MLP of three matrices.
#[rustfmt::skip]
pub(super) const MLP: &[Name] = &[
    Name { house: "layers.{i}.mlp.gate", gguf: "blk.{i}.ffn_gate", hf: "model.layers.{i}.mlp.gate_proj" },
    Name { house: "layers.{i}.mlp.up", gguf: "blk.{i}.ffn_up", hf: "model.layers.{i}.mlp.up_proj" },
    Name { house: "layers.{i}.mlp.down", gguf: "blk.{i}.ffn_down", hf: "model.layers.{i}.mlp.down_proj" },
];
