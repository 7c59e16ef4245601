use super::*;
use std::io::Write as _;
use std::process::{Command as Process, Stdio};

#[test]
fn the_commands_are_what_they_were() {
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
            eprintln!("left out: {program} is not installed");
            continue;
        };
        checks.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(checks.wait().unwrap().success(), "{program} -n");
    }
}
