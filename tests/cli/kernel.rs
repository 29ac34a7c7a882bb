//! `kernel`: every subcommand on the best adapter there is, with kernels that are right, and wrong in each way that a check
//! promises to catch.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::Value;

use super::{Said, Scratch, command, keys, kittiwake, tiny};

/// The text of a new kernel with something replaced.
fn kernel(op: &str, replacements: &[(&str, &str)]) -> String {
    let mut text = kittiwake(["kernel", "new", "--op", op]).ok();
    for (from, to) in replacements {
        assert!(text.contains(from), "{op} has no '{from}'");
        text = text.replace(from, to);
    }
    text
}

fn check(file: &str, op: &str, more: &[&str]) -> Said {
    kittiwake([&["kernel", "check", file, "--op", op][..], more].concat())
}

/// The report of a check that fails.
fn failed(said: Said, words: &[&str]) -> String {
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.err.contains("failed its check"), "{}", said.err);
    for word in words {
        assert!(said.out.contains(word), "'{word}' is missing: {}", said.out);
    }
    said.out
}

/// The line of `text` that contains `needle`, from 1.
fn line_of(text: &str, needle: &str) -> usize {
    text.lines().position(|line| line.contains(needle)).expect(needle) + 1
}

const NAMES: [&str; 22] = [
    "add",
    "attention",
    "attention_combine",
    "check_finite",
    "embed",
    "gated_activation",
    "gather_columns",
    "linear",
    "moe_combine",
    "moe_linear",
    "moe_route",
    "norm_heads",
    "rms_norm",
    "rope",
    "rope_store_kv",
    "sample_draw",
    "sample_pick",
    "sample_scan",
    "scale_by_position",
    "select_rows",
    "soft_cap",
    "store_kv",
];

#[test]
fn list_says_what_a_kernel_must_have() {
    let rows = kittiwake(["kernel", "list", "--json"]).json();
    let rows = rows.as_array().expect("a list");
    assert_eq!(rows.iter().map(|row| row["name"].as_str().expect("a name")).collect::<Vec<_>>(), NAMES);
    let expected = ["about", "bindings", "formula", "name", "num_cases", "params", "settings", "targets", "tolerance"];
    for row in rows {
        assert_eq!(keys(row), expected);
        assert!(
            row["num_cases"].as_u64() >= Some(5) && row["formula"].as_str().is_some_and(|f| !f.is_empty()),
            "{row}"
        );
    }
    let linear = rows.iter().find(|row| row["name"] == "linear").expect("a linear");
    let format = linear["settings"].as_array().expect("settings").iter().find(|s| s["name"] == "FORMAT").expect("one");
    assert!(format["values"].as_array().expect("values").contains(&"q6_k".into()) && format["required"] == true);
    assert_eq!(linear["bindings"][0], serde_json::json!({"name": "x", "access": "read", "type": "array<vec4<f32>>"}));
    let text = kittiwake(["kernel", "list", "attention"]).ok();
    assert!(
        text.starts_with("attention: out[t, h] = ") && text.contains("ITEMS = 8: ") && !text.contains("linear"),
        "{text}"
    );
    kittiwake(["kernel", "list", "matmul"]).refused(&["no kernel 'matmul'", "attention, attention_combine"]);
}

#[test]
fn new_writes_kernels_that_pass_their_check() {
    let scratch = Scratch::new("kernel new");
    for op in ["attention", "linear", "select_rows"] {
        let file = scratch.0.join(format!("{op}.wgsl")).display().to_string();
        assert_eq!(kittiwake(["kernel", "new", "--op", op, "-o", &file]).ok(), "");
        let report = check(&file, op, &["--json"]).json();
        assert!(report["num_cases"].as_u64() > Some(5) && report["num_other_cases"] == 0, "{report}");
        assert_eq!((&report["failures"], &report["faults"]), (&Value::Array(vec![]), &Value::Array(vec![])));
        kittiwake(["kernel", "new", "--op", op, "--output", &file]).refused(&[&file, "exists"]);
    }
    kittiwake(["kernel", "new", "--op", "matmul"]).refused(&["no kernel 'matmul'"]);
}

