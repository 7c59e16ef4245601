//! The conventions of the workspace: dependencies between crates, those of the pure crate, and what no source may contain.

use regex::Regex;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// The allowed dependencies between crates (design 3).
const ALLOWED_DEPENDENCIES: [(&str, &[&str]); 17] = [
    ("domain", &[]),
    // What failed, and when to try again: of no service.
    ("failures", &[]),
    // How the messages of others are read.
    ("strict-json", &[]),
    ("wire", &["strict-json"]),
    ("telemetry", &[]),
    ("persistence", &["domain", "failures"]),
    ("actors", &["domain", "telemetry", "strict-json"]),
    ("edge", &["domain", "wire", "telemetry", "failures", "strict-json", "actors", "persistence"]),
    (
        "supervisors",
        &["domain", "wire", "telemetry", "failures", "strict-json", "actors", "persistence", "edge", "local-servers"],
    ),
    // The servers of `gpuaas dev` and of the tests.
    ("local-servers", &["persistence"]),
    ("agent", &["wire", "telemetry", "failures", "strict-json", "agent-package"]),
    // A static program is made of it: as little as possible.
    ("agent-package", &["wire", "failures", "strict-json"]),
    // A library that programs load; the agent's tests control it.
    ("fake-nvml", &[]),
    // The files of packages that the programs' tests write.
    ("manual-pages", &[]),
    // The dependencies of an outside client: nothing that knows the service.
    ("gpuctl", &["failures"]),
    // The test world without processes; other crates have it as a dependency of their tests alone.
    ("test-host", &["domain", "actors", "persistence", "wire"]),
    (
        "tests",
        &[
            "domain",
            "wire",
            "telemetry",
            "actors",
            "agent",
            "agent-package",
            "persistence",
            "edge",
            "supervisors",
            "local-servers",
            "test-host",
        ],
    ),
];

/// The third-party crates that `domain` may use: plain data, errors, and the names of variants.
const DOMAIN_DEPENDENCIES: [&str; 6] = ["serde", "serde_json", "strum", "thiserror", "uuid", "chrono"];

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

/// The normal and build dependencies of each crate of the workspace, from the manifests.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let ran = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let metadata: Value = serde_json::from_slice(&ran.stdout).expect("cargo metadata is JSON");
    let packages = metadata["packages"].as_array().expect("there are packages");
    let named = |package: &Value| {
        let all = package["dependencies"].as_array().unwrap();
        all.iter().filter(|it| it["kind"] != "dev").map(|it| it["name"].as_str().unwrap().to_owned()).collect()
    };
    packages.iter().map(|package| (package["name"].as_str().unwrap().to_owned(), named(package))).collect()
}

#[test]
fn dependencies_point_one_way() {
    let found = dependencies();
    let known: BTreeSet<&str> = ALLOWED_DEPENDENCIES.iter().map(|(name, _)| *name).collect();
    let there: BTreeSet<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(there, known, "a crate came or went: give it its place in the table of arrows");
    for (name, allowed) in ALLOWED_DEPENDENCIES {
        let ours: BTreeSet<&str> = found[name].iter().map(String::as_str).filter(|it| known.contains(it)).collect();
        let forbidden: Vec<_> = ours.iter().filter(|it| !allowed.contains(it)).collect();
        assert!(forbidden.is_empty(), "{name} must not depend on {forbidden:?}");
    }
}

#[test]
fn domain_depends_on_plain_data_crates_alone() {
    let found = &dependencies()["domain"];
    let foreign: Vec<_> = found.iter().filter(|it| !DOMAIN_DEPENDENCIES.contains(&it.as_str())).collect();
    assert!(foreign.is_empty(), "domain depends on {foreign:?}");
}

