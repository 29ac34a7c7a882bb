//! Chat templates: Jinja with Hugging Face's conventions, in bounded time and space.
//!
//! Invariant: rendering ends, and no template can end the process. Fuel pays for every instruction and every 64 bytes made,
//! so loops and doubling strings stop; the output has a cap of its own, and the stack holds what fuel can nest. Source of the conventions:
//! `transformers/utils/chat_template_utils.py`. `TextModel` renders the model's template or one that it is given.

use std::io::{self, Write};
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

use super::clock;

/// What a template may spend: this, and one unit per byte of its input up to as much again. A unit pays for one
/// instruction or 64 bytes, so this is some tenths of a second and 128 MiB at most.
const BASE_FUEL: u64 = 1_000_000;
/// Stack for rendering. The engine drops, compares and prints nested values by recursion, and fuel bounds the nesting only: a
/// level costs at least 3 units and was measured to need less than 640 bytes. Only pages that are touched cost memory.
const STACK_BYTES: usize = 512 << 20;
/// What a template may write besides eight times its input.
const BASE_OUTPUT_BYTES: u64 = 1 << 20;
/// Longest template source.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Deepest value that `tojson` writes.
const MAX_DEPTH: usize = 128;

/// A parsed chat template; cheap to clone.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    env: Arc<Environment<'static>>,
}