#[test]
fn check_points_at_what_is_not_valid() {
    let scratch = Scratch::new("kernel invalid");
    let text = kernel("add", &[("+= x[", "+= y[")]);
    let file = scratch.file("add.wgsl", &text);
    let at = line_of(&text, "+= y[");
    let column = text.lines().nth(at - 1).expect("a line").find("y[").expect("the name") + 1;
    let out = failed(check(&file, "add", &[]), &[&format!("add.wgsl:{at}:{column}: ")]);
    let (marked, marks) = (out.lines().nth(1).expect("the line"), out.lines().nth(2).expect("marks"));
    assert_eq!(marks.find('^'), marked.find("y["), "{out}");
    // In a file that it uses: that file's own line.
    scratch.file("twice.wgsl", "fn twice(v: vec4f) -> vec4f {\n    return v + w;\n}\n");
    let file = scratch.file("add.wgsl", kernel("add", &[("struct Params", "//!use twice.wgsl\nstruct Params")]));
    failed(check(&file, "add", &[]), &["twice.wgsl:2:16: "]);
    let file = scratch.file("none.wgsl", kernel("add", &[("struct Params", "//!use no/such.wgsl\nstruct Params")]));
    failed(check(&file, "add", &[]), &["there is no 'no/such.wgsl'"]);
}

#[test]
fn check_lists_every_difference_from_the_contract() {
    let scratch = Scratch::new("kernel contract");
    let refused = |op: &str, replacements: &[(&str, &str)], words: &[&str]| {
        let file = scratch.file("contract.wgsl", kernel(op, replacements));
        failed(
            check(&file, op, &[]),
            &[&[&format!("contract.wgsl does not fit the kernel '{op}':")[..]], words].concat(),
        );
    };
    let order = [
        ("@binding(1) var<storage, read> x", "@binding(2) var<storage, read> x"),
        ("@binding(2) var<storage, read_write> residual", "@binding(1) var<storage, read_write> residual"),
    ];
    refused(
        "add",
        &order,
        &["@binding(1): expected 'x' here, got 'residual'", "@binding(2): expected 'residual' here, got 'x'"],
    );
    let access = [("var<storage, read> x", "var<storage, read_write> x")];
    refused("add", &access, &["@binding(1) 'x': expected access storage, read, got storage, read_write"]);
    let kind =
        [("x: array<vec4f>", "x: array<vec4u>"), ("+= x[id.y * params.width_quads + id.x]", "+= vec4f(x[id.x])")];
    refused("add", &kind, &["@binding(1) 'x': expected type array<vec4<f32>>, got array<vec4<u32>>"]);
    let missing = [
        ("@group(0) @binding(4) var<storage, read_write> out: array<vec4f>;", ""),
        ("    out[", "    _ = vec4f("),
        ("+ quad] = value", "+ quad) * value"),
    ];
    let missing = &missing[..];
    let text = kernel("embed", &missing[..1]);
    let file = scratch
        .file("missing.wgsl", text.replace("    out[id.y * params.width_quads + quad] = value * params.scale;\n", ""));
    failed(
        check(&file, "embed", &[]),
        &["@binding(4) is missing: expected var<storage, read_write> out: array<vec4<f32>>"],
    );
    let extra = [("const LANES", "@group(0) @binding(3) var<storage, read> more: array<u32>;\nconst LANES")];
    refused("add", &extra, &["@binding(3) 'more': the kernel has no such thing"]);
    let field = [
        ("width_quads: u32 }", "width_quads: f32, more: u32 }"),
        ("id.x < params.width_quads", "id.x < u32(params.width_quads)"),
        ("id.y * params.width_quads", "id.y * u32(params.width_quads)"),
    ];
    refused(
        "add",
        &field,
        &["field 0 of the uniform, 'width_quads': expected type u32, got f32", "field 'more' of the uniform"],
    );
    // A number that the grid depends on has gone.
    let lanes = [("const LANES: u32 = 32u; //!set lanes per workgroup, along the width", ""), ("LANES", "32")];
    refused(
        "add",
        &lanes,
        &["setting LANES (lanes per workgroup, along the width) is missing: declare `const LANES: u32 = 32u; //!set"],
    );
}