/// The environment variables of `gpuaas serve`.
#[test]
fn every_variable_of_an_installation_is_documented() {
    let page = std::fs::read_to_string(root().join("deploy/docs/src/reference/configuration.md")).unwrap();
    let sources =
        ["config.rs", "config/listener_bounds.rs", "config/listeners.rs", "config/mail.rs", "config/payments.rs"]
            .map(|file| format!("supervisors/src/{file}"));
    let is_variable = |text: &&str| {
        ["SVC_", "NODE_", "INTERNAL_"].iter().any(|prefix| text.starts_with(prefix))
            && text.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
    };
    let mut found = BTreeSet::new();
    for source in sources {
        let text = std::fs::read_to_string(root().join(source)).unwrap();
        found.extend(text.split('"').filter(is_variable).map(str::to_owned));
    }
    assert!(found.len() > 30, "{found:?}");
    let lacking: Vec<_> = found.iter().filter(|name| !page.contains(&format!("`{name}`"))).collect();
    assert!(lacking.is_empty(), "deploy/docs/src/reference/configuration.md says nothing of {lacking:?}");
}

#[test]
fn domain_lints_ban_clocks_randomness_and_the_environment() {
    let lints =
        std::fs::read_to_string(root().join("actors/domain/clippy.toml")).expect("domain has its own clippy.toml");
    for banned in [
        "std::time::SystemTime::now",
        "std::time::Instant::now",
        "chrono::Utc::now",
        "chrono::Local::now",
        "uuid::Uuid::now_v7",
        "uuid::Uuid::new_v4",
        "std::env::var",
    ] {
        assert!(lints.contains(banned), "actors/domain/clippy.toml does not ban {banned}");
    }
}

#[test]
fn domain_has_no_async_code() {
    for (path, text) in sources().into_iter().filter(|(path, _)| path.starts_with("actors/domain/src")) {
        for word in ["async fn", "async move", ".await", "std::fs", "std::net", "std::thread", "tokio"] {
            assert!(!text.contains(word), "{} says {word}", path.display());
        }
    }
}

#[test]
fn no_source_names_a_machine_or_a_registry() {
    // Assembled here, so that this file does not contain them.
    let here = root().display().to_string();
    let places = [["/Us", "ers/"], ["/ro", "ot/"]].map(|parts| parts.concat()).into_iter().chain([here]);
    let hosts = [
        ["crates", ".io"],
        ["pypi", ".org"],
        ["files.python", "hosted"],
        ["npm", "js."],
        ["registry.", "npm"],
        ["docker", ".io"],
        ["ghcr", ".io"],
        ["arti", "factory"],
    ]
    .map(|parts| parts.concat());
    let words: Vec<String> = places.chain(hosts).collect();
    for (path, text) in sources() {
        for word in &words {
            let line = text.find(word.as_str()).map(|at| text[..at].matches('\n').count() + 1);
            assert_eq!(line, None, "{} says {word} in this line", path.display());
        }
    }
}

#[test]
fn no_source_has_a_marker_of_unfinished_work() {
    let words = [["TO", "DO"], ["FIX", "ME"], ["todo", "!("], ["unimplemented", "!("], ["#[ig", "nore"]]
        .map(|parts| parts.concat());
    for (path, text) in sources() {
        for word in &words {
            assert!(!text.contains(word.as_str()), "{} says {word}", path.display());
        }
    }
}

