//! Which module of a crate uses which other one: no circles, and no arrow from a lower floor to an upper one.
//!
//! The sources are read as text: `crate::` and `super::` paths, resolved through the re-exports of `lib.rs`, and calls of methods (see
//! [`calls`]). Test modules are not read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::LazyLock;

/// A crate's source folder and its rules.
struct Rules {
    folder: &'static str,
    /// Top-level modules whose modules are the units, the lowest first. Without floors the top-level modules are the units.
    floors: &'static [&'static str],
    /// Floors whose modules do not use each other at all.
    apart: &'static [&'static str],
    /// Arrows that close circles, without which there is none.
    back: &'static [(&'static str, &'static str)],
}

impl Rules {
    /// A crate whose top-level modules form no circle.
    const fn of(folder: &'static str) -> Self {
        Self { folder, floors: &[], apart: &[], back: &[] }
    }
}

const FLOORS: &[&str] = &["kernel", "entities", "cross_entity"];

const CRATES: [Rules; 7] = [
    Rules { floors: FLOORS, apart: &["entities"], ..Rules::of("actors/domain/src") },
    Rules { back: &[("entity_host", "entity")], ..Rules::of("actors/src") },
    Rules::of("agent/src"),
    Rules::of("edge/cli/src"),
    Rules::of("edge/src"),
    Rules::of("persistence/src"),
    Rules::of("supervisors/src"),
];

/// The arrows from unit to unit, each with the places that draw it: file and path.
type Arrows = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