#[test]
fn check_finds_the_first_wrong_element() {
    let scratch = Scratch::new("kernel wrong");
    let wrong = "+= select(1.0, 2.0, id.y == 2u && id.x == 1u) * x[";
    let file = scratch.file("add.wgsl", kernel("add", &[("+= x[", wrong)]));
    failed(
        check(&file, "add", &[]),
        &["FAILED", "first of 4 wrong elements: row 2, column 4: got ", "in case Add { width: 20, tokens: 5 }"],
    );
    let report = check(&file, "add", &["--json"]);
    let report: Value = serde_json::from_str(&report.out).expect("JSON");
    assert_eq!(report["failures"][0]["first_wrong"]["row"], 2);
    assert_eq!(report["faults"], serde_json::json!([]));
}

/// Results are right in all of these: what lies out of bounds is thrown away.
#[test]
fn check_catches_what_is_out_of_bounds() {
    let scratch = Scratch::new("kernel bounds");
    let caught = |op: &str, replacements: &[(&str, &str)], needle: &str, words: &[&str]| {
        let text = kernel(op, replacements);
        let file = scratch.file("bounds.wgsl", &text);
        let place = format!("bounds.wgsl:{}:", line_of(&text, needle));
        let out = failed(check(&file, op, &[]), &[&[&place[..], " 0 wrong, 1 places out of bounds"], words].concat());
        assert!(out.contains('^'), "{out}");
    };
    let guard = "if id.x < params.width {";
    let read = "let past = x[arrayLength(&x) + id.x];\n    if id.x < params.width && past != 1u {";
    caught("select_rows", &[(guard, read)], "let past", &["reads 'x' out of bounds: index "]);
    let write = "out[arrayLength(&out) + 7u * id.y] = 1u;\n    if id.x < params.width {";
    caught("select_rows", &[(guard, write)], "out[arrayLength", &["writes 'out' out of bounds: index "]);
    let negative = "let past = x[i32(id.x) - 70000];\n    if id.x < params.width && past != 1u {";
    caught("select_rows", &[(guard, negative)], "let past", &["reads 'x' out of bounds"]);
    // In memory of the lane's own.
    let local = "var own: array<u32, 4>;\n    own[id.x % 4u + 1u] = id.y;\n    if id.x < params.width {";
    caught("select_rows", &[(guard, local)], "own[id.x", &["writes 'own' out of bounds: index 4, length 4"]);
}

#[test]
fn a_kernel_may_fix_what_it_is_for() {
    let scratch = Scratch::new("kernel fixed");
    // One format only: the other cases are the built-in kernel's.
    let file =
        scratch.file("q8.wgsl", kernel("linear", &[("//!use format/q4_1.wgsl as FORMAT", "//!use format/q8_0.wgsl")]));
    let report = check(&file, "linear", &["--json"]).json();
    assert!(report["num_cases"].as_u64() > Some(10) && report["num_other_cases"].as_u64() > Some(100), "{report}");
    // The grid follows what is pinned or fixed.
    let file = scratch.file("add.wgsl", kernel("add", &[]));
    check(&file, "add", &["--set", "LANES=1"]).ok();
    let file =
        scratch.file("fixed.wgsl", kernel("add", &[("= 32u; //!set lanes per workgroup, along the width", "= 96u;")]));
    check(&file, "add", &[]).ok();
    let said = check(&file, "add", &["--set", "LANES=1"]);
    failed(said, &["no setting 'LANES' here"]);
    failed(check(&file, "add", &["--set", "WIDTH=1"]), &["no setting 'WIDTH' here"]);
}

