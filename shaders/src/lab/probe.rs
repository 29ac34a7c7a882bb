//! The device's side of a probe: pipelines of watched kernels, and the buffer in which they note what was out of bounds.
//!
//! Invariant: watched pipelines are made with all runtime checks compiled in, so that an index out of bounds is noted and
//! then harmless. The buffer is bound as group 1 beside a kernel's own bindings.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use runtime::error::DeviceError;
use serde::Serialize;

use super::instrument::{MAX_SITES, Site, WORDS_PER_SITE, instrument};
use crate::compose::Composed;
use crate::device::{Buffer, Gpu};
use crate::reflect::check;
use crate::table::Kernel;

/// An index that was out of bounds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// The variable that was indexed.
    pub variable: String,
    /// Whether the access was a write.
    pub is_write: bool,
    /// The largest index.
    pub index: u32,
    /// The length of what was indexed.
    pub len: u32,
    /// The file.
    pub file: String,
    /// The line, from 1.
    pub line: u32,
    /// The column, from 1.
    pub column: u32,
    /// The line and carets under the place.
    pub excerpt: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { variable, index, len, file, line, column, excerpt, .. } = self;
        let does = if self.is_write { "writes" } else { "reads" };
        write!(f, "{file}:{line}:{column}: {does} '{variable}' out of bounds: index {index}, length {len}{excerpt}")
    }
}

/// See the module's head.
pub(crate) struct Probe {
    notes: Buffer,
    readback: Buffer,
    layout: wgpu::BindGroupLayout,
    bind_group: wgpu::BindGroup,
    sites: Mutex<Vec<Site>>,
}

impl Probe {
    /// # Errors
    /// Out of memory.
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, DeviceError> {
        use wgpu::BufferUsages as Usage;
        let bytes = 4 * u64::from(MAX_SITES * WORDS_PER_SITE);
        let notes = gpu.buffer("probe", bytes, Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST)?;
        let readback = gpu.buffer("probe readback", bytes, Usage::MAP_READ | Usage::COPY_DST)?;
        let entry = wgpu::BindGroupLayoutEntry {
            binding: 0,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only: false },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        };
        let descriptor = wgpu::BindGroupLayoutDescriptor { label: Some("probe"), entries: &[entry] };
        let layout = gpu.device.create_bind_group_layout(&descriptor);
        let bind_group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some("probe"),
            layout: &layout,
            entries: &[wgpu::BindGroupEntry { binding: 0, resource: notes.as_entire_binding() }],
        });
        Ok(Self { notes, readback, layout, bind_group, sites: Mutex::new(Vec::new()) })
    }

    pub(crate) fn bind_group(&self) -> &wgpu::BindGroup {
        &self.bind_group
    }

    /// A pipeline of a kernel, watched, with all runtime checks.
    ///
    /// # Errors
    /// What the device says against it.
    pub(crate) fn pipeline(
        &self,
        gpu: &Gpu,
        kernel: &Kernel,
        composed: &Composed,
        layout: &wgpu::BindGroupLayout,
    ) -> Result<wgpu::ComputePipeline, DeviceError> {
        let checked = check(composed).map_err(|error| DeviceError::Failed(error.to_string()))?;
        let module = {
            let mut sites = self.sites.lock().unwrap_or_else(PoisonError::into_inner);
            let (module, new) = instrument(&checked, composed, sites.len() as u32);
            sites.extend(new);
            // Places beyond would go unwatched.
            if sites.len() >= MAX_SITES as usize {
                return Err(DeviceError::Failed(format!("more than {MAX_SITES} places to watch in all variants")));
            }
            module
        };
        let validation = gpu.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let source = wgpu::ShaderSource::Naga(Cow::Owned(module));
        let descriptor = wgpu::ShaderModuleDescriptor { label: Some(kernel.name), source };
        let module = gpu.device.create_shader_module(descriptor);
        let pipeline_layout = gpu.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(kernel.name),
            bind_group_layouts: &[Some(layout), Some(&self.layout)],
            immediate_size: 0,
        });
        let pipeline = gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(kernel.name),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        });
        match pollster::block_on(validation.pop()) {
            Some(error) => Err(DeviceError::Failed(format!("kernel {}: {error}", kernel.name))),
            None => Ok(pipeline),
        }
    }

    /// What was out of bounds since the last time, one for each place.
    ///
    /// # Errors
    /// The device was lost.
    pub(crate) fn take(&self, gpu: &Gpu) -> Result<Vec<Fault>, DeviceError> {
        let sites = self.sites.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = 4 * u64::from(WORDS_PER_SITE) * sites.len() as u64;
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let mut encoder = gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(&self.notes, 0, &self.readback, 0, bytes);
        encoder.clear_buffer(&self.notes, 0, None);
        encoder.map_buffer_on_submit(&self.readback, wgpu::MapMode::Read, 0..bytes, |_| ());
        gpu.queue.submit([encoder.finish()]);
        gpu.wait()?;
        let view = self.readback.get_mapped_range(0..bytes).map_err(|error| DeviceError::Failed(error.to_string()))?;
        let words: &[u32] = bytemuck::cast_slice(&view);
        let noted = words.chunks_exact(WORDS_PER_SITE as usize).zip(sites.iter()).filter(|(words, _)| words[0] > 0);
        let mut faults: Vec<Fault> = Vec::new();
        for (words, Site { variable, is_write, place }) in noted {
            let fault = Fault {
                variable: variable.clone(),
                is_write: *is_write,
                index: words[0],
                len: words[1],
                file: place.file.clone(),
                line: place.line,
                column: place.column,
                excerpt: place.excerpt.clone(),
            };
            // The same place of another variant.
            let place = |fault: &Fault| (fault.file.clone(), fault.line, fault.column);
            if !faults.iter().any(|known| place(known) == place(&fault)) {
                faults.push(fault);
            }
        }
        drop(view);
        self.readback.unmap();
        Ok(faults)
    }
}
