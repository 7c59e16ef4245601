//! Fields of the API's requests, and the arguments of commands that set them. Messages of the service name fields; for users of the command
//! line they are replaced by the arguments that the user gave, or may give.

use crate::{Arguments, duration};
use clap::{ArgMatches, CommandFactory as _};
use std::time::Duration;

/// A field, and the long names (or the placeholders) of the arguments that set it. A field that is called as its flag is not here.
const FIELDS: [(&str, &[&str]); 31] = [
    ("allocation_id", &["allocation", "ALLOCATION"]),
    ("allowed_regions", &["region"]),
    ("amount_minor", &["amount"]),
    ("cpu.cores", &["cores"]),
    ("cpu.model", &["cpu-model"]),
    ("events", &["event"]),
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
    ("org_id", &["org"]),
    ("payment_id", &["payment"]),
    ("price.amount_minor_per_gpu_hour", &["price"]),
    ("project_id", &["project"]),
    ("queue_seconds", &["queue"]),
    ("region_code", &["region"]),
    ("seconds", &["for"]),
    ("ssh_key_ids", &["ssh-key"]),
    ("ssh_username", &["ssh-user"]),
    ("user_id", &["user"]),
];

/// The command that the arguments select.
pub(crate) struct SelectedCommand {
    pub(crate) leaf: clap::Command,
    /// The command that lists what it is about, such as `gpuctl nodes list`.
    pub(crate) list: Option<String>,
}

impl SelectedCommand {
    pub(crate) fn of(matches: &ArgMatches) -> Self {
        let (mut leaf, mut matches, mut path) = (Arguments::command(), matches, "gpuctl".to_owned());
        let mut list = None;
        while let Some((name, below)) = matches.subcommand() {
            let Some(sub) = leaf.find_subcommand(name) else { break };
            path = format!("{path} {name}");
            list = match name {
                "ssh" | "terminal" => Some("gpuctl allocations list".to_owned()),
                "entity" | "restart" => Some("gpuctl tree --entities".to_owned()),
                _ if sub.find_subcommand("list").is_some() => Some(format!("{path} list")),
                _ => list,
            };
            (leaf, matches) = (sub.clone(), below);
        }
        Self { leaf, list }
    }
}

/// Phrases of the API about JSON, headers and routes, each with its phrase about an argument or a command.
const OF_ARGUMENTS: [(&str, &str); 16] = [
    ("Query parameter `--", "`--"),
    ("Field `--", "`--"),
    (" cannot be read: unknown variant, expected ", " must be "),
    (" cannot be read: invalid type, expected ", " must be "),
    (" cannot be read: invalid value, expected ", " must be "),
    (" cannot be read: invalid length, expected ", " must be "),
    (" cannot be read: expected ", " must be "),
    ("retire with \"drain\": true", "retire it with --drain"),
    (" (`global` is an empty `scope`)", " (global: without any of these options)"),
    // Each command has a new key, and repeats its own requests under it.
    (", with a new Idempotency-Key", ""),
    (", with the same Idempotency-Key", ""),
    ("this Idempotency-Key", "this --idempotency-key"),
    ("This Idempotency-Key", "This --idempotency-key"),
    (" after the time in Retry-After", " in a moment"),
    (" since the version in If-Match", ""),
    (" comes back by reissue-enrollment", " comes back by `gpuctl nodes reissue NODE --reason TEXT`"),
];

/// The message with arguments in the place of fields, and in the words of the command line.
pub(crate) fn with_argument_names(message: &str, command: &clap::Command) -> String {
    let named = with_names(message, command);
    OF_ARGUMENTS.into_iter().fold(named, |text, (api, ours)| text.replace(api, ours))
}

