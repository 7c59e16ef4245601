//! Command lines that cannot be read: as the parser prints them for people, as JSON for scripts that asked for it.

use crate::failure::{ExitStatus, Failure, with_profile};
use crate::output::print_error;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;
use std::process::ExitCode;

/// Commands of other tools, each with the command of `gpuctl`.
const RENAMED_COMMANDS: [(&str, &str, &str); 1] = [(
    "nodes",
    "drain",
    "gpuctl nodes retire NODE --drain --reason TEXT: it takes no new allocations, and retires after the last one",
)];

/// Prints the error, or the help that was asked for, and returns the exit code.
pub(crate) fn report(error: &clap::Error, arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<String> = arguments.map(|argument| argument.to_string_lossy().into_owned()).collect();
    let profile = profile_in(&arguments);
    // Help and version, where they were asked for, are results.
    let is_error = error.use_stderr();
    if is_error && wants_json(&arguments) {
        print_error(&failure_of(error, &arguments).of_profile(&profile).to_json().to_string());
    } else {
        // A closed standard output is no failure.
        let _ = error.print();
        if let Some(next) = renamed_command(error, &arguments) {
            print_error(&format!("\n  next: {}", with_profile(next, &profile)));
        }
    }
    ExitCode::from(if is_error { ExitStatus::Usage.code() } else { 0 })
}

/// The profile that the arguments name, or the environment, as far as arguments that cannot be parsed show it.
fn profile_in(arguments: &[String]) -> String {
    let own = arguments.split(|argument| argument == "--").next().unwrap_or_default();
    let pairs = own.iter().zip(own.iter().skip(1));
    let beside = pairs.into_iter().find(|(name, _)| *name == "--profile").map(|(_, value)| value.as_str());
    let named = beside.or_else(|| own.iter().find_map(|argument| argument.strip_prefix("--profile=")));
    named.map(str::to_owned).unwrap_or_else(|| crate::profile_of(None))
}

/// Whether the arguments ask for JSON, as far as arguments that cannot be parsed show it.
fn wants_json(arguments: &[String]) -> bool {
    let own = arguments.split(|argument| argument == "--").next().unwrap_or_default();
    let pairs = own.iter().zip(own.iter().skip(1));
    let has_value = |(name, value): (&String, &String)| matches!(name.as_str(), "-o" | "--output") && value == "json";
    own.iter().any(|argument| matches!(argument.as_str(), "-ojson" | "-o=json" | "--output=json"))
        || pairs.into_iter().any(has_value)
}

/// The error as a failure: its first paragraph, and the usage as the next step.
fn failure_of(error: &clap::Error, arguments: &[String]) -> Failure {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let mut paragraphs = text.split("\n\n").map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    let message = match error.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => "a command is missing".to_owned(),
        _ => paragraphs.next().unwrap_or_default(),
    };
    let usage = paragraphs.find(|paragraph| paragraph.starts_with("Usage: "));
    let next = renamed_command(error, arguments).map(str::to_owned).or(usage);
    Failure { next, ..Failure::usage(message) }
}

fn renamed_command(error: &clap::Error, arguments: &[String]) -> Option<&'static str> {
    let Some(ContextValue::String(unknown)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    let is_it = |(noun, verb, _): &&(&str, &str, &str)| {
        let is_noun = |argument: &String| *argument == *noun || format!("{argument}s") == *noun;
        unknown == verb && arguments.iter().any(is_noun)
    };
    RENAMED_COMMANDS.iter().find(is_it).map(|(_, _, next)| *next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arguments;
    use clap::Parser as _;

    fn failure(line: &str) -> Failure {
        let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        failure_of(&Arguments::try_parse_from(&arguments).unwrap_err(), &arguments)
    }

    #[test]
    fn usage_error_is_json_with_its_message_and_the_usage() {
        for (line, message, next) in [
            ("gpuctl nodes retire n", "--reason <TEXT>", "Usage: gpuctl nodes retire"),
            ("gpuctl nodes lst", "unrecognized subcommand 'lst'", "Usage: gpuctl nodes"),
            ("gpuctl allocations create --sku x --gpus 0", "invalid value '0'", ""),
            ("gpuctl nodes", "a command is missing", "Usage: gpuctl nodes"),
        ] {
            let error = failure(line).to_json()["error"].clone();
            assert_eq!(error["exit_code"], 2, "{line}");
            assert!(error["message"].as_str().unwrap().contains(message), "{line}: {error}");
            assert!(error["next"].as_str().unwrap_or_default().contains(next), "{line}: {error}");
            assert!(!error["message"].as_str().unwrap().contains('\n'), "{line}: {error}");
        }
    }

    #[test]
    fn unknown_command_drain_names_retire() {
        for line in ["gpuctl nodes drain gpu-1 --reason r", "gpuctl node drain gpu-1"] {
            let next = failure(line).next.unwrap();
            assert!(next.contains("gpuctl nodes retire NODE --drain"), "{line}: {next}");
        }
        assert!(!failure("gpuctl skus drain x").next.unwrap_or_default().contains("--drain"));
    }

    #[test]
    fn next_step_of_an_unreadable_command_line_is_for_its_profile() {
        for line in ["--profile staging nodes drain x", "nodes drain x --profile=staging"] {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(profile_in(&arguments), "staging", "{line}");
        }
        let next = failure("gpuctl nodes drain x").of_profile("staging").next.unwrap();
        assert!(next.starts_with("gpuctl --profile staging nodes retire NODE --drain"), "{next}");
    }

    #[test]
    fn output_of_an_unreadable_command_line_is_json_where_it_says_so() {
        let wants = |line: &str| wants_json(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        for line in ["-o json nodes lst", "nodes lst --output json", "--output=json nodes", "nodes -ojson"] {
            assert!(wants(line), "{line}");
        }
        for line in ["nodes lst", "-o table nodes", "ssh a -- x -o json", "nodes show json"] {
            assert!(!wants(line), "{line}");
        }
    }
}
