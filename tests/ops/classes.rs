//! The tuning table's rows, each on the adapter that is there: every shape that some class of GPU takes gives the reference's
//! numbers, and the same bits for any number of tokens; sums by subgroups hold for every size of a subgroup.
//!
//! Invariant: rows that are equal run once, and the adapter's own row is left to the table of `ops.rs`.

use std::process::Command;

use runtime::backend::cases::{AttentionCase, BlockMoves, Case, CaseOp, all_cases};
use runtime::weights::WeightFormat;
use shaders::{AttentionTile, BatchInvariant, DeviceClass, GpuOptions, LinearTile, Tuning, TuningFile};

use super::{MakeBackend, for_all, gpu, on, reference, run, run_case, same_bits, tolerance};

/// One class of each row of the table but the adapter's own.
fn foreign_classes() -> Vec<DeviceClass> {
    let own = shaders::adapters().first().map(|adapter| adapter.class.tuning());
    let mut tunings: Vec<_> = own.into_iter().collect();
    let is_new = |class: &DeviceClass| {
        let is_new = !tunings.contains(&class.tuning());
        tunings.push(class.tuning());
        is_new
    };
    DeviceClass::ALL.into_iter().filter(is_new).collect()
}

fn backend_of(class: DeviceClass, batch_invariant: BatchInvariant) -> Option<MakeBackend> {
    gpu::device(GpuOptions { class: Some(class), batch_invariant, ..GpuOptions::default() }).map(on)
}

/// One format of each kind.
const FEW_FORMATS: [WeightFormat; 3] = [WeightFormat::F32, WeightFormat::Q8_0, WeightFormat::Q4K];

/// Cases with every op and format, each shape of a linear, and attention by whole rows, by splits, and with heads too wide
/// for the table's number of lanes.
fn selection(class: DeviceClass) -> Vec<Case> {
    let tiles = &class.tuning().linear;
    let is_chosen = |case: &Case| match &case.op {
        CaseOp::Embed { tokens, .. } => *tokens == 37,
        CaseOp::Linear { parts, tokens, .. } => match parts.len() {
            1 => parts[0].out_features == 37 && (*tokens == 16 || tiles.iter().any(|tile| tile.from_tokens == *tokens)),
            _ => *tokens == 17,
        },
        CaseOp::FusedLinear(case) => FEW_FORMATS.contains(&case.parts[0].format),
        CaseOp::RmsNorm { width, .. }
        | CaseOp::Add { width, .. }
        | CaseOp::GatedActivation { width, .. }
        | CaseOp::SoftCap { width, .. }
        | CaseOp::CheckFinite { width, .. }
        | CaseOp::GatherColumns { width, .. }
        | CaseOp::SelectRows { width, .. } => [40, 1536].contains(width),
        CaseOp::NormHeads { .. } | CaseOp::Rope { .. } | CaseOp::ScaleByPosition { .. } | CaseOp::Sample(_) => true,
        CaseOp::MoeRoute { .. } | CaseOp::Moe(_) | CaseOp::Heads(_) => true,
        CaseOp::Attention(AttentionCase { heads, head_dim, rows, moves, trees, .. }) => {
            *moves == BlockMoves::None
                && ([(9, 64), (2, 256), (7, 20), (6, 20)].contains(&(*heads, *head_dim))
                    || rows[0] == (599, 1)
                    || !trees.is_empty())
        }
    };
    all_cases().into_iter().filter(is_chosen).collect()
}

fn agrees(make: &MakeBackend, class: DeviceClass, cases: &[Case]) {
    for_all(cases, |case| {
        let expected = run_case(&mut reference(), case).map_err(|e| e.to_string())?;
        let got = run(make, case)?;
        tolerance("wgpu", case).check(&got, &expected).map_err(|e| format!("class {}: {e}", class.name()))
    });
}

#[test]
fn every_class_agrees_with_the_reference() {
    for class in foreign_classes() {
        let Some(make) = backend_of(class, BatchInvariant::Auto) else { return };
        agrees(&make, class, &selection(class));
    }
}

/// Without the promise a linear of many tokens may add in another order, and is right all the same.
#[test]
fn every_class_agrees_where_the_order_of_sums_is_free() {
    let is_linear = |case: &Case| matches!(case.op, CaseOp::Linear { tokens: 16 | 17, .. });
    for class in foreign_classes().into_iter().filter(|class| class.tuning().splits > 1) {
        let Some(make) = backend_of(class, BatchInvariant::Off) else { return };
        assert!(!make().caps().batch_invariant);
        let cases: Vec<Case> = selection(class).into_iter().filter(is_linear).collect();
        agrees(&make, class, &cases);
    }
}

/// A row's bits in every shape that the class has for some number of tokens.
#[test]
fn no_class_depends_on_the_number_of_tokens() {
    // Formats with a minimum, with a scale only, and plain numbers.
    let is_chosen = |case: &Case| match &case.op {
        CaseOp::Linear { in_features: 512.., parts, tokens: 17 } => parts.len() > 1,
        CaseOp::Linear { parts, tokens: 16, .. } => parts[0].format.block_len() == 1,
        _ => false,
    };
    let cases: Vec<Case> = all_cases().into_iter().filter(is_chosen).collect();
    for class in foreign_classes() {
        let Some(make) = backend_of(class, BatchInvariant::Auto) else { return };
        assert!(make().caps().batch_invariant);
        for_all(&cases, |case| {
            let CaseOp::Linear { in_features, parts, .. } = &case.op else { unreachable!("filtered above") };
            let whole = run(&make, case)?;
            for tokens in class.tuning().linear.iter().map(|tile| tile.from_tokens) {
                let op = CaseOp::Linear { in_features: *in_features, parts: parts.clone(), tokens };
                let got = run(&make, &Case { op, ..case.clone() })?;
                let what = |e| format!("class {}, {tokens} tokens: {e}", class.name());
                same_bits(&got, &whole[..got.len()]).map_err(what)?;
            }
            Ok(())
        });
        attention_is_the_same_in_chunks(&make, class);
    }
}