#[test]
fn every_row_of_the_specification_names_tests_that_exist_or_is_marked_not_built() {
    let page = std::fs::read_to_string(root().join("tests/specification.md")).expect("the page is there");
    let sources: BTreeMap<PathBuf, String> = sources().into_iter().collect();
    let rows = page.lines().filter(|line| line.starts_with('|') && !line.starts_with("| ---"));
    let rows: Vec<&str> = rows.filter(|line| !line.ends_with("| shown by |")).collect();
    assert!(rows.len() > 50, "only {} rows were found", rows.len());
    let sections = page.split("\n## ");
    for section in sections {
        let mut names = BTreeSet::new();
        for row in section.lines().filter(|line| line.starts_with("| ") && line.contains('`')) {
            let name = row.split(" | ").next().expect("a first column");
            assert!(names.insert(name), "this row is there twice: {name}");
        }
    }
    for row in rows {
        let quoted = row.split('`').skip(1).step_by(2);
        let named: Vec<_> = quoted.filter_map(|text| text.split_once("::")).collect();
        let (in_rust, others): (Vec<_>, Vec<_>) = named.into_iter().partition(|(file, _)| file.ends_with(".rs"));
        // Those of the console have sentences for names.
        let is_of_console = |file: &str| file.ends_with(".test.ts") || file.ends_with(".test.tsx");
        let in_console: Vec<_> = others.into_iter().filter(|(file, _)| is_of_console(file)).collect();
        let is_built = !row.contains("| *not built*");
        assert!(is_built || row.contains("decision 0"), "no decision says why this is not built: {row}");
        let has_tests = !in_rust.is_empty() || !in_console.is_empty();
        assert_eq!(is_built, has_tests, "a row names tests, or says *not built* and no test: {row}");
        for (file, function) in in_rust {
            let text = sources.get(Path::new(file));
            let text = text.unwrap_or_else(|| panic!("there is no {file}, which is named in: {row}"));
            assert!(is_test(text, function), "{file} has no test {function}, which is named in: {row}");
        }
        for (file, title) in in_console {
            let text = std::fs::read_to_string(root().join(file));
            let text = text.unwrap_or_else(|error| panic!("{file}: {error}, in: {row}"));
            assert!(text.contains(&format!("(\"{title}\"")), "{file} has no test {title:?}, which is named in: {row}");
        }
    }
}

/// The words of a name, in lower case: `ReadPool`, `read_pool` and `READ_POOL` have the same two.
fn parts_of(name: &str) -> BTreeSet<String> {
    let is_constant = !name.contains(|letter: char| letter.is_lowercase());
    let name = if is_constant { name.to_lowercase() } else { name.to_owned() };
    let mut words = vec![String::new()];
    for letter in name.chars() {
        if letter == '_' || letter == '-' || letter.is_uppercase() {
            words.push(String::new());
        }
        if letter.is_alphanumeric() {
            words.last_mut().expect("there is one").extend(letter.to_lowercase());
        }
    }
    words.into_iter().filter(|word| !word.is_empty()).collect()
}

/// The names that a Rust source declares: types, and tests. With each, whether it is a type that is public without bounds.
fn declared_names(text: &str) -> Vec<(String, bool)> {
    let (mut names, mut is_test) = (Vec::new(), false);
    for line in text.lines().map(str::trim) {
        is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        let public = line.strip_prefix("pub ");
        let item = public.or_else(|| line.split_once(") ").filter(|(it, _)| it.starts_with("pub(")).map(|(_, it)| it));
        let item = item.unwrap_or(line);
        let declares = |keyword: &str| item.strip_prefix(keyword).map(name_at_start);
        if let Some(name) = ["struct ", "enum ", "trait ", "union "].into_iter().find_map(declares) {
            names.push((name, public.is_some()));
        }
        if let Some(name) = ["fn ", "async fn "].into_iter().find_map(declares) {
            if is_test {
                names.push((name, false));
            }
            is_test = false;
        }
    }
    names
}

fn name_at_start(text: &str) -> String {
    text.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect()
}

