//! Adapters: which there are, best first, and which one a flag names.
//!
//! Invariant: only adapters that can run the backend are listed; one that was asked for and is absent is an error that lists
//! what there is. Used by `device`, which opens them.

use runtime::error::DeviceError;

use crate::device::MAX_BINDINGS;
use crate::tuning::DeviceClass;

/// An adapter, in words and numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterInfo {
    /// As its driver names it.
    pub name: String,
    /// Driver and version.
    pub driver: String,
    /// `Vulkan`, `Metal`, `Dx12`.
    pub api: String,
    /// What kind of device it is, best first.
    pub kind: AdapterKind,
    /// The row of the tuning table that fits.
    pub class: DeviceClass,
}

/// Kinds of adapters in the order in which `--device auto` takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AdapterKind {
    /// A card with its own memory.
    Discrete,
    /// A GPU beside the CPU.
    Integrated,
    /// A GPU passed into a virtual machine, or one that does not say.
    Virtual,
    /// Software on the CPU.
    Software,
}

impl std::fmt::Display for AdapterKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Discrete => "discrete GPU",
            Self::Integrated => "integrated GPU",
            Self::Virtual => "virtual GPU",
            Self::Software => "software",
        })
    }
}

impl AdapterInfo {
    pub(crate) fn new(info: &wgpu::AdapterInfo) -> Self {
        Self {
            name: info.name.clone(),
            driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
            api: format!("{:?}", info.backend),
            kind: match info.device_type {
                wgpu::DeviceType::DiscreteGpu => AdapterKind::Discrete,
                wgpu::DeviceType::IntegratedGpu => AdapterKind::Integrated,
                wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => AdapterKind::Virtual,
                wgpu::DeviceType::Cpu => AdapterKind::Software,
            },
            class: DeviceClass::of(info),
        }
    }
}

/// Adapters that can run the backend, best first; the place in this list is N of `wgpu:N`.
pub fn adapters() -> Vec<AdapterInfo> {
    enumerate().iter().map(|adapter| AdapterInfo::new(&adapter.get_info())).collect()
}

pub(crate) fn enumerate() -> Vec<wgpu::Adapter> {
    let mut backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    if cfg!(feature = "noop") {
        backends |= wgpu::Backends::NOOP;
        descriptor.backend_options.noop.enable = true;
    }
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor { backends, ..descriptor });
    let mut adapters = pollster::block_on(instance.enumerate_adapters(backends));
    adapters.retain(|adapter| adapter.limits().max_storage_buffers_per_shader_stage >= MAX_BINDINGS);
    adapters.sort_by_key(|adapter| AdapterInfo::new(&adapter.get_info()).kind);
    adapters
}

/// Which adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AdapterChoice {
    /// The best.
    #[default]
    Best,
    /// By its place in `adapters()`.
    Index(usize),
    /// By a part of its name, in any case.
    Name(String),
}

pub(crate) fn choose(adapters: Vec<wgpu::Adapter>, choice: &AdapterChoice) -> Result<wgpu::Adapter, DeviceError> {
    let names: Vec<String> = adapters.iter().map(|adapter| adapter.get_info().name).collect();
    let found = match choice {
        AdapterChoice::Best => adapters.into_iter().next(),
        AdapterChoice::Index(index) => adapters.into_iter().nth(*index),
        AdapterChoice::Name(name) => {
            let name = name.to_lowercase();
            adapters.into_iter().find(|adapter| adapter.get_info().name.to_lowercase().contains(&name))
        }
    };
    found.ok_or_else(|| {
        let asked = match choice {
            AdapterChoice::Best => "wgpu".into(),
            AdapterChoice::Index(index) => format!("wgpu:{index}"),
            AdapterChoice::Name(name) => format!("wgpu:{name}"),
        };
        let there = if names.is_empty() {
            "no Vulkan, Metal or DX12 adapter was found".into()
        } else {
            let list: Vec<String> = names.iter().enumerate().map(|(i, name)| format!("{i} = {name}")).collect();
            format!("the adapters are {}", list.join(", "))
        };
        DeviceError::Absent(asked, there)
    })
}
