//! Shapes that `kernel bench` measures: the sizes of an op by name, the case that they make, and the work that it is.
//!
//! Invariant: a size that the kernels do not take is an error that names it; no product of sizes overflows. `bytes` counts
//! what must cross memory once (a row's cached keys and values once for all its heads and tokens), `flops` counts an addition
//! and a multiplication as two.

use std::collections::BTreeMap;

use runtime::backend::cases::{AttentionCase, Case, CaseOp, MoeCase, PartCase, SampleCase, Tolerance, TurnCase};
use runtime::program::{Activation, KvDtype, Plane, RopePairing, Router, RouterScore, StateSpec};
use runtime::sample::MAX_TOP;
use runtime::weights::WeightFormat;

use crate::layout;

/// Elements of the largest tensor that is measured.
const MAX_ELEMENTS: u64 = 1 << 27;

/// A case to be timed and the work of its op.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The case.
    pub case: Case,
    /// Every size by name.
    pub sizes: BTreeMap<&'static str, String>,
    /// Bytes that cross memory.
    pub bytes: u64,
    /// Operations on floats.
    pub flops: u64,
}

/// The sizes of a kernel's op and what is measured when nothing is asked for.
fn defaults(kernel: &str) -> &'static [(&'static str, &'static str)] {
    match kernel {
        "linear" => &[("in", "2048"), ("out", "2048"), ("tokens", "1"), ("format", "q4_1")],
        "embed" => &[("width", "2048"), ("tokens", "64"), ("format", "q4_1")],
        "rms_norm" => &[("width", "2048"), ("tokens", "64")],
        "norm_heads" | "rope" => &[("heads", "32"), ("head_dim", "64"), ("tokens", "64")],
        "attention" | "attention_combine" | "store_kv" | "rope_store_kv" => &[
            ("heads", "32"),
            ("kv_heads", "8"),
            ("head_dim", "64"),
            ("context", "1024"),
            ("tokens", "1"),
            ("rows", "1"),
            ("cache", "f16"),
            ("block_size", "16"),
            ("window", "none"),
            ("soft_cap", "none"),
            ("sinks", "false"),
        ],
        "sample_scan" | "sample_draw" | "sample_pick" => {
            &[("vocab", "49152"), ("rows", "1"), ("temperature", "0.8"), ("logprobs", "0")]
        }
        "moe_route" => &[("experts", "128"), ("top_k", "8"), ("tokens", "64")],
        "moe_linear" | "moe_combine" => &[
            ("hidden", "2048"),
            ("intermediate", "768"),
            ("experts", "16"),
            ("top_k", "4"),
            ("tokens", "1"),
            ("format", "q4_1"),
        ],
        _ => &[("width", "2048"), ("tokens", "64")],
    }
}

/// The shape of a kernel's op, from the defaults and `NAME=VALUE` pairs.
///
/// # Errors
/// A size that the op does not have, or a value that the kernels do not take.
pub fn shape(kernel: &str, asked: &[(String, String)]) -> Result<Shape, String> {
    let mut sizes: BTreeMap<&'static str, String> =
        defaults(kernel).iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    for (name, value) in asked {
        let known: Vec<&str> = sizes.keys().copied().collect();
        match sizes.get_mut(name.as_str()) {
            Some(size) => size.clone_from(value),
            None => return Err(format!("'{kernel}' has no size '{name}' (there are: {})", known.join(", "))),
        }
    }
    let (op, bytes, flops) = Sizes(&sizes).op(kernel)?;
    // Nothing is compared: speed has its tests in `check`.
    let tolerance = Tolerance { relative_rms: 0.0, relative_max: 0.0, reason: "not compared" };
    Ok(Shape { case: Case { op, tolerance, seed: 1 }, sizes, bytes, flops })
}

/// The router of measurements, but for its number of choices.
const SOFTMAX: Router =
    Router { top_k: 1, score: RouterScore::Softmax, groups: 1, top_groups: 1, renormalise: true, scale: 1.0 };

struct Sizes<'a>(&'a BTreeMap<&'static str, String>);

