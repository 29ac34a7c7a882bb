//! The file of measured shapes: what may stand there, whose it is, and that what tuning finds is right.

use std::path::Path;

use runtime::backend::cases::{Case, CaseOp, EXACT, all_cases, run_case};
use runtime::error::DeviceError;
use runtime::weights::WeightFormat;
use shaders::lab::{Lab, TuneOptions, Workload};
use shaders::{AdapterChoice, AdapterInfo, DeviceClass, GpuOptions, Tuning, TuningFile, WgpuBackend, WgpuDevice};

use crate::cache::Scratch;
use crate::gpu;
use crate::memory::tiny;

fn adapter() -> AdapterInfo {
    AdapterInfo {
        name: "Some card".into(),
        driver: "driver 1.2".into(),
        api: "Vulkan".into(),
        kind: shaders::AdapterKind::Discrete,
        class: DeviceClass::Amd,
    }
}

/// A table of some card with one change to its text.
fn written(folder: &Path, change: (&str, &str)) -> Result<TuningFile, String> {
    let file = folder.join("tuning.json");
    let mut table = TuningFile::default();
    table.set(&adapter(), DeviceClass::Amd.tuning().clone());
    table.write(&file).expect("a temporary file");
    let text = std::fs::read_to_string(&file).expect("it was written");
    assert!(text.contains(change.0), "'{}' is not in {text}", change.0);
    std::fs::write(&file, text.replacen(change.0, change.1, 1)).expect("it was written");
    TuningFile::read(&file).map_err(|error| error.to_string())
}

#[test]
fn a_table_is_this_adapters_or_left_alone() {
    let scratch = Scratch::new("tuning adapter");
    let table = written(&scratch.0, ("format", "format")).expect("a sound file");
    let (own, class) = (adapter(), DeviceClass::Amd);
    assert_eq!(table.of(&own, class), Some(DeviceClass::Amd.tuning()));
    let other = |name: &str, driver: &str| AdapterInfo { name: name.into(), driver: driver.into(), ..adapter() };
    assert_eq!(table.of(&other("Another card", "driver 1.2"), class), None);
    assert_eq!(table.of(&other("Some card", "driver 1.3"), class), None, "another compiler");
    assert_eq!(table.of(&own, DeviceClass::Unknown), None, "another class that was asked for");
    // Shapes of one adapter are replaced, those of the others stay.
    let mut table = table;
    let plain = DeviceClass::Unknown.tuning();
    table.set(&other("Another card", "x"), plain.clone());
    table.set(&own, plain.clone());
    assert_eq!(table.of(&own, class), Some(plain));
    assert_eq!(table.of(&other("Another card", "x"), class), Some(plain));
}

#[test]
fn what_is_no_table_is_refused_by_name() {
    let scratch = Scratch::new("tuning refused");
    for (from, to, said) in [
        ("{", "[", "tuning.json: "),
        ("\"format\": 1", "\"format\": 2", "format 2: this build knows format 1"),
        ("\"splits\": 4", "\"splits\": 4, \"slices\": 2", "unknown field `slices`"),
        ("\"row_lanes\": 128,", "", "missing field `row_lanes`"),
        ("\"row_lanes\": 128", "\"row_lanes\": 96", "row_lanes 96: expected a power of two"),
        ("\"flat_lanes\": 64", "\"flat_lanes\": 0", "flat_lanes 0: expected 1 to 1024"),
        ("\"flat_lanes\": 64", "\"flat_lanes\": -1", "invalid value"),
        ("\"lanes\": 32", "\"lanes\": 24", "rows 1 * lanes 24"),
        ("\"lanes\": 32", "\"lanes\": 0", "rows 1 * lanes 0"),
        ("\"tokens\": 1", "\"tokens\": 4294967295", "must divide 64"),
        ("\"from_tokens\": 1", "\"from_tokens\": 0", "the first tile must be from_tokens 1"),
        ("\"from_tokens\": 3", "\"from_tokens\": 2", "from_tokens must ascend"),
        ("\"items\": 1", "\"items\": 0", "attention: items 0"),
        ("\"class\": \"amd\"", "\"class\": \"voodoo\"", "unknown variant `voodoo`"),
    ] {
        let error = written(&scratch.0, (from, to)).expect_err(to);
        assert!(error.contains(said) && error.contains("tuning.json"), "{to}: {error}");
    }
    let error = TuningFile::read(&scratch.0.join("absent.json")).expect_err("it is not there").to_string();
    assert!(error.contains("absent.json"), "{error}");
}

