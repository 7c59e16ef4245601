//! The end of `deploy/test`: exit statuses, what failed, and the command that repeats it; second tries; and what `--changed` chooses. The parts here
//! are stand-ins; the functions are those of `deploy/lib`, and the settings those of `.config/nextest.toml`.

use crate::external_tools::root;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// Two failed tests and one that passed at its second try, as cargo-nextest reports them.
const REPORT: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run"><testsuite name="tests::it">
<testcase name="billing::charge_is_posted_once" time="3.2">
<failure message="thread panicked" type="test failure with exit code 101">thread 'billing' (7) panicked at tests/it/billing.rs:7:15:
assertion `left == right` failed: one posting
  left: 2
 right: 1
stack backtrace:
   0: __rustc::rust_begin_unwind
note: Some details are omitted, run with `RUST_BACKTRACE=full` for a verbose backtrace.</failure>
</testcase>
<testcase name="terminal::output_is_resumed" time="12.1">
<failure message="process aborted with signal 6 (SIGABRT)" type="test abort">process aborted with signal 6 (SIGABRT)</failure>
</testcase>
<testcase name="cluster::member_is_replaced" time="9.0">
<flakyFailure message="thread panicked" type="test failure with exit code 101">thread 'cluster' (9) panicked at tests/it/cluster.rs:9:1:
no member after 60 s</flakyFailure>
</testcase>
<testcase name="policy::key_is_set" time="0.4"/>
</testsuite></testsuites>"#;

/// Tests of real processes, of none, and of a module that is in neither set.
const TESTS: &str = r#"
fn fails_until(attempt: u32) {
    let this: u32 = std::env::var("NEXTEST_ATTEMPT").unwrap().parse().unwrap();
    assert!(this >= attempt, "attempt {this} fails");
}
mod first_rental {
    #[test]
    fn passes_at_the_first_try() { super::fails_until(1) }
    #[test]
    fn passes_at_the_second_try() { super::fails_until(2) }
    #[test]
    fn passes_at_the_fourth_try() { super::fails_until(4) }
}
mod tidy {
    #[test]
    fn without_processes_passes_at_the_second_try() { super::fails_until(2) }
}
mod new_module {
    #[test]
    fn is_in_no_set() { super::fails_until(9) }
}
"#;

/// A run of the script in a checkout that has the real functions, and the report of tests.
struct Run {
    checkout: TempDir,
}

impl Run {
    fn new(report: &str) -> Self {
        let checkout = tempfile::Builder::new().prefix("a checkout ").tempdir().unwrap();
        let folder = checkout.path().join("deploy/lib");
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["parts.sh", "toolchain.sh", "test_report.py", "part_times.tsv"] {
            std::fs::copy(root().join("deploy/lib").join(name), folder.join(name)).unwrap();
        }
        std::fs::write(checkout.path().join("junit.xml"), report).unwrap();
        Self { checkout }
    }

    /// Runs these parts as `deploy/test` does.
    fn of(&self, parts: &str) -> Output {
        self.with("all=''", parts)
    }

    /// The same with these variables of the script.
    fn with(&self, variables: &str, parts: &str) -> Output {
        let script = format!(
            r#"set -euo pipefail
root=$1 only_part='' junit=$1/junit.xml {variables}
say() {{ printf '\033[1m==>\033[0m %s\n' "$*"; }}
print_not_run() {{ say "everything ran"; }}
. "$root/deploy/lib/toolchain.sh"
. "$root/deploy/lib/parts.sh"
run_parts() {{
{parts}
}}
run_and_print_end run_parts
"#
        );
        let mut bash = Command::new("bash");
        bash.args(["-c", &script, "bash"]).arg(self.checkout.path());
        // What the run of this test has set for its own compilation and tests.
        for (name, _) in std::env::vars_os() {
            if ["NEXTEST", "CARGO_", "RUSTC_"].iter().any(|begin| name.to_string_lossy().starts_with(begin)) {
                bash.env_remove(name);
            }
        }
        // Cargo waits for no other run of this user then.
        bash.env("CARGO_HOME", self.path().join("cargo"));
        bash.output().unwrap()
    }

