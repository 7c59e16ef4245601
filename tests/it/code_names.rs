//! Names of code on the pages for those who change it: files, modules, types and functions in code font exist; and a table of modules in a
//! source lists all of them, as does the documentation of a folder of many.

use crate::tidy::sources;
use regex::Regex;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::LazyLock;

/// The folders of the book whose pages name code, and the pages at the root that do.
const FOLDERS: [&str; 2] = ["deploy/docs/src/contribute/", "deploy/docs/src/internals/"];
const ROOT_PAGES: [&str; 2] = ["ARCHITECTURE.md", "CONTRIBUTING.md"];

/// Folders at the root: a path in code font that begins with one is a path of the repository.
const ROOT_FOLDERS: [&str; 8] =
    ["actors/", "agent/", "deploy/", "edge/", "migrations/", "persistence/", "supervisors/", "tests/"];

/// Paths that begin with such a folder and are of another tree: a file of a release.
const OF_OTHER_TREES: [&str; 1] = ["agent/digest"];

/// What pages can name.
struct Code {
    paths: Vec<String>,
    rust: Vec<(String, String)>,
    /// Crates of others: their names are not checked.
    foreign: BTreeSet<String>,
}

impl Code {
    fn of(files: impl IntoIterator<Item = (String, String)>) -> Self {
        let (mut paths, mut rust, mut foreign) = (Vec::new(), Vec::new(), BTreeSet::from(["std".to_owned()]));
        for (path, text) in files {
            if path == "Cargo.toml" {
                let of_others = text.lines().filter(|line| !line.contains("path = "));
                foreign.extend(of_others.filter_map(|line| Some(line.split_once(" = ")?.0.replace('-', "_"))));
            }
            if path.ends_with(".rs") {
                rust.push((path.clone(), text));
            }
            paths.push(path);
        }
        Self { paths, rust, foreign }
    }

    /// The names in a text in code font that do not exist.
    fn unknown_names(&self, text: &str) -> Vec<String> {
        let is_path = text.chars().all(|sign| sign.is_alphanumeric() || "./_-".contains(sign));
        let is_source = text.ends_with(".rs") || text.ends_with(".sql");
        if OF_OTHER_TREES.contains(&text) {
            return Vec::new();
        }
        if is_path && (is_source || ROOT_FOLDERS.iter().any(|folder| text.starts_with(folder))) {
            return if self.has_path(text) { Vec::new() } else { vec![text.to_owned()] };
        }
        let path = Regex::new(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)+…?").unwrap();
        let mut unknown = Vec::new();
        for found in path.find_iter(text) {
            let names: Vec<&str> = found.as_str().split("::").collect();
            if self.foreign.contains(names[0]) {
                continue;
            }
            let is_known = names.windows(2).all(|pair| self.has_name(pair[0], pair[1]));
            unknown.extend((!is_known).then(|| found.as_str().to_owned()));
        }
        unknown
    }

    /// Whether a file or a folder has this path, or ends in it; the number of a decision stands for its page.
    fn has_path(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        self.paths.iter().any(|it| {
            let begins = it.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '-']));
            begins || it.strip_suffix(path).is_some_and(|rest| rest.ends_with('/'))
        })
    }

    /// Whether a module, a crate or a type has this item. An ellipsis at its end stands for the rest of its name.
    fn has_name(&self, parent: &str, name: &str) -> bool {
        let (name, end) = name.strip_suffix('…').map_or((name, r"\b"), |name| (name, ""));
        let items = r"(?:fn|struct|enum|trait|type|const|static|mod|union|macro_rules!)";
        let is_type = parent.starts_with(|first: char| first.is_ascii_uppercase());
        let declared = if is_type {
            // A function, or a variant at the beginning of its line.
            Regex::new(&format!(r"(?m)\b(?:fn|const|type) {name}{end}|^\s*{name}\b\s*(?:[,(\{{=]|$)")).unwrap()
        } else {
            Regex::new(&format!(r"\b{items} {name}{end}|\bpub(?:\([a-z]+\))? use [^;]*\b{name}\b")).unwrap()
        };
        let file = format!("/{parent}.rs");
        let folders = [format!("/{parent}/"), format!("{parent}/src/")];
        self.rust.iter().any(|(path, text)| {
            if is_type {
                return text.contains(parent) && declared.is_match(text);
            }
            let path = format!("/{path}");
            let is_of_parent = path.ends_with(&file) || folders.iter().any(|folder| path.contains(folder.as_str()));
            let is_module = folders.iter().any(|folder| path.contains(&format!("{folder}{name}.rs")));
            is_module || (is_of_parent && declared.is_match(text))
        }) && (!is_type || self.declares_type(parent))
    }

    fn declares_type(&self, name: &str) -> bool {
        let declared = Regex::new(&format!(r"\b(?:struct|enum|trait|type|union) {name}\b")).unwrap();
        self.rust.iter().any(|(_, text)| text.contains(name) && declared.is_match(text))
    }
}

/// What stands in code font on a page, outside of blocks of code.
fn in_code_font(page: &str) -> Vec<String> {
    let prose: String = page.split("```").step_by(2).collect();
    let texts = prose.split("\n\n").flat_map(|part| part.split('`').skip(1).step_by(2).map(str::to_owned));
    texts.collect()
}

