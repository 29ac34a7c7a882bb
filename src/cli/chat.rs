//! `kittiwake chat`: a conversation in the terminal, or with `--message` one question and its answer.
//!
//! Invariant: each turn re-renders the whole conversation through the model's template; the prefix cache makes that cheap.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::Context;
use clap::Args;
use kittiwake::Loaded;
use runtime::request::FinishReason;
use runtime::text::ChatInput;
use serde_json::{Map, Value, json};

use super::answer::{Answer, Question, answer};
use super::engine_args::EngineArgs;
use super::model;
use super::sampling_args::SamplingArgs;
use super::{is_closed_pipe, note};

/// Arguments of `chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// A directory, a .gguf file, `demo`, or `org/name[@revision][:file-or-quant]` of the hub.
    model: String,
    /// Ask this, print the answer and what it took, and end.
    #[arg(long, short, allow_hyphen_values = true)]
    message: Option<String>,
    /// System message.
    #[arg(long, allow_hyphen_values = true)]
    system: Option<String>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

const HELP: &str = "Type a message and Enter. /reset forgets the conversation, /exit (or end of input) ends it.";

/// Loads and talks.
pub fn run(args: &ChatArgs) -> anyhow::Result<()> {
    args.sampling.check()?;
    let loaded = model::load(&args.engine.options(&args.model, 0)?)?;
    let mut conversation = opening(args);
    if let Some(message) = &args.message {
        let answer = turn(args, &loaded, &mut conversation, message)?;
        print_speed(&answer);
        return Ok(());
    }
    let interactive = std::io::stdin().is_terminal();
    if interactive {
        note(format_args!("{} on {}. {HELP}\n", args.model, loaded.device));
    }
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if interactive {
            note(format_args!("> "));
        }
        let Some(line) = lines.next().transpose().context("standard input")? else { return Ok(()) };
        match line.trim() {
            "" => {}
            "/exit" | "/quit" => return Ok(()),
            "/reset" => conversation = opening(args),
            "/help" => note(format_args!("{HELP}\n")),
            message => {
                let kept = conversation.len();
                if let Err(error) = turn(args, &loaded, &mut conversation, message) {
                    // A person can ask something shorter instead; a script must not take silence for an answer.
                    if !interactive || is_closed_pipe(&error) {
                        return Err(error);
                    }
                    conversation.truncate(kept);
                    note(format_args!("{error:#}\n"));
                }
            }
        }
    }
}

fn opening(args: &ChatArgs) -> Vec<Value> {
    args.system.iter().map(|text| json!({"role": "system", "content": text})).collect()
}

/// Adds a message and its answer to the conversation, showing the answer as it comes.
fn turn(args: &ChatArgs, loaded: &Loaded, conversation: &mut Vec<Value>, message: &str) -> anyhow::Result<Answer> {
    conversation.push(json!({"role": "user", "content": message}));
    let messages = Value::Array(conversation.clone());
    let chat = ChatInput {
        messages: &messages,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: &Map::new(),
    };
    let text = &loaded.text;
    let params = args.sampling.params(text)?;
    let max_tokens = params.max_tokens as usize;
    let question = Question { prompt: text.encode_chat(&chat)?, params, stream: args.sampling.stream_options() };
    let mut out = std::io::stdout();
    let answer = answer(loaded, question, |text| out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok())?;
    writeln!(out)?;
    if answer.finish_reason == FinishReason::Length {
        note(match answer.token_ids.len() < max_tokens {
            true => format_args!("[cut: the context is full; /reset starts a new conversation]\n"),
            false => format_args!("[cut: --max-tokens allows longer answers]\n"),
        });
    }
    conversation.push(json!({"role": "assistant", "content": answer.text}));
    Ok(answer)
}

fn print_speed(answer: &Answer) {
    let timings = answer.timings;
    note(format_args!(
        "[{}: loaded in {:.2} s; first token of {} prompt tokens after {:.0} ms; {} tokens at {:.0} tokens/s]\n",
        answer.device,
        timings.load_s,
        answer.prompt_ids.len(),
        timings.ttft_s * 1000.0,
        answer.token_ids.len(),
        timings.decode_tokens_per_s,
    ));
}
