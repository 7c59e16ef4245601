//! Which module of a crate uses which other one: no circles, and no arrow from a lower floor to an upper one.
//!
//! The sources are read as text: `crate::` and `super::` paths, resolved through the re-exports of `lib.rs`. Test modules are not read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

/// A crate's source folder and its rules.
struct Rules {
    folder: &'static str,
    /// Top-level modules whose modules are the units, the lowest first. Without floors the top-level modules are the units.
    floors: &'static [&'static str],
    /// Floors whose modules do not use each other at all.
    apart: &'static [&'static str],
}

const DOMAIN: Rules =
    Rules { folder: "actors/domain/src", floors: &["kernel", "entities", "cross_entity"], apart: &["entities"] };

/// The arrows from unit to unit, each with the places that draw it: file and path.
type Arrows = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// The crates whose top-level modules form no circle.
const WITHOUT_FLOORS: [&str; 2] = ["edge/src", "supervisors/src"];

#[test]
fn modules_of_other_crates_form_no_circles() {
    for folder in WITHOUT_FLOORS {
        let violations = violations(&Rules { folder, floors: &[], apart: &[] }, &sources(folder));
        assert!(violations.is_empty(), "{folder}:\n{}", violations.join("\n"));
    }
}

#[test]
fn modules_of_domain_have_floors_and_no_circles() {
    let violations = violations(&DOMAIN, &sources(DOMAIN.folder));
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn violations_are_found() {
    let lib = "mod low;\nmod top;\npub use low::{a, b};\npub use top::{x, y};\npub use x::Thing;\n";
    let base = [("lib.rs", lib), ("low.rs", "pub mod a;\npub mod b;\n"), ("top.rs", "pub mod x;\npub mod y;\n")];
    let empty = ["low/a.rs", "low/b.rs", "top/x.rs", "top/y.rs"].map(|path| (path, ""));
    let found = |more: &[(&str, &str)]| {
        let files = base.iter().chain(&empty).chain(more).map(|(path, text)| ((*path).to_owned(), (*text).to_owned()));
        let rules = Rules { folder: "", floors: &["low", "top"], apart: &["top"] };
        violations(&rules, &files.collect())
    };
    let clean = "use crate::b::B;\n/// See crate::x::X.\n#[cfg(test)]\nmod tests {\n    use crate::x::X;\n}\n";
    assert_eq!(found(&[("low/a.rs", clean), ("top/x.rs", "use crate::{a::A, b::B};")]), [""; 0]);
    let test_file = ("low/a/checks.rs", "use crate::x::X;");
    assert_eq!(found(&[("low/a.rs", "#[cfg(test)]\nmod checks;\n"), test_file]), [""; 0]);
    assert_eq!(found(&[("low/a.rs", "use crate::x::X;")]).len(), 1, "an arrow upwards");
    assert_eq!(found(&[("low/a.rs", "use crate::{b::{B, C}, x::X};")]).len(), 1, "an arrow upwards, in a group");
    assert_eq!(found(&[("low/a.rs", "use crate::Thing;")]).len(), 1, "an arrow upwards, through a re-export");
    assert_eq!(found(&[("low/a/c.rs", "use super::super::super::top::x::X;")]).len(), 1, "an arrow upwards, by super");
    assert_eq!(found(&[("top/y.rs", "use crate::x::X;")]).len(), 1, "an arrow in a floor whose modules stay apart");
    let circle = found(&[("low/a.rs", "use crate::b::B;"), ("low/b.rs", "fn f() { crate::a::f() }")]);
    assert_eq!(circle, ["a circle:\n  low/a.rs uses crate::b::B\n  low/b.rs uses crate::a::f"]);
}

/// The sources of a folder, by their paths in it.
fn sources(folder: &str) -> BTreeMap<String, String> {
    fn add(root: &Path, folder: &Path, all: &mut BTreeMap<String, String>) {
        for entry in std::fs::read_dir(folder).expect("the folder is there") {
            let path = entry.expect("an entry is read").path();
            if path.is_dir() {
                add(root, &path, all);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root).expect("it is below").display().to_string();
                all.insert(name, std::fs::read_to_string(&path).expect("a source is text"));
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find(|path| path.join("Cargo.lock").exists());
    let root = root.expect("the workspace has a Cargo.lock").join(folder);
    let mut all = BTreeMap::new();
    add(&root, &root, &mut all);
    all
}

fn violations(rules: &Rules, files: &BTreeMap<String, String>) -> Vec<String> {
    let arrows = arrows(rules, files);
    let floor = |unit: &str| rules.floors.iter().position(|floor| unit.split("::").next() == Some(floor));
    let mut found = Vec::new();
    for (from, to, places) in arrows.iter().flat_map(|(from, tos)| tos.iter().map(move |(to, at)| (from, to, at))) {
        let (lower, upper) = (floor(from), floor(to));
        let is_apart = lower == upper && lower.is_some_and(|floor| rules.apart.contains(&rules.floors[floor]));
        if lower < upper && lower.is_some() {
            found.push(format!("an arrow upwards, from {from} to {to}:{}", lines(places)));
        } else if is_apart {
            found.push(format!("an arrow between modules that stay apart, from {from} to {to}:{}", lines(places)));
        }
    }
    if found.is_empty()
        && let Some(circle) = circle(&arrows)
    {
        let steps = circle.iter().zip(circle.iter().cycle().skip(1));
        found.push(format!("a circle:{}", steps.map(|(from, to)| lines(&arrows[from][to])).collect::<String>()));
    }
    found
}

fn lines(places: &BTreeSet<String>) -> String {
    places.iter().fold(String::new(), |mut text, place| {
        write!(text, "\n  {place}").expect("a string takes it");
        text
    })
}

/// One circle, where there is one. Units that no circle can contain are removed until nothing changes.
fn circle(arrows: &Arrows) -> Option<Vec<String>> {
    let mut left: BTreeSet<&String> = arrows.keys().collect();
    loop {
        let stays = |unit: &&String| arrows[*unit].keys().any(|to| left.contains(to));
        let next: BTreeSet<&String> = left.iter().copied().filter(stays).collect();
        if next.len() == left.len() {
            break;
        }
        left = next;
    }
    // Each unit that is left leads to another one, so a walk returns to where it was.
    let mut walk = vec![(*left.first()?).clone()];
    loop {
        let next = arrows[walk.last()?].keys().find(|to| left.contains(to))?;
        if let Some(begin) = walk.iter().position(|unit| unit == next) {
            return Some(walk.split_off(begin));
        }
        walk.push(next.clone());
    }
}

fn arrows(rules: &Rules, files: &BTreeMap<String, String>) -> Arrows {
    let modules: BTreeMap<&String, Vec<String>> = files.keys().map(|file| (file, module(file))).collect();
    let unit = |path: &[String]| {
        let depth = if path.first().is_some_and(|first| rules.floors.contains(&first.as_str())) { 2 } else { 1 };
        path.get(..depth).map(<[String]>::to_vec)
    };
    let units: BTreeSet<Vec<String>> = modules.values().filter_map(|path| unit(path)).collect();
    let tests: Vec<Vec<String>> = files.iter().flat_map(|(file, text)| test_modules(&modules[file], text)).collect();
    let exports = exports(files.get("lib.rs").expect("the crate has a lib.rs"));
    let mut arrows = Arrows::new();
    for (file, text) in files {
        let path = &modules[file];
        let Some(from) = unit(path).filter(|_| !tests.iter().any(|test| path.starts_with(test))) else {
            continue;
        };
        let places = arrows.entry(from.join("::")).or_default();
        for used in used_paths(path, &production_code(text)) {
            let written = used.join("::");
            if let Some(to) = unit(&resolved(used, &exports)).filter(|to| *to != from && units.contains(to)) {
                places.entry(to.join("::")).or_default().insert(format!("{file} uses crate::{written}"));
            }
        }
    }
    arrows
}

/// The module of a file: `a/b.rs` is `a::b`. The crate's root is the empty path.
fn module(file: &str) -> Vec<String> {
    let path = file.trim_end_matches(".rs").trim_end_matches("/mod");
    if matches!(path, "lib" | "main") { Vec::new() } else { path.split('/').map(str::to_owned).collect() }
}

/// The modules with files of their own that are compiled for tests alone.
fn test_modules(parent: &[String], text: &str) -> Vec<Vec<String>> {
    let after = text.split("#[cfg(test)]").skip(1).filter_map(|rest| rest.split_once("mod ")?.1.split_once([';', '{']));
    let name = |(name, _): (&str, &str)| [parent, &[name.trim().to_owned()]].concat();
    after.map(name).collect()
}

/// The names that `lib.rs` re-exports, with the paths that they stand for.
fn exports(lib: &str) -> BTreeMap<String, Vec<String>> {
    let lines = production_code(lib);
    let statements = lines.split("pub use ").skip(1).filter_map(|rest| rest.split_once(';'));
    let paths = statements.flat_map(|(statement, _)| expanded(statement));
    paths.filter_map(|path| Some((path.last()?.clone(), path))).collect()
}

/// The path with the re-exports of `lib.rs` replaced by what they stand for.
fn resolved(mut path: Vec<String>, exports: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    // A re-export may name another one; a name that stands for itself ends the search.
    for _ in 0..exports.len() {
        match path.first().and_then(|first| exports.get(first)) {
            Some(target) if target.len() > 1 => path = [target, &path[1..]].concat(),
            _ => break,
        }
    }
    path
}

/// The text without comments and without test modules in it.
fn production_code(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let trimmed = line.trim_start();
        if trimmed.starts_with("#[cfg(test)]") {
            let indent = &line[..line.len() - trimmed.len()];
            let opens = lines.find(|line| !line.trim_start().starts_with("#["));
            if opens.is_some_and(|opens| opens.ends_with('{')) {
                let end = format!("{indent}}}");
                let _ = lines.find(|line| *line == end);
            }
        } else if !trimmed.starts_with("//") {
            code.push_str(line.split(" // ").next().unwrap_or(line));
            code.push('\n');
        }
    }
    code
}

/// The paths in the code that begin with `crate::` or `super::`, from the crate's root.
fn used_paths(module: &[String], code: &str) -> Vec<Vec<String>> {
    let is_name = |before: &str| before.ends_with(|last: char| last.is_alphanumeric() || matches!(last, '_' | ':'));
    let at = |prefix: &'static str| code.match_indices(prefix).filter(|(at, _)| !is_name(&code[..*at]));
    let from_root = at("crate::").flat_map(|(at, prefix)| expanded(&code[at + prefix.len()..]));
    let from_here = at("super::").flat_map(|(at, prefix)| {
        let mut rest = &code[at..];
        let mut base = module;
        while let Some(inner) = rest.strip_prefix(prefix) {
            (rest, base) = (inner, &base[..base.len().saturating_sub(1)]);
        }
        expanded(rest).into_iter().map(move |path| [base, &path].concat())
    });
    from_root.chain(from_here).collect()
}

/// The paths of a tree, as `a::{b, c::D}` at the start of the text.
fn expanded(text: &str) -> Vec<Vec<String>> {
    /// Reads one tree and returns the rest of the text.
    fn tree<'a>(mut text: &'a str, mut base: Vec<String>, paths: &mut Vec<Vec<String>>) -> &'a str {
        loop {
            text = text.trim_start();
            if let Some(mut inner) = text.strip_prefix('{') {
                loop {
                    inner = inner.trim_start();
                    if let Some(rest) = inner.strip_prefix('}') {
                        return rest;
                    }
                    let rest = tree(inner, base.clone(), paths);
                    if rest.len() == inner.len() {
                        return rest;
                    }
                    inner = rest.trim_start().trim_start_matches(',');
                }
            }
            let length = text.find(|next: char| !next.is_alphanumeric() && next != '_').unwrap_or(text.len());
            let (name, rest) = text.split_at(length);
            if !name.is_empty() && name != "self" {
                base.push(name.to_owned());
            }
            match rest.strip_prefix("::") {
                Some(inner) => text = inner,
                None => {
                    paths.push(base);
                    // `as name` and `*` belong to the leaf.
                    let end = rest.find([',', '}', ';', '\n', '(', ')']).unwrap_or(rest.len());
                    return &rest[end..];
                }
            }
        }
    }
    let mut paths = Vec::new();
    tree(text, Vec::new(), &mut paths);
    paths
}
