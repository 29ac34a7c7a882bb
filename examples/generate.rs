//! The library in thirty lines: load a model, continue a prompt, print text as it comes.
//!
//! `cargo run --release --example generate -- models/SmolLM2-135M-Instruct.Q4_1.gguf "The capital of France is"`

use std::io::Write;
use std::sync::mpsc;

use runtime::request::{Event, Request, SamplingParams};
use runtime::text::TextStreamOptions;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or("models/SmolLM2-135M-Instruct.Q4_1.gguf".into());
    let prompt = arguments.next().unwrap_or("The capital of France is".into());

    let model = kittiwake::load(&kittiwake::Options::new(path), &mut |_| ())?;
    let params = SamplingParams {
        temperature: 0.0,
        max_tokens: 32,
        eos_token_ids: model.text.eos_token_ids().to_vec(),
        ..SamplingParams::default()
    };
    let prompt_ids = model.text.encode(&prompt, true, true).into();
    let request = Request { id: model.engine.next_id(), prompt: prompt_ids, params, cache_salt: None };
    let (sender, events) = mpsc::channel();
    model.engine.submit(request, Box::new(move |event: Event| sender.send(event).is_ok()))?;

    print!("{prompt}");
    let mut text = model.text.stream(&TextStreamOptions::default());
    for event in events {
        if let Event::Token { id, .. } = event {
            print!("{}", text.push(id).text);
            std::io::stdout().flush()?;
        }
    }
    println!("{}", text.finish().text);
    Ok(())
}
