//! The end of `deploy/bench --against`: the medians and ratios that `deploy/lib/compare_benchmarks.py` prints, from reports of turns.

use crate::external_tools::root;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// A report as `tests/src/bench.rs` writes it.
fn report(rate: f64, p99_ms: f64) -> Value {
    json!({
        "name": "commit", "unit": "transitions/s", "ours": rate, "ratio": rate / 1000.0,
        "baseline": {"name": "pgbench", "value": 1000.0},
        "figures": {"p99_ms": p99_ms, "batch_mean": 12.0, "is_met": true},
        "conditions": {"cores": 2},
    })
}

fn write(folder: &Path, turn: usize, before: &Value, after: &Value) {
    for (name, report) in [("before", before), ("after", after)] {
        std::fs::write(folder.join(format!("{turn}.{name}.json")), report.to_string()).unwrap();
    }
}

fn compare(folder: &Path) -> (bool, String) {
    let script = root().join("deploy/lib/compare_benchmarks.py");
    let output = Command::new("python3").arg(script).arg(folder).output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(printed).unwrap())
}

#[test]
fn turns_are_compared_pairwise_and_a_change_beyond_the_noise_is_named() {
    let folder = tempfile::tempdir().unwrap();
    // The machine is four times slower in the second turn, for both.
    for (turn, machine) in [1.0, 0.25, 1.0].into_iter().enumerate() {
        write(folder.path(), turn, &report(1000.0 * machine, 10.0 / machine), &report(800.0 * machine, 9.0 / machine));
    }
    insta::assert_snapshot!(compare(folder.path()).1, @r"
    measurement                           before        after   ratio
    commit, transitions/s               1000.000      800.000   0.800  worse
    commit, transitions/s : pgbench        1.000        0.800   0.800  worse
    batch_mean                            12.000       12.000   1.000
    p99_ms                                10.000        9.000   0.900  better
    ");
}

#[test]
fn measurement_that_one_commit_lacks_is_named_and_a_folder_without_reports_fails() {
    let folder = tempfile::tempdir().unwrap();
    assert!(!compare(folder.path()).0);
    let mut after = report(1000.0, 10.0);
    after["figures"]["p50_ms"] = json!(3.0);
    write(folder.path(), 1, &report(1000.0, 10.0), &after);
    let (is_compared, printed) = compare(folder.path());
    assert!(is_compared && printed.contains("p50_ms"), "{printed}");
    assert!(
        printed.lines().any(|line| line.starts_with("p50_ms") && line.ends_with("is in one of the two alone")),
        "{printed}"
    );
}
