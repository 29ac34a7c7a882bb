//! From raw arguments to a parsed command: spellings that vLLM accepts, environment twins, the configuration file.
//!
//! Invariant: all of that is generic over the flags; adding a flag to a subcommand gives it its twin and its YAML key.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context, bail};
use clap::{CommandFactory, FromArgMatches};

/// Why the arguments could not be parsed.
#[derive(Debug)]
pub enum ArgsError {
    /// clap's own message, help and version included.
    Usage(clap::Error),
    /// The configuration file is bad.
    Config(anyhow::Error),
}

/// Parses `arguments` (program name first) with environment twins and `--config`.
///
/// # Errors
/// Usage errors (help and version included) or a bad configuration file.
pub fn parse<T: CommandFactory + FromArgMatches>(arguments: impl Iterator<Item = OsString>) -> Result<T, ArgsError> {
    let mut arguments: Vec<OsString> = arguments.map(normalise).collect();
    if let Some(path) = config_path(&arguments) {
        let flags = config_flags(Path::new(&path)).map_err(ArgsError::Config)?;
        // Behind the subcommand, before its own flags: the last one given wins.
        let at = arguments.len().min(2);
        arguments.splice(at..at, flags.into_iter().map(|flag| normalise(flag.into())));
    }
    let matches = with_environment(T::command()).try_get_matches_from(arguments).map_err(ArgsError::Usage)?;
    T::from_arg_matches(&matches).map_err(ArgsError::Usage)
}

/// `--max_model_len` is `--max-model-len`, and `--no-X` is `--X=false`.
fn normalise(argument: OsString) -> OsString {
    let Some(flag) = argument.to_str().and_then(|text| text.strip_prefix("--")) else { return argument };
    let (name, value) = match flag.split_once('=') {
        Some((name, value)) => (name.replace('_', "-"), format!("={value}")),
        None => (flag.replace('_', "-"), String::new()),
    };
    match name.strip_prefix("no-") {
        Some(name) if value.is_empty() => format!("--{name}=false").into(),
        _ => format!("--{name}{value}").into(),
    }
}

/// Gives every flag of every subcommand its environment twin.
fn with_environment(command: clap::Command) -> clap::Command {
    let twin = |arg: clap::Arg| {
        let Some(name) = arg.get_long().map(|long| format!("KITTIWAKE_{}", long.replace('-', "_").to_uppercase()))
        else {
            return arg;
        };
        match name.as_str() {
            "KITTIWAKE_HELP" | "KITTIWAKE_VERSION" | "KITTIWAKE_CONFIG" => arg,
            _ => arg.env(name).hide_env(true),
        }
    };
    command.mut_args(twin).mut_subcommands(with_environment)
}

fn config_path(arguments: &[OsString]) -> Option<OsString> {
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        if argument == "--config" {
            return rest.next().cloned();
        }
        if let Some(path) = argument.to_str().and_then(|text| text.strip_prefix("--config=")) {
            return Some(path.into());
        }
    }
    None
}

/// The flags that a YAML mapping stands for: scalars, lists (one flag per entry), mappings (as JSON).
fn config_flags(path: &Path) -> anyhow::Result<Vec<String>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("--config {}", path.display()))?;
    let values: serde_json::Map<String, serde_json::Value> = serde_yaml_ng::from_str(&text)
        .with_context(|| format!("--config {}: expected a mapping of flags", path.display()))?;
    let mut flags = Vec::new();
    for (key, value) in values {
        match value {
            serde_json::Value::Array(entries) => {
                for entry in entries {
                    flags.push(format!("--{key}={}", scalar(&key, entry, path)?));
                }
            }
            serde_json::Value::Null => bail!("--config {}: {key} has no value", path.display()),
            value => flags.push(format!("--{key}={}", scalar(&key, value, path)?)),
        }
    }
    Ok(flags)
}

fn scalar(key: &str, value: serde_json::Value, path: &Path) -> anyhow::Result<String> {
    match value {
        serde_json::Value::String(text) => Ok(text),
        serde_json::Value::Array(_) | serde_json::Value::Null => {
            bail!("--config {}: {key}: expected a scalar, a list of scalars or a mapping", path.display())
        }
        other => Ok(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use clap::{ArgAction, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Toy {
        #[command(subcommand)]
        command: ToyCommand,
    }

    #[derive(Debug, clap::Subcommand)]
    enum ToyCommand {
        #[command(args_override_self = true)]
        Run {
            model: Option<PathBuf>,
            #[arg(long, default_value_t = 7)]
            max_model_len: u32,
            #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
            enable_prefix_caching: bool,
            #[arg(long)]
            api_key: Vec<String>,
            #[arg(long)]
            config: Option<PathBuf>,
        },
    }

    fn run(arguments: &[&str]) -> (u32, bool, Vec<String>) {
        let arguments = ["kittiwake", "run"].iter().chain(arguments).map(OsString::from);
        let ToyCommand::Run { max_model_len, enable_prefix_caching, api_key, model, config: _ } =
            parse::<Toy>(arguments).expect("valid arguments").command;
        assert_eq!(model, Some(PathBuf::from("m_o_d")), "positional values keep their underscores");
        (max_model_len, enable_prefix_caching, api_key)
    }

    #[test]
    fn underscores_and_no_flags_are_accepted() {
        assert_eq!(run(&["m_o_d", "--max_model_len", "9", "--no-enable-prefix-caching"]), (9, false, vec![]));
        assert!(run(&["m_o_d", "--no_enable_prefix_caching", "--enable-prefix-caching"]).1);
        assert_eq!(run(&["m_o_d", "--max_model_len=11"]).0, 11);
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let path = std::env::temp_dir().join(format!("kittiwake args {}.yaml", std::process::id()));
        std::fs::write(&path, "max_model_len: 33\nenable-prefix-caching: false\napi-key: [a, b]\n").expect("temp file");
        let config = format!("--config={}", path.display());
        assert_eq!(run(&["m_o_d", &config]), (33, false, vec!["a".into(), "b".into()]));
        assert_eq!(run(&["m_o_d", &config, "--max-model-len", "5"]).0, 5);
        std::fs::write(&path, "just text").expect("temp file");
        assert!(matches!(parse::<Toy>(["k", "run", &config].iter().map(OsString::from)), Err(ArgsError::Config(_))));
        std::fs::remove_file(&path).expect("temp file");
    }
}
