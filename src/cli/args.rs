//! From raw arguments to a parsed command: spellings that vLLM accepts, environment twins, the configuration file.
//!
//! Invariant: all of that is generic over the flags; adding a flag to a subcommand gives it its twin, its YAML key and, if it
//! is a switch, its `--no-` form. A flag's value comes from the highest layer that has it: command line over environment
//! over file over what was found on this machine over default; layers never mix, not even for a flag that may be given several
//! times.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use clap::builder::BoolishValueParser;
use clap::error::ContextKind;
use clap::{Arg, ArgAction, Command, CommandFactory, FromArgMatches};
use serde_json::Value;

/// Why the arguments could not be parsed.
#[derive(Debug)]
pub enum ArgsError {
    /// clap's own message, help and version included.
    Usage(clap::Error),
    /// The configuration file or an environment variable is bad.
    Layer(anyhow::Error),
}

/// Looks up an environment variable.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Parses `arguments` (program name first) with environment twins, `--config`, and values that were `found` for flags by name.
///
/// # Errors
/// Usage errors (help and version included), a bad configuration file or environment variable.
pub fn parse<T: CommandFactory + FromArgMatches>(
    arguments: impl Iterator<Item = OsString>,
    environment: Environment,
    found: &[(&str, OsString)],
) -> Result<T, ArgsError> {
    let command = with_switches(T::command());
    let mut arguments: Vec<OsString> = arguments.collect();
    let mut layered = Vec::new();
    if let Some((at, subcommand)) = find_subcommand(&command, &arguments) {
        let flags: Vec<&Arg> = command.get_arguments().chain(subcommand.get_arguments()).collect();
        let mut given = respell(&mut arguments[1..at], &flags);
        given.extend(respell(&mut arguments[at + 1..], &flags));
        layered = environment_layer(&flags, &given, environment);
        given.extend(layered.iter().map(|setting| setting.id.clone()));
        if let Some(path) = config_path(&arguments, &layered) {
            layered.extend(config_layer(Path::new(&path), subcommand, &flags, &given).map_err(ArgsError::Layer)?);
            given.extend(layered.iter().map(|setting| setting.id.clone()));
        }
        layered.extend(found.iter().filter_map(|(name, value)| {
            let arg = find(&flags, name).filter(|arg| !given.contains(arg.get_id().as_str()))?;
            Some(setting(arg, name, value, "what was found on this machine".into()))
        }));
        arguments.splice(at + 1..at + 1, layered.iter().map(|setting| setting.argument.clone()));
    }
    let matches = command.try_get_matches_from(arguments).map_err(|error| blame(error, &layered))?;
    T::from_arg_matches(&matches).map_err(ArgsError::Usage)
}

/// A value that did not come from the command line.
struct Setting {
    /// The flag's id in clap.
    id: String,
    /// Name without dashes.
    name: String,
    /// As it would stand on the command line.
    argument: OsString,
    /// Where it came from, for messages.
    origin: String,
}

/// Lets every switch take a value (`--x=false`, so that all layers can turn it off) and every value be negative.
fn with_switches(command: Command) -> Command {
    let shape = |arg: Arg| {
        if !matches!(arg.get_action(), ArgAction::SetTrue) {
            return if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg };
        }
        let arg = match arg.get_default_values() {
            [] => arg.default_value("false").hide_default_value(true),
            _ => arg,
        };
        let arg = arg.action(ArgAction::Set).num_args(0..=1).require_equals(true).default_missing_value("true");
        arg.value_parser(BoolishValueParser::new()).value_name("BOOL").hide_possible_values(true)
    };
    command.mut_args(shape).mut_subcommands(with_switches)
}

fn is_switch(arg: &Arg) -> bool {
    arg.is_require_equals_set()
}

/// The flag of this name, with dashes or underscores.
fn find<'a>(flags: &[&'a Arg], name: &str) -> Option<&'a Arg> {
    let name = name.replace('_', "-");
    let called = |arg: &&&Arg| {
        arg.get_long() == Some(&name) || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name.as_str()))
    };
    flags.iter().find(called).copied()
}

/// How many of the arguments after `argument` are its values.
fn num_values(arg: &Arg, argument: &str) -> usize {
    if !arg.get_action().takes_values() || is_switch(arg) || argument.contains('=') {
        return 0;
    }
    arg.get_num_args().map_or(1, |range| range.max_values())
}

