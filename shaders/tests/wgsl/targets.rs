//! Every kernel for every compiler that its header names: translated in process by naga, the SPIR-V looked at by `spirv-val`,
//! the WGSL itself by Tint. What a class of GPU runs is checked here without that GPU.
//!
//! Invariant: a line `//!targets` in a kernel or in a file that it uses names the targets that remain with it; the plain
//! variant of a kernel, all settings at their defaults, has all four. A line `//!naga-only` says what other WGSL compilers
//! do not know.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use naga::ShaderStage;
use naga::proc::BoundsCheckPolicies;
use runtime::backend::Backend;
use runtime::backend::cases::{Case, CaseOp, all_cases, build_case};
use runtime::ids::WeightId;
use runtime::weights::WeightFormat;
use shaders::compose::{Composed, SettingKind, Settings};
use shaders::reflect::{Checked, check};
use shaders::table::{KERNELS, Kernel, SOURCES};
use shaders::{BatchInvariant, DeviceClass, GpuOptions, WgpuBackend};

use crate::gpu;

const TARGETS: [&str; 4] = ["spirv", "msl", "hlsl", "glsl"];

/// The name of a kernel, and settings.
type Variant = (&'static str, Settings);

/// Every choice of files and switches that `build.rs` checks, numbers at their defaults.
fn table_variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for kernel in KERNELS {
        let mut variants = vec![Settings::new()];
        for setting in kernel.settings {
            let folder = format!("{}/", setting.doc);
            let values: Vec<&str> = match setting.kind {
                SettingKind::U32 => continue,
                SettingKind::Bool => vec!["false", "true"],
                SettingKind::File => {
                    let stems = SOURCES.iter().filter_map(|(path, _)| path.strip_prefix(&folder));
                    stems.map(|stem| stem.trim_end_matches(".wgsl")).collect()
                }
            };
            assert!(values.contains(&setting.value), "{}: {} has its default", kernel.name, setting.name);
            let with = |settings: &Settings| values.iter().map(|v| settings.clone().with(setting.name, v)).collect();
            variants = variants.iter().flat_map(|settings| -> Vec<Settings> { with(settings) }).collect();
            variants.retain(|chosen| {
                let changed = kernel.settings.iter().filter(|s| chosen.get(s.name).is_some_and(|v| v != s.value));
                let (formats, others): (Vec<_>, Vec<_>) = changed.partition(|s| s.name == "FORMAT");
                formats.is_empty() || others.len() <= 1
            });
        }
        all.extend(variants.into_iter().map(|settings| (kernel.name, settings)));
    }
    all
}

/// What the classes ask for to run the op table: every shape of each row of the tuning table.
fn class_variants() -> Vec<Variant> {
    let (mut all, mut tunings) = (Vec::new(), Vec::new());
    for class in DeviceClass::ALL {
        if tunings.contains(&class.tuning()) {
            continue;
        }
        tunings.push(class.tuning());
        // The order of sums is one and the same where there is one slice.
        let orders = [BatchInvariant::On, BatchInvariant::Off];
        for &batch_invariant in &orders[..class.tuning().splits.min(2) as usize] {
            let options = GpuOptions { class: Some(class), batch_invariant, ..GpuOptions::default() };
            let Some(device) = gpu::device(options) else { return Vec::new() };
            for case in all_cases().iter().filter(|case| is_small(case)) {
                let built = build_case(case);
                let mut backend = WgpuBackend::new(&device);
                for (i, tensor) in built.tensors.iter().enumerate() {
                    backend.upload(WeightId(i as u32), tensor).expect("a small case fits");
                }
                let layout = built.step.layout();
                backend.alloc_state(&built.program.states, built.num_blocks, layout.block_size).expect("it fits");
                backend
                    .compile(&built.program, layout.bucket, layout, &mut |_, _| ())
                    .expect("the device takes every kernel");
            }
            for variant in device.variants() {
                if !all.contains(&variant) {
                    all.push(variant);
                }
            }
        }
    }
    all
}