#[test]
fn arguments_that_name_nothing_are_refused() {
    let scratch = Scratch::new("kernel arguments");
    let file = scratch.file("add.wgsl", kernel("add", &[]));
    check(&file, "matmul", &[]).refused(&["no kernel 'matmul'", "add, attention"]);
    check("/no/such.wgsl", "add", &[]).refused(&["/no/such.wgsl"]);
    check(&file, "add", &["--set", "LANES"]).refused(&["--set", "NAME=VALUE"]);
    failed(check(&file, "add", &["--set", "LANES=many"]), &["setting LANES is a u32, got 'many'"]);
    check(&file, "add", &["--device", "cpu"]).refused(&["--device cpu", "wgpu"]);
    check(&file, "add", &["--device", "wgpu:no such card"]).refused(&["wgpu:no such card", "the adapters are"]);
    // Flags of nested subcommands have their twins, too.
    let mut twin = command();
    twin.env("KITTIWAKE_OP", "matmul").args(["kernel", "check", &file]);
    Said::from(twin.output().expect("the binary runs")).refused(&["no kernel 'matmul'"]);
    let no_driver = |arguments: &[&str]| {
        let mut command = command();
        // Every loader's word for where drivers are.
        command.env("VK_DRIVER_FILES", "/dev/null").env("VK_ICD_FILENAMES", "/dev/null");
        let said: Said = command.args(arguments).output().expect("the binary runs").into();
        said.refused(&["no Vulkan, Metal or DX12 adapter"]);
    };
    no_driver(&["kernel", "check", &file, "--op", "add"]);
    no_driver(&["kernel", "bench", "--op", "add"]);
}

#[test]
fn bench_measures_beside_the_built_in_kernel() {
    let scratch = Scratch::new("kernel bench");
    let file = scratch.file("add.wgsl", kernel("add", &[]));
    let bench = |arguments: &[&str]| kittiwake([&["kernel", "bench"][..], arguments].concat());
    let report = bench(&[&file, "--op", "add", "--shape", "width=64,tokens=3", "--json"]).json();
    let expected =
        ["bytes", "clock", "device", "flops", "kernel", "kernels", "roofline", "runtime_checks", "shape", "speedup"];
    assert_eq!(keys(&report), expected);
    assert_eq!((&report["bytes"], &report["flops"]), (&(12 * 64 * 3).into(), &(64 * 3).into()));
    assert!(
        report["speedup"].as_f64() > Some(0.0) && report["roofline"]["copy_gb_per_s"].as_f64() > Some(0.0),
        "{report}"
    );
    let kernels = report["kernels"].as_array().expect("a list");
    assert_eq!(
        kernels.iter().map(|k| k["name"].as_str().expect("a name")).collect::<Vec<_>>(),
        [file.as_str(), "built-in"]
    );
    for kernel in kernels {
        assert!(kernel["us"].as_f64() > Some(0.0) && kernel["min_us"].as_f64() <= kernel["us"].as_f64(), "{kernel}");
    }
    let text = bench(&["--op", "attention", "--shape", "context=128,heads=4,kv_heads=2"]).ok();
    assert!(text.contains("built-in") && text.contains("roofline: copy ") && !text.contains("times as fast"), "{text}");
    let text = bench(&["--op", "attention", "--set", "ITEMS=4", "--shape", "context=128", "--shape", "heads=8"]).ok();
    assert!(text.contains("times as fast"), "{text}");
    bench(&["--op", "linear", "--shape", "rows=3"]).refused(&["--shape", "no size 'rows'", "format, in, out, tokens"]);
    bench(&["--op", "linear", "--shape", "in=33"]).refused(&["in=33: q4_1 needs a multiple of 32"]);
    bench(&["--op", "linear", "--shape", "in=1048576,out=1048576"]).refused(&["1048576 * 1048576 elements"]);
    bench(&["--op", "attention", "--shape", "kv_heads=5"]).refused(&["heads=32", "kv_heads=5"]);
    bench(&["--op", "linear", "--shape", "format=q9_k"]).refused(&["format=q9_k", "q6_k"]);
    let q8 =
        scratch.file("q8.wgsl", kernel("linear", &[("//!use format/q4_1.wgsl as FORMAT", "//!use format/q8_0.wgsl")]));
    bench(&[&q8, "--op", "linear"]).refused(&["q8.wgsl: fixes FORMAT=q8_0"]);
}

