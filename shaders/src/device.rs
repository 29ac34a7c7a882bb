//! A wgpu device behind one door: limits, allocations, pipelines, errors.
//!
//! Invariant: everything that the backend creates on a device is created here, so that memory is counted and capped, the
//! creations in the token loop can be counted (none), and an out-of-memory or lost device is a typed error, never a panic.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use runtime::error::DeviceError;

use crate::adapter::{AdapterChoice, AdapterInfo, AdapterKind, choose, enumerate};
use crate::cache::{self, PipelineFile};
use crate::compose::Composed;
use crate::lab::KernelFile;
use crate::reflect::Access;
use crate::table::Kernel;
use crate::tuned::TuningFile;
use crate::tuning::{DeviceClass, Tuning};

/// Offsets of bindings are multiples of this on every device.
pub(crate) const ALIGN_BYTES: u64 = 256;

/// How a device is used.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// The most bytes to allocate; `None`: no cap but the driver's. wgpu cannot ask how much is free.
    pub memory_bytes: Option<u64>,
    /// The most bytes to bind at once, where that is less than the device's limit (tests cut small weights with it).
    pub max_binding_bytes: Option<u64>,
    /// The tuning table's row, instead of the adapter's own class (tests run every class on one device).
    pub class: Option<DeviceClass>,
    /// Whether a row's bits never depend on its batch mates: one order of sums for every number of tokens.
    pub batch_invariant: BatchInvariant,
    /// Whether a program's kernels are tested before it serves.
    pub self_test: bool,
    /// Users' kernels that run in the places of built-in ones.
    pub kernels: Vec<KernelFile>,
    /// Where the driver's compiled kernels are kept for the next start; `None`: nowhere.
    pub cache_dir: Option<PathBuf>,
    /// Measured shapes (`kernel tune`), used where they are this adapter's.
    pub tuning: Option<TuningFile>,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self {
            memory_bytes: None,
            max_binding_bytes: None,
            class: None,
            batch_invariant: BatchInvariant::Auto,
            self_test: true,
            kernels: Vec::new(),
            cache_dir: None,
            tuning: None,
        }
    }
}

/// `--batch-invariant`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BatchInvariant {
    /// On: with the kernels of this backend it costs less than a tenth.
    #[default]
    Auto,
    /// One order of sums for every number of tokens.
    On,
    /// The fastest order for each number of tokens.
    Off,
}

/// Storage buffers that one dispatch may bind: what WebGPU guarantees.
pub(crate) const MAX_BINDINGS: u32 = 8;

/// Bytes of one binding.
#[derive(Clone, Copy, Debug)]
pub struct Range<'a> {
    /// The buffer.
    pub buffer: &'a wgpu::Buffer,
    /// First byte, a multiple of 256.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

impl Range<'_> {
    /// The rest after some bytes.
    pub(crate) fn after(self, bytes: u64) -> Self {
        Self { offset: self.offset + bytes, size: self.size - bytes, ..self }
    }
}

/// What was created so far, and the bytes of the buffers that live.
#[derive(Debug, Default)]
struct Counters {
    bytes: AtomicU64,
    created: AtomicU64,
}

/// A buffer whose bytes count until it is dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    buffer: wgpu::Buffer,
    counters: Arc<Counters>,
}

impl std::ops::Deref for Buffer {
    type Target = wgpu::Buffer;

    fn deref(&self) -> &wgpu::Buffer {
        &self.buffer
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.counters.bytes.fetch_sub(self.buffer.size(), Ordering::Relaxed);
    }
}

/// An open device.
pub(crate) struct Gpu {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    pub(crate) adapter: AdapterInfo,
    pub(crate) limits: wgpu::Limits,
    pub(crate) features: wgpu::Features,
    /// The adapter's class, or the one that was asked for.
    pub(crate) class: DeviceClass,
    /// Shapes of the kernels: the class's, or measured ones.
    pub(crate) tuning: Tuning,
    options: GpuOptions,
    /// Compiled kernels of earlier starts.
    compiled: Option<PipelineFile>,
    counters: Arc<Counters>,
    /// The first error that nobody was waiting for.
    failure: Arc<Mutex<Option<String>>>,
}

