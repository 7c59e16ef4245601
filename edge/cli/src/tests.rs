#[path = "../../../agent/tests/skipped_tests/mod.rs"]
mod skipped_tests;

use super::*;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command as Process, Stdio};

#[test]
fn commands_are_as_reviewed() {
    Arguments::command().debug_assert();
    fn page(command: &clap::Command, path: &str, text: &mut String) {
        for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
            let path = format!("{path} {}", sub.get_name());
            let takes = sub.get_arguments().filter(|argument| !argument.is_global_set() && argument.get_id() != "help");
            let takes: Vec<_> = takes.map(|argument| argument.to_string()).collect();
            if !sub.is_subcommand_required_set() {
                text.push_str(&format!("{path} {}\n", takes.join(" ")));
            }
            page(sub, &path, text);
        }
    }
    let mut text = String::new();
    let mut command = Arguments::command();
    command.build();
    page(&command, "gpuctl", &mut text);
    insta::assert_snapshot!(text);
}

#[test]
fn invalid_command_line_exits_with_2() {
    for bad in [
        "gpuctl allocations create",
        "gpuctl allocations create --sku x --gpus 0",
        "gpuctl allocations create --sku x --queue soon",
        "gpuctl allocations create --sku x --queue 60",
        "gpuctl allocations list --all --state active",
        "gpuctl nodes retire 0198f000-0000-7000-8000-000000000000",
        "gpuctl nodes update 0198f000-0000-7000-8000-000000000000",
        "gpuctl allocations set 0198f000-0000-7000-8000-000000000000",
        "gpuctl allocations set train --name a --no-name",
        "gpuctl allocations set train --label env",
        "gpuctl allocations create --sku x --label =dev",
        "gpuctl keys stage nothing --reason r",
        "gpuctl terminal",
        "gpuctl terminal sessions list",
        "gpuctl login --device --username ann",
        "gpuctl login --service-account sa --username ann",
        "gpuctl skus list --limit 0",
        "gpuctl billing estimate --gpus 1",
        "gpuctl billing statement November",
        "gpuctl billing statement 2026-11 --to file",
        "gpuctl billing statement 2026-11 --as docx",
        "gpuctl billing ledger --from yesterday",
        "gpuctl policy set billing.window_seconds 60 --reason r --effective-at tomorrow",
        "gpuctl policy unset billing.window_seconds --reason r --effective-at tomorrow",
        "gpuctl billing top-up --amount 20,00",
        "gpuctl billing top-up --amount 1e3",
        "gpuctl billing refund --amount 1.00 --reason r",
        "gpuctl --output xml whoami",
        "gpuctl --idempotency-key= whoami",
    ] {
        let error = Arguments::try_parse_from(bad.split(' ')).unwrap_err();
        assert_eq!(error.exit_code(), i32::from(ExitStatus::Usage.code()), "{bad}");
    }
}

#[test]
fn every_line_that_the_console_shows_is_a_command() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../console/test/gpuctl-lines");
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let texts: Vec<_> = files.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let lines: Vec<_> = texts.iter().flat_map(|text| text.lines()).collect();
    assert!(lines.len() > 100, "only {} lines were found", lines.len());
    let refusal = |line: &str| Some(format!("{line}\n{}", Arguments::try_parse_from(arguments_of(line)).err()?));
    let refused: Vec<_> = lines.iter().filter_map(|line| refusal(line)).collect();
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

/// What a shell makes of the line. It expands nothing in it.
fn arguments_of(line: &str) -> Vec<String> {
    let mut shell = Process::new("bash");
    let ran = shell.args(["-c", &format!(r"printf '%s\0' {line}")]).env("HOME", "expanded").output().unwrap();
    assert!(ran.status.success() && ran.stderr.is_empty(), "{line}: {}", String::from_utf8_lossy(&ran.stderr));
    let arguments: Vec<_> = String::from_utf8(ran.stdout).unwrap().split_terminator('\0').map(str::to_owned).collect();
    assert!(!arguments.iter().any(|argument| argument.contains("expanded")), "{line}");
    arguments
}

#[test]
fn login_requires_a_server_alone() {
    assert!(Arguments::try_parse_from(["gpuctl", "login", "--server", "https://gpu.example"]).is_ok());
}

#[test]
fn environment_variables_are_not_in_usage_lines() {
    fn arguments_of(command: &clap::Command, found: &mut Vec<String>) {
        found.extend(command.get_arguments().filter(|argument| argument.get_env().is_some()).map(ToString::to_string));
        command.get_subcommands().for_each(|sub| arguments_of(sub, found));
    }
    let mut found = Vec::new();
    arguments_of(&Arguments::command(), &mut found);
    assert_eq!(found, Vec::<String>::new(), "the parser shows what it reads from the environment in every usage line");
}

#[test]
fn bare_program_and_bare_nouns_show_their_help() {
    for bare in ["gpuctl", "gpuctl nodes", "gpuctl keys", "gpuctl terminal sessions"] {
        let error = Arguments::try_parse_from(bare.split(' ')).unwrap_err();
        assert_eq!(error.kind(), clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand, "{bare}");
        assert!(error.to_string().contains("Usage: "), "{error}");
    }
}

#[test]
fn irreversible_commands_require_a_confirmation() {
    for dangerous in [
        "nodes remove NODE --reason r",
        "allocations force-release ALLOCATION --reason r",
        "keys stage node-ca --reason r",
        "keys activate node-ca KEY --reason r",
        "keys retire node-ca KEY --reason r",
        "keys rewrap --reason r",
        "restart ENTITY",
        "service-accounts delete ACCOUNT",
    ] {
        let line = format!("gpuctl {dangerous} --yes");
        assert!(Arguments::try_parse_from(line.split(' ')).is_ok(), "{line}");
    }
}

#[test]
fn completion_scripts_are_valid_for_their_shells() {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let script = completion_script(shell).unwrap();
        assert!(script.contains(COMPLETE), "{shell}: the script asks the program");
        let program = shell.to_string();
        let checks = Process::new(&program).arg("-n").stdin(Stdio::piped()).spawn();
        let Ok(mut checks) = checks else {
            assert_ne!(shell, Shell::Bash, "there is a bash everywhere");
            skipped_tests::report_skipped(&format!("{program} is not installed, so its completions are not checked"));
            continue;
        };
        checks.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(checks.wait().unwrap().success(), "{program} -n");
    }
}

#[test]
fn manual_pages_and_completions_of_the_package_are_those_of_the_commands() {
    let mut files = manual_pages::pages(Arguments::command(), "1").unwrap();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        // As `gpuctl completions` prints it.
        let script = format!("{}\n", completion_script(shell).unwrap().trim_end());
        files.insert(manual_pages::completion_path(shell, "gpuctl"), script.into_bytes());
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/debian/gpuctl");
    manual_pages::compare(&folder, "gpuctl", &files).unwrap();
}