fn with_names(message: &str, command: &clap::Command) -> String {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
    let mut text = String::new();
    let mut rest = message;
    while let Some(begin) = rest.find(is_part) {
        let (before, word) = rest.split_at(begin);
        let (word, after) = word.split_at(word.find(|c| !is_part(c)).unwrap_or(word.len()));
        let field = word.trim_end_matches('.');
        text.push_str(before);
        // `events[0]` is an entry of a field, which an argument gives that is repeated.
        let after = match after.strip_prefix('[').and_then(|entry| entry.split_once(']')) {
            Some((number, after)) if before.ends_with('`') && number.bytes().all(|digit| digit.is_ascii_digit()) => {
                after
            }
            Some(_) | None => after,
        };
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

    fn command(line: &str) -> clap::Command {
        let names = line.split(' ').map(str::to_owned).chain(["--help".to_owned()]);
        let all = Arguments::command();
        let mut found = all;
        for name in names.skip(1) {
            let Some(sub) = found.find_subcommand(&name) else { break };
            found = sub.clone();
        }
        found
    }

    #[test]
    fn message_names_the_arguments_of_the_command() {
        for (line, message, shown) in [
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
            ("gpuctl billing estimate", "Query parameter `seconds` is too much.", "`--for` is too much."),
            ("gpuctl policy set", "`effective_at` lies in the past.", "`--effective-at` lies in the past."),
            (
                "gpuctl nodes list",
                "Query parameter `state` cannot be read: unknown variant, expected one of `active`, `offline`.",
                "`--state` must be one of `active`, `offline`.",
            ),
            (
                "gpuctl notification-endpoints create",
                "Field `events[0]` cannot be read: expected the type of an event.",
                "`--event` must be the type of an event.",
            ),
            (
                "gpuctl policy set",
                "x cannot be set in scope `plan`: y. Set it in one of the scopes user_id, org_id, global (`global` is an empty `scope`).",
                "x cannot be set in scope `--plan`: y. Set it in one of the scopes --user, --org, global (global: without any of these options).",
            ),
            (
                "gpuctl nodes retire",
                "Allocation 7 is on the node; release it first, or retire with \"drain\": true.",
                "Allocation 7 is on the node; release it first, or retire it with --drain.",
            ),
            // Not an argument of this command, no field, or a policy key.
            ("gpuctl whoami", "`queue_seconds` is too much.", "`queue_seconds` is too much."),
            ("gpuctl allocations create", "The node is full.", "The node is full."),
            (
                "gpuctl billing adjust",
                "policy `billing.adjustment_max_minor` says so.",
                "policy `billing.adjustment_max_minor` says so.",
            ),
        ] {
            assert_eq!(with_argument_names(message, &command(line)), shown, "{line}");
        }
    }

    #[test]
    fn no_refusal_of_the_service_is_shown_with_the_headers_and_routes_of_the_api() {
        let refusals = include_str!(concat!(
            "../../src/api/rejection_response/snapshots/",
            "edge__api__rejection_response__tests__every_refusal_of_a_machine_says_what_to_do_next.snap"
        ));
        let refusals: Vec<_> = refusals.lines().filter(|line| line.contains(": 4") || line.contains(": 5")).collect();
        assert!(refusals.len() > 90, "{}", refusals.len());
        for refusal in refusals {
            let shown = with_argument_names(&crate::routes::for_people(refusal), &command("gpuctl whoami"));
            for word in
                ["Idempotency-Key", "If-Match", "Retry-After", "reissue-enrollment", "GET /", "POST /", "\"drain\""]
            {
                assert!(!shown.contains(word), "{shown}");
            }
        }
    }

    #[test]
    fn refusal_names_the_flag_and_bounds_in_its_notation() {
        let body = json!({
            "code": "invalid_request", "message": "`queue_seconds` must be a whole number from 0 to 3600.",
            "details": { "field": "queue_seconds" },
        });
        let refused = Failure::of_answer(StatusCode::BAD_REQUEST, &body, None);
        let leaf = command("gpuctl allocations create");
        let refused = refused.for_command(&SelectedCommand { leaf, list: None });
        assert_eq!(refused.message, "`--queue` must be from 0s to 1h.");
        assert_eq!(refused.to_json()["error"]["details"]["field"], "queue_seconds", "scripts get the field");
    }

    #[test]
    fn what_is_not_found_is_looked_up_with_the_list_of_its_kind() {
        for (line, list) in [
            ("gpuctl nodes show x", Some("gpuctl nodes list")),
            ("gpuctl node remove x --reason r", Some("gpuctl nodes list")),
            ("gpuctl terminal sessions show x", Some("gpuctl terminal sessions list")),
            ("gpuctl terminal 0198f000-0000-7000-8000-000000000000", Some("gpuctl allocations list")),
            ("gpuctl ssh x", Some("gpuctl allocations list")),
            ("gpuctl restart node/0198", Some("gpuctl tree --entities")),
            ("gpuctl whoami", None),
        ] {
            let matches = Arguments::command().get_matches_from(line.split(' '));
            let command = SelectedCommand::of(&matches);
            assert_eq!(command.list.as_deref(), list, "{line}");
            let body = json!({ "code": "not_found", "message": "There is no such node.", "details": {} });
            let next = Failure::of_answer(StatusCode::NOT_FOUND, &body, None).for_command(&command).next.unwrap();
            assert_eq!(next.contains("shows what there is"), list.is_some(), "{next}");
            assert!(!next.contains('<') && list.is_none_or(|list| next.contains(list)), "{next}");
        }
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