fn is_small(case: &Case) -> bool {
    match &case.op {
        CaseOp::Linear { in_features, parts, tokens } => *in_features <= 512 && parts.len() == 1 && *tokens == 1,
        CaseOp::Embed { tokens, .. } => *tokens == 37,
        // Three query heads per KV head, and heads too wide for the table's number of lanes.
        // And all that it can do at once.
        CaseOp::Attention(attention) => {
            [(9, 64), (2, 256)].contains(&(attention.heads, attention.head_dim))
                || attention.sinks && attention.window.is_some() && attention.rows == [(0, 300)]
                || attention.head_dim == 24 && attention.rope.is_some()
        }
        CaseOp::RmsNorm { width, .. } => *width == 64,
        // Every end, with and without a norm.
        CaseOp::FusedLinear(case) => case.parts[0].format == WeightFormat::Q4_1,
        CaseOp::Sample(case) => case.vocab == 513,
        _ => false,
    }
}

fn described((name, settings): &Variant) -> String {
    format!("{name} {settings}")
}

fn composed((name, settings): &Variant) -> Composed {
    Kernel::named(name).expect("a kernel of the table").compose(settings).expect("a variant of the table")
}

/// The targets that every file of a text has.
fn declared(composed: &Composed) -> Vec<&'static str> {
    let lines: Vec<&str> = composed.text.lines().filter_map(|line| line.strip_prefix("//!targets ")).collect();
    assert!(!lines.is_empty(), "a kernel names its targets");
    let names = |line: &str, target: &str| line.split_whitespace().any(|name| name == target);
    assert!(lines.iter().flat_map(|line| line.split_whitespace()).all(|name| TARGETS.contains(&name)), "{lines:?}");
    TARGETS.into_iter().filter(|target| lines.iter().all(|line| names(line, target))).collect()
}

/// # Errors
/// What naga, or `spirv-val`, says against it.
fn translate(checked: &Checked, target: &str, validate: bool) -> Result<(), String> {
    use naga::back::{glsl, hlsl, msl, spv};
    let Checked { module, info, .. } = checked;
    let (stage, entry_point) = (ShaderStage::Compute, String::from("main"));
    match target {
        "spirv" => {
            // As wgpu has it on Vulkan 1.1, which subgroup operations need.
            let options = spv::Options { lang_version: (1, 3), ..spv::Options::default() };
            let pipeline = spv::PipelineOptions { shader_stage: stage, entry_point };
            let words = spv::write_vec(module, info, &options, Some(&pipeline)).map_err(|e| e.to_string())?;
            if validate { spirv_val(&words) } else { Ok(()) }
        }
        "msl" => {
            let options = msl::Options { lang_version: (2, 4), ..msl::Options::default() };
            let pipeline = msl::PipelineOptions { entry_point: Some((stage, entry_point)), ..Default::default() };
            msl::write_string(module, info, &options, &pipeline).map(|_| ()).map_err(|e| e.to_string())
        }
        "hlsl" => {
            let options = hlsl::Options { shader_model: hlsl::ShaderModel::V6_0, ..hlsl::Options::default() };
            let pipeline = hlsl::PipelineOptions { entry_point: Some((stage, entry_point)) };
            let mut text = String::new();
            let written = hlsl::Writer::new(&mut text, &options, &pipeline).write(module, info, None);
            written.map(|_| ()).map_err(|e| e.to_string())
        }
        _ => {
            let options = glsl::Options { version: glsl::Version::Desktop(430), ..glsl::Options::default() };
            let pipeline = glsl::PipelineOptions { shader_stage: stage, entry_point, multiview: None };
            let (mut text, policies) = (String::new(), BoundsCheckPolicies::default());
            let writer = glsl::Writer::new(&mut text, module, info, &options, &pipeline, policies);
            writer.and_then(|mut writer| writer.write()).map(|_| ()).map_err(|e| e.to_string())
        }
    }
}