impl Gpu {
    /// Opens an adapter with all limits and every optional feature that it has and we use.
    ///
    /// # Errors
    /// `Absent` where there is no such adapter; `Failed` where it cannot be opened, or where its measured shapes pass its limits.
    pub(crate) fn open(choice: &AdapterChoice, options: GpuOptions) -> Result<Self, DeviceError> {
        let adapter = choose(enumerate(), choice)?;
        let info = AdapterInfo::new(&adapter.get_info());
        let limits = adapter.limits();
        let class = options.class.unwrap_or(info.class);
        let measured = options.tuning.as_ref().and_then(|file| file.of(&info, class));
        let tuning = measured.cloned().unwrap_or_else(|| class.tuning().clone());
        tuning
            .check(&limits)
            .map_err(|problem| DeviceError::Failed(format!("the measured shapes of this device: {problem}")))?;
        let wanted = wgpu::Features::SUBGROUP
            | wgpu::Features::SHADER_INT64
            | wgpu::Features::TIMESTAMP_QUERY
            | wgpu::Features::PIPELINE_CACHE;
        let features = adapter.features() & wanted;
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("kittiwake"),
            required_features: features,
            required_limits: limits.clone(),
            memory_hints: wgpu::MemoryHints::Performance,
            ..Default::default()
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor))
            .map_err(|error| DeviceError::Failed(format!("{}: {error}", info.name)))?;
        let failure = Arc::new(Mutex::new(None));
        let record = |failure: &Arc<Mutex<Option<String>>>, what: String| {
            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(what);
        };
        let lost = Arc::clone(&failure);
        // Also where the reason is that it was destroyed: nobody looks after a device that this process gave up itself.
        device.set_device_lost_callback(move |reason, message| {
            record(&lost, format!("device lost: {reason:?} {message}"));
        });
        let uncaptured = Arc::clone(&failure);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| record(&uncaptured, error.to_string())));
        let compiled = options.cache_dir.as_deref().filter(|_| features.contains(wgpu::Features::PIPELINE_CACHE));
        let file = compiled.zip(wgpu::util::pipeline_cache_key(&adapter.get_info()));
        let compiled = file.and_then(|(dir, name)| open_compiled(&device, dir.join(name)));
        let counters = Arc::default();
        Ok(Self { device, queue, adapter: info, limits, features, class, tuning, options, compiled, counters, failure })
    }

    pub(crate) fn has_subgroups(&self) -> bool {
        self.features.contains(wgpu::Features::SUBGROUP)
    }

    /// Whether a CPU plays the device.
    pub(crate) fn is_software(&self) -> bool {
        self.adapter.kind == AdapterKind::Software
    }

    pub(crate) fn has_64_bit_integers(&self) -> bool {
        self.features.contains(wgpu::Features::SHADER_INT64)
    }

    pub(crate) fn self_test(&self) -> bool {
        self.options.self_test
    }

    pub(crate) fn batch_invariant(&self) -> bool {
        self.options.batch_invariant != BatchInvariant::Off
    }

    /// Buffers, bind groups and pipelines created so far.
    pub(crate) fn num_created(&self) -> u64 {
        self.counters.created.load(Ordering::Relaxed)
    }

    /// Bytes of all buffers.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.counters.bytes.load(Ordering::Relaxed)
    }

    /// The most bytes of one binding.
    pub(crate) fn max_binding_bytes(&self) -> u64 {
        let limit = self.limits.max_storage_buffer_binding_size.min(self.limits.max_buffer_size);
        limit.min(self.options.max_binding_bytes.unwrap_or(u64::MAX))
    }

    /// # Errors
    /// The device was lost, or an error was reported that nobody was waiting for.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        match &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(what) => Err(DeviceError::Failed(what.clone())),
            None => Ok(()),
        }
    }

    /// A zeroed buffer of at least `bytes`.
    ///
    /// # Errors
    /// `OutOfMemory` by the driver, by the adapter's limit for one buffer, or by the cap.
    pub(crate) fn buffer(&self, what: &str, bytes: u64, usage: wgpu::BufferUsages) -> Result<Buffer, DeviceError> {
        let size = bytes.max(1).next_multiple_of(ALIGN_BYTES);
        let out_of_memory = || DeviceError::OutOfMemory { what: what.into(), needed_bytes: size };
        let total = self.memory_bytes().saturating_add(size);
        if size > self.limits.max_buffer_size || self.options.memory_bytes.is_some_and(|cap| total > cap) {
            return Err(out_of_memory());
        }
        let memory = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let validation = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let descriptor = wgpu::BufferDescriptor { label: Some(what), size, usage, mapped_at_creation: false };
        let buffer = self.device.create_buffer(&descriptor);
        let invalid = pollster::block_on(validation.pop());
        if pollster::block_on(memory.pop()).is_some() {
            return Err(out_of_memory());
        }
        if let Some(error) = invalid {
            return Err(DeviceError::Failed(format!("{what}: {error}")));
        }
        self.counters.bytes.fetch_add(size, Ordering::Relaxed);
        self.counters.created.fetch_add(1, Ordering::Relaxed);
        Ok(Buffer { buffer, counters: Arc::clone(&self.counters) })
    }

    /// The layout that all variants of a kernel share.
    pub(crate) fn layout(&self, kernel: &Kernel) -> wgpu::BindGroupLayout {
        let entries: Vec<_> = kernel
            .bindings
            .iter()
            .enumerate()
            .map(|(i, binding)| wgpu::BindGroupLayoutEntry {
                binding: i as u32,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: match binding.access {
                        Access::Uniform => wgpu::BufferBindingType::Uniform,
                        Access::Read => wgpu::BufferBindingType::Storage { read_only: true },
                        Access::ReadWrite => wgpu::BufferBindingType::Storage { read_only: false },
                    },
                    has_dynamic_offset: false,
                    min_binding_size: std::num::NonZeroU64::new(u64::from(binding.min_bytes)),
                },
                count: None,
            })
            .collect();
        self.counters.created.fetch_add(1, Ordering::Relaxed);
        let descriptor = wgpu::BindGroupLayoutDescriptor { label: Some(kernel.name), entries: &entries };
        self.device.create_bind_group_layout(&descriptor)
    }

    /// A pipeline of a composed kernel. Checks at run time are compiled in where debug assertions are.
    ///
    /// # Errors
    /// What the device says against it.
    pub(crate) fn pipeline(
        &self,
        kernel: &Kernel,
        composed: &Composed,
        layout: &wgpu::BindGroupLayout,
    ) -> Result<wgpu::ComputePipeline, DeviceError> {
        let validation = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let source = wgpu::ShaderSource::Wgsl(composed.text.as_str().into());
        let descriptor = wgpu::ShaderModuleDescriptor { label: Some(kernel.name), source };
        let checks = match cfg!(debug_assertions) {
            true => wgpu::ShaderRuntimeChecks::checked(),
            false => wgpu::ShaderRuntimeChecks::unchecked(),
        };
        // SAFETY: every kernel of the table, and every user's kernel before it serves, has passed the op table with all
        // checks compiled in, and loops are bounded by sizes that `lower` has checked.
        let module = unsafe { self.device.create_shader_module_trusted(descriptor, checks) };
        let pipeline_layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(kernel.name),
            bind_group_layouts: &[Some(layout)],
            immediate_size: 0,
        });
        let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(kernel.name),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: cfg!(debug_assertions),
                ..Default::default()
            },
            cache: self.compiled.as_ref().map(|file| &file.cache),
        });
        self.counters.created.fetch_add(1, Ordering::Relaxed);
        match pollster::block_on(validation.pop()) {
            Some(error) => Err(DeviceError::Failed(format!("kernel {}: {error}", kernel.name))),
            None => Ok(pipeline),
        }
    }

    /// Keeps what was compiled for the next start.
    pub(crate) fn save_compiled(&self) {
        if let Some(file) = &self.compiled {
            file.save();
        }
    }

    /// A bind group: the uniform at binding 0, then `ranges` in order.
    pub(crate) fn bind_group(
        &self,
        layout: &wgpu::BindGroupLayout,
        uniform: Range<'_>,
        ranges: &[Range<'_>],
    ) -> wgpu::BindGroup {
        let all = std::iter::once(uniform).chain(ranges.iter().copied());
        let entries: Vec<_> = (0..)
            .zip(all)
            .map(|(binding, Range { buffer, offset, size })| {
                let size = std::num::NonZeroU64::new(size);
                let resource = wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset, size });
                wgpu::BindGroupEntry { binding, resource }
            })
            .collect();
        self.counters.created.fetch_add(1, Ordering::Relaxed);
        self.device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout, entries: &entries })
    }

    /// Waits until everything submitted so far is done.
    ///
    /// # Errors
    /// The device was lost.
    pub(crate) fn wait(&self) -> Result<(), DeviceError> {
        self.device
            .poll(wgpu::PollType::wait_indefinitely())
            .map_err(|error| DeviceError::Failed(format!("waiting for the device: {error}")))?;
        self.check()
    }
}

/// The compiled kernels of a file; empty where the file is not there, not whole, or of another driver.
fn open_compiled(device: &wgpu::Device, path: PathBuf) -> Option<PipelineFile> {
    let stored = cache::read(&path);
    let create = |data: Option<&[u8]>| {
        let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let descriptor = wgpu::PipelineCacheDescriptor { label: Some("compiled kernels"), data, fallback: true };
        // SAFETY: the bytes are whole by their checksum and were written by `PipelineFile::save`, which has them from
        // `get_data`; wgpu compares adapter and driver.
        let cache = unsafe { device.create_pipeline_cache(&descriptor) };
        pollster::block_on(validation.pop()).is_none().then_some(cache)
    };
    let accepted = stored.as_deref().and_then(|data| create(Some(data)));
    let stored = if accepted.is_some() { stored } else { None };
    Some(PipelineFile::new(path, accepted.or_else(|| create(None))?, stored))
}