    /// Writes a workspace with the settings of the tests, whose tests fail at the tries that their names say.
    fn write_workspace(&self) {
        let write = |name: &str, text: &str| {
            let path = self.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(".config/nextest.toml", &std::fs::read_to_string(root().join(".config/nextest.toml")).unwrap());
        write("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"agent\", \"persistence\", \"tests\"]\n");
        // The settings name these crates and this program.
        for (crate_name, program) in [("agent", "system_executor"), ("persistence", "it"), ("tests", "it")] {
            write(
                &format!("{crate_name}/Cargo.toml"),
                &format!("[package]\nname = \"{crate_name}\"\nedition = \"2024\"\n"),
            );
            write(&format!("{crate_name}/src/lib.rs"), "");
            write(&format!("{crate_name}/tests/{program}.rs"), if crate_name == "tests" { TESTS } else { "" });
        }
    }

    fn path(&self) -> &Path {
        self.checkout.path()
    }
}

fn last_lines(output: &Output) -> String {
    let printed = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = printed.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

#[test]
fn failed_tests_are_named_with_their_panics_and_the_command_that_repeats_them() {
    let run = Run::new(REPORT);
    let ended =
        run.of(r#"tests() { touch "$parts_folder/tests-ran"; seq 1 300; return 100; }; run_part tests tests tests"#);
    let end = last_lines(&ended);
    assert_eq!(ended.status.code(), Some(100), "{end}");
    for wanted in [
        "2 failed:",
        "tests::it billing::charge_is_posted_once",
        "panicked at tests/it/billing.rs:7:15:",
        "assertion `left == right` failed: one posting",
        "tests::it terminal::output_is_resumed",
        "process aborted with signal 6 (SIGABRT)",
        "gpuaas: failed after",
        "deploy/test --part tests 'tests::it billing::charge_is_posted_once' 'tests::it terminal::output_is_resumed'",
    ] {
        assert!(end.contains(wanted), "{wanted} is missing in:\n{end}");
    }
    assert!(end.contains(&run.path().join(".dev/test.log").display().to_string()), "{end}");
    assert!(!end.contains("rust_begin_unwind"), "{end}");
    let log = std::fs::read_to_string(run.path().join(".dev/test.log")).unwrap();
    assert!(log.contains("\n1\n") && log.contains("\n300\n"), "the log has the whole output");
}

#[test]
fn failed_proof_is_repeated_with_the_cases_that_it_had() {
    let run = Run::new(REPORT);
    let ended = run.with(
        "all=yes seed=7",
        r#"tests() { touch "$parts_folder/tests-ran"; return 100; }; run_part tests tests tests"#,
    );
    let end = last_lines(&ended);
    let wanted = "again: TEST_SEED=7 deploy/test --all --part tests 'tests::it billing::charge_is_posted_once'";
    assert!(end.contains(wanted), "{wanted} is missing in:\n{end}");
}

#[test]
fn test_that_passed_at_a_second_try_is_listed_as_flaky_and_the_run_passes() {
    let run = Run::new(REPORT);
    let ended = run.of(r#"tests() { touch "$parts_folder/tests-ran"; }; run_part tests tests tests"#);
    let end = last_lines(&ended);
    assert_eq!(ended.status.code(), Some(0), "{end}");
    for wanted in ["flaky, 1 passed", "tests::it cluster::member_is_replaced", "no member after 60 s", "all passed"] {
        assert!(end.contains(wanted), "{wanted} is missing in:\n{end}");
    }
}

#[test]
fn test_of_real_processes_that_fails_is_run_three_times_and_one_without_processes_once() {
    let run = Run::new("");
    run.write_workspace();
    let tests = r#"tests() { touch "$parts_folder/tests-ran"; cd "$root"; cargo nextest run --offline --workspace --profile gate; }"#;
    let ended =
        run.with("all='' junit=$1/target/nextest/gate/junit.xml", &format!("{tests}; run_part tests tests tests"));
    let end = last_lines(&ended);
    assert_eq!(ended.status.code(), Some(100), "{end}");
    for wanted in [
        "flaky, 1 passed at a second or third try",
        "attempt 1 fails",
        "2 failed:",
        "deploy/test --part tests 'tests::it ",
        " 'tests::it first_rental::passes_at_the_fourth_try'",
        " 'tests::it tidy::without_processes_passes_at_the_second_try'",
    ] {
        assert!(end.contains(wanted), "{wanted} is missing in:\n{end}");
    }
    let log = std::fs::read_to_string(run.path().join(".dev/test.log")).unwrap();
    assert!(log.contains("TRY 3 FAIL") && !log.contains("is_in_no_set"), "{log}");
}

#[test]
fn changed_files_choose_the_tests_of_their_crates_and_of_those_that_depend_on_them() {
    let chosen = |files: &str| {
        let script = root().join("deploy/lib/changed_crates.py");
        let mut python = Command::new("python3");
        python.arg(script).arg(root()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut python = python.spawn().unwrap();
        python.stdin.take().unwrap().write_all(files.as_bytes()).unwrap();
        let output = python.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(chosen("actors/domain/src/lib.rs\nedge/console/src/main.tsx\n"), "rdeps(=domain) | rdeps(=edge)");
    assert_eq!(chosen("migrations/0001_first.sql\ndeploy/up\n"), "rdeps(=persistence) | rdeps(=tests)");
    assert_eq!(chosen("deploy/up\nCargo.lock\n"), "all()");
    assert_eq!(chosen("\n"), "none()");
}

#[test]
fn failed_check_ends_with_1_and_its_first_error() {
    let run = Run::new(REPORT);
    let ended = run.of(
        "compile() { echo 'error[E0308]: mismatched types'; echo '  --> edge/src/lib.rs:1:1'; seq 1 100; return 101; }
run_part check 'build' compile
run_part check after echo 'must not run'",
    );
    let end = last_lines(&ended);
    assert_eq!(ended.status.code(), Some(1), "{end}");
    for wanted in ["error[E0308]: mismatched types", "--> edge/src/lib.rs:1:1", "deploy/test --part build"] {
        assert!(end.contains(wanted), "{wanted} is missing in:\n{end}");
    }
    assert!(!end.contains("must not run"), "{end}");
}

#[test]
fn part_that_runs_beside_others_is_printed_where_it_is_awaited_and_its_failure_is_that_of_the_run() {
    let run = Run::new(REPORT);
    let parts = |compile: &str| {
        format!(
            r#"compile() {{ until [ -e "$root/formatted" ]; do sleep 0.05; done; {compile}; }}
start_beside build compile
run_part check formatting touch "$root/formatted"
run_part check build finish_beside build
run_part check after echo 'it goes on'"#
        )
    };
    let passed = run.of(&parts("seq 1 300"));
    let log = std::fs::read_to_string(run.path().join(".dev/test.log")).unwrap();
    assert_eq!(passed.status.code(), Some(0), "{log}");
    assert!(log.contains(" build\n1\n2\n"), "{log}");
    assert!(log.contains("\n300\n") && log.contains("it goes on"), "{log}");

    let failed = run.of(&parts("echo 'error[E0308]: mismatched types'; return 101"));
    let end = last_lines(&failed);
    assert_eq!(failed.status.code(), Some(1), "{end}");
    for wanted in ["error[E0308]: mismatched types", "deploy/test --part build"] {
        assert!(end.contains(wanted), "{wanted} is missing in:\n{end}");
    }
    assert!(!end.contains("it goes on"), "{end}");
}

#[test]
fn failed_download_and_full_disk_end_with_2() {
    let run = Run::new(REPORT);
    let download = run
        .of("download() { echo 'gpuaas: PyPI cannot be reached' >&2; return 7; }; run_part environment tools download");
    let end = last_lines(&download);
    assert_eq!(download.status.code(), Some(2), "{end}");
    assert!(end.contains("PyPI cannot be reached"), "{end}");
    let full = run.of(
        "compile() { echo 'error: No space left on device (os error 28)'; return 101; }; run_part check build compile",
    );
    let end = last_lines(&full);
    assert_eq!(full.status.code(), Some(2), "{end}");
    assert!(end.contains("the disk is full"), "{end}");
}

#[test]
fn part_that_grew_since_the_last_release_is_named() {
    let run = Run::new(REPORT);
    std::fs::write(run.path().join("deploy/lib/part_times.tsv"), "10\tbook\n10\tscripts\n").unwrap();
    let ended =
        run.of("grown() { SECONDS=$((SECONDS + 40)); }; run_part check book grown; run_part check scripts true");
    let end = last_lines(&ended);
    assert_eq!(ended.status.code(), Some(0), "{end}");
    assert_eq!(end.matches("grew: 10 at the last release").count(), 1, "{end}");
}
