//! The end of `deploy/test`: exit statuses, what failed, and the command that repeats it. The parts here are stand-ins; the functions are those of
//! `deploy/lib/parts.sh` and `deploy/lib/test_report.py`.

use crate::external_tools::root;
use std::path::Path;
use std::process::{Command, Output};
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

/// A run of the script in a checkout that has the real functions, and the report of tests.
struct Run {
    checkout: TempDir,
}

impl Run {
    fn new(report: &str) -> Self {
        let checkout = tempfile::Builder::new().prefix("a checkout ").tempdir().unwrap();
        let folder = checkout.path().join("deploy/lib");
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["parts.sh", "test_report.py", "part_times.tsv"] {
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
root=$1 {variables} only_part='' junit=$1/junit.xml
say() {{ printf '\033[1m==>\033[0m %s\n' "$*"; }}
print_not_run() {{ say "everything ran"; }}
. "$root/deploy/lib/parts.sh"
run_parts() {{
{parts}
}}
run_and_print_end run_parts
"#
        );
        Command::new("bash").args(["-c", &script, "bash"]).arg(self.checkout.path()).output().unwrap()
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