/// The names of the functions, fields, variants, constants and aliases of types that a Rust source declares.
fn declared_members(text: &str) -> Vec<String> {
    let (mut names, mut depth) = (Vec::new(), 0_usize);
    let is_qualifier = |sign: char| sign.is_ascii_lowercase() || matches!(sign, ' ' | '(' | ')' | ':');
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with("//") && !line.starts_with('#')) {
        let code = line.split(" //").next().unwrap_or_default();
        let function = code.split_once("fn ").filter(|(before, _)| before.chars().all(is_qualifier));
        names.extend(function.map(|(_, function)| name_at_start(function)));
        if depth == 0 {
            let bounded = code.split_once(") ").filter(|(bounds, _)| bounds.starts_with("pub("));
            let item = bounded.map_or_else(|| code.trim_start_matches("pub "), |(_, item)| item);
            let constant = ["const ", "static ", "type "].iter().find_map(|keyword| item.strip_prefix(keyword));
            let constant = constant.map(name_at_start).filter(|name| !matches!(name.as_str(), "fn" | "unsafe" | "_"));
            names.extend(constant);
            let begins = ["struct ", "enum ", "union "].iter().any(|keyword| item.starts_with(keyword));
            depth = usize::from(begins && code.ends_with('{'));
            continue;
        }
        if code.starts_with(|first: char| first.is_ascii_uppercase()) {
            names.push(name_at_start(code));
        }
        // A colon and a space follow the name of a field; in a path there is no space.
        for (at, _) in code.match_indices(": ") {
            let name = code[..at].rsplit(|sign: char| !sign.is_alphanumeric() && sign != '_').next();
            names.extend(name.map(str::to_owned));
        }
        depth = (depth + code.matches('{').count()).saturating_sub(code.matches('}').count());
    }
    names.retain(|name| !name.is_empty());
    names
}

#[test]
fn declared_functions_fields_and_variants_are_found() {
    let text = "pub(crate) struct It {\n    /// A note: none.\n    pub(super) first: a::B,\n    second: C<D>,\n}\n\
                enum Of {\n    One,\n    Two { left: E, right: F },\n    Three(G),\n}\n\
                impl It {\n    pub(super) async fn run(&self) {\n        let it = Of::Two { up: 1 };\n    }\n}\n\
                const fn stop() {}\npub(crate) const LIMIT: u8 = 1;\nstatic ALL: u8 = 1;\npub type It = u8;\n";
    let expected = ["first", "second", "One", "Two", "left", "right", "Three", "run", "stop", "LIMIT", "ALL", "It"];
    assert_eq!(declared_members(text), expected);
}

/// The names that statements in SQL give to their parts, tables and columns.
fn sql_aliases(text: &str) -> Vec<String> {
    static ALIAS: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\bAS ([a-z_]\w*)|\b([a-z_]\w*) AS (?:MATERIALIZED )?\(").expect("it is a pattern")
    });
    ALIAS.captures_iter(text).filter_map(|it| it.get(1).or(it.get(2))).map(|it| it.as_str().to_owned()).collect()
}

#[test]
fn aliases_of_sql_are_found() {
    let text =
        "WITH one AS MATERIALIZED (SELECT a AS two FROM b), three AS (SELECT) SELECT FROM unnest($1) AS four (c)";
    assert_eq!(sql_aliases(text), ["one", "two", "three", "four"]);
}

/// Names in which such a word is a term of the field: the words of a GPU's memory, and those of which names are made.
const TERMS_OF_THE_FIELD: [&str; 4] = ["wrong_words", "wrong_words_on_the_gpu", "PAGE_WORDS", "SECRET_WORDS"];

#[test]
fn names_contain_no_word_that_the_glossary_excludes() {
    let glossary = std::fs::read_to_string(root().join("deploy/docs/src/glossary.md")).expect("the glossary is there");
    let (_, excluded) = glossary.split_once("## Words that no name contains").expect("the glossary has the list");
    let excluded: BTreeSet<String> = excluded.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    assert!(excluded.len() > 20, "{excluded:?}");
    let mut found = Vec::new();
    // Migrations are not changed.
    let is_code =
        |path: &Path| path.extension().is_some_and(|it| it == "rs" || it == "sql") && !path.starts_with("migrations");
    for (path, text) in sources().into_iter().filter(|(path, _)| is_code(path)) {
        let declared = declared_names(&text).into_iter().map(|(name, _)| name).chain(declared_members(&text));
        let declared = declared.chain(sql_aliases(&text));
        let declared = declared.filter(|name| !TERMS_OF_THE_FIELD.contains(&name.as_str()));
        let names = path.iter().map(|part| part.to_string_lossy().replace(".rs", "")).chain(declared);
        found.extend(
            names
                .filter(|name| !parts_of(name).is_disjoint(&excluded))
                .map(|name| format!("{}: {name}", path.display())),
        );
    }
    assert!(found.is_empty(), "deploy/docs/src/glossary.md has other words for:\n{}", found.join("\n"));
}

