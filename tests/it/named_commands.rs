//! The commands that texts name: messages, pages and comments send people to `gpuctl`, `gpuaas` and `gpuaas-agent`, so those commands have to
//! exist, with the options that are named.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAMS: [&str; 3] = ["gpuctl", "gpuaas", "gpuaas-agent"];
/// Where the installer puts the agent's programs, by which the pages name them.
const PACKAGE: &str = "/opt/gpuaas/current/bin/";
/// Where texts are. Not the decisions and the changelog: they name commands of earlier releases.
const FOLDERS: [&str; 7] =
    ["actors", "agent", "edge", "persistence", "supervisors", "deploy/docs/src", "deploy/runbooks"];
const EXTENSIONS: [&str; 4] = ["rs", "md", "ts", "tsx"];
const SKIPPED: [&str; 6] = ["decisions", "dist", "generated", "node_modules", "target", "test"];
/// Options that a program gives to itself, which its help does not show.
const HIDDEN: [&str; 2] = ["gpu-probe", "hold-terminal"];

/// A command as a text names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NamedCommand {
    program: String,
    /// The commands and their first values, up to the first word that is a placeholder or an option.
    path: Vec<String>,
    /// The long options.
    options: BTreeSet<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in the workspace").to_owned()
}

fn texts(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("the folder exists") {
        let path = entry.expect("the folder is readable").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && !SKIPPED.contains(&&*name) {
            texts(&path, found);
        } else if path.extension().is_some_and(|extension| EXTENSIONS.iter().any(|known| extension == *known)) {
            found.push(path);
        }
    }
}

/// The code in backticks that is one line, and the lines of code blocks.
fn codes(text: &str) -> impl Iterator<Item = &str> {
    let in_line = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    in_line.chain(text.lines().map(str::trim_start))
}

fn named(code: &str) -> Option<NamedCommand> {
    let mut words = code.split_whitespace();
    let program = words.next().map(|word| word.strip_prefix(PACKAGE).unwrap_or(word));
    let program = program.filter(|word| PROGRAMS.contains(word))?.to_owned();
    let mut words: Vec<&str> = words.take_while(|word| !matches!(*word, "--" | "|" | ">" | "&&" | "||")).collect();
    if words.first() == Some(&"--profile") {
        words.drain(..2.min(words.len()));
    }
    let is_name = |word: &str| !word.is_empty() && word.chars().all(|sign| sign.is_ascii_lowercase() || sign == '-');
    let path = words.iter().take_while(|word| is_name(word) && !word.starts_with('-'));
    let options = words.iter().filter_map(|word| word.strip_prefix("--"));
    let options = options.map(|option| option.split('=').next().unwrap_or(option).trim_end_matches([',', ';', ')']));
    Some(NamedCommand {
        program,
        path: path.map(|word| (*word).to_owned()).collect(),
        options: options.filter(|option| is_name(option)).map(str::to_owned).collect(),
    })
}

/// The help of the command; `None` where there is none.
fn help(program: &Path, path: &[String]) -> Option<String> {
    let run = Command::new(program).args(path).arg("--help").env_clear().output().expect("the program runs");
    run.status.success().then(|| String::from_utf8_lossy(&run.stdout).into_owned())
}

#[test]
fn command_in_a_text_is_read_with_its_options() {
    let read = named("gpuctl --profile admin nodes retire NODE --drain --reason=TEXT -- x --not").unwrap();
    assert_eq!(read.path, ["nodes", "retire"]);
    assert_eq!(read.options, BTreeSet::from(["drain".to_owned(), "reason".to_owned()]));
    assert_eq!(named("kubectl get nodes"), None);
}

#[test]
fn every_command_that_a_text_names_exists_with_its_options() {
    let test = std::env::current_exe().unwrap();
    let programs: BTreeMap<&str, PathBuf> = PROGRAMS
        .iter()
        .map(|name| (*name, local_servers::private_files::find_sibling(&test, name).expect("cargo build --bins")))
        .collect();
    let mut files = Vec::new();
    FOLDERS.iter().for_each(|folder| texts(&root().join(folder), &mut files));
    let mut commands: BTreeMap<NamedCommand, PathBuf> = BTreeMap::new();
    for file in files {
        let text = std::fs::read_to_string(&file).expect("the file is text");
        commands.extend(codes(&text).filter_map(named).map(|command| (command, file.clone())));
    }
    assert!(commands.len() > 150, "{} commands were found", commands.len());
    let mut wrong = Vec::new();
    let mut helps: BTreeMap<(String, Vec<String>), Option<String>> = BTreeMap::new();
    for (command, file) in commands {
        let key = (command.program.clone(), command.path.clone());
        let help = helps.entry(key).or_insert_with(|| help(&programs[&*command.program], &command.path));
        let is_hidden = |option: &String| HIDDEN.contains(&&**option);
        let shows = |option: &String| help.as_ref().is_some_and(|help| help.contains(&format!("--{option}")));
        let has = |option: &String| is_hidden(option) || shows(option);
        if help.is_none() || !command.options.iter().all(has) {
            wrong.push(format!("{}: {} {}", file.display(), command.program, command.path.join(" ")));
        }
    }
    assert!(wrong.is_empty(), "texts name commands, or options of commands, that do not exist: {wrong:#?}");
}
