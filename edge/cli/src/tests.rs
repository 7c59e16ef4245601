#![allow(clippy::unwrap_used)]

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
            if !sub.has_subcommands() {
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
fn what_is_no_command_line_ends_with_2() {
    for bad in [
        "gpuctl allocations show not-an-id",
        "gpuctl allocations create",
        "gpuctl allocations create --sku x --gpus 0",
        "gpuctl allocations create --sku x --queue soon",
        "gpuctl nodes retire 0198f000-0000-7000-8000-000000000000",
        "gpuctl login --device --username ann --issuer https://id.example",
        "gpuctl skus list --limit 0",
        "gpuctl billing estimate --gpus 1",
        "gpuctl billing statement November",
        "gpuctl billing statement 2026-11 --to file",
        "gpuctl billing statement 2026-11 --as docx",
        "gpuctl billing ledger --from yesterday",
        "gpuctl billing top-up --amount 0",
        "gpuctl billing top-up --amount 1e3",
        "gpuctl billing refund --amount 1 --reason r",
        "gpuctl --output xml whoami",
        "gpuctl --idempotency-key= whoami",
    ] {
        let error = Arguments::try_parse_from(bad.split(' ')).unwrap_err();
        assert_eq!(error.exit_code(), i32::from(Ended::Usage.code()), "{bad}");
    }
}

#[test]
fn completions_are_scripts_that_their_shells_read() {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Arguments::command(), "gpuctl", &mut script);
        assert!(String::from_utf8_lossy(&script).contains("allocations"), "{shell}");
        let program = shell.to_string();
        let checks = Process::new(&program).arg("-n").stdin(Stdio::piped()).spawn();
        let Ok(mut checks) = checks else {
            assert_ne!(shell, Shell::Bash, "there is a bash everywhere");
            eprintln!("left out: {program} is not installed");
            continue;
        };
        checks.stdin.take().unwrap().write_all(&script).unwrap();
        assert!(checks.wait().unwrap().success(), "{program} -n");
    }
}