#[test]
fn public_type_names_are_unique() {
    // What every machine, route or module has one of.
    const SHARED: [&str; 10] =
        ["Command", "Request", "Instruction", "Fact", "Maintenance", "Reply", "Rejection", "Phase", "View", "Error"];
    let mut homes: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for (path, text) in sources().into_iter().filter(|(path, _)| path.extension().is_some_and(|it| it == "rs")) {
        for (name, _) in
            declared_names(&text).into_iter().filter(|(name, is_public)| *is_public && !SHARED.contains(&&**name))
        {
            homes.entry(name).or_default().insert(path.clone());
        }
    }
    homes.retain(|_, paths| paths.len() > 1);
    assert!(homes.is_empty(), "types of one name: {homes:#?}");
}

/// The crates that read JSON of others: requests, answers, and messages between programs.
const READERS_OF_OTHERS: [&str; 4] = ["actors/src/", "agent/", "edge/src/", "supervisors/src/"];

/// Their files that read JSON with serde_json itself: what the program stored, or with visitors of their own. All other JSON is read with
/// `strict_json`, for which a list is no object (decision 0082).
const READERS_OF_OWN_JSON: [&str; 42] = [
    "actors/src/entity_shell.rs",
    "agent/package/src/update/update_folder.rs",
    "agent/src/allocation_records.rs",
    "agent/src/finding_log.rs",
    "agent/src/identity.rs",
    "agent/src/integrity/baseline.rs",
    "agent/src/integrity/recorded_tenants.rs",
    "agent/src/log_collector/spool.rs",
    "agent/src/server_clock.rs",
    "agent/src/system_executor/accounts.rs",
    "agent/src/task_journal.rs",
    "agent/src/terminal/session_handover/holder.rs",
    "agent/src/terminal/session_handover/record.rs",
    "agent/src/unproved_gpus.rs",
    "edge/src/api/allocation.rs",
    "edge/src/api/document/common_parts.rs",
    "edge/src/api/idempotency/stored_response.rs",
    "edge/src/api/request_context.rs",
    "edge/src/app_state/read_model.rs",
    "edge/src/app_state/rollout_nodes.rs",
    "edge/src/auth/browser_session.rs",
    "edge/src/auth/signed_tokens/service_account.rs",
    "edge/src/console_login/pending_login.rs",
    "edge/src/console_login/pending_logout.rs",
    "edge/src/http/request_body.rs",
    "edge/src/log_gateway/push_request.rs",
    "edge/src/node_api/task_result.rs",
    "edge/src/notifications/delivery/email.rs",
    "edge/src/trust/current_keys.rs",
    "supervisors/src/support_bundle/anonymity.rs",
    "supervisors/src/workers/auditor.rs",
    "supervisors/src/workers/bare_metal.rs",
    "supervisors/src/workers/close_terminals.rs",
    "supervisors/src/workers/notification_delivery.rs",
    "supervisors/src/workers/notification_queue.rs",
    "supervisors/src/workers/notification_relay.rs",
    "supervisors/src/workers/payments/processor_events.rs",
    "supervisors/src/workers/placement_index/free_gpus.rs",
    "supervisors/src/workers/provisioning.rs",
    "supervisors/src/workers/recordings.rs",
    "supervisors/src/workers/rollout_nodes.rs",
    "supervisors/src/workers/ssh_access.rs",
];

