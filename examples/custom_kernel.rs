//! A kernel of one's own through the library: checked against the reference, then timed beside the built-in one.
//!
//! `cargo run --release --example custom_kernel [NAME FILE.wgsl]`; without arguments the template of `attention` stands in.
//! Runs on the best adapter, software Vulkan included. `kittiwake kernel` does the same from the command line.

use std::path::Path;

use anyhow::ensure;
use shaders::compose::Settings;
use shaders::lab::{CustomKernel, Lab, cases_of, kernel_named, shape, template};
use shaders::{AdapterChoice, GpuOptions};

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // Pinned settings; every other one is what the tuning table has for the device.
    let pinned = Settings::new();
    let kernel = match arguments.as_slice() {
        [name, file] => CustomKernel::load(name, Path::new(file), &pinned)?,
        _ => {
            CustomKernel::new(kernel_named("attention")?, Path::new("template.wgsl"), template("attention")?, &pinned)?
        }
    };
    let name = kernel.kernel().name;
    let lab = Lab::open(&AdapterChoice::Best, GpuOptions::default())?;

    // Right first: every row of the op case table that meets the kernel, every access watched.
    let report = lab.check(&kernel, &cases_of(name), &mut |_| true)?;
    println!("{report}");
    ensure!(report.passed(), "a wrong kernel is not worth timing");

    // Then fast: at the default shape of the op, against what this device can do.
    let bench = lab.bench(name, Some(&kernel), &shape(name, &[]).map_err(anyhow::Error::msg)?)?;
    for measured in &bench.kernels {
        println!("{:>10.1} us  {:>5.1} % of the roofline  {}", measured.us, measured.roofline_percent, measured.name);
    }
    Ok(())
}