/// The last token alone (by splits, on lanes of their own) and among others (one lane after the other).
fn attention_is_the_same_in_chunks(make: &MakeBackend, class: DeviceClass) {
    let is_chosen = |case: &Case| matches!(&case.op, CaseOp::Attention(a) if a.rows == [(0, 300)]);
    let cases: Vec<Case> = all_cases().into_iter().filter(is_chosen).collect();
    for_all(&cases, |case| {
        let CaseOp::Attention(whole) = &case.op else { unreachable!("filtered above") };
        let last = AttentionCase { rows: vec![(299, 1)], ..whole.clone() };
        let (whole, got) = (run(make, case)?, run(make, &Case { op: CaseOp::Attention(last), ..case.clone() })?);
        same_bits(&got, &whole[whole.len() - got.len()..]).map_err(|e| format!("class {}: {e}", class.name()))
    });
}

/// On whatever size of a subgroup the driver has: sums over its lanes, and inputs of linears that its lanes hand round.
#[test]
fn what_lanes_of_a_subgroup_share_agrees() {
    let is_norm = |case: &Case| matches!(case.op, CaseOp::RmsNorm { .. });
    let is_linear = |case: &Case| match &case.op {
        CaseOp::Linear { parts, tokens: 1 | 4, .. } => parts.len() > 1,
        CaseOp::FusedLinear(case) => case.norm && case.tokens < 3 && FEW_FORMATS.contains(&case.parts[0].format),
        _ => false,
    };
    for class in DeviceClass::ALL {
        let (sums, inputs) = (class.tuning().subgroups, class.tuning().dear_loads);
        let is_chosen = |case: &Case| (sums && is_norm(case)) || (inputs && is_linear(case));
        let cases: Vec<Case> = all_cases().into_iter().filter(is_chosen).collect();
        let Some(make) = backend_of(class, BatchInvariant::Auto) else { return };
        if sums || inputs {
            agrees(&make, class, &cases);
        }
    }
}

/// Software Vulkan takes the size of a subgroup from the width of a vector, which it reads when it is loaded: 4, 8 or 16 lanes.
#[test]
fn what_lanes_share_agrees_for_every_size_of_a_subgroup() {
    if !gpu::is_there() {
        return;
    }
    let this = std::env::current_exe().expect("a test has a file");
    for width in ["128", "256", "512"] {
        let mut command = Command::new(&this);
        command
            .args(["--exact", "classes::what_lanes_of_a_subgroup_share_agrees"])
            .env("LP_NATIVE_VECTOR_WIDTH", width);
        // The driver's cache on disk does not tell the widths apart.
        let said = command.env("MESA_SHADER_CACHE_DISABLE", "true").output().expect("this very program");
        let text = String::from_utf8_lossy(&said.stdout);
        assert!(said.status.success() && text.contains("1 passed"), "vectors of {width} bits:\n{text}");
    }
}

/// A table that nobody would write, of shapes that are all legal: sizes that are no powers of two, tiles of many rows, of many
/// tokens and of neither, more slices than groups, splits of an odd length, norms by some of the tiles.
fn odd() -> Tuning {
    let tile = |from_tokens, (rows, lanes), (tokens, token_lanes), split_lanes, norm_blocks| LinearTile {
        from_tokens,
        rows,
        tokens,
        lanes,
        token_lanes,
        split_lanes,
        norm_blocks,
    };
    let linear = vec![
        tile(1, (1, 1), (1, 1), true, 4),
        tile(2, (16, 4), (2, 1), false, 3),
        tile(3, (2, 2), (1, 16), false, 0),
        tile(5, (1, 16), (8, 2), true, 0),
        tile(16, (4, 1), (4, 16), false, 1),
    ];
    let attention = AttentionTile { split: 37, items: 3, parts: 5, max_values: 100, max_split_tokens: 3 };
    Tuning {
        flat_lanes: 7,
        row_lanes: 4,
        subgroups: false,
        dear_loads: true,
        splits: 4,
        linear: linear.into(),
        attention,
    }
}

#[test]
fn odd_measured_shapes_agree_with_the_reference() {
    let Some(own) = gpu::device(GpuOptions::default()) else { return };
    let mut table = TuningFile::default();
    table.set(own.adapter(), odd());
    let device = gpu::device(GpuOptions { tuning: Some(table), ..GpuOptions::default() }).expect("as before");
    assert_eq!(device.tuning(), &odd());
    let class = own.adapter().class;
    // And every tile in one format.
    let is_chosen = |case: &Case| match &case.op {
        CaseOp::Linear { parts, .. } => parts.iter().all(|part| FEW_FORMATS.contains(&part.format)),
        CaseOp::Embed { format, .. } => FEW_FORMATS.contains(format),
        _ => true,
    };
    let is_tile = |case: &Case| match &case.op {
        CaseOp::Linear { parts, tokens, .. } => parts[0].format == WeightFormat::F32 && [2, 4, 9, 33].contains(tokens),
        _ => false,
    };
    let mut cases = selection(class);
    cases.retain(is_chosen);
    cases.extend(all_cases().into_iter().filter(is_tile));
    agrees(&on(device), class, &cases);
}