impl ChatTemplate {
    /// Parses a template.
    ///
    /// # Errors
    /// What is wrong with it, and in which line.
    pub fn parse(source: &str) -> Result<Self, String> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(format!("the template has {} bytes, expected at most {MAX_SOURCE_BYTES}", source.len()));
        }
        let mut env = Environment::new();
        let syntax =
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(|e| e.to_string())?;
        env.set_syntax(syntax);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_formatter(python_formatter);
        // No chat template needs it, and it is quadratic in the depth of a value.
        env.remove_filter("pprint");
        env.add_filter("tojson", to_json);
        env.add_filter("indent", indent);
        // As in Jinja, where even what is missing is an empty sequence: templates write `tools is iterable`.
        let is_sequence = |value: &Value| {
            matches!(value.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map)
        };
        env.add_test("sequence", is_sequence);
        env.add_test("iterable", move |value: &Value| is_sequence(value) || value.kind() == ValueKind::Iterable);
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        env.add_function("strftime_now", |format: &str| clock::strftime(format, clock::now_s()));
        env.add_template_owned("chat", without_generation_tags(source)).map_err(|error| describe(&error))?;
        Ok(Self { env: Arc::new(env) })
    }

    /// Renders with the variables of `context`, which hold about `input_bytes` of text.
    ///
    /// # Errors
    /// What the template raised, or that it ran out of fuel or wrote too much.
    pub(super) fn render(
        &self,
        context: &serde_json::Map<String, serde_json::Value>,
        input_bytes: usize,
    ) -> Result<String, String> {
        let mut env = (*self.env).clone();
        let input_bytes = input_bytes as u64;
        env.set_fuel(Some(BASE_FUEL + input_bytes.min(BASE_FUEL)));
        let cap = BASE_OUTPUT_BYTES.saturating_add(input_bytes.saturating_mul(8));
        let render = || {
            let mut output = Capped { bytes: Vec::new(), cap };
            let template = env.get_template("chat").map_err(|error| describe(&error))?;
            let context = Value::from(Serde(context));
            template.render_captured_to(context, &mut output).map_err(|error| describe(&error))?;
            String::from_utf8(output.bytes).map_err(|error| error.to_string())
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("template".into()).stack_size(STACK_BYTES);
            let thread =
                thread.spawn_scoped(scope, render).map_err(|error| format!("no thread to render on: {error}"))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// The innermost message of an error: what `raise_exception` was given, or what went wrong and where.
fn describe(error: &Error) -> String {
    match (error.kind(), error.detail(), error.line()) {
        (ErrorKind::OutOfFuel, ..) => "the template does too much work".into(),
        (ErrorKind::WriteFailure, ..) => "the template writes too much".into(),
        (ErrorKind::InvalidOperation, Some(detail), _) => detail.to_owned(),
        (kind, Some(detail), Some(line)) => format!("{kind}: {detail} (line {line})"),
        (kind, None, Some(line)) => format!("{kind} (line {line})"),
        (kind, ..) => kind.to_string(),
    }
}

/// A buffer that refuses to grow past its cap.
struct Capped {
    bytes: Vec<u8>,
    cap: u64,
}

impl Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if (self.bytes.len() + bytes.len()) as u64 > self.cap {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Prints truth values, none and numbers as Python does.
fn python_formatter(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let name = match value.kind() {
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        ValueKind::None => "None",
        ValueKind::Number => &python_number(value),
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(name).map_err(Error::from)
}

/// A number as Python writes it: `1e+20` and `1.5e-07` where Rust has `1e20` and `1.5e-7`.
fn python_number(value: &Value) -> String {
    let float = if value.is_integer() { None } else { f64::try_from(value.clone()).ok() };
    let Some(float) = float else { return value.to_string() };
    let text = format!("{float:?}");
    match text.split_once('e').and_then(|(digits, exponent)| Some((digits, exponent.parse::<i32>().ok()?))) {
        Some((digits, exponent)) => format!("{digits}e{exponent:+03}"),
        None => text,
    }
}

/// `{% generation %}` marks the assistant's part for training. Here it is a block that is always taken; the marks that
/// control white space stay.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let marks: &[char] = &['-', '+'];
        let name = tag[..end].trim_matches(marks).trim();
        match name {
            "generation" => out.push_str(&tag[..end].replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag[..end].replace("endgeneration", "endif")),
            _ => out.push_str(&tag[..end]),
        }
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

/// Jinja's `indent`: unlike the engine's own it keeps a line break at the end.
fn indent(state: &State, text: &str, width: Option<usize>, options: Kwargs) -> Result<String, Error> {
    let width = width.or(options.get("width")?).unwrap_or(4);
    let first = options.get::<Option<bool>>("first")?.unwrap_or(false);
    let blank = options.get::<Option<bool>>("blank")?.unwrap_or(false);
    options.assert_all_used()?;
    let num_lines = text.split('\n').count();
    state.consume_fuel((width.saturating_mul(num_lines) / 64) as u64)?;
    let mut out = String::new();
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            out.push('\n');
        }
        let indented = if index == 0 { first } else { blank || !line.is_empty() };
        if indented {
            out.push_str(&" ".repeat(width));
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `json.dumps` with Hugging Face's defaults: ", " and ": ", no escaping of letters.
fn to_json(state: &State, value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let [item, key] = match separators.as_deref() {
        None => [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings")),
    };
    let mut json = Json {
        state,
        out: String::new(),
        indent: indent.map(|width| " ".repeat(width.min(16))),
        item,
        key,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    json.value(value, 0)?;
    Ok(Value::from(json.out))
}

/// A JSON writer in the manner of Python's.
struct Json<'s> {
    /// Pays for what is written: a small value may hold another one many times.
    state: &'s State<'s, 's>,
    out: String,
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sorted: bool,
}

impl Json<'_> {
    fn push(&mut self, text: &str) -> Result<(), Error> {
        self.state.consume_fuel(1 + text.len() as u64 / 64)?;
        self.out.push_str(text);
        Ok(())
    }

    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: nested deeper than {MAX_DEPTH}")));
        }
        match value.kind() {
            ValueKind::None => self.push("null"),
            ValueKind::Bool => self.push(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.push(&python_number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.sequence(["[", "]"], &items, depth, |json, item| json.value(item, depth + 1))
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.sequence(["{", "}"], &keys, depth, |json, key| {
                    json.string(&key.to_string())?;
                    let separator = json.key.clone();
                    json.push(&separator)?;
                    json.value(&value.get_item(key)?, depth + 1)
                })
            }
            kind => Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: {kind} is not JSON"))),
        }
    }

    fn sequence(
        &mut self,
        [open, close]: [&str; 2],
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.push(open)?;
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                let separator = self.item.clone();
                self.push(&separator)?;
            }
            self.new_line(depth + 1)?;
            write(self, item)?;
        }
        if !items.is_empty() {
            self.new_line(depth)?;
        }
        self.push(close)
    }

    fn new_line(&mut self, depth: usize) -> Result<(), Error> {
        match &self.indent {
            Some(indent) => self.push(&format!("\n{}", indent.repeat(depth))),
            None => Ok(()),
        }
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        let quoted =
            serde_json::to_string(text).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))?;
        if !self.ascii {
            return self.push(&quoted);
        }
        let mut escaped = String::with_capacity(quoted.len());
        for c in quoted.chars() {
            if c.is_ascii() {
                escaped.push(c);
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    escaped.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
        self.push(&escaped)
    }
}
