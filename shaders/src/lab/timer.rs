//! Times a compute pass: by the device's clock where it has one, else by the host's, around submission and wait.
//!
//! Invariant: nothing else runs on the device meanwhile; a device's clock that says more than the host's, or nothing, is not
//! believed. Used by `bench` and `roofline`.

use std::rc::Rc;
use std::time::Instant;

use runtime::error::DeviceError;

use crate::device::{Buffer, Gpu};

/// Two timestamps of eight bytes.
const BYTES: u64 = 16;

/// See the module's head.
pub(crate) struct Timer {
    gpu: Rc<Gpu>,
    queries: Option<Queries>,
}

struct Queries {
    set: wgpu::QuerySet,
    resolved: Buffer,
    readback: Buffer,
    tick_s: f64,
}

impl Timer {
    /// # Errors
    /// Out of memory.
    pub(crate) fn new(gpu: &Rc<Gpu>) -> Result<Self, DeviceError> {
        use wgpu::BufferUsages as Usage;
        let gpu = Rc::clone(gpu);
        if !gpu.features.contains(wgpu::Features::TIMESTAMP_QUERY) {
            return Ok(Self { gpu, queries: None });
        }
        let descriptor = wgpu::QuerySetDescriptor { label: Some("timer"), ty: wgpu::QueryType::Timestamp, count: 2 };
        let queries = Queries {
            set: gpu.device.create_query_set(&descriptor),
            resolved: gpu.buffer("timer", BYTES, Usage::QUERY_RESOLVE | Usage::COPY_SRC)?,
            readback: gpu.buffer("timer readback", BYTES, Usage::MAP_READ | Usage::COPY_DST)?,
            tick_s: f64::from(gpu.queue.get_timestamp_period()) * 1e-9,
        };
        Ok(Self { gpu, queries: Some(queries) })
    }

    /// Whose clock it is.
    pub(crate) fn clock(&self) -> &'static str {
        if self.queries.is_some() { "device" } else { "host" }
    }

    /// Seconds of a pass.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn seconds(&self, encode: &mut dyn FnMut(&mut wgpu::ComputePass<'_>)) -> Result<f64, DeviceError> {
        let mut encoder = self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let timestamp_writes = self.queries.as_ref().map(|queries| wgpu::ComputePassTimestampWrites {
            query_set: &queries.set,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        });
        {
            let descriptor = wgpu::ComputePassDescriptor { label: Some("timed"), timestamp_writes };
            encode(&mut encoder.begin_compute_pass(&descriptor));
        }
        if let Some(Queries { set, resolved, readback, .. }) = &self.queries {
            encoder.resolve_query_set(set, 0..2, resolved, 0);
            encoder.copy_buffer_to_buffer(resolved, 0, readback, 0, BYTES);
            encoder.map_buffer_on_submit(readback, wgpu::MapMode::Read, 0..BYTES, |_| ());
        }
        let commands = encoder.finish();
        let start = Instant::now();
        self.gpu.queue.submit([commands]);
        self.gpu.wait()?;
        let host_s = start.elapsed().as_secs_f64();
        let Some(Queries { readback, tick_s, .. }) = &self.queries else { return Ok(host_s) };
        let view = readback.get_mapped_range(0..BYTES).map_err(|error| DeviceError::Failed(error.to_string()))?;
        let ticks: &[u64] = bytemuck::cast_slice(&view);
        let seconds = ticks[1].wrapping_sub(ticks[0]) as f64 * tick_s;
        drop(view);
        readback.unmap();
        // A clock that stands still or runs backwards is none.
        Ok(if seconds > 0.0 && seconds <= host_s * 1.5 { seconds } else { host_s })
    }
}