/// Where the subcommand stands, behind the global flags; of nested ones the innermost.
fn find_subcommand<'a>(command: &'a Command, arguments: &[OsString]) -> Option<(usize, &'a Command)> {
    let globals: Vec<&Arg> = command.get_arguments().collect();
    let mut at = 1;
    loop {
        let argument = arguments.get(at)?.to_str()?;
        match argument.strip_prefix("--") {
            Some(flag) => at += 1 + find(&globals, flag).map_or(0, |arg| num_values(arg, flag)),
            None => break,
        }
    }
    let mut found = command.find_subcommand(arguments.get(at)?.to_str()?)?;
    while let Some(inner) = arguments.get(at + 1).and_then(|next| found.find_subcommand(next.to_str()?)) {
        (at, found) = (at + 1, inner);
    }
    Some((at, found))
}

/// Brings flags into clap's spelling, in place: `--max_model_len` is `--max-model-len`, and `--no-X` is `--X=false`.
/// Returns the ids of what is given, MODEL included. Values are left alone, even those that look like flags.
fn respell(arguments: &mut [OsString], flags: &[&Arg]) -> BTreeSet<String> {
    let mut given = BTreeSet::new();
    let mut num_values_left = 0;
    for argument in arguments {
        let Some(text) = argument.to_str() else { continue };
        if num_values_left == 1 || num_values_left > 1 && !text.starts_with('-') {
            num_values_left -= 1;
            continue;
        }
        num_values_left = 0;
        if text == "--" {
            break;
        }
        let found = match text.strip_prefix("--") {
            Some(flag) => {
                let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
                let found = find(flags, name);
                let negated = name.strip_prefix("no").filter(|name| name.starts_with(['-', '_']) && value.is_none());
                let switch = negated.and_then(|name| find(flags, &name[1..])).filter(|arg| is_switch(arg));
                let long = found.or(switch).and_then(Arg::get_long).unwrap_or(name);
                let value = if switch.is_some() { Some("false") } else { value };
                let spelled = value.map_or(format!("--{long}"), |value| format!("--{long}={value}"));
                num_values_left = found.map_or(0, |arg| num_values(arg, flag));
                *argument = spelled.into();
                found.or(switch)
            }
            None if text.starts_with('-') && text.len() > 1 => {
                let short = text.chars().nth(1);
                let found = flags.iter().find(|arg| arg.get_short() == short).copied();
                num_values_left = found.filter(|_| text.len() == 2).map_or(0, |arg| num_values(arg, text));
                found
            }
            None => flags.iter().find(|arg| arg.is_positional()).copied(),
        };
        given.extend(found.map(|arg| arg.get_id().to_string()));
    }
    given
}

fn setting(arg: &Arg, name: &str, value: &OsStr, origin: String) -> Setting {
    let mut argument = OsString::from(format!("--{name}="));
    argument.push(value);
    Setting { id: arg.get_id().to_string(), name: name.to_owned(), argument, origin }
}

/// What `KITTIWAKE_<FLAG>` says about the flags that are not given; an empty variable says nothing.
fn environment_layer(flags: &[&Arg], given: &BTreeSet<String>, environment: Environment) -> Vec<Setting> {
    let twin = |arg: &&Arg| {
        let name = arg.get_long().filter(|_| arg.get_action().takes_values())?;
        let variable = format!("KITTIWAKE_{}", name.replace('-', "_").to_uppercase());
        let value = environment(&variable).filter(|value| !value.is_empty())?;
        Some(setting(arg, name, &value, variable))
    };
    flags.iter().filter(|arg| !given.contains(arg.get_id().as_str())).filter_map(twin).collect()
}

fn config_path(arguments: &[OsString], environment: &[Setting]) -> Option<OsString> {
    let from_environment = environment.iter().filter(|setting| setting.name == "config").map(|s| &s.argument);
    let mut path = None;
    let mut rest = from_environment.chain(arguments).take_while(|argument| *argument != "--");
    while let Some(argument) = rest.next() {
        if argument == "--config" {
            path = rest.next().cloned();
        } else if let Some(value) = argument.to_str().and_then(|text| text.strip_prefix("--config=")) {
            path = Some(value.into());
        }
    }
    path
}

