//! The rule files of `deploy/alerts`, their cases and their runbooks, as text. They are written in one form, which this reads line by line;
//! whether they are YAML, promtool says.

use crate::external_tools::root;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// A file of rules.
#[derive(Debug)]
pub(super) struct RuleFile {
    pub(super) name: String,
    pub(super) alerts: Vec<Alert>,
    /// The recorded names and their expressions.
    pub(super) records: Vec<(String, String)>,
}

#[derive(Debug)]
pub(super) struct Alert {
    pub(super) name: String,
    pub(super) expression: String,
    pub(super) severity: String,
    pub(super) runbook: String,
}

/// All files of rules, by name.
pub(super) fn all() -> Vec<RuleFile> {
    let folder = root().join("deploy/alerts");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .expect("the folder exists")
        .map(|entry| entry.expect("it is readable").file_name().into_string().expect("a name"))
        .filter(|name| name.ends_with(".yaml"))
        .collect();
    names.sort_unstable();
    assert!(names.len() > 10, "{names:?}");
    let read = |name: String| {
        let text = fs::read_to_string(folder.join(&name)).expect("a text");
        let mut file = RuleFile { name, alerts: Vec::new(), records: Vec::new() };
        for rule in text.split("\n      - ").skip(1) {
            let expression = expression(rule);
            if let Some(name) = value(rule, "alert") {
                let named = |key| value(rule, key).unwrap_or_else(|| panic!("{name} has no {key}"));
                file.alerts.push(Alert { expression, severity: named("severity"), runbook: named("runbook_id"), name });
            } else {
                file.records.push((value(rule, "record").expect("an alert or a record"), expression));
            }
        }
        assert!(!file.alerts.is_empty(), "{} has no alert", file.name);
        file
    };
    names.into_iter().map(read).collect()
}

/// The value of a key, where it is in one line.
fn value(rule: &str, key: &str) -> Option<String> {
    rule.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix(": ").map(str::to_owned))
}

fn expression(rule: &str) -> String {
    let mut lines = rule.lines().skip_while(|line| !line.trim().starts_with("expr:"));
    let first = lines.next().expect("a rule has an expression").trim().trim_start_matches("expr:").trim();
    if first != ">-" {
        return first.to_owned();
    }
    let continued = lines.take_while(|line| line.starts_with("          "));
    continued.map(str::trim).collect::<Vec<_>>().join(" ")
}

/// The cases of a file's alerts: for each, whether it is expected to fire, in the order of time.
pub(super) fn cases_of(name: &str) -> BTreeMap<String, Vec<bool>> {
    let path = root().join("deploy/alerts/tests").join(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut cases = BTreeMap::<String, Vec<bool>>::new();
    for case in text.split("eval_time: ").skip(1) {
        let (_, after) = case.split_once("alertname: ").expect("a case names its alert");
        let alert = after.split([',', '\n']).next().expect("a name").to_owned();
        cases.entry(alert).or_default().push(!after.contains("exp_alerts: []"));
    }
    cases
}

/// The runbooks, by id.
pub(super) fn runbooks() -> BTreeMap<String, String> {
    let entries = fs::read_dir(root().join("deploy/runbooks")).expect("the folder exists");
    let paths = entries.map(|entry| entry.expect("it is readable").path());
    let read = |path: std::path::PathBuf| {
        let id = path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned();
        (id, fs::read_to_string(path).expect("a text"))
    };
    paths.map(read).collect()
}

const KEYWORDS: [&str; 10] =
    ["and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool"];

/// The names of metrics in an expression of PromQL: words that are neither functions, keywords, labels nor durations.
pub(super) fn metrics_in(expression: &str) -> BTreeSet<String> {
    let (mut found, mut rest) = (BTreeSet::new(), expression);
    let mut after_grouping = false;
    while let Some(sign) = rest.chars().next() {
        let skip_to = |end: char| rest.find(end).map_or(rest.len(), |at| at + end.len_utf8());
        if sign.is_ascii_alphabetic() || sign == '_' {
            let is_word = |it: char| it.is_ascii_alphanumeric() || it == '_' || it == ':';
            let length = rest.find(|it| !is_word(it)).unwrap_or(rest.len());
            let (word, after) = rest.split_at(length);
            let is_function = after.trim_start().starts_with('(');
            after_grouping = ["by", "without", "on", "ignoring", "group_left", "group_right"].contains(&word);
            // An aggregation may have its grouping before its argument.
            let is_aggregation = ["sum", "max", "min", "avg", "count", "topk"].contains(&word);
            if !is_function && !is_aggregation && !KEYWORDS.contains(&word) {
                found.insert(word.to_owned());
            }
            rest = after;
            continue;
        }
        let skipped = match sign {
            '{' => matchers_length(rest),
            '[' => skip_to(']'),
            '(' if after_grouping => skip_to(')'),
            '0'..='9' => rest.find(|it: char| !it.is_ascii_alphanumeric() && it != '.').unwrap_or(rest.len()),
            _ => sign.len_utf8(),
        };
        if !sign.is_whitespace() {
            after_grouping = false;
        }
        rest = &rest[skipped..];
    }
    found
}

/// The length of the label matchers at the beginning; a brace in a quoted value is no end.
fn matchers_length(text: &str) -> usize {
    let mut is_quoted = false;
    for (at, sign) in text.char_indices() {
        match sign {
            '"' => is_quoted = !is_quoted,
            '}' if !is_quoted => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[test]
fn metrics_of_an_expression_are_found_beside_labels_functions_and_durations() {
    let of = |expression| metrics_in(expression).into_iter().collect::<Vec<_>>();
    assert_eq!(
        of(r#"sum by (kind) (increase(a_total{outcome="x",k!="/{id}y"}[15m])) > 0.5 * b_b"#),
        ["a_total", "b_b"]
    );
    assert_eq!(of("histogram_quantile(0.99, sum(rate(c_bucket[5m])) by (le, route))"), ["c_bucket"]);
    assert_eq!(of("vector(1)"), Vec::<String>::new());
    assert_eq!(of("time() - min by (x) (d_seconds) < 14 * 86400"), ["d_seconds"]);
}
