//! The sets of tests: `.config/nextest.toml` names those of the gate and the proofs, and each test of this program is in exactly one of them.

use crate::external_tools::root;
use regex::Regex;
use std::process::Command;

/// The names of all tests of this program.
fn all_tests() -> Vec<String> {
    let program = std::env::current_exe().expect("a test is a program");
    let ran =
        Command::new(program).args(["--list", "--format", "terse"]).output().expect("the program lists its tests");
    let listed = String::from_utf8(ran.stdout).expect("names are text");
    let names: Vec<String> = listed.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect();
    assert!(names.len() > 100, "the program lists its tests: {listed}");
    names
}

/// What the default filter of a profile has for this program: its expressions `package(tests) & test(/…/)`.
fn set(profile: &str) -> Vec<Regex> {
    let path = root().join(".config/nextest.toml");
    let text = std::fs::read_to_string(&path).expect("the configuration of nextest").replace("\\\n", "");
    let (_, section) = text.split_once(&format!("\n[profile.{profile}]\n")).expect("the profile has a section");
    let section = section.split("\n[").next().unwrap_or_default();
    let expression = Regex::new(r"package\(tests\) & test\(/(.+?)/\)").unwrap();
    let patterns: Vec<Regex> = expression.captures_iter(section).map(|found| Regex::new(&found[1]).unwrap()).collect();
    assert!(!patterns.is_empty(), "{}: the profile {profile} names no tests", path.display());
    patterns
}

fn contains(set: &[Regex], test: &str) -> bool {
    set.iter().any(|pattern| pattern.is_match(test))
}

#[test]
fn each_test_is_in_the_gate_or_in_the_proofs() {
    let (gate, proofs) = (set("gate"), set("proofs"));
    let (mut none, mut both) = (Vec::new(), Vec::new());
    for test in all_tests() {
        match (contains(&gate, &test), contains(&proofs, &test)) {
            (false, false) => none.push(test),
            (true, true) => both.push(test),
            _ => {}
        }
    }
    assert!(
        none.is_empty(),
        "in no set of .config/nextest.toml; add their module to the gate or to the proofs: {none:#?}"
    );
    assert!(both.is_empty(), "in both sets of .config/nextest.toml: {both:#?}");
}

#[test]
fn each_name_of_a_set_is_that_of_a_test() {
    let tests = all_tests();
    for profile in ["gate", "proofs"] {
        for pattern in set(profile) {
            let alternatives = pattern
                .as_str()
                .trim_start_matches("^(")
                .rsplit_once(')')
                .expect("a list of names in brackets")
                .0
                .to_owned();
            for name in alternatives.split('|') {
                let found = tests.iter().any(|test| test.starts_with(name));
                assert!(found, "{profile} in .config/nextest.toml names {name}, and no test begins so");
            }
        }
    }
}