#[test]
fn every_name_of_code_on_a_page_exists() {
    let files: Vec<(String, String)> =
        sources().into_iter().map(|(path, text)| (path.to_string_lossy().into_owned(), text)).collect();
    let is_page = |path: &str| {
        ROOT_PAGES.contains(&path) || (FOLDERS.iter().any(|folder| path.starts_with(folder)) && path.ends_with(".md"))
    };
    let pages: Vec<(String, String)> = files.iter().filter(|(path, _)| is_page(path)).cloned().collect();
    let code = Code::of(files);
    let (mut checked, mut unknown) = (0, Vec::new());
    for (page, text) in &pages {
        for name in in_code_font(text) {
            checked += 1;
            unknown.extend(code.unknown_names(&name).into_iter().map(|name| format!("{page}: {name}")));
        }
    }
    assert!(checked > 500, "only {checked} texts in code font were found");
    assert!(unknown.is_empty(), "pages name what does not exist:\n{}", unknown.join("\n"));
}

#[test]
fn names_of_code_that_do_not_exist_are_found() {
    let files = [
        ("Cargo.toml", "[workspace.dependencies]\nours = { path = \"ours\" }\nserde-json = \"1\"\n"),
        (
            "actors/src/state_machine.rs",
            "pub use command::{AnyCommand, Command};\npub enum Rejection {\n    Full,\n}\n",
        ),
        ("actors/src/state_machine/command.rs", "impl Rejection {\n    pub fn explain() {}\n}\n"),
        ("deploy/decisions/0051-why.md", ""),
    ];
    let code = Code::of(files.map(|(path, text)| (path.to_owned(), text.to_owned())));
    for known in [
        "actors/src/state_machine.rs",
        "state_machine/command.rs",
        "actors/src/",
        "deploy/decisions/0051",
        "state_machine::Rejection",
        "state_machine::AnyCommand<Request>",
        "Rejection::Full",
        "f(state_machine::Rejection::expl…)",
        "serde_json::Value",
        "cargo test",
    ] {
        assert_eq!(code.unknown_names(known), [""; 0], "{known}");
    }
    for unknown in
        ["actors/src/machine.rs", "other.rs", "edge/src", "machine::Rejection", "Rejection::Empty", "Phase::Full"]
    {
        assert_eq!(code.unknown_names(unknown), [unknown], "{unknown}");
    }
    assert_eq!(in_code_font("a `b::C` d\n\n```sh\nx `y`\n```\n\n`e`"), ["b::C", "e"]);
}

/// The documentation of a file with more modules than these names each of them.
const MODULES_WITHOUT_LIST: usize = 9;

/// The modules that a source declares, but those for tests; and those of the rows of its table, where it has one.
fn modules_and_rows(text: &str) -> (BTreeSet<String>, Option<BTreeSet<String>>) {
    static MODULE: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"(?m)^(#\[cfg\(test\)\]\n(?:#\[.*\n)*)?(?:pub(?:\([a-z]+\))? )?mod (\w+);").unwrap()
    });
    static ROW: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"(?m)^//! \| (.+?) \|").unwrap());
    static NAME: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"`(\w+)`").unwrap());
    let modules = MODULE.captures_iter(text).filter(|it| it.get(1).is_none()).map(|it| it[2].to_owned()).collect();
    let table = text.split_once("\n//! | module |").map(|(_, rows)| {
        let cells = ROW.captures_iter(rows).map(|it| it[1].to_owned()).collect::<String>();
        NAME.captures_iter(&cells).map(|it| it[1].to_owned()).collect()
    });
    (modules, table)
}

/// Whether a source has tests alone, whose names say enough.
fn is_of_tests(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem == "tests")
        || path.iter().skip(1).any(|part| part == "tests" || part == "it")
}

#[test]
fn table_of_modules_lists_all_of_them() {
    for (path, text) in sources().into_iter().filter(|(path, _)| path.extension().is_some_and(|it| it == "rs")) {
        let (modules, table) = modules_and_rows(&text);
        if let Some(rows) = table {
            assert_eq!(rows, modules, "{}", path.display());
        } else if modules.len() > MODULES_WITHOUT_LIST && !is_of_tests(&path) {
            let documentation: String = text.lines().filter(|line| line.starts_with("//!")).collect();
            let unnamed = modules.iter().filter(|module| !documentation.contains(&format!("`{module}`")));
            let unnamed: Vec<_> = unnamed.collect();
            assert!(unnamed.is_empty(), "the documentation of {} does not name {unnamed:?}", path.display());
        }
    }
    let source = "//! A crate.\n//!\n//! | module | what |\n//! | --- | --- |\n//! | [`a`], `b` | `c` |\n\n\
                  pub mod a;\nmod b;\n#[cfg(test)]\n#[allow(dead_code)]\nmod tests;\n";
    let names = BTreeSet::from(["a".to_owned(), "b".to_owned()]);
    assert_eq!(modules_and_rows(source), (names.clone(), Some(names)));
}
