//! The `kittiwake` executable: parses the command line, starts logging, runs one subcommand.
//!
//! Invariant: arguments and environment are read here (through `cli::args`) and nowhere else.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run(std::env::args_os()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kittiwake: {error:#}");
            ExitCode::FAILURE
        }
    }
}
