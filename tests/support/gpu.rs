//! The adapter of tests that need one. Where there is none, a line that the test harness does not swallow says so; where
//! `KITTIWAKE_REQUIRE_WGPU` is 1, as `tests/run.sh` sets it, the test fails: in CI no test may be skipped unnoticed.
#![allow(dead_code)] // each test binary uses its part

use std::io::Write;

use runtime::error::DeviceError;
use shaders::{AdapterChoice, GpuOptions, WgpuDevice};

/// The best adapter, without the start-up self-test (these tests are one), or `None` with a visible line.
pub fn device(options: GpuOptions) -> Option<WgpuDevice> {
    match WgpuDevice::open(&AdapterChoice::Best, GpuOptions { self_test: false, ..options }) {
        Ok(device) => Some(device),
        Err(DeviceError::Absent(_, why)) => {
            skip(&why);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Whether there is an adapter; says so where there is none.
pub fn is_there() -> bool {
    let is_there = !shaders::adapters().is_empty();
    if !is_there {
        skip("no Vulkan, Metal or DX12 adapter was found");
    }
    is_there
}

/// Says that the part of a test that needs something absent does not run.
///
/// # Panics
/// Where nothing may be skipped.
pub fn skip(why: &str) {
    let required = std::env::var("KITTIWAKE_REQUIRE_WGPU").is_ok_and(|value| value == "1");
    assert!(!required, "{why}, and KITTIWAKE_REQUIRE_WGPU=1 forbids to skip");
    let thread = std::thread::current();
    // Not by `eprintln!`, which the harness keeps to itself.
    let _ = writeln!(std::io::stderr(), "SKIPPED, the part of {} on wgpu: {why}", thread.name().unwrap_or("a test"));
}
