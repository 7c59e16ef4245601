//! Fields of the API's requests, and the arguments of commands that set them. Messages of the service name fields; for users of the command
//! line they are replaced by the arguments that the user gave, or may give.

use crate::{Arguments, duration};
use clap::{ArgMatches, CommandFactory as _};
use std::time::Duration;

/// A field, and the long names (or the placeholders) of the arguments that set it. A field that is called as its flag is not here.
const FIELDS: [(&str, &[&str]); 28] = [
    ("allocation_id", &["allocation", "ALLOCATION"]),
    ("allowed_regions", &["region"]),
    ("amount_minor", &["amount"]),
    ("cpu.cores", &["cores"]),
    ("cpu.model", &["cpu-model"]),
    ("expected_hardware.cpu_cores", &["expect-cores"]),
    ("expected_hardware.cpu_model", &["expect-cpu-model"]),
    ("expected_hardware.driver_version_min", &["expect-driver-version-min"]),
    ("expected_hardware.memory_mib", &["expect-memory-mib"]),
    ("expected_hardware.storage_gib", &["expect-storage-gib"]),
    ("gpu.count", &["gpus"]),
    ("gpu.memory_mib", &["gpu-memory-mib"]),
    ("gpu.model", &["gpu-model"]),
    ("gpu.vendor", &["gpu-vendor"]),
    ("gpu_count", &["gpus"]),
    ("gpus_total", &["gpus"]),
    ("host", &["HOST"]),
    ("labels", &["label"]),
    ("node_id", &["node"]),
    ("onboarding_mode", &["onboarding"]),
    ("payment_id", &["payment"]),
    ("price.amount_minor_per_gpu_hour", &["price"]),
    ("project_id", &["project"]),
    ("queue_seconds", &["queue"]),
    ("region_code", &["region"]),
    ("seconds", &["for"]),
    ("ssh_key_ids", &["ssh-key"]),
    ("ssh_username", &["ssh-user"]),
];

/// The command that the words on the command line select.
pub(crate) fn selected_command(matches: &ArgMatches) -> clap::Command {
    let (mut command, mut matches) = (Arguments::command(), matches);
    while let Some((name, below)) = matches.subcommand() {
        let Some(sub) = command.find_subcommand(name) else { break };
        (command, matches) = (sub.clone(), below);
    }
    command
}

/// The message with arguments in the place of fields.
pub(crate) fn with_argument_names(message: &str, command: &clap::Command) -> String {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
    let mut text = String::new();
    let mut rest = message;
    while let Some(begin) = rest.find(is_part) {
        let (before, word) = rest.split_at(begin);
        let (word, after) = word.split_at(word.find(|c| !is_part(c)).unwrap_or(word.len()));
        let field = word.trim_end_matches('.');
        text.push_str(before);
        // A word without an underscore is a field where it is quoted.
        let is_field = field.contains('_') || before.ends_with('`') && after.starts_with('`');
        match argument_of(field, command).filter(|_| is_field) {
            Some(argument) => {
                text.push_str(&argument);
                text.push_str(&word[field.len()..]);
            }
            None => text.push_str(word),
        }
        rest = after;
    }
    text + rest
}

/// The argument of the command that sets a field: `--queue`, or `HOST`.
fn argument_of(field: &str, command: &clap::Command) -> Option<String> {
    let known = FIELDS.iter().find(|(name, _)| *name == field).map_or(&[][..], |(_, arguments)| arguments);
    let flag = field.replace('_', "-");
    known.iter().copied().chain([flag.as_str()]).find_map(|name| {
        let is_it = |argument: &&clap::Arg| match argument.get_long() {
            Some(long) => long == name,
            None => placeholder(argument) == name,
        };
        let argument = command.get_arguments().find(is_it)?;
        Some(argument.get_long().map_or_else(|| placeholder(argument), |long| format!("--{long}")))
    })
}

/// What a positional argument is called in the help.
fn placeholder(argument: &clap::Arg) -> String {
    let named = argument.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    named.unwrap_or_else(|| argument.get_id().as_str().to_ascii_uppercase())
}

