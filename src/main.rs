//! The `kittiwake` executable: parses the command line, starts logging, runs one subcommand.
//!
//! Invariant: arguments and environment are read here and nowhere else. A reader that closes our output (`| head`) has what it
//! wanted: that is a quiet end, not an error.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run(std::env::args_os(), &|name| std::env::var_os(name)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if cli::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            cli::note(format_args!("kittiwake: {error:#}\n"));
            ExitCode::FAILURE
        }
    }
}