#[test]
fn json_of_others_is_read_by_the_strict_reader() {
    let is_test = |path: &str| {
        ["/tests/", "/tests.rs", "/testing", "/fuzz"].iter().any(|part| path.contains(part))
            || path.contains("strict-json")
    };
    // Its body, at the end of the file: a declaration of a test's module may stand above the code.
    let tests = Regex::new(r"\n#\[cfg\(test\)\]\n(?:#\[[^\n]*\]\n)?mod \w+ \{").expect("it is a pattern");
    let reads = |text: &str| {
        let code = tests.split(text).next().unwrap_or_default();
        code.contains("serde_json::from_")
            || code.contains("serde_json::Deserializer")
            || code.contains("use axum::extract::Json")
    };
    let found: Vec<String> = sources()
        .into_iter()
        .map(|(path, text)| (path.to_string_lossy().into_owned(), text))
        .filter(|(path, _)| READERS_OF_OTHERS.iter().any(|crate_| path.starts_with(crate_)) && path.ends_with(".rs"))
        .filter(|(path, text)| !is_test(path) && reads(text))
        .map(|(path, _)| path)
        .collect();
    assert_eq!(
        found, READERS_OF_OWN_JSON,
        "read JSON of others with `strict_json`; what is stored here belongs in the table"
    );
}

/// The files of what runs on nodes that start programs, and how many they start: programs that run as long as the agent does or have a
/// protocol with deadlines of its own, and the two ways to run a program to its end.
const STARTS_OF_PROGRAMS: [(&str, usize); 7] = [
    ("agent/package/src/update/installed_machine.rs", 1),
    ("agent/src/bounded_tool.rs", 2),
    ("agent/src/gpu_probe.rs", 1),
    ("agent/src/log_collector/journald.rs", 1),
    ("agent/src/ssh.rs", 1),
    ("agent/src/terminal.rs", 1),
    ("agent/src/terminal/session_handover/holder.rs", 2),
];

#[test]
fn program_on_a_node_is_run_with_a_deadline_and_bounded_output() {
    let is_test = |path: &str| ["/tests/", "/tests.rs", "_tests.rs"].iter().any(|part| path.contains(part));
    let starts = |text: &str| {
        let code = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
        code.matches("Command::new(").count()
    };
    let found: Vec<(String, usize)> = sources()
        .into_iter()
        .map(|(path, text)| (path.to_string_lossy().into_owned(), starts(&text)))
        .filter(|(path, starts)| *starts > 0 && path.starts_with("agent/") && path.ends_with(".rs") && !is_test(path))
        .collect();
    let expected: Vec<_> = STARTS_OF_PROGRAMS.map(|(path, starts)| (path.to_owned(), starts)).into();
    assert_eq!(found, expected, "run a program of the machine by `bounded_tool::Tool`, which ends at a deadline");
}

/// Whether the text has a test function of this name.
fn is_test(text: &str, function: &str) -> bool {
    let Some(at) = text.find(&format!("fn {function}(")) else { return false };
    // Between the end of the previous item and the function.
    let above = text[..at].rsplit("}\n").next().unwrap_or_default();
    above.contains("#[test]") || above.contains("#[tokio::test")
}

/// Every text file that git tracks or would add, by its path in the workspace.
pub(crate) fn sources() -> Vec<(PathBuf, String)> {
    let ran = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(root())
        .output()
        .expect("git runs");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let listed = String::from_utf8(ran.stdout).expect("paths are text");
    let paths = listed.split('\0').filter(|path| !path.is_empty() && *path != "Cargo.lock").map(PathBuf::from);
    let read = paths.filter_map(|path| {
        // Files that were removed and not yet committed are listed too; binary files are skipped.
        let text = std::fs::read_to_string(root().join(&path)).ok()?;
        Some((path, text))
    });
    let all: Vec<_> = read.collect();
    assert!(all.len() > 100, "only {} files were found", all.len());
    all
}
