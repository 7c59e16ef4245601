//! The pages of the book that are written from the source: `reference/metrics.md` and `reference/task-types.md`. `UPDATE_DOCS=1` writes
//! them. That no process exports a metric beside them, `observability.rs` shows.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

const METRICS_PAGE: &str = "deploy/docs/src/reference/metrics.md";
const TASK_TYPES_PAGE: &str = "deploy/docs/src/reference/task-types.md";

/// The crates that register metrics.
const SOURCES: [&str; 3] = ["edge/src", "persistence/src", "supervisors/src"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in the workspace").to_owned()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Compares the page with its text, or writes it.
fn expect_page(path: &str, text: &str) {
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(root().join(path), text).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    assert_eq!(read(path), text, "{path} is not what the source says; UPDATE_DOCS=1 regenerates it");
}

/// The Rust files of a folder, without those of tests.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("the folder exists") {
        let path = entry.expect("the folder is readable").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        match (path.is_dir(), name) {
            (_, "tests" | "tests.rs" | "testing" | "testing.rs") => {}
            (true, _) => sources(&path, found),
            (false, _) => found.extend(name.ends_with(".rs").then_some(path)),
        }
    }
}

/// A metric as the source declares it.
#[derive(Debug, PartialEq, Eq)]
struct Metric {
    name: String,
    kind: &'static str,
    labels: Vec<String>,
    help: String,
}

/// All metrics of the control plane, by name.
fn metrics() -> Vec<Metric> {
    let mut files = Vec::new();
    for folder in SOURCES {
        sources(&root().join(folder), &mut files);
    }
    let mut found = BTreeMap::new();
    for file in files {
        let text = std::fs::read_to_string(&file).expect("the file is readable");
        if text.contains("prometheus::") {
            let code = text.split("\nmod tests {").next().unwrap_or_default();
            let unread = unread(code);
            assert!(
                unread.is_empty(),
                "{}: this test cannot read a metric's name and help here: {unread:#?}",
                file.display()
            );
            found.extend(declared(code).into_iter().map(|metric| (metric.name.clone(), metric)));
        }
    }
    found.into_values().collect()
}

/// The metrics that a file declares: calls with a name and a help, both literals.
fn declared(code: &str) -> Vec<Metric> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(at) = rest.find("(\"").into_iter().chain(rest.find("(\n")).min() {
        let function =
            rest[..at].rsplit(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').next().unwrap_or_default();
        rest = &rest[at + 1..];
        let Some((name, after)) = literal(rest) else { continue };
        let Some((help, after)) = after.trim_start().strip_prefix(',').and_then(literal) else { continue };
        if !is_metric_name(&name) || !declares_metrics(function) {
            continue;
        }
        let name = in_pattern(code, &name);
        let kind = match function {
            _ if name.ends_with("_total") => "counter",
            "HistogramOpts::new" => "histogram",
            _ => "gauge",
        };
        let labels = labels_after(after).or_else(|| labels_of_helper(code, function)).unwrap_or_default();
        found.push(Metric { name, kind, labels, help });
    }
    found
}

/// The constructors that take a name and a help.
const CONSTRUCTORS: [&str; 8] =
    ["Opts", "HistogramOpts", "Gauge", "IntGauge", "GenericGauge", "Counter", "IntCounter", "GenericCounter"];
/// The closures around one of them.
const HELPERS: [&str; 4] = ["gauge", "gauges", "counter", "counters"];

