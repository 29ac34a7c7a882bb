//! Which device runs a model: names, discovery, construction.
//!
//! Invariant: a device that was asked for and is absent is an error, never a silent fallback.

use std::fmt;
use std::str::FromStr;

use runtime::backend::Backend;
use runtime::backend::cpu::{CpuBackend, CpuOptions};
use runtime::backend::reference::ReferenceBackend;
use runtime::error::DeviceError;

/// A device that `--device` can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// SIMD kernels on the host's cores: the embedded default.
    Cpu,
    /// The oracle: plain f32 loops, for tests and doubts.
    Reference,
}

impl Device {
    /// Every device that this build knows, best first.
    pub const ALL: [Self; 2] = [Self::Cpu, Self::Reference];
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Reference => "reference",
        })
    }
}

impl FromStr for Device {
    type Err = DeviceError;

    fn from_str(name: &str) -> Result<Self, DeviceError> {
        Self::ALL.into_iter().find(|device| device.to_string() == name).ok_or_else(|| {
            let known: Vec<String> = Self::ALL.iter().map(Self::to_string).collect();
            DeviceError::Absent(name.into(), format!("this build has auto, {}", known.join(", ")))
        })
    }
}

/// The device that was asked for, or the best there is.
///
/// # Errors
/// `Absent`, never a fallback.
pub fn choose(asked: Option<Device>) -> Result<Device, DeviceError> {
    Ok(asked.unwrap_or(Device::ALL[0]))
}

/// Makes the backend; call it on the thread that will use it.
///
/// # Errors
/// The device is absent or failed.
pub fn open(device: Device, threads: Option<usize>) -> Result<Box<dyn Backend>, DeviceError> {
    Ok(match device {
        Device::Cpu => Box::new(CpuBackend::new(CpuOptions { threads: threads.unwrap_or(0), isa: None })?),
        Device::Reference => Box::new(ReferenceBackend::new(
            threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)),
        )),
    })
}