impl Sizes<'_> {
    fn number(&self, name: &str) -> Result<u32, String> {
        let text = &self.0[name];
        let number = text.parse().ok().filter(|number| (1..=1 << 20).contains(number));
        number.ok_or_else(|| format!("{name}={text}: expected a number from 1 to {}", 1 << 20))
    }

    /// A number above 0, or `none`.
    fn optional<T: std::str::FromStr + PartialOrd + Default>(&self, name: &str) -> Result<Option<T>, String> {
        let text = &self.0[name];
        if text == "none" {
            return Ok(None);
        }
        let number = text.parse().ok().filter(|number: &T| *number > T::default());
        number.map(Some).ok_or_else(|| format!("{name}={text}: expected a number above 0, or none"))
    }

    fn switch(&self, name: &str) -> Result<bool, String> {
        let text = &self.0[name];
        text.parse().map_err(|_| format!("{name}={text}: expected true or false"))
    }

    fn quads(&self, name: &str) -> Result<u32, String> {
        let number = self.number(name)?;
        if number.is_multiple_of(4) { Ok(number) } else { Err(format!("{name}={number}: expected a multiple of 4")) }
    }

    fn format(&self) -> Result<WeightFormat, String> {
        let text = &self.0["format"];
        let found = WeightFormat::all().find(|format| layout::fragment_of(*format) == text);
        let known: Vec<&str> = WeightFormat::all().map(layout::fragment_of).collect();
        found.ok_or_else(|| format!("format={text}: expected one of {}", known.join(", ")))
    }

    /// The op, its bytes and its operations.
    fn op(&self, kernel: &str) -> Result<(CaseOp, u64, u64), String> {
        match kernel {
            "linear" => self.linear(),
            "embed" => self.embed(),
            "attention" | "attention_combine" | "store_kv" | "rope_store_kv" => self.attention(kernel),
            "norm_heads" | "rope" => {
                let (heads, head_dim, tokens) =
                    (self.number("heads")?, self.quads("head_dim")?, self.number("tokens")?);
                let n = bounded(&[heads, head_dim, tokens])?;
                if kernel == "rope" {
                    let turn = TurnCase::whole(RopePairing::Half, head_dim);
                    return Ok((CaseOp::Rope { heads, head_dim, offset: 0, turn, start: 0, tokens }, 8 * n, 3 * n));
                }
                Ok((CaseOp::NormHeads { heads, head_dim, offset: 0, tokens }, 8 * n, 4 * n))
            }
            "sample_scan" | "sample_draw" | "sample_pick" => self.sample(kernel),
            "moe_route" => {
                let (experts, top_k, tokens) = (self.number("experts")?, self.number("top_k")?, self.number("tokens")?);
                if top_k > experts.min(32) {
                    return Err(format!("top_k={top_k}: expected at most 32, and the experts"));
                }
                let router = Router { top_k, ..SOFTMAX };
                let n = bounded(&[experts, tokens])?;
                Ok((CaseOp::MoeRoute { experts, router, bias: false, tokens }, 4 * n, n * (2 + u64::from(top_k))))
            }
            "moe_linear" | "moe_combine" => self.moe(kernel),
            _ => self.elementwise(kernel),
        }
    }

    fn elementwise(&self, kernel: &str) -> Result<(CaseOp, u64, u64), String> {
        let (width, tokens) = (self.quads("width")?, self.number("tokens")?);
        let n = bounded(&[2, width, tokens])? / 2;
        Ok(match kernel {
            "add" => (CaseOp::Add { width, tokens }, 12 * n, n),
            "gated_activation" => {
                (CaseOp::GatedActivation { width, tokens, activation: Activation::Silu }, 12 * n, 20 * n)
            }
            "scale_by_position" => {
                (CaseOp::ScaleByPosition { width, offset: 0, period: 1024, start: 0, tokens }, 8 * n, n)
            }
            "soft_cap" => (CaseOp::SoftCap { width, tokens, cap: 30.0 }, 8 * n, 20 * n),
            "check_finite" => (CaseOp::CheckFinite { width, tokens }, 4 * n, 0),
            "select_rows" => (CaseOp::SelectRows { width, tokens, logit_rows: tokens }, 8 * n, 0),
            "gather_columns" => (CaseOp::GatherColumns { width, tokens }, 8 * n + 4 * u64::from(width), 0),
            _ => (CaseOp::RmsNorm { width, tokens }, 8 * n, 4 * n),
        })
    }

    /// Every choice reads its expert's matrices.
    fn moe(&self, kernel: &str) -> Result<(CaseOp, u64, u64), String> {
        let (format, experts, top_k) = (self.format()?, self.number("experts")?, self.number("top_k")?);
        let (hidden, intermediate, tokens) =
            (self.quads("hidden")?, self.quads("intermediate")?, self.number("tokens")?);
        whole_blocks("hidden", hidden, format)?;
        whole_blocks("intermediate", intermediate, format)?;
        if top_k > experts.min(32) {
            return Err(format!("top_k={top_k}: expected at most 32, and the experts"));
        }
        bounded(&[experts, 3, hidden, intermediate])?;
        let (activation, bias) = (Activation::Silu, false);
        let case = MoeCase { hidden, intermediate, experts, top_k, format, activation, bias, tokens };
        let choices = u64::from(top_k) * u64::from(tokens);
        let weights = 3 * u64::from(hidden) * u64::from(intermediate);
        if kernel == "moe_combine" {
            return Ok((CaseOp::Moe(case), 4 * choices * u64::from(hidden), 2 * choices * u64::from(hidden)));
        }
        let matrix = 2 * matrix_bytes(format, intermediate, hidden) + matrix_bytes(format, hidden, intermediate);
        Ok((CaseOp::Moe(case), choices * matrix, 2 * choices * weights))
    }

    /// `logprobs=0` is a token without log-probabilities.
    fn sample(&self, kernel: &str) -> Result<(CaseOp, u64, u64), String> {
        let (vocab, rows) = (self.number("vocab")?, self.number("rows")?);
        bounded(&[vocab, 32])?;
        if rows > 32 {
            return Err(format!("rows={rows}: expected at most 32"));
        }
        let text = &self.0["temperature"];
        let temperature = text.parse().ok().filter(|temperature| (0.0..=2.0).contains(temperature));
        let temperature: f32 = temperature.ok_or_else(|| format!("temperature={text}: expected 0 to 2"))?;
        let text = &self.0["logprobs"];
        let logprobs: Option<u32> = text.parse().ok().filter(|&logprobs| logprobs <= MAX_TOP as u32);
        let logprobs = logprobs.ok_or_else(|| format!("logprobs={text}: expected 0 to {MAX_TOP}"))?;
        let case = SampleCase { vocab, rows, temperature, logprobs: Some(logprobs).filter(|&logprobs| logprobs > 0) };
        let n = u64::from(vocab) * u64::from(rows);
        // What is picked from is the shares' results.
        Ok((CaseOp::Sample(case), if kernel == "sample_pick" { n / 4 } else { 4 * n }, n))
    }

    fn embed(&self) -> Result<(CaseOp, u64, u64), String> {
        let (format, width, tokens) = (self.format()?, self.quads("width")?, self.number("tokens")?);
        whole_blocks("width", width, format)?;
        let n = bounded(&[width, tokens])?;
        Ok((CaseOp::Embed { format, width, tokens, scale: 1.0 }, matrix_bytes(format, tokens, width) + 4 * n, 2 * n))
    }

    fn linear(&self) -> Result<(CaseOp, u64, u64), String> {
        let (format, tokens) = (self.format()?, self.number("tokens")?);
        let (in_features, out_features) = (self.number("in")?, self.number("out")?);
        whole_blocks("in", in_features, format)?;
        let weights = bounded(&[in_features, out_features])?;
        let activations = bounded(&[in_features, tokens])? + bounded(&[out_features, tokens])?;
        let parts = vec![PartCase { out_features, format, bias: false }];
        let bytes = matrix_bytes(format, out_features, in_features) + 4 * activations;
        Ok((CaseOp::Linear { in_features, parts, tokens }, bytes, 2 * weights * u64::from(tokens)))
    }

    fn cache(&self) -> Result<KvDtype, String> {
        let text = self.0["cache"].as_str();
        KvDtype::ALL.into_iter().find(|dtype| dtype.name() == text).ok_or_else(|| {
            let names = KvDtype::ALL.map(KvDtype::name).join(", ");
            format!("cache={text}: expected one of {names}")
        })
    }

    fn attention(&self, kernel: &str) -> Result<(CaseOp, u64, u64), String> {
        let (heads, kv_heads, head_dim) = (self.number("heads")?, self.number("kv_heads")?, self.quads("head_dim")?);
        let (context, tokens, rows) = (self.number("context")?, self.number("tokens")?, self.number("rows")?);
        let block_size = self.number("block_size")?;
        let dtype = self.cache()?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!("heads={heads}: expected a multiple of kv_heads={kv_heads}"));
        }
        if tokens > context {
            return Err(format!("tokens={tokens}: expected at most context={context}"));
        }
        let width = bounded(&[heads, 3, head_dim])? as u32;
        bounded(&[width, context, rows])?;
        let case = AttentionCase {
            block_size,
            rows: vec![(context - tokens, tokens); rows as usize],
            rope: (kernel == "rope_store_kv").then(|| TurnCase::whole(RopePairing::Half, head_dim)),
            window: self.optional("window")?,
            soft_cap: self.optional("soft_cap")?,
            sinks: self.switch("sinks")?,
            ..AttentionCase::causal(heads, kv_heads, head_dim, dtype)
        };
        let window = u64::from(case.window.unwrap_or(u32::MAX));
        let (heads, kv_heads, dim) = (u64::from(heads), u64::from(kv_heads), u64::from(head_dim));
        let (context, tokens, rows) = (u64::from(context), u64::from(tokens), u64::from(rows));
        let all_tokens = tokens * rows;
        // Of K and V of one token, with their scales.
        let token_bytes = StateSpec::kv(Plane { heads: case.kv_heads, dim: head_dim, dtype }).block_bytes(1);
        let cached = rows * context.min(window + tokens - 1) * token_bytes;
        let stored = all_tokens * (8 * kv_heads * dim + token_bytes);
        let (bytes, flops) = match kernel {
            "store_kv" => (stored, 0),
            "rope_store_kv" => (stored + 8 * all_tokens * heads * dim, 3 * all_tokens * (heads + kv_heads) * dim),
            _ => {
                let seen = rows * (context - tokens + 1..=context).map(|seen| seen.min(window)).sum::<u64>();
                (cached + 8 * all_tokens * heads * dim, 4 * heads * dim * seen)
            }
        };
        Ok((CaseOp::Attention(case), bytes, flops))
    }
}

fn bounded(sizes: &[u32]) -> Result<u64, String> {
    let product = sizes.iter().try_fold(1u64, |product, &size| product.checked_mul(u64::from(size)));
    product.filter(|&product| product <= MAX_ELEMENTS).ok_or_else(|| {
        let sizes: Vec<String> = sizes.iter().map(u32::to_string).collect();
        format!("{} elements are more than the {MAX_ELEMENTS} that are measured", sizes.join(" * "))
    })
}

fn whole_blocks(name: &str, columns: u32, format: WeightFormat) -> Result<(), String> {
    let block = (format.block_len() as u32).max(32);
    if columns.is_multiple_of(block) {
        return Ok(());
    }
    Err(format!("{name}={columns}: {} needs a multiple of {block}", layout::fragment_of(format)))
}

/// Bytes of a matrix as the kernels read it.
fn matrix_bytes(format: WeightFormat, rows: u32, columns: u32) -> u64 {
    let (rows, columns) = (rows as usize, columns as usize);
    4 * (layout::codes_words(format, rows, columns) + layout::side_words(format, rows, columns)) as u64
}