/// The flags that a YAML mapping stands for and that no higher layer has: scalars, lists (one flag per entry), mappings (as
/// JSON), and `model`.
fn config_layer(
    path: &Path,
    subcommand: &Command,
    flags: &[&Arg],
    given: &BTreeSet<String>,
) -> anyhow::Result<Vec<Setting>> {
    let origin = format!("--config {}", path.display());
    let text = std::fs::read_to_string(path).with_context(|| origin.clone())?;
    let values: serde_json::Map<String, Value> =
        serde_yaml_ng::from_str(&text).with_context(|| format!("{origin}: expected a mapping of flags"))?;
    let mut settings: Vec<Setting> = Vec::new();
    for (key, value) in values {
        let positional = flags.iter().find(|arg| arg.is_positional() && arg.get_id() == key.as_str()).copied();
        let known = find(flags, &key).or(positional);
        let Some(arg) = known.filter(|arg| arg.get_action().takes_values() && arg.get_id() != "config") else {
            bail!("{origin}: '{key}' is not a flag of '{}'", subcommand.get_name());
        };
        let id = arg.get_id().to_string();
        if settings.iter().any(|setting| setting.id == id) {
            bail!("{origin}: '{key}' is given twice");
        }
        let entries = match value {
            Value::Array(entries) if matches!(arg.get_action(), ArgAction::Append) => entries,
            value => vec![value],
        };
        if given.contains(&id) {
            continue;
        }
        for entry in entries {
            let value = match entry {
                Value::String(text) => text,
                Value::Array(_) | Value::Null => bail!("{origin}: '{key}' takes one value"),
                other => other.to_string(),
            };
            let name = arg.get_long().unwrap_or(&key).to_owned();
            let argument = if arg.is_positional() { value } else { format!("--{name}={value}") };
            settings.push(Setting { id: id.clone(), name, argument: argument.into(), origin: origin.clone() });
        }
    }
    Ok(settings)
}