#[test]
fn modules_of_a_crate_have_floors_and_no_circles() {
    let found: Vec<String> = CRATES.iter().flat_map(|rules| violations(rules, &sources(rules.folder))).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

const ENTITIES: &str = "actors/domain/src/entities";

/// The sources of the service, and those of the programs outside of it, which know nothing of each other: what both call is of neither.
const SERVICE: [&str; 2] = ["actors/domain/src", "persistence/src"];
const OUTSIDE: [&str; 2] = ["agent/src", "edge/cli/src"];

/// Other methods of libraries that functions of ours are called like.
const OF_LIBRARIES: [&str; 6] = ["as_fd", "condition", "help", "intersection", "read_until", "reload"];

/// The parts of a node: their files do not name the node, nor each other's part.
const PARTS: [(&str, &str); 9] = [
    ("identity", "Identity"),
    ("lifecycle", "Lifecycle"),
    ("tenancy", "Tenancy"),
    ("tasks", "Tasks"),
    ("health", "Health"),
    ("repair", "MachineRepair"),
    ("validation", "Validation"),
    ("machine", "NodeMachine"),
    ("agent", "Agent"),
];

#[test]
fn files_of_an_entity_form_no_circle() {
    let all = sources(ENTITIES);
    let mut found = String::new();
    let entity_files = all.iter().filter(|(file, _)| !file.contains('/'));
    for (entity, own) in entity_files.map(|(file, text)| (file.trim_end_matches(".rs"), text)) {
        let below = |(file, text): (&String, &String)| {
            Some((file.strip_prefix(entity)?.strip_prefix('/')?.to_owned(), text.clone()))
        };
        let arrows = file_arrows(entity, &all.iter().filter_map(below).collect(), own);
        if let Some(circle) = circle(&arrows) {
            let steps = circle.iter().zip(circle.iter().cycle().skip(1));
            write!(found, "\n{entity}:{}", steps.map(|(from, to)| lines(&arrows[from][to])).collect::<String>())
                .unwrap();
        }
    }
    assert!(found.is_empty(), "circles:{found}");
}

#[test]
fn parts_of_the_node_know_neither_it_nor_each_other() {
    let files = sources(&format!("{ENTITIES}/node"));
    for (file, text) in &files {
        let unit = module(file)[0].clone();
        let code = production_code(text);
        let is_known = |name: &str| identifiers(&code).any(|word| word == name);
        let Some((_, own)) = PARTS.iter().find(|(part, _)| *part == unit) else { continue };
        assert!(!is_known("Node"), "{file} names the node");
        for (part, name) in PARTS.iter().filter(|(_, name)| name != own) {
            let imports = used_paths(&["node".to_owned()].into_iter().chain(module(file)).collect::<Vec<_>>(), &code);
            let of_node = |path: &Vec<String>| matches!(&path[..], [.., last] if last == name) && is_of_node(path);
            assert!(!imports.iter().any(of_node), "{file} names the part {part}");
        }
    }
}

#[test]
fn circles_of_calls_are_found() {
    let entity = "mod a;\nmod b;\npub use a::{A, Thing};\nuse b::B;\n";
    let found = |a: &str, b: &str| {
        let files = [("a.rs", a), ("b.rs", b), ("b/c.rs", "")];
        let files = files.map(|(path, text)| (path.to_owned(), text.to_owned())).into_iter().collect();
        circle(&file_arrows("it", &files, entity)).map(|circle| circle.join(" "))
    };
    let calls = "impl It {\n    pub(super) fn low(&self) {\n        self.high()\n    }\n}\n";
    let called = "impl It {\n    pub(super) fn high(&self) {}\n}\n";
    assert_eq!(found(calls, called), None);
    assert_eq!(found(calls, &called.replace("{}", "{ self.low() }")), Some("a b".to_owned()), "by methods");
    assert_eq!(found(calls, "use super::Thing;\nimpl It {\n    fn high(&self) {}\n}\n"), Some("a b".to_owned()));
    assert_eq!(found(calls, "use super::It;\nimpl It {\n    fn high(&self) {}\n}\n"), None, "the entity itself");
    let same = "impl It {\n    fn same(&self) {\n        self.it.same()\n    }\n}\n";
    assert_eq!(found(same, same), None, "which one is called is not known");
    let of_field = |field: &str| same.replace("self.it", &format!("self.{field}"));
    assert_eq!(found(&of_field("b"), &of_field("a")), Some("a b".to_owned()), "a field names the file of its part");
}

#[test]
fn violations_are_found() {
    let lib = "mod low;\nmod top;\npub use low::{a, b};\npub use top::{x, y};\npub use x::Thing;\n";
    let base = [("lib.rs", lib), ("low.rs", "pub mod a;\npub mod b;\n"), ("top.rs", "pub mod x;\npub mod y;\n")];
    let empty = ["low/a.rs", "low/b.rs", "top/x.rs", "top/y.rs"].map(|path| (path, ""));
    let found = |more: &[(&str, &str)]| {
        let files = base.iter().chain(&empty).chain(more).map(|(path, text)| ((*path).to_owned(), (*text).to_owned()));
        let rules = Rules { floors: &["low", "top"], apart: &["top"], ..Rules::of("") };
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
    let method =
        |name: &str, calls: &str| format!("impl It {{\n    fn {name}(&self) {{\n        it.{calls}()\n    }}\n}}\n");
    let circle = found(&[("low/a.rs", &method("zig", "zag")), ("low/b.rs", &method("zag", "zig"))]);
    assert_eq!(circle, ["a circle:\n  low/a.rs calls zag of low::b\n  low/b.rs calls zig of low::a"]);
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
    let mut arrows = arrows(rules, files);
    for (from, to) in rules.back {
        let back = arrows.get_mut(*from).and_then(|tos| tos.remove(*to));
        assert!(back.is_some(), "{}: nothing leads from {from} to {to}", rules.folder);
    }
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
        path.get(..depth).map(|unit| unit.join("::"))
    };
    let tests: Vec<Vec<String>> = files.iter().flat_map(|(file, text)| test_modules(&modules[file], text)).collect();
    let is_test = |path: &[String]| tests.iter().any(|test| path.starts_with(test));
    let code: Vec<(&String, String, String)> = files
        .iter()
        .filter(|(file, _)| !is_test(&modules[file]))
        .filter_map(|(file, text)| Some((file, unit(&modules[file])?, production_code(text))))
        .collect();
    let units: BTreeSet<&String> = code.iter().map(|(_, unit, _)| unit).collect();
    let root = files.get("lib.rs").or_else(|| files.get("main.rs"));
    let exports = exports(root.expect("the crate has a root"));
    let mut arrows = calls(&code, &functions_of_others(rules.folder));
    for (file, from, code) in &code {
        let places = arrows.entry(from.clone()).or_default();
        for used in used_paths(&modules[file], code) {
            let written = used.join("::");
            if let Some(to) = unit(&resolved(used, &exports)).filter(|to| to != from && units.contains(to)) {
                places.entry(to).or_default().insert(format!("{file} uses crate::{written}"));
            }
        }
    }
    arrows
}

fn is_of_node(path: &[String]) -> bool {
    path.first().is_some_and(|first| first == "node") || path.starts_with(&["entities", "node"].map(str::to_owned))
}

fn identifiers(code: &str) -> impl DoubleEndedIterator<Item = &str> {
    code.split(|next: char| !next.is_alphanumeric() && next != '_')
}

/// The arrows between the files of an entity: by paths, through what its own file re-exports, and by calls of methods. A file's folder belongs
/// to it. The entity's own file is no unit: all others are written for it.
fn file_arrows(entity: &str, files: &BTreeMap<String, String>, entity_file: &str) -> Arrows {
    let code: Vec<(&String, String, String)> = files
        .iter()
        .map(|(file, text)| (file, module(file)[0].clone(), production_code(text)))
        .filter(|(_, unit, _)| unit != "tests")
        .collect();
    let units: BTreeSet<&String> = code.iter().map(|(_, unit, _)| unit).collect();
    let imports = production_code(entity_file);
    let statements = imports.split("use ").skip(1).filter_map(|rest| rest.split_once(';'));
    let paths = statements.flat_map(|(statement, _)| expanded(statement));
    let exports: BTreeMap<String, String> = paths
        .filter(|path| path.first().is_some_and(|first| units.contains(first)))
        .filter_map(|path| Some((path.last()?.clone(), path[0].clone())))
        .collect();
    let mut arrows = calls(&code, &functions_of_others("actors/domain/src"));
    for (file, from, code) in &code {
        let places = arrows.entry(from.clone()).or_default();
        let here: Vec<String> = [entity.to_owned()].into_iter().chain(module(file)).collect();
        for path in used_paths(&here, code) {
            let within = match &path[..] {
                [first, name, ..] if first == entity => name,
                [first, second, name, ..] if first == "entities" && second == entity => name,
                _ => continue,
            };
            let to = exports.get(within).unwrap_or(within);
            if to != from && units.contains(to) {
                places.entry(to.clone()).or_default().insert(format!("{file} uses {}", path.join("::")));
            }
        }
    }
    arrows
}

/// The arrows by calls of methods and associated functions, between the units of files.
///
/// A call `.name(` or `Self::name(` leads to the one unit that defines a function of this name; where several do, to the unit that has the
/// name of the field it is called on, or else nowhere. What is called in sources of others, too, is none of these functions.
fn calls(code: &[(&String, String, String)], of_others: &BTreeSet<&str>) -> Arrows {
    let mut defined: BTreeMap<&str, BTreeSet<&String>> = BTreeMap::new();
    for (_, unit, code) in code {
        for name in functions(code).filter(|name| !of_others.contains(name)) {
            defined.entry(name).or_default().insert(unit);
        }
    }
    let mut arrows = Arrows::new();
    for (file, from, code) in code {
        for (at, name) in called(code) {
            let Some(definers) = defined.get(name) else { continue };
            let field = identifiers(&code[..at]).next_back().unwrap_or_default();
            let of_field = || definers.iter().find(|unit| unit.rsplit("::").next() == Some(field));
            let only = definers.first().filter(|_| definers.len() == 1);
            if let Some(to) = only.or_else(of_field).filter(|to| **to != from) {
                let places = arrows.entry(from.clone()).or_default().entry((*to).clone()).or_default();
                places.insert(format!("{file} calls {name} of {to}"));
            }
        }
    }
    arrows
}

/// A crate's folder, the functions that it defines, and those that it calls.
type CrateFunctions = (&'static str, [BTreeSet<String>; 2]);

/// Those of each crate.
static FUNCTIONS: LazyLock<Vec<CrateFunctions>> = LazyLock::new(|| {
    let of = |rules: &Rules| {
        let code = sources(rules.folder).values().map(|text| production_code(text)).collect::<String>();
        let called = called(&code).map(|(_, name)| name.to_owned()).collect();
        (rules.folder, [functions(&code).map(str::to_owned).collect(), called])
    };
    CRATES.iter().map(of).collect()
});

/// The functions of other crates, and those that are called in sources which know nothing of this one: namesakes of this crate's functions, and
/// methods of libraries.
fn functions_of_others(folder: &str) -> BTreeSet<&'static str> {
    let strangers = if OUTSIDE.contains(&folder) { &SERVICE[..] } else { &OUTSIDE[..] };
    let others = FUNCTIONS.iter().filter(|(other, _)| *other != folder);
    let names = others.flat_map(|(other, [defined, called])| {
        defined.iter().chain(called.iter().filter(|_| strangers.contains(other)))
    });
    names.map(String::as_str).chain(OF_LIBRARIES).collect()
}

/// The associated functions that are defined in the code: they are indented.
fn functions(code: &str) -> impl Iterator<Item = &str> {
    let indented = code.lines().filter(|line| line.starts_with(' '));
    indented.filter_map(|line| identifiers(line.split_once("fn ")?.1).next())
}

/// The names of the methods and associated functions that are called, each with the place of the dot or the colons before it.
fn called(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let at = |prefix: &'static str| code.match_indices(prefix).map(move |(at, _)| (at, &code[at + prefix.len()..]));
    at(".").chain(at("Self::")).filter_map(|(at, rest)| {
        let end = rest.find(|next: char| !next.is_alphanumeric() && next != '_')?;
        (rest[end..].starts_with('(') && end > 0).then_some((at, &rest[..end]))
    })
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

/// The names that the crate's root imports or re-exports, with the paths that they stand for.
fn exports(root: &str) -> BTreeMap<String, Vec<String>> {
    let code = production_code(root);
    let statements = code.split("use ").skip(1).filter_map(|rest| rest.split_once(';'));
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
