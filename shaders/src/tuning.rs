//! The tuning table: which shapes the kernels take on which class of device.
//!
//! Invariant: a row of the table changes speed only; every row passes the op table on every device. Shapes whose sums run in
//! another order (`splits`, `parts`, `split`, `row_lanes`, `subgroups`) are fixed for a device, never chosen by the size of a step. The `cpu` row was
//! measured on Mesa's software Vulkan; the others follow what other projects ship and await measurement (`kernel tune`).

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// Kinds of devices that want kernels of the same shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum DeviceClass {
    Cpu,
    Apple,
    Nvidia,
    Amd,
    Intel,
    Unknown,
}

impl DeviceClass {
    /// Every class.
    pub const ALL: [Self; 6] = [Self::Cpu, Self::Apple, Self::Nvidia, Self::Amd, Self::Intel, Self::Unknown];

    /// The class of an adapter, by its kind and PCI vendor.
    pub(crate) fn of(info: &wgpu::AdapterInfo) -> Self {
        match (info.device_type, info.vendor) {
            (wgpu::DeviceType::Cpu, _) => Self::Cpu,
            (_, 0x106b) => Self::Apple,
            (_, 0x10de) => Self::Nvidia,
            (_, 0x1002) => Self::Amd,
            (_, 0x8086) => Self::Intel,
            _ if info.backend == wgpu::Backend::Metal => Self::Apple,
            _ => Self::Unknown,
        }
    }

    /// Its name in flags and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Apple => "apple",
            Self::Nvidia => "nvidia",
            Self::Amd => "amd",
            Self::Intel => "intel",
            Self::Unknown => "unknown",
        }
    }

    /// Its row of the table.
    pub fn tuning(self) -> &'static Tuning {
        match self {
            Self::Cpu => &CPU,
            Self::Apple | Self::Nvidia | Self::Amd | Self::Intel => &GPU,
            Self::Unknown => &PLAIN,
        }
    }
}

/// Shapes of the kernels; the fields are the settings of the WGSL files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    /// Lanes of kernels whose lanes share nothing.
    pub flat_lanes: u32,
    /// Lanes of kernels that reduce a row.
    pub row_lanes: u32,
    /// Whether sums over lanes use subgroup operations where the device has them.
    pub subgroups: bool,
    /// Whether a load costs the same whatever its width and whoever else reads the place: the lanes of a linear then own
    /// neighbouring rows, load 32 bytes at once and hand each other what they loaded, where the device can.
    pub dear_loads: bool,
    /// Slices of `in_features` of a linear.
    pub splits: u32,
    /// Tiles of a linear by the number of tokens, ascending.
    pub linear: Cow<'static, [LinearTile]>,
    /// Attention.
    pub attention: AttentionTile,
}

/// One shape of `linear.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearTile {
    /// Taken from this number of tokens on.
    pub from_tokens: u32,
    /// Rows of the matrix per lane.
    pub rows: u32,
    /// Tokens per lane.
    pub tokens: u32,
    /// Lanes along the rows; `lanes * rows` divides 64.
    pub lanes: u32,
    /// Lanes along the tokens.
    pub token_lanes: u32,
    /// Whether the slices of `in_features` have lanes of their own.
    pub split_lanes: bool,
    /// Where a norm comes first: blocks of `lanes * rows` rows that a workgroup takes after it has normed its tokens' rows itself,
    /// where that keeps the order of sums. 0: a dispatch before norms them.
    pub norm_blocks: u32,
}

/// The shape of `attention.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionTile {
    /// Positions per split.
    pub split: u32,
    /// Items per workgroup.
    pub items: u32,
    /// Lanes per item.
    pub parts: u32,
    /// A lane takes as many query heads of one KV head as make up to this many elements.
    pub max_values: u32,
    /// Up to this many tokens each split of a token has a lane of its own.
    pub max_split_tokens: u32,
}

/// Software Vulkan: loads are dear (a loop over the lanes each, and a bounds check each), barriers and sums over subgroups
/// too; registers are free.
static CPU: Tuning = Tuning {
    flat_lanes: 32,
    row_lanes: 8,
    subgroups: false,
    dear_loads: true,
    splits: 1,
    linear: Cow::Borrowed(&[
        LinearTile { from_tokens: 1, rows: 8, tokens: 1, lanes: 8, token_lanes: 1, split_lanes: false, norm_blocks: 2 },
        LinearTile { from_tokens: 2, rows: 8, tokens: 2, lanes: 8, token_lanes: 1, split_lanes: false, norm_blocks: 2 },
        // A tile of 8 tokens is no faster and takes the driver 15 times as long to compile.
        LinearTile { from_tokens: 3, rows: 8, tokens: 4, lanes: 8, token_lanes: 1, split_lanes: false, norm_blocks: 0 },
    ]),
    attention: AttentionTile { split: 64, items: 8, parts: 1, max_values: 192, max_split_tokens: 16 },
};

/// GPUs: neighbouring lanes read neighbouring words, many lanes per output where there are few outputs.
static GPU: Tuning = Tuning {
    flat_lanes: 64,
    row_lanes: 128,
    subgroups: true,
    dear_loads: false,
    splits: 4,
    linear: Cow::Borrowed(&[
        LinearTile { from_tokens: 1, rows: 1, tokens: 1, lanes: 32, token_lanes: 1, split_lanes: true, norm_blocks: 0 },
        LinearTile { from_tokens: 2, rows: 1, tokens: 2, lanes: 32, token_lanes: 1, split_lanes: true, norm_blocks: 0 },
        LinearTile { from_tokens: 3, rows: 1, tokens: 4, lanes: 32, token_lanes: 1, split_lanes: true, norm_blocks: 0 },
        LinearTile {
            from_tokens: 9,
            rows: 4,
            tokens: 4,
            lanes: 16,
            token_lanes: 8,
            split_lanes: false,
            norm_blocks: 0,
        },
    ]),
    attention: AttentionTile { split: 256, items: 1, parts: 32, max_values: 1, max_split_tokens: 16 },
};

/// What is least likely to go wrong anywhere: small workgroups, no subgroups. Also the fallback of the start-up self-test.
static PLAIN: Tuning = Tuning {
    flat_lanes: 64,
    row_lanes: 64,
    subgroups: false,
    dear_loads: false,
    splits: 1,
    linear: Cow::Borrowed(&[
        LinearTile {
            from_tokens: 1,
            rows: 1,
            tokens: 1,
            lanes: 64,
            token_lanes: 1,
            split_lanes: false,
            norm_blocks: 0,
        },
        LinearTile {
            from_tokens: 2,
            rows: 2,
            tokens: 4,
            lanes: 32,
            token_lanes: 2,
            split_lanes: false,
            norm_blocks: 0,
        },
    ]),
    attention: AttentionTile { split: 256, items: 64, parts: 1, max_values: 1, max_split_tokens: 16 },
};
