//! What a device can do: bytes per second of a plain copy, and multiply-adds per second in registers.
//!
//! Invariant: the fastest of a few samples counts, since these are bounds. Plain WGSL kernels, so that the bounds are those of
//! the same compiler.

use runtime::error::DeviceError;

use super::bench::Roofline;
use super::timer::Timer;
use crate::device::{Buffer, Gpu};

const COPY_BYTES: u64 = 64 << 20;
const SAMPLES: usize = 5;
/// Lanes of the arithmetic kernel, its rounds, and operations of one round: 16 vectors of 4 multiply-adds.
const FMA_LANES: u32 = 1 << 16;
const FMA_ROUNDS: u32 = 128;
const FMA_OPS_PER_ROUND: f64 = 16.0 * 4.0 * 2.0;

const COPY: &str = "
@group(0) @binding(0) var<storage, read> from_: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> to_: array<vec4f>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) grid: vec3u, @builtin(local_invocation_index) lane: u32) {
    let at = (group.y * grid.x + group.x) * 64u + lane;
    to_[at] = from_[at];
}
";

const FMA: &str = "
@group(0) @binding(0) var<storage, read> from_: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> to_: array<vec4f>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
    let m = from_[id.x];
    let n = m * 0.5;
    var a = m; var b = m + 1.0; var c = m + 2.0; var d = m + 3.0;
    var e = m + 4.0; var f = m + 5.0; var g = m + 6.0; var h = m + 7.0;
    for (var i = 0u; i < 128u; i++) {
        a = fma(a, m, n); b = fma(b, m, n); c = fma(c, m, n); d = fma(d, m, n);
        e = fma(e, m, n); f = fma(f, m, n); g = fma(g, m, n); h = fma(h, m, n);
        a = fma(a, n, m); b = fma(b, n, m); c = fma(c, n, m); d = fma(d, n, m);
        e = fma(e, n, m); f = fma(f, n, m); g = fma(g, n, m); h = fma(h, n, m);
    }
    to_[id.x] = a + b + c + d + e + f + g + h;
}
";

/// Measures both.
///
/// # Errors
/// Out of memory, or the device failed.
pub(crate) fn measure(gpu: &Gpu, timer: &Timer) -> Result<Roofline, DeviceError> {
    let bytes = COPY_BYTES.min(gpu.limits.max_storage_buffer_binding_size);
    let from = gpu.buffer("roofline", bytes, wgpu::BufferUsages::STORAGE)?;
    let to = gpu.buffer("roofline", bytes, wgpu::BufferUsages::STORAGE)?;
    let fastest = |text: &str, grid: [u32; 2]| -> Result<f64, DeviceError> {
        let (pipeline, bind_group) = kernel(gpu, text, [&from, &to]);
        let mut seconds = f64::INFINITY;
        for _ in 0..SAMPLES {
            let sample = timer.seconds(&mut |pass| {
                pass.set_pipeline(&pipeline);
                pass.set_bind_group(0, &bind_group, &[]);
                pass.dispatch_workgroups(grid[0], grid[1], 1);
            })?;
            seconds = seconds.min(sample);
        }
        Ok(seconds)
    };
    let workgroups = (bytes / (16 * 64)) as u32;
    let copy_s = fastest(COPY, [workgroups / 64, 64])?;
    let fma_s = fastest(FMA, [FMA_LANES / 64, 1])?;
    let fma_ops = f64::from(FMA_LANES) * f64::from(FMA_ROUNDS) * FMA_OPS_PER_ROUND;
    let copied = f64::from(workgroups / 64 * 64) * 64.0 * 16.0;
    Ok(Roofline { copy_gb_per_s: 2.0 * copied / copy_s / 1e9, fma_gflop_per_s: fma_ops / fma_s / 1e9 })
}

fn kernel(gpu: &Gpu, text: &str, buffers: [&Buffer; 2]) -> (wgpu::ComputePipeline, wgpu::BindGroup) {
    let source = wgpu::ShaderSource::Wgsl(text.into());
    let module = gpu.device.create_shader_module(wgpu::ShaderModuleDescriptor { label: Some("roofline"), source });
    let pipeline = gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some("roofline"),
        layout: None,
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions::default(),
        cache: None,
    });
    let entries: Vec<_> = (0..)
        .zip(buffers)
        .map(|(binding, buffer)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
        .collect();
    let layout = pipeline.get_bind_group_layout(0);
    let descriptor = wgpu::BindGroupDescriptor { label: Some("roofline"), layout: &layout, entries: &entries };
    (pipeline, gpu.device.create_bind_group(&descriptor))
}
