//! A conversation in sixty lines: each turn renders the whole of it through the model's template, and the prefix cache
//! makes that cheap. Type a message and Enter; end of input ends it.
//!
//! `cargo run --release --example chat -- models/SmolLM2-135M-Instruct.Q4_1.gguf`

use std::io::{BufRead, Write};
use std::sync::mpsc;

use kittiwake::Loaded;
use runtime::request::{Event, Request, SamplingParams};
use runtime::text::{ChatInput, TextStreamOptions};
use serde_json::{Map, Value, json};

fn main() -> anyhow::Result<()> {
    let path = std::env::args().nth(1).unwrap_or("models/SmolLM2-135M-Instruct.Q4_1.gguf".into());
    let model = kittiwake::load(&kittiwake::Options::new(path), &mut |_| ())?;
    let mut messages = vec![json!({"role": "system", "content": "You answer in one or two sentences."})];
    for line in std::io::stdin().lock().lines() {
        messages.push(json!({"role": "user", "content": line?}));
        let (answer, cached_tokens) = answer(&model, &messages)?;
        eprintln!("  [{cached_tokens} tokens came from the prefix cache]");
        messages.push(json!({"role": "assistant", "content": answer}));
    }
    Ok(())
}

/// The model's answer to a conversation, printed as it comes, and how many prompt tokens the prefix cache held.
fn answer(model: &Loaded, messages: &[Value]) -> anyhow::Result<(String, u32)> {
    let chat = ChatInput {
        messages: &messages.into(),
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: &Map::new(),
    };
    let params = SamplingParams {
        temperature: 0.0,
        max_tokens: 256,
        eos_token_ids: model.text.eos_token_ids().to_vec(),
        ..SamplingParams::default()
    };
    let prompt = model.text.encode_chat(&chat)?.into();
    let request = Request { id: model.engine.next_id(), prompt, params, cache_salt: None };
    let (sender, events) = mpsc::channel();
    model.engine.submit(request, Box::new(move |event: Event| sender.send(event).is_ok()))?;

    let mut stream = model.text.stream(&TextStreamOptions { skip_special: true, ..TextStreamOptions::default() });
    let (mut answer, mut num_cached) = (String::new(), 0);
    for event in events {
        let text = match event {
            Event::Started { cached_tokens } => {
                num_cached = cached_tokens;
                continue;
            }
            Event::Token { id, .. } => stream.push(id).text,
            Event::Finished { .. } => stream.finish().text,
            Event::PromptLogprobs(_) => continue,
            Event::Failed(message) => anyhow::bail!(message),
        };
        print!("{text}");
        std::io::stdout().flush()?;
        answer.push_str(&text);
    }
    println!();
    Ok((answer, num_cached))
}