/// Shapes that no device of today takes pass as a file, and are refused where they would run.
#[test]
fn shapes_beyond_a_devices_limits_are_refused_when_it_is_opened() {
    let Some(device) = gpu::device(GpuOptions::default()) else { return };
    let mut tuning = device.tuning().clone();
    (tuning.attention.items, tuning.attention.parts) = (1024, 1024);
    let mut table = TuningFile::default();
    table.set(device.adapter(), tuning);
    let options = GpuOptions { tuning: Some(table), ..GpuOptions::default() };
    match WgpuDevice::open(&AdapterChoice::Best, options).err() {
        Some(DeviceError::Failed(said)) => assert!(said.contains("1024 x 1024 x 1 lanes"), "{said}"),
        other => panic!("{other:?}"),
    }
}

/// Cases of every kernel that has something to tune.
fn cases() -> Vec<Case> {
    let is_chosen = |case: &Case| match &case.op {
        CaseOp::Linear { parts, tokens, .. } => {
            parts[0].format == WeightFormat::F32 && [1, 2, 3, 5, 9, 16, 33].contains(tokens)
        }
        CaseOp::Attention(case) => [(599, 1), (0, 300), (0, 5)].contains(&case.rows[0]),
        CaseOp::RmsNorm { width, .. } | CaseOp::GatedActivation { width, .. } => *width == 576,
        _ => false,
    };
    all_cases().into_iter().filter(is_chosen).collect()
}

fn outputs(device: &WgpuDevice, cases: &[Case]) -> Vec<Vec<u32>> {
    let bits = |case: &Case| {
        let output = run_case(&mut WgpuBackend::new(device), case).expect("the device works");
        output.iter().map(|value| value.to_bits()).collect()
    };
    cases.iter().map(bits).collect()
}

#[test]
fn what_tuning_finds_changes_no_bit() {
    let Some(device) = gpu::device(GpuOptions::default()) else { return };
    let lab = Lab::open(&AdapterChoice::Best, GpuOptions::default()).expect("it is there");
    let model = tiny();
    let workload = Workload::of_model(&model.program, &model.weights);
    let options = TuneOptions { max_seconds: f64::INFINITY, max_candidates: 3, order_is_free: false };
    let mut seen = Vec::new();
    let report = lab.tune(&workload, options, &mut |progress| seen.push((progress.done, progress.total)));
    let report = report.expect("the device works");
    assert_eq!(report.rejected, Vec::<String>::new(), "every candidate is right");
    assert!(report.num_measured == 3 && report.is_cut_short, "{report:?}");
    assert_eq!(seen.len(), report.choices.len(), "each choice is announced");
    assert!(report.choices.iter().all(|choice| choice.before_us > 0.0 && choice.after_us <= choice.before_us));
    report.tuning.check_shapes().expect("a table that can be read again");
    let scratch = Scratch::new("tuning found");
    let file = scratch.0.join("tuning.json");
    let mut table = TuningFile::default();
    table.set(lab.adapter(), report.tuning.clone());
    table.write(&file).expect("a temporary file");
    let read = TuningFile::read(&file).expect("what was written");
    assert_eq!(read, table);
    let tuned = gpu::device(GpuOptions { tuning: Some(read), ..GpuOptions::default() }).expect("as before");
    assert_eq!(tuned.tuning(), &report.tuning);
    let cases = cases();
    assert!(cases.len() > 10);
    assert!(outputs(&tuned, &cases) == outputs(&device, &cases), "{:?}", report.tuning);
}

/// Without time there is nothing to find, and the table is the class's own.
#[test]
fn no_time_is_no_change() {
    if !gpu::is_there() {
        return;
    }
    let lab = Lab::open(&AdapterChoice::Best, GpuOptions::default()).expect("it is there");
    let options = TuneOptions { max_seconds: 0.0, max_candidates: 5, order_is_free: true };
    let report = lab.tune(&Workload::default_shapes(), options, &mut |_| ()).expect("nothing runs");
    assert!(report.is_cut_short && report.num_measured == 0 && report.choices.is_empty());
    let own: &Tuning = lab.adapter().class.tuning();
    assert_eq!(&report.tuning, own);
}

/// A loaded table is what runs: other variants are asked for.
#[test]
fn a_table_is_used_by_programs() {
    let Some(device) = gpu::device(GpuOptions::default()) else { return };
    let mut tuning = device.tuning().clone();
    tuning.flat_lanes = 4;
    let mut table = TuningFile::default();
    table.set(device.adapter(), tuning);
    let tuned = gpu::device(GpuOptions { tuning: Some(table), ..GpuOptions::default() }).expect("as before");
    let case = Case { op: CaseOp::Add { width: 64, tokens: 5 }, tolerance: EXACT, seed: 1 };
    for (device, lanes) in [(&tuned, "4".to_owned()), (&device, device.tuning().flat_lanes.to_string())] {
        run_case(&mut WgpuBackend::new(device), &case).expect("the device works");
        let (_, settings) = device.variants().into_iter().find(|(kernel, _)| *kernel == "add").expect("it ran");
        assert_eq!(settings.get("LANES"), Some(lanes.as_str()));
    }
}
