//! Citations in comments lead to a section, a page or a name that exists (`deploy/docs/src/contribute/citations.md`).

use crate::tidy::{root, sources};
use std::collections::BTreeSet;

/// What comments can cite.
struct Sources {
    /// The sections of the promises, from their number on.
    promises: Vec<String>,
    /// The sections of the design, from their number on.
    design: Vec<String>,
    /// The numbers of the pages of `deploy/decisions`, of four digits.
    decisions: BTreeSet<String>,
    /// The parts of the specification.
    parts: BTreeSet<String>,
}

impl Sources {
    fn of_repository() -> Self {
        let read =
            |path: &str| std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        let sections = |path: &str| read(path).split("\n## ").skip(1).map(str::to_owned).collect();
        let pages = std::fs::read_dir(root().join("deploy/decisions")).expect("the folder exists");
        let names = pages.map(|page| page.expect("the folder is readable").file_name().to_string_lossy().into_owned());
        let page = read("deploy/docs/src/contribute/citations.md");
        let parts = page.lines().filter_map(|line| line.strip_prefix("| *")?.split_once("* |"));
        Self {
            promises: sections("deploy/docs/src/specification/service.md"),
            design: sections("deploy/docs/src/specification/design.md"),
            decisions: names.filter_map(|name| Some(name.split_once('-')?.0.to_owned())).collect(),
            parts: parts.map(|(name, _)| name.to_owned()).collect(),
        }
    }

    /// The citations of a comment, and whether each leads somewhere.
    fn citations(&self, comment: &str) -> Vec<(String, bool)> {
        let in_section = |sections: &[String], number: &str, name: Option<&str>, mark: &str| {
            let section = sections.iter().find(|section| section.starts_with(&format!("{number}. ")));
            section.is_some_and(|text| name.is_none_or(|name| text.contains(&format!("{mark}{name}"))))
        };
        let mut found = Vec::new();
        for (number, name) in numbered(comment, "decisions ") {
            let leads = in_section(&self.promises, number, name, "**");
            found.push((format!("decisions {number}, *{}*", name.unwrap_or_default()), leads));
        }
        for (number, name) in numbered(comment, "design ") {
            let leads = in_section(&self.design, number, name, "*");
            found.push((format!("design {number}, *{}*", name.unwrap_or_default()), leads));
        }
        for (number, _) in numbered(comment, "decision ") {
            found.push((format!("decision {number}"), self.decisions.contains(number)));
        }
        for name in after(comment, "specification").filter_map(name_of) {
            found.push((format!("specification, *{name}*"), self.parts.contains(name)));
        }
        // A section of the promises has a number.
        found.extend(
            after(comment, "decisions").filter_map(name_of).map(|name| (format!("decisions, *{name}*"), false)),
        );
        found
    }
}

/// What follows each occurrence of the word.
fn after<'a>(comment: &'a str, word: &'static str) -> impl Iterator<Item = &'a str> {
    comment.match_indices(word).map(move |(at, _)| &comment[at + word.len()..])
}

/// The numbers that follow the word, each with its name.
fn numbered<'a>(comment: &'a str, word: &'static str) -> impl Iterator<Item = (&'a str, Option<&'a str>)> {
    after(comment, word).filter_map(|rest| {
        let (number, rest) = rest.split_at(rest.bytes().take_while(u8::is_ascii_digit).count());
        (!number.is_empty()).then_some((number, name_of(rest)))
    })
}

/// The name in `, *name*` at the start of the text.
fn name_of(text: &str) -> Option<&str> {
    text.strip_prefix(", *")?.split_once('*').map(|(name, _)| name)
}

/// The comments of a source, each in one line.
fn comments(text: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    for line in text.lines().map(str::trim_start) {
        let last = found.last_mut().expect("there is one");
        match ["//!", "///", "//", "--"].into_iter().find_map(|mark| line.strip_prefix(mark)) {
            Some(comment) => {
                last.push(' ');
                last.push_str(comment.trim());
            }
            None => found.push(String::new()),
        }
    }
    found.retain(|comment| !comment.is_empty());
    found
}

#[test]
fn every_citation_leads_to_a_section_a_page_or_a_name() {
    let cited = Sources::of_repository();
    let (mut checked, mut wrong) = (0, Vec::new());
    let is_code = |extension: &std::ffi::OsStr| extension == "rs" || extension == "sql";
    for (path, text) in sources().into_iter().filter(|(path, _)| path.extension().is_some_and(is_code)) {
        for (citation, leads) in comments(&text).iter().flat_map(|comment| cited.citations(comment)) {
            checked += 1;
            if !leads {
                wrong.push(format!("{}: {citation}", path.display()));
            }
        }
    }
    assert!(checked > 100, "only {checked} citations were found");
    assert!(
        wrong.is_empty(),
        "deploy/docs/src/contribute/citations.md says what can be cited, and not:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn citation_that_leads_nowhere_is_found() {
    let cited = Sources {
        promises: vec!["5. Terminals\n\n- **Terminal**: its token\n".to_owned()],
        design: vec!["6. The cluster\n\n- *Overload.* Bounds\n".to_owned()],
        decisions: BTreeSet::from(["0051".to_owned()]),
        parts: BTreeSet::from(["SSH key".to_owned()]),
    };
    let leads = |comment: &str| cited.citations(comment).into_iter().map(|(_, leads)| leads).collect::<Vec<_>>();
    let right = ["decisions 5", "(decisions 5, *Terminal*; 7)", "design 6", "design 6, *Overload*", "decision 0051"];
    for comment in right.into_iter().chain(["specification, *SSH key*"]) {
        assert_eq!(leads(comment), [true], "{comment}");
    }
    let wrong = ["decisions 8", "decisions 5, *Webhook*", "decisions, *Terminal*", "design 7", "design 6, *Reads*"];
    for comment in wrong.into_iter().chain(["decision 51", "decision 0052", "specification, *Interface*"]) {
        assert_eq!(leads(comment), [false], "{comment}");
    }
    assert_eq!(leads("the specification, the decisions and a design of ours"), [false; 0]);
    let source = "//! Keys (specification,\n//! *SSH key*).\nuse a::b;\n    // As decision\n    // 0051 says.\n";
    let of_source: Vec<_> = comments(source).iter().flat_map(|comment| cited.citations(comment)).collect();
    assert_eq!(of_source.len(), 2, "{of_source:?}");
}
