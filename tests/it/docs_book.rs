//! The book (`deploy/docs`) and the pages that lead into it: their sizes, their list of pages, their links, and the README's commands.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

const BOOK: &str = "deploy/docs/src";
const SUMMARY: &str = "deploy/docs/src/SUMMARY.md";

/// Bytes that a page at the root of the repository may have: longer texts are chapters of the book.
const LIMITS: [(&str, usize); 2] = [("README.md", 6144), ("ARCHITECTURE.md", 10_240)];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in the workspace").to_owned()
}

/// A file by its path in the workspace.
fn read(path: &Path) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The pages in a folder and below it, by their paths in the workspace. Symbolic links are followed, as mdBook does.
fn pages(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(root().join(folder)).expect("the folder exists") {
        let path = folder.join(entry.expect("the folder is readable").file_name());
        if root().join(&path).is_dir() {
            found.extend(pages(&path));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.insert(path);
        }
    }
    found
}

/// The lines of a page: those of blocks that begin with the fence `in_block`, or those outside of all blocks.
fn lines<'a>(text: &'a str, in_block: Option<&str>) -> Vec<&'a str> {
    let (mut block, mut found) = (None, Vec::new());
    for line in text.lines() {
        match (line.trim_start().starts_with("```"), block) {
            (true, None) => block = Some(line.trim()),
            (true, Some(_)) => block = None,
            (false, _) if block == in_block => found.push(line),
            (false, _) => {}
        }
    }
    found
}

/// Where the links of a page lead, but for those to other hosts.
fn links(text: &str) -> Vec<String> {
    let prose = lines(text, None).join("\n");
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://")).map(str::to_owned).collect()
}

/// The anchors of a page's headings, as mdBook makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let anchor = |heading: &str| -> String {
        let title = heading.trim_start_matches('#').trim();
        let is_anchor_sign = |sign: &char| sign.is_alphanumeric() || matches!(sign, ' ' | '-' | '_');
        title
            .chars()
            .filter(is_anchor_sign)
            .map(|sign| if sign == ' ' { '-' } else { sign.to_ascii_lowercase() })
            .collect()
    };
    lines(text, None).into_iter().filter(|line| line.starts_with('#')).map(anchor).collect()
}

/// The path of a link's target in the workspace, by the text of the two paths alone.
fn resolve(page: &Path, target: &str) -> PathBuf {
    let mut path = page.parent().expect("a page is in a folder").to_owned();
    for component in Path::new(target).components() {
        match component {
            Component::ParentDir => assert!(path.pop(), "{}: {target} leaves the workspace", page.display()),
            Component::Normal(name) => path.push(name),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    path
}

#[test]
fn root_pages_are_within_their_size() {
    for (page, limit) in LIMITS {
        let size = read(Path::new(page)).len();
        assert!(size <= limit, "{page} has {size} bytes, and may have {limit}: move the rest into the book");
    }
}

#[test]
fn summary_lists_every_page_of_the_book_once() {
    let links = links(&read(Path::new(SUMMARY)));
    let listed: BTreeSet<PathBuf> = links.iter().map(|link| Path::new(BOOK).join(link)).collect();
    assert_eq!(listed.len(), links.len(), "SUMMARY.md lists a page twice");
    let mut existing = pages(Path::new(BOOK));
    existing.remove(Path::new(SUMMARY));
    let missing: Vec<_> = existing.difference(&listed).collect();
    assert!(missing.is_empty(), "SUMMARY.md does not list {missing:#?}");
    let stale: Vec<_> = listed.difference(&existing).collect();
    assert!(stale.is_empty(), "SUMMARY.md lists pages that do not exist: {stale:#?}");
}

/// A chapter links to chapters alone: a link out of the book would be broken in the built one.
#[test]
fn every_link_leads_to_a_page_and_a_heading_that_exist() {
    let mut all: Vec<PathBuf> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(PathBuf::from).to_vec();
    for folder in [BOOK, "deploy/decisions", "deploy/runbooks"] {
        all.extend(pages(Path::new(folder)));
    }
    let (mut checked, mut broken) = (0, Vec::new());
    for page in &all {
        for link in links(&read(page)) {
            let (path, anchor) = match link.split_once('#') {
                Some((path, anchor)) => (path, Some(anchor)),
                None => (link.as_str(), None),
            };
            let target = if path.is_empty() { page.clone() } else { resolve(page, path) };
            let is_inside = target.starts_with(BOOK) || !page.starts_with(BOOK);
            let is_there = root().join(&target).exists();
            if !is_inside || !is_there || anchor.is_some_and(|anchor| !anchors(&read(&target)).contains(anchor)) {
                broken.push(format!("{}: {link}", page.display()));
            }
            checked += 1;
        }
    }
    assert!(checked > 100, "only {checked} links were found");
    assert!(broken.is_empty(), "links that lead nowhere, or out of the book: {broken:#?}");
}

/// mdBook puts the text of the file, or some lines of it, in the place of `{{#include FILE:FROM:TO}}`.
#[test]
fn every_file_that_a_chapter_includes_exists() {
    let mut checked = 0;
    for page in pages(Path::new(BOOK)) {
        let text = read(&page);
        for include in text.split("{{#include ").skip(1).filter_map(|rest| rest.split("}}").next()) {
            let file = include.split(':').next().unwrap_or(include).trim();
            assert!(
                root().join(resolve(&page, file)).is_file(),
                "{} includes {file}, which does not exist",
                page.display()
            );
            checked += 1;
        }
    }
    assert!(checked > 0, "no page includes a file");
}

/// The book's commands are run by `docs_recipes.rs`; the README's are among them.
#[test]
fn every_command_of_the_readme_is_a_command_of_the_book() {
    let texts: Vec<String> = pages(Path::new(BOOK)).iter().map(|page| read(page)).collect();
    let commands: BTreeSet<&str> = texts.iter().flat_map(|text| lines(text, Some("```sh"))).collect();
    let readme = read(Path::new("README.md"));
    let of_readme = lines(&readme, Some("```sh"));
    assert!(of_readme.len() >= 10, "{of_readme:?}");
    for command in of_readme {
        assert!(commands.contains(command), "README.md has a command that is in no chapter: {command}");
    }
}
