//! Which device runs a model: names, discovery, ranking, construction.
//!
//! Invariant: a device that was asked for and is absent is an error, never a silent fallback; `devices` says what `auto` takes and why.

use std::fmt;
use std::str::FromStr;

use runtime::backend::Backend;
use runtime::backend::cpu::{CpuBackend, CpuOptions, describe};
use runtime::backend::reference::ReferenceBackend;
use runtime::error::DeviceError;
#[cfg(feature = "wgpu")]
use shaders::{AdapterChoice, AdapterKind, GpuOptions, WgpuBackend, WgpuDevice};

/// A device that `--device` can name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// A GPU, or software Vulkan, through wgpu: `wgpu`, `wgpu:1`, `wgpu:radeon`.
    #[cfg(feature = "wgpu")]
    Wgpu(AdapterChoice),
    /// SIMD kernels on the host's cores: the embedded default.
    Cpu,
    /// The oracle: plain f32 loops, for tests and doubts.
    Reference,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            #[cfg(feature = "wgpu")]
            Self::Wgpu(AdapterChoice::Best) => f.write_str("wgpu"),
            #[cfg(feature = "wgpu")]
            Self::Wgpu(AdapterChoice::Index(index)) => write!(f, "wgpu:{index}"),
            #[cfg(feature = "wgpu")]
            Self::Wgpu(AdapterChoice::Name(name)) => write!(f, "wgpu:{name}"),
            Self::Cpu => f.write_str("cpu"),
            Self::Reference => f.write_str("reference"),
        }
    }
}

impl FromStr for Device {
    type Err = DeviceError;

    fn from_str(name: &str) -> Result<Self, DeviceError> {
        match name {
            "cpu" => return Ok(Self::Cpu),
            "reference" => return Ok(Self::Reference),
            _ => {}
        }
        #[cfg(feature = "wgpu")]
        if name == "wgpu" {
            return Ok(Self::Wgpu(AdapterChoice::Best));
        } else if let Some(adapter) = name.strip_prefix("wgpu:").filter(|adapter| !adapter.is_empty()) {
            let by_name = || AdapterChoice::Name(adapter.into());
            return Ok(Self::Wgpu(adapter.parse().map_or_else(|_| by_name(), AdapterChoice::Index)));
        }
        let wgpu = if cfg!(feature = "wgpu") { "wgpu, wgpu:N, wgpu:name, " } else { "" };
        Err(DeviceError::Absent(name.into(), format!("this build has auto, {wgpu}cpu, reference")))
    }
}

/// A device of this machine.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// What `--device` calls it.
    pub device: Device,
    /// The hardware in words.
    pub description: String,
    /// Why it stands where it stands in the list.
    pub rank: &'static str,
}

/// Every device of this machine, in the order in which `--device auto` takes them.
pub fn candidates() -> Vec<Candidate> {
    let mut all = Vec::new();
    let mut software = Vec::new();
    #[cfg(feature = "wgpu")]
    for (index, adapter) in shaders::adapters().into_iter().enumerate() {
        let rank = match adapter.kind {
            AdapterKind::Discrete => "a card of its own",
            AdapterKind::Integrated => "a GPU beside the CPU",
            AdapterKind::Virtual => "a GPU that a host shares",
            AdapterKind::Software => "software Vulkan is slower than the cpu device",
        };
        let description = format!("{}, {} ({}, {})", adapter.name, adapter.kind, adapter.api, adapter.driver);
        let list = if adapter.kind == AdapterKind::Software { &mut software } else { &mut all };
        list.push(Candidate { device: Device::Wgpu(AdapterChoice::Index(index)), description, rank });
    }
    let rank = if all.is_empty() { "no GPU was found" } else { "where a GPU is not to be used" };
    all.push(Candidate { device: Device::Cpu, description: describe(CpuOptions::default()), rank });
    all.append(&mut software);
    let (description, rank) = ("plain f32 loops, for tests and doubts".into(), "the oracle of the others");
    all.push(Candidate { device: Device::Reference, description, rank });
    all
}

/// How a backend is made.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// CPU worker threads; `None`: one per available core.
    pub threads: Option<usize>,
    /// How wgpu devices are used.
    #[cfg(feature = "wgpu")]
    pub gpu: GpuOptions,
}

/// The device that was asked for, or the best there is.
pub fn choose(asked: Option<Device>) -> Device {
    if let Some(device) = asked {
        return device;
    }
    let best = candidates().swap_remove(0);
    tracing::debug!(device = %best.device, "--device auto: {} ({})", best.description, best.rank);
    best.device
}

/// Makes the backend; call it on the thread that will use it.
///
/// # Errors
/// The device is absent or failed.
pub fn open(device: &Device, options: DeviceOptions) -> Result<Box<dyn Backend>, DeviceError> {
    let DeviceOptions { threads, .. } = options;
    Ok(match device {
        #[cfg(feature = "wgpu")]
        Device::Wgpu(choice) => Box::new(WgpuBackend::new(&WgpuDevice::open(choice, options.gpu)?)),
        Device::Cpu => Box::new(CpuBackend::new(CpuOptions { threads: threads.unwrap_or(0), isa: None })?),
        Device::Reference => Box::new(ReferenceBackend::new(
            threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)),
        )),
    })
}