/// Says where a refused value came from when it was not the command line.
fn blame(error: clap::Error, settings: &[Setting]) -> ArgsError {
    let refused = error.get(ContextKind::InvalidArg).map(ToString::to_string).unwrap_or_default();
    let name = refused.trim_start_matches('-').split([' ', '=', '[']).next().unwrap_or_default();
    match settings.iter().find(|setting| setting.name == name) {
        Some(setting) => {
            let message = error.to_string();
            let first = message.lines().next().unwrap_or_default();
            ArgsError::Layer(anyhow!("{}: {}", setting.origin, first.trim_start_matches("error: ")))
        }
        None => ArgsError::Usage(error),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    #[command(args_override_self = true)]
    struct Toy {
        #[arg(long, global = true)]
        config: Option<PathBuf>,
        #[arg(long, global = true, default_value = "info")]
        log_level: String,
        #[command(subcommand)]
        command: ToyCommand,
    }

    #[derive(Debug, clap::Subcommand)]
    enum ToyCommand {
        Run(ToyRun),
    }

    #[derive(Clone, Debug, PartialEq, clap::Args)]
    struct ToyRun {
        model: String,
        #[arg(long, default_value_t = 7)]
        max_model_len: i32,
        #[arg(long, default_value_t = true)]
        enable_prefix_caching: bool,
        #[arg(long)]
        json: bool,
        #[arg(long, alias = "secret")]
        api_key: Vec<String>,
        #[arg(long, num_args = 1..)]
        names: Vec<String>,
        #[arg(long, short, allow_hyphen_values = true)]
        prompt: Option<String>,
    }

    fn toy(model: &str) -> ToyRun {
        ToyRun {
            model: model.into(),
            max_model_len: 7,
            enable_prefix_caching: true,
            json: false,
            api_key: vec![],
            names: vec!["found".into()],
            prompt: None,
        }
    }

    fn try_run(arguments: &[&str], environment: &[(&str, &str)]) -> Result<ToyRun, String> {
        let arguments = ["kittiwake"].iter().chain(arguments).map(OsString::from);
        let lookup = |name: &str| environment.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        match parse::<Toy>(arguments, &lookup, &[("nowhere", "x".into()), ("names", "found".into())]) {
            Ok(Toy { command: ToyCommand::Run(run), .. }) => Ok(run),
            Err(ArgsError::Usage(error)) => Err(format!("usage: {error}")),
            Err(ArgsError::Layer(error)) => Err(format!("{error:#}")),
        }
    }

    fn run(arguments: &[&str]) -> ToyRun {
        try_run(arguments, &[]).expect("valid arguments")
    }

    /// A configuration file that goes with its test.
    struct Yaml(PathBuf);

    impl Yaml {
        fn new(name: &str, text: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kittiwake args {name} {}.yaml", std::process::id()));
            std::fs::write(&path, text).expect("temp file");
            Self(path)
        }

        fn flag(&self) -> String {
            format!("--config={}", self.0.display())
        }
    }

    impl Drop for Yaml {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn underscores_and_no_flags_are_accepted() {
        let expected = ToyRun { max_model_len: 9, enable_prefix_caching: false, ..toy("m_o_d") };
        assert_eq!(run(&["run", "m_o_d", "--max_model_len", "9", "--no-enable-prefix-caching"]), expected);
        assert_eq!(run(&["run", "m", "--max_model_len=-11"]).max_model_len, -11);
        assert_eq!(run(&["run", "m", "--max-model-len", "-1"]).max_model_len, -1);
        assert!(run(&["run", "m", "--no_enable_prefix_caching", "--enable-prefix-caching"]).enable_prefix_caching);
        assert!(run(&["run", "m", "--json"]).json && !run(&["run", "m", "--json", "--no-json"]).json);
        assert!(try_run(&["run", "m", "--no-max-model-len"], &[]).is_err(), "not a switch");
    }

    #[test]
    fn values_are_never_respelled() {
        for text in ["--no-json", "--max_model_len", "--enable_prefix_caching", "--a_b", "-1 is", "--"] {
            assert_eq!(run(&["run", "m", "--prompt", text]), ToyRun { prompt: Some(text.into()), ..toy("m") });
            assert_eq!(run(&["run", "-p", text, "m"]), ToyRun { prompt: Some(text.into()), ..toy("m") });
        }
    }

    #[test]
    fn the_command_line_wins_over_the_environment_and_that_over_the_file() {
        let yaml =
            Yaml::new("layers", "max_model_len: 33\nenable-prefix-caching: false\napi-key: [a, b]\njson: true\n");
        let flag = yaml.flag();
        let file = ToyRun {
            max_model_len: 33,
            enable_prefix_caching: false,
            api_key: vec!["a".into(), "b".into()],
            json: true,
            ..toy("m")
        };
        assert_eq!(run(&["run", "m", &flag]), file);
        assert_eq!(run(&["--log-level", "run", &flag, "run", "m"]), file, "global flags before the subcommand");
        let environment = [("KITTIWAKE_MAX_MODEL_LEN", "44"), ("KITTIWAKE_API_KEY", "c"), ("KITTIWAKE_JSON", "0")];
        let both = ToyRun { max_model_len: 44, api_key: vec!["c".into()], json: false, ..file.clone() };
        assert_eq!(try_run(&["run", "m", &flag], &environment), Ok(both.clone()));
        let named = [&environment[..], &[("KITTIWAKE_CONFIG", yaml.0.to_str().expect("UTF-8"))]].concat();
        assert_eq!(try_run(&["run", "m"], &named), Ok(both.clone()), "the file by its own twin");
        let all = ToyRun { max_model_len: 5, api_key: vec!["d".into()], ..both };
        assert_eq!(try_run(&["run", "m", &flag, "--secret", "d", "--max-model-len", "5"], &environment), Ok(all));
        assert_eq!(try_run(&["run", "m"], &[("KITTIWAKE_MAX_MODEL_LEN", "")]), Ok(toy("m")), "empty is unset");
    }

    #[test]
    fn the_file_may_name_the_model() {
        let yaml = Yaml::new("model", "model: from-file\nnames: [x, y]\n");
        let names = vec!["x".to_owned(), "y".to_owned()];
        let expected = ToyRun { names: names.clone(), ..toy("from-file") };
        assert_eq!(run(&["run", &yaml.flag()]), expected);
        assert_eq!(run(&["run", "m", &yaml.flag()]), ToyRun { names: names.clone(), ..toy("m") });
        // The values of a flag that takes several are no MODEL.
        assert_eq!(run(&["run", &yaml.flag(), "--names", "x", "y"]), expected);
    }

    #[test]
    fn what_a_layer_cannot_mean_is_refused_by_name() {
        let refused = |text: &str| {
            let yaml = Yaml::new("bad", text);
            try_run(&["run", "m", &yaml.flag()], &[]).expect_err(text)
        };
        assert!(refused("just text").contains("expected a mapping"));
        assert!(refused("max-num-birds: 3").ends_with("'max-num-birds' is not a flag of 'run'"));
        assert!(refused("config: other.yaml").contains("'config' is not a flag"));
        assert!(refused("help: true").contains("'help' is not a flag"));
        assert!(refused("max-model-len: 1\nmax_model_len: 2").contains("'max_model_len' is given twice"));
        assert!(refused("max-model-len: [1, 2]").contains("'max-model-len' takes one value"));
        assert!(refused("max-model-len:").contains("'max-model-len' takes one value"));
        assert!(refused("max-model-len: many").contains("yaml: invalid value 'many' for '--max-model-len"));
        let error = try_run(&["run", "m"], &[("KITTIWAKE_MAX_MODEL_LEN", "x")]).expect_err("not a number");
        assert!(error.starts_with("KITTIWAKE_MAX_MODEL_LEN: invalid value 'x'"), "{error}");
        let error = try_run(&["run", "m", "--config", "/no/such.yaml"], &[]).expect_err("no file");
        assert!(error.starts_with("--config /no/such.yaml: "), "{error}");
    }
}