fn spirv_val(words: &[u32]) -> Result<(), String> {
    let mut command = Command::new("spirv-val");
    command
        .args(["--target-env", "vulkan1.1", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped());
    let mut running = command.spawn().map_err(|e| format!("spirv-val: {e}"))?;
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    running.stdin.take().expect("piped").write_all(&bytes).map_err(|e| format!("spirv-val: {e}"))?;
    let said = running.wait_with_output().map_err(|e| format!("spirv-val: {e}"))?;
    let text = String::from_utf8_lossy(&said.stdout) + String::from_utf8_lossy(&said.stderr);
    if said.status.success() { Ok(()) } else { Err(format!("spirv-val: {text}")) }
}

fn has_spirv_val() -> bool {
    let found = Command::new("spirv-val").arg("--version").output().is_ok_and(|said| said.status.success());
    if !found {
        gpu::skip("there is no spirv-val");
    }
    found
}

fn check_targets(variants: &[Variant]) {
    let validate = has_spirv_val();
    let mut failures = Vec::new();
    for variant in variants {
        let composed = composed(variant);
        let checked = check(&composed).unwrap_or_else(|e| panic!("{}: {e}", described(variant)));
        for target in declared(&composed) {
            if let Err(problem) = translate(&checked, target, validate) {
                failures.push(format!("{} to {target}: {problem}", described(variant)));
            }
        }
    }
    assert!(failures.is_empty(), "{} translations failed:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_variant_translates_to_the_targets_of_its_files() {
    let variants = table_variants();
    assert!(variants.len() >= 40, "{}", variants.len());
    check_targets(&variants);
}

#[test]
fn every_shape_of_a_class_translates_to_the_targets_of_its_files() {
    let variants = class_variants();
    check_targets(&variants);
    if let Some(said) = tint(&variants, "classes") {
        said.unwrap_or_else(|problems| panic!("{problems}"));
    }
}

#[test]
fn the_plain_variant_has_every_target() {
    for kernel in KERNELS {
        let variant = (kernel.name, Settings::new());
        assert_eq!(declared(&composed(&variant)), TARGETS, "{}", kernel.name);
    }
}

/// naga does not look whether all lanes of a workgroup meet a barrier, nor refuses what only naga takes for WGSL.
#[test]
fn tint_accepts_every_variant() {
    if let Some(said) = tint(&table_variants(), "table") {
        said.unwrap_or_else(|problems| panic!("{problems}"));
    }
}

/// Tint itself is seen to refuse a barrier that some lanes leave out.
#[test]
fn tint_sees_a_barrier_that_is_not_uniform() {
    let text = "@group(0) @binding(0) var<storage, read_write> x: array<u32>;\n\
                @compute @workgroup_size(8) fn main(@builtin(local_invocation_index) lane: u32) {\n\
                \x20   if x[lane] > 1u {\n        workgroupBarrier();\n    }\n}\n";
    let folder = empty_folder("barrier");
    std::fs::write(folder.join("bad.wgsl"), text).expect("the folder is ours");
    if let Some(said) = run_tint(&folder) {
        let problem = said.expect_err("the barrier must be refused");
        assert!(problem.contains("bad.wgsl:4: 'workgroupBarrier' must only be called from uniform"), "{problem}");
    }
}

fn empty_folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("wgsl").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("the target folder is writable");
    folder
}

/// Writes the variants' texts to a folder of their own and lets Tint compile them; `None` where there is no Tint.
fn tint(variants: &[Variant], name: &str) -> Option<Result<(), String>> {
    let folder = empty_folder(name);
    for variant in variants {
        let (file, text) = (described(variant).replace(' ', ".") + ".wgsl", composed(variant).text);
        if !text.lines().any(|line| line.starts_with("//!naga-only ")) {
            std::fs::write(folder.join(file), text).expect("the folder is ours");
        }
    }
    run_tint(&folder)
}

/// `KITTIWAKE_TINT` names the folder of node modules that `tests/run.sh` has put Tint into, where there is npm.
fn run_tint(folder: &Path) -> Option<Result<(), String>> {
    let Some(modules) = std::env::var_os("KITTIWAKE_TINT") else {
        let _ = writeln!(std::io::stderr(), "SKIPPED, the check of kernels by Tint: KITTIWAKE_TINT is not set");
        return None;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wgsl/tint.mjs");
    let said =
        Command::new("node").arg(script).arg(modules).arg(folder).output().expect("node is there with KITTIWAKE_TINT");
    let text = format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    Some(if said.status.success() { Ok(()) } else { Err(text) })
}