/// The declarations whose name and help [`declared`] does not read, so that the page would lack them: a constructor or a helper whose
/// arguments are no literals, outside of a helper.
fn unread(code: &str) -> Vec<String> {
    let of_literals = |arguments: &str| {
        let named = literal(arguments).filter(|(name, _)| is_metric_name(name));
        named.is_some_and(|(_, after)| after.trim_start().strip_prefix(',').and_then(literal).is_some())
    };
    let in_helper = |at: usize, arguments: &str| {
        let names = ["name,", "format!(\""];
        let closure = code[..at].rfind("= |name").and_then(|end| code[..end].trim_end().rsplit(' ').next());
        names.iter().any(|name| arguments.starts_with(name)) && closure.is_some_and(|name| HELPERS.contains(&name))
    };
    let mut found = Vec::new();
    for (at, _) in code.match_indices('(') {
        let before =
            code[..at].rsplit(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').next().unwrap_or_default();
        let is_constructor = before.strip_suffix("::new").is_some_and(|of| CONSTRUCTORS.contains(&of));
        let is_helper = HELPERS.contains(&before) && code.contains(&format!("let {before} = |name"));
        let arguments = code[at + 1..].trim_start();
        let is_read = of_literals(arguments) || is_constructor && in_helper(at, arguments);
        if (is_constructor || is_helper) && !is_read {
            found.push(format!("{before}({}", arguments.lines().next().unwrap_or_default()));
        }
    }
    found
}

#[test]
fn declaration_that_cannot_be_read_is_reported() {
    let read = "let gauge = |name: &str, help| IntGauge::new(name, help);\ngauge(\"a_b\", \"What.\")?;\n\
        IntCounter::new(\n    \"c_d_total\",\n    \"How many.\",\n)?;\nIntCounterVec::new(opts, &[\"kind\"])?;";
    assert_eq!((unread(read), declared(read).len()), (Vec::new(), 2));
    for code in [
        "IntCounter::new(NAME, \"How many.\")",
        "Opts::new(\"a_b\", HELP)",
        "HistogramOpts::new(\"seconds\", \"One word.\")",
        "let made = |name, help| IntGauge::new(name, help);",
        "let gauge = |name, help| IntGauge::new(name, help);\ngauge(NAME, \"What.\")",
    ] {
        assert_eq!(unread(code).len(), 1, "{code}");
    }
}

fn is_metric_name(name: &str) -> bool {
    name.contains('_') && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

/// A constructor of the metrics library, or a closure around one.
fn declares_metrics(function: &str) -> bool {
    HELPERS.contains(&function)
        || ["Opts::new", "Gauge::new", "Counter::new"].iter().any(|constructor| function.ends_with(constructor))
}

/// The string literal at the beginning, and what follows it.
fn literal(text: &str) -> Option<(String, &str)> {
    let text = text.trim_start().strip_prefix('"')?;
    let (mut value, mut signs) = (String::new(), text.char_indices());
    while let Some((at, sign)) = signs.next() {
        match sign {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match signs.next()?.1 {
                // A continued line begins at its first sign.
                '\n' => {
                    let blank = signs.as_str().len() - signs.as_str().trim_start().len();
                    signs.by_ref().take(blank).for_each(drop);
                }
                escaped => value.push(escaped),
            },
            other => value.push(other),
        }
    }
    None
}

/// The whole name, where the file declares the names by a pattern: `format!("api_{name}_total")`.
fn in_pattern(code: &str, name: &str) -> String {
    let pattern = code.split("::new(format!(\"").nth(1).and_then(|rest| rest.split('"').next());
    pattern.map_or_else(|| name.to_owned(), |pattern| pattern.replace("{name}", name))
}

/// The labels that follow a help.
fn labels_after(after: &str) -> Option<Vec<String>> {
    let end = after.find(';').into_iter().chain(after.find("(\"")).chain(after.find("::new(")).min();
    let of_opts = after.trim_start_matches([')', ',', ' ', '\n']).strip_prefix(';').and_then(|rest| {
        let rest = rest.split(';').next()?;
        rest.contains("Vec::new(opts,").then_some(rest)
    });
    list(of_opts.unwrap_or_else(|| &after[..end.unwrap_or(after.len())]))
}

/// The labels of all metrics that a closure makes.
fn labels_of_helper(code: &str, function: &str) -> Option<Vec<String>> {
    let helper = code.split(&format!("let {function} = |")).nth(1)?;
    let (_, body) = helper.split_once('|')?;
    let end = if body.trim_start().starts_with('{') { "};" } else { ";" };
    list(body.split(end).next()?)
}

/// The first list of literals: `&["kind", "outcome"]`.
fn list(text: &str) -> Option<Vec<String>> {
    let list = text.split("&[\"").nth(1)?.split(']').next()?;
    Some(
        list.split('"')
            .map(str::to_owned)
            .filter(|label| is_metric_name(label) || label.chars().all(char::is_alphanumeric) && !label.is_empty())
            .collect(),
    )
}

/// The names of all metrics on the page.
pub(super) fn metric_names() -> std::collections::BTreeSet<String> {
    metrics().into_iter().map(|metric| metric.name).collect()
}

/// The labels whose values are ids: of invariants, and of the service's keys, of which there are a handful.
const LABELS_WITH_IDS: [(&str, &str); 4] = [
    ("invariant_checks_skipped_total", "id"),
    ("invariant_checks_total", "id"),
    ("invariant_violations_total", "id"),
    ("key_phase_age_seconds", "key_id"),
];

/// A label with the id of an entity would make as many series as there are entities.
#[test]
fn no_label_of_a_metric_is_the_id_of_an_entity() {
    for Metric { name, labels, .. } in metrics() {
        for label in labels {
            let of_entity =
                ["id", "node", "allocation", "tenant", "user", "account", "project", "org", "host", "email"];
            let is_id = label.split('_').any(|word| of_entity.contains(&word));
            assert!(!is_id || LABELS_WITH_IDS.contains(&(&*name, &*label)), "{name} has a label {label}");
        }
    }
}

#[test]
fn page_of_metrics_is_what_the_source_declares() {
    let metrics = metrics();
    assert!(metrics.len() > 70, "{metrics:#?}");
    let mut page = "# Metrics\n\n<!-- Made by the code: `UPDATE_DOCS=1 cargo test -p tests reference_pages` regenerates it. -->\n\n\
        Every process of the control plane exports these at `GET /metrics` in the Prometheus text format\n([how to scrape them](../operator/monitoring.md)); \
        a process has the metrics of its roles. Beside them are the `process_*` metrics of the\nPrometheus client library. A histogram has \
        `_bucket`, `_sum` and `_count`.\n\n| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n"
        .to_owned();
    for Metric { name, kind, labels, help } in &metrics {
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        writeln!(page, "| `{name}` | {kind} | {} | {} |", labels.join(", "), help.replace('|', "\\|"))
            .expect("a string");
    }
    expect_page(METRICS_PAGE, &page);
}

/// What a task type takes to be described beside its row in the source: the structure of its payload, its result and its deadline.
const TASK_TYPES: [(&str, &str, &str, &str); 9] = [
    (
        "allocation.provision",
        "Provision",
        "the tenant's `user_name`, `home`, `authorized_keys_path`, `devices` and `isolation`; with the `system` executor also `uid`, `sudo`, `separated` and `further_devices`",
        "`allocation.provisioning_timeout_seconds`",
    ),
    (
        "allocation.release",
        "Release",
        "`processes_ended`, and as `proof` the signed clean-up report",
        "`allocation.release_timeout_seconds`",
    ),
    (
        "ssh_keys.reconcile",
        "ReconcileSshKeys",
        "`authorized_keys_path` and the number of `keys`",
        "`node.task_timeout_seconds`",
    ),
    (
        "node.validate",
        "",
        "the UUIDs of its `gpus` and the ids of its `allocations`; with the `system` executor also `uids_left`, `isolation` and `separated`; with a load also `level`, `measurements`, `not_tested`, `failed` and `by_gpu`",
        "`node.task_timeout_seconds`, with a deep load and `node.deep_validation_seconds`",
    ),
    (
        "diagnostics.collect",
        "",
        "`executor`, `fitness`, `gpus`, `load`, `uptime_seconds`, `memory_pressure`, `processes` and `kernel_gpu_errors`",
        "`node.task_timeout_seconds`",
    ),
    ("terminal.open", "OpenTerminal", "nothing", "`terminal.token_ttl_seconds`"),
    (
        "agent.update",
        "UpdateAgent",
        "the `version` and the `package_digest` in use",
        "`node.task_timeout_seconds` and `node.update_commit_seconds`",
    ),
    ("node.reboot", "Reboot", "the `boot_id` of the new boot", "`node.task_timeout_seconds`"),
    ("node.gpu_reset", "ResetGpu", "the `gpu_uuid`, and what `nvidia-smi` wrote", "`node.task_timeout_seconds`"),
];

/// The rows of `task_types!`: the name, what happens without a result, and what the agent does.
fn task_types(code: &str) -> Vec<[String; 3]> {
    let table = code.split("\ntask_types! {\n").nth(1).and_then(|rest| rest.split("\n}").next()).expect("the table");
    let row = |line: &str| {
        let (head, what) = line.trim().split_once(": ")?;
        let mut head = head.split(' ').skip(1);
        let unquoted = |text: &str| text.trim_end_matches(';').trim_matches('"').to_owned();
        Some([unquoted(head.next()?), unquoted(head.next()?), unquoted(what)])
    };
    table.lines().filter_map(row).collect()
}

/// The fields of a structure: name, type, and description.
fn fields(code: &str, structure: &str) -> Vec<[String; 3]> {
    let body = code.split(&format!("pub struct {structure} {{\n")).nth(1).and_then(|rest| rest.split("\n}").next());
    let body = body.unwrap_or_else(|| panic!("there is no structure {structure}"));
    let (mut found, mut text) = (Vec::new(), Vec::new());
    for line in body.lines().map(str::trim) {
        if let Some(comment) = line.strip_prefix("/// ") {
            text.push(comment);
        } else if let Some((name, kind)) = line.strip_prefix("pub ").and_then(|line| line.split_once(": ")) {
            let kind = kind.trim_end_matches(',').rsplit("::").next().unwrap_or_default();
            let kind = kind.replace("DateTime<Utc>", "instant").replace("Uuid", "UUID").replace("String", "text");
            let kind = kind
                .strip_prefix("Vec<")
                .and_then(|of| of.strip_suffix('>'))
                .map_or_else(|| kind.clone(), |of| format!("list of {of}"));
            found.push([name.to_owned(), kind, std::mem::take(&mut text).join(" ")]);
        }
    }
    found
}

#[test]
fn page_of_task_types_is_what_the_source_declares() {
    let wire = read("agent/wire/src/task.rs");
    let rows = task_types(&read("actors/domain/src/kernel/task_type.rs"));
    let described: Vec<&str> = TASK_TYPES.iter().map(|(name, ..)| *name).collect();
    let mut page = "# Task types\n\n<!-- Made by the code: `UPDATE_DOCS=1 cargo test -p tests reference_pages` regenerates it. -->\n\n\
        A task is signed work for one node ([the agent](../internals/agent.md)). Its `type` is one of these; a node is given only the types \
        that its\nagent reports. `gpuctl nodes tasks` shows the tasks of a node. A result has a `status`, the `output` of the type, and an \
        `error` where the\ntask failed.\n\n\
        Without a result in time a task is dispatched once more (*requeue*), dropped (*expire*), or it waits for an operator \
        (*await operator*,\n`gpuctl nodes resume`). Times are [policy keys](policies.md).\n\n\
        | type | what the agent does | without a result | time | output |\n| --- | --- | --- | --- | --- |\n"
        .to_owned();
    assert!(rows.len() >= described.len(), "{rows:?}");
    let description = |name: &str| {
        TASK_TYPES
            .iter()
            .find(|(described, ..)| *described == name)
            .unwrap_or_else(|| panic!("describe {name} in TASK_TYPES"))
    };
    for [name, stale, what] in &rows {
        let (_, _, output, time) = description(name);
        let stale = match stale.as_str() {
            "AwaitOperator" => "await operator".to_owned(),
            other => other.to_lowercase(),
        };
        writeln!(page, "| `{name}` | {what} | {stale} | {time} | {output} |").expect("a string");
    }
    page.push_str("\n## Payloads\n\nA type that is not here has no fields.\n");
    for [name, ..] in &rows {
        let (_, structure, ..) = description(name);
        if structure.is_empty() {
            continue;
        }
        write!(page, "\n### {name}\n\n| field | type | meaning |\n| --- | --- | --- |\n").expect("a string");
        for [field, kind, text] in fields(&wire, structure) {
            writeln!(page, "| `{field}` | {kind} | {text} |").expect("a string");
        }
    }
    expect_page(TASK_TYPES_PAGE, &page);
}

/// Xids are many: the page says what each repair asks of an operator.
#[test]
fn each_finding_of_the_table_has_its_advice_on_an_operators_page() {
    let pages =
        ["troubleshooting.md", "integrity.md"].map(|page| read(&format!("deploy/docs/src/operator/{page}"))).concat();
    let is_advised = |rule: &&domain::finding::FindingRule| {
        let (probe, code) = (rule.probe, rule.code);
        let is_with_others = pages.contains(&format!("`{probe}/")) && pages.contains(&format!("`{code}`"));
        let is_named = pages.contains(&format!("`{probe}/{code}")) || pages.contains(&format!("`{probe}/…`"));
        probe == "xid" || is_named || is_with_others
    };
    let missing: Vec<_> =
        domain::finding::TABLE.iter().filter(|rule| !is_advised(rule)).map(|it| (it.probe, it.code)).collect();
    assert!(missing.is_empty(), "no advice on {missing:?}");
}