/// The bounds of a field in seconds as times: `from 0s to 1h`.
pub(crate) fn with_times(message: &str) -> String {
    const BOUNDS: &str = "a whole number from ";
    let Some((before, bounds)) = message.split_once(BOUNDS) else { return message.to_owned() };
    let Some((low, high)) = bounds.split_once(" to ") else { return message.to_owned() };
    let (high, after) = high.split_at(high.find(|c: char| !c.is_ascii_digit()).unwrap_or(high.len()));
    match (low.parse(), high.parse()) {
        (Ok(low), Ok(high)) => {
            let [low, high] = [low, high].map(|seconds| duration::to_text(Duration::from_secs(seconds)));
            format!("{before}from {low} to {high}{after}")
        }
        _ => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Failure;
    use reqwest::StatusCode;
    use serde_json::json;

    fn command(words: &str) -> clap::Command {
        let words = words.split(' ').map(str::to_owned).chain(["--help".to_owned()]);
        let all = Arguments::command();
        let mut found = all;
        for word in words.skip(1) {
            let Some(sub) = found.find_subcommand(&word) else { break };
            found = sub.clone();
        }
        found
    }

    #[test]
    fn message_names_the_arguments_of_the_command() {
        for (words, message, shown) in [
            (
                "gpuctl allocations create",
                "ask for fewer, or wait with queue_seconds.",
                "ask for fewer, or wait with --queue.",
            ),
            (
                "gpuctl allocations create",
                "Another node of this SKU has room; leave node_id out.",
                "Another node of this SKU has room; leave --node out.",
            ),
            ("gpuctl allocations create", "`gpu_count` must be from 1 to 16.", "`--gpus` must be from 1 to 16."),
            (
                "gpuctl allocations create",
                "`sku` is not the name or id of an active SKU.",
                "`--sku` is not the name or id of an active SKU.",
            ),
            (
                "gpuctl nodes create",
                "`gpus_total` is 4, but a node of this SKU has 8 GPUs.",
                "`--gpus` is 4, but a node of this SKU has 8 GPUs.",
            ),
            ("gpuctl nodes create", "Field `host` is no address.", "Field `HOST` is no address."),
            ("gpuctl nodes create", "use onboarding_mode manual.", "use --onboarding manual."),
            ("gpuctl billing adjust", "`amount_minor` must not be 0.", "`--amount` must not be 0."),
            (
                "gpuctl billing estimate",
                "Query parameter `seconds` is too much.",
                "Query parameter `--for` is too much.",
            ),
            ("gpuctl policy set", "`effective_at` lies in the past.", "`--effective-at` lies in the past."),
            // Not an argument of this command, no field, or a policy key.
            ("gpuctl whoami", "`queue_seconds` is too much.", "`queue_seconds` is too much."),
            ("gpuctl allocations create", "The node is full.", "The node is full."),
            (
                "gpuctl billing adjust",
                "policy `billing.adjustment_max_minor` says so.",
                "policy `billing.adjustment_max_minor` says so.",
            ),
        ] {
            assert_eq!(with_argument_names(message, &command(words)), shown, "{words}");
        }
    }

    #[test]
    fn refusal_names_the_flag_and_bounds_in_its_notation() {
        let body = json!({
            "code": "invalid_request", "message": "`queue_seconds` must be a whole number from 0 to 3600.",
            "details": { "field": "queue_seconds" },
        });
        let refused = Failure::of_answer(StatusCode::BAD_REQUEST, &body, None);
        let refused = refused.naming_arguments_of(&command("gpuctl allocations create"));
        assert_eq!(refused.message, "`--queue` must be from 0s to 1h.");
        assert_eq!(refused.to_json()["error"]["details"]["field"], "queue_seconds", "scripts get the field");
    }

    #[test]
    fn every_field_of_the_table_is_set_by_an_argument_of_a_command() {
        fn leaves(command: &clap::Command, found: &mut Vec<clap::Command>) {
            found.push(command.clone());
            command.get_subcommands().for_each(|sub| leaves(sub, found));
        }
        let mut all = Vec::new();
        leaves(&Arguments::command(), &mut all);
        for (field, arguments) in FIELDS {
            for argument in arguments {
                let is_it = |given: &clap::Arg| given.get_long() == Some(argument) || placeholder(given) == *argument;
                let found = all.iter().any(|command| command.get_arguments().any(is_it));
                assert!(found, "{field}: no command has an argument {argument}");
            }
        }
        assert!(FIELDS.is_sorted(), "in the order of their names");
    }
}
