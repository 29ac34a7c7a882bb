//! What a step of the wgpu backend costs on the host: a decode step of a model of 30 layers, written, encoded, submitted and read
//! back, on an adapter that does nothing.
//!
//! `cargo bench -p kittiwake-shaders --features noop --bench encode`; the limit and the last figure are in `benches/README.md`.

use std::path::Path;

use divan::Bencher;
use runtime::backend::{Backend, Bucket, InputLayout, StepInputs};
use runtime::ids::WeightId;
use runtime::model::Model;
use runtime::program::KvDtype;
use runtime::weights::Checkpoint;
use shaders::{AdapterChoice, GpuOptions, WgpuBackend, WgpuDevice};

const NUM_LAYERS: u32 = 30;
const BLOCK_SIZE: u32 = 16;
const BLOCKS_PER_ROW: u32 = 128;

fn main() {
    divan::main();
}

/// A model of many narrow layers with random weights: widths do not matter where nothing is computed.
fn model() -> Model {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/llama-tiny/config.json");
    let text = std::fs::read_to_string(fixture).expect("a fixture");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    config["num_hidden_layers"] = NUM_LAYERS.into();
    config["max_position_embeddings"] = (BLOCKS_PER_ROW * BLOCK_SIZE).into();
    let folder = std::env::temp_dir().join(format!("kittiwake bench encode {}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("a temporary file");
    let checkpoint = Checkpoint::open_dummy(&folder).expect("a sound configuration");
    let model = runtime::model::load(&checkpoint, KvDtype::F16).expect("a sound model");
    std::fs::remove_dir_all(&folder).expect("it was made");
    model
}

/// The whole host side of a step, by the number of sequences that decode.
#[divan::bench(args = [1, 8, 64])]
fn decode_step(bencher: Bencher<'_, '_>, rows: u32) {
    let options = GpuOptions { self_test: false, ..GpuOptions::default() };
    let device = WgpuDevice::open(&AdapterChoice::Name("noop".into()), options).expect("the feature `noop`");
    let (model, mut backend) = (model(), WgpuBackend::new(&device));
    for (i, tensor) in model.weights.iter().enumerate() {
        backend.upload(WeightId(i as u32), tensor).expect("there is room");
    }
    let num_blocks = rows * BLOCKS_PER_ROW + 1;
    backend.alloc_state(&model.program.states, num_blocks, BLOCK_SIZE).expect("there is room");
    let bucket = Bucket { tokens: rows, rows, logit_rows: rows };
    let layout = InputLayout::new(bucket, BLOCKS_PER_ROW, BLOCK_SIZE, 64);
    let plan = backend.compile(&model.program, bucket, &layout, &mut |_, _| ()).expect("every kernel is valid");
    let mut inputs = StepInputs::new(layout);
    let tables: Vec<Vec<u32>> =
        (0..rows).map(|row| (1..=BLOCKS_PER_ROW).map(|block| row * BLOCKS_PER_ROW + block).collect()).collect();
    bencher.bench_local(|| {
        inputs.clear();
        for (row, table) in tables.iter().enumerate() {
            inputs.push_row([7].into_iter(), 1000, table);
            inputs.push_logit_row(row as u32);
        }
        let ticket = backend.submit(plan, &inputs).expect("nothing fails");
        backend.wait(ticket).expect("nothing fails").logits.len()
    });
}