#[test]
fn watch_checks_again_at_each_save() {
    let scratch = Scratch::new("kernel watch");
    let file = scratch.file("add.wgsl", kernel("add", &[]));
    let mut command = command();
    command.args(["kernel", "watch", &file, "--op", "add"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().expect("the binary runs");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map(|line| line.expect("UTF-8"));
    let mut until = |words: &str| lines.find(|line| line.contains(words)).is_some();
    assert!(until(": passed: "));
    scratch.file("add.wgsl", kernel("add", &[("+= x[", "-= x[")]));
    assert!(until("FAILED"));
    scratch.file("add.wgsl", "not WGSL at all");
    assert!(until("add.wgsl:1:1: "));
    scratch.file("add.wgsl", kernel("add", &[]));
    assert!(until(": passed: "));
    child.kill().expect("it runs until it is ended");
    child.wait().expect("it ends");
    kittiwake(["kernel", "watch", "/no/such.wgsl", "--op", "add"]).refused(&["/no/such.wgsl"]);
    kittiwake(["kernel", "watch", &file, "--op", "matmul"]).refused(&["no kernel 'matmul'"]);
}

#[test]
fn export_writes_what_drivers_take() {
    let scratch = Scratch::new("kernel export");
    let export = |arguments: &[&str]| kittiwake([&["kernel", "export"][..], arguments].concat());
    let spirv = scratch.0.join("attention.spv");
    assert_eq!(export(&["--op", "attention", "--target", "spirv", "-o", &spirv.display().to_string()]).ok(), "");
    assert_eq!(std::fs::read(&spirv).expect("written")[..4], 0x0723_0203u32.to_le_bytes());
    for (target, word) in
        [("msl", "kernel void main_("), ("hlsl", "[numthreads(8, 1, 1)]"), ("glsl", "local_size_x = 8")]
    {
        let text = export(&["--op", "attention", "--target", target]).ok();
        assert!(text.contains(word), "{target}: {text}");
    }
    assert!(
        export(&["--op", "attention", "--target", "hlsl", "--set", "ITEMS=4"]).ok().contains("[numthreads(4, 1, 1)]")
    );
    let file = scratch.file("add.wgsl", kernel("add", &[]));
    assert!(export(&[&file, "--op", "add", "--target", "msl"]).ok().contains("[[buffer(2)]]"));
    export(&["--op", "attention", "--target", "ptx"]).refused(&["'ptx' is none of spirv, msl, hlsl, glsl"]);
    export(&["--op", "attention", "--target", "msl", "--set", "NOTHING=1"]).refused(&["no setting 'NOTHING'"]);
    export(&["--op", "attention", "--target", "msl", "-o", "/no/such/folder/x"]).refused(&["/no/such/folder/x"]);
}

#[test]
fn a_model_runs_with_a_users_kernel() {
    let scratch = Scratch::new("kernel serve");
    let file = scratch.file("attention.wgsl", kernel("attention", &[]));
    let generate = |more: &[&str]| {
        let arguments = ["generate", &tiny(), "--prompt-ids=1,2,3", "--max-tokens=80", "--ignore-eos", "--json"];
        kittiwake([&arguments[..], more].concat())
    };
    let ids = |said: Said| said.json()["token_ids"].clone();
    let expected = ids(generate(&["--device=cpu"]));
    let named = format!("--kernel=attention={file}");
    let said = generate(&["--device=wgpu", &named]);
    assert!(said.err.contains("kernel loaded"), "{}", said.err);
    assert_eq!(ids(said), expected);
    let wrong = scratch.file("wrong.wgsl", kernel("attention", &[("own_split = item /", "own_split = 0u * item /")]));
    generate(&["--device=wgpu", &format!("--kernel=attention={wrong}")])
        .refused(&["failed the self-test", "first of "]);
    generate(&["--device=wgpu", "--kernel=attention=/no/such.wgsl"]).refused(&["/no/such.wgsl"]);
    generate(&["--device=wgpu", "--kernel=attention"]).refused(&["--kernel attention", "NAME=FILE"]);
    generate(&["--device=wgpu", &named, &named]).refused(&["already"]);
    generate(&["--device=cpu", &named]).refused(&["--kernel", "--device wgpu"]);
}
