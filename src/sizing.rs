//! How long the context, how many blocks: arithmetic done once, before anything is allocated.
//!
//! Invariant: what a flag asks for is given or refused with the numbers; only what is unset adapts (context, number of blocks).

use runtime::backend::Caps;
use runtime::backend::cpu::available_bytes;
use runtime::engine::EngineConfig;
use runtime::error::LoadError;
use runtime::model::Model;
use runtime::program::StateSpec;

use crate::{Device, Options};

/// The part of free memory that the KV cache takes when no flag says otherwise.
const DEFAULT_FRACTION_OF_AVAILABLE: u64 = 4;

/// The KV cache of a GPU when no flag says otherwise: wgpu cannot ask how much memory is free.
#[cfg(feature = "wgpu")]
const DEFAULT_GPU_BYTES: u64 = 1 << 30;

/// Fills in `vocab_size`, `max_model_len` and `num_blocks`; what it gives is consistent (`EngineConfig::fit`).
///
/// # Errors
/// `Limit` where a flag asks for more than the model or the memory allows.
pub fn engine_config(
    options: &Options,
    device: &Device,
    model: &Model,
    caps: &Caps,
) -> Result<EngineConfig, LoadError> {
    let mut config = options.engine.clone();
    config.vocab_size = model.info.vocab_size;
    if let Some(len) = options.max_model_len
        && len > model.info.max_position
    {
        return Err(limit(
            "--max-model-len",
            format!("{len} tokens"),
            format!("{} tokens (the model's)", model.info.max_position),
        ));
    }
    let wanted_len = options.max_model_len.unwrap_or(model.info.max_position);

    let block_bytes: u64 = model.program.states.iter().map(|state| state.block_bytes(config.block_size)).sum();
    // The KV of the last token is never needed.
    let blocks_per_seq = wanted_len.saturating_sub(1).div_ceil(config.block_size);
    let usable = match options.num_gpu_blocks_override {
        Some(blocks) => blocks,
        None => {
            let full = u64::from(blocks_per_seq) * u64::from(config.max_num_seqs);
            let bytes = kv_cache_bytes(options.kv_cache_memory_bytes, device, full * block_bytes);
            let blocks = u32::try_from(bytes / block_bytes.max(1)).unwrap_or(u32::MAX - 1);
            match options.kv_cache_memory_bytes {
                Some(_) => blocks,
                None => blocks.min(bindable_blocks(&model.program.states, config.block_size, caps)),
            }
        }
    };
    if usable == 0 {
        return Err(limit("KV cache", format!("{block_bytes} bytes for one block"), "0 blocks fit".into()));
    }
    config.num_blocks = usable + 1; // block 0 takes the writes of padding
    if let Some(len) = options.max_model_len
        && blocks_per_seq > usable
        && options.num_gpu_blocks_override.is_none()
    {
        let needed = u64::from(blocks_per_seq) * block_bytes;
        let fits = u64::from(usable) * block_bytes;
        return Err(limit(
            "--max-model-len",
            format!("{needed} bytes of KV cache for {len} tokens"),
            format!("{fits} bytes"),
        ));
    }
    config.max_model_len = wanted_len;
    config.fit()
}

/// Blocks, without block 0, whose largest plane a device can bind whole.
fn bindable_blocks(states: &[StateSpec], block_size: u32, caps: &Caps) -> u32 {
    let planes = states.iter().flat_map(|StateSpec::Paged { planes }| planes);
    let plane_bytes = planes.map(|&plane| StateSpec::Paged { planes: vec![plane] }.block_bytes(block_size));
    let blocks = caps.max_binding_bytes / plane_bytes.max().unwrap_or(1).max(1);
    u32::try_from(blocks.saturating_sub(1)).unwrap_or(u32::MAX - 1)
}

/// Bytes for the KV cache: what the flag says, else as much as all sequences at full length need, but at most a quarter of
/// the memory that the system has to give; on a GPU at most 1 GiB.
pub fn kv_cache_bytes(asked: Option<u64>, device: &Device, full_bytes: u64) -> u64 {
    let most = match device {
        #[cfg(feature = "wgpu")]
        Device::Wgpu(_) => DEFAULT_GPU_BYTES,
        Device::Cpu | Device::Reference => {
            available_bytes().map_or(1 << 30, |available| available / DEFAULT_FRACTION_OF_AVAILABLE)
        }
    };
    asked.unwrap_or(full_bytes.min(most))
}

fn limit(what: &str, needed: String, limit: String) -> LoadError {
    LoadError::Limit { what: what.into(), needed, limit }
}
