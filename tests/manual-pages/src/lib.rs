//! The manual pages and shell completions of the Debian packages, made from a program's command line.
//!
//! They are files of `deploy/debian`, which the test of each program compares with its command line; `UPDATE_DOCS=1` writes them. So no
//! program has to be able to print them, and they are reviewed as text.

use clap::{Arg, Command};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Files by their paths below a package's folder.
pub type Files = BTreeMap<PathBuf, Vec<u8>>;

/// The pages of a program: one of its own, and one for each command that has commands itself. Commands without are part of the page above.
///
/// # Errors
/// Never: the pages are written into memory.
pub fn pages(program: Command, section: &str) -> io::Result<Files> {
    let mut program = program.disable_help_subcommand(true);
    program.build();
    let mut files = Files::new();
    add_pages(&program, section, &mut files)?;
    Ok(files)
}

fn add_pages(command: &Command, section: &str, files: &mut Files) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    files.insert(format!("man/{name}.{section}").into(), page(command, name, section)?);
    visible_commands(command).filter(|it| it.has_subcommands()).try_for_each(|it| add_pages(it, section, files))
}

fn page(command: &Command, name: &str, section: &str) -> io::Result<Vec<u8>> {
    let man = Man::new(command.clone()).title(name).section(section).source("gpuaas").manual("gpuaas");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if command.get_arguments().any(|argument| !argument.is_hide_set()) {
        man.render_options_section(&mut page)?;
    }
    if visible_commands(command).next().is_some() {
        page.extend_from_slice(b".SH COMMANDS\n");
    }
    for command in visible_commands(command) {
        page.extend(command_section(command, section)?);
    }
    if command.get_after_help().is_some() {
        man.render_extra_section(&mut page)?;
    }
    Ok(page)
}

/// A command in the page above it: its usage, what it does, and its own options. One with commands of its own names its page.
fn command_section(command: &Command, section: &str) -> io::Result<Vec<u8>> {
    let mut roff = Roff::default();
    let usage = command.clone().render_usage().to_string();
    let about = command.get_long_about().or_else(|| command.get_about()).map(ToString::to_string).unwrap_or_default();
    if let (true, Some(page)) = (command.has_subcommands(), command.get_display_name()) {
        roff.control("TP", []);
        roff.text([bold(page), roman(format!("({section})"))]);
        roff.text([roman(about)]);
        return Ok(roff.to_roff().into_bytes());
    }
    roff.control("SS", [usage.trim_start_matches("Usage: ")]);
    for paragraph in about.split("\n\n") {
        roff.control("PP", []);
        roff.text([roman(paragraph)]);
    }
    let mut text = roff.to_roff().into_bytes();
    if command.get_arguments().any(is_own) {
        let own = command.clone().mut_args(|argument| if is_own(&argument) { argument } else { argument.hide(true) });
        let mut section = Vec::new();
        Man::new(own).render_options_section(&mut section)?;
        let lines = section.split_inclusive(|byte| *byte == b'\n').filter(|line| !line.starts_with(b".SH"));
        text.extend(lines.flatten());
    }
    Ok(text)
}

fn is_own(argument: &Arg) -> bool {
    !argument.is_hide_set() && !argument.is_global_set() && !["help", "version"].contains(&argument.get_id().as_str())
}

fn visible_commands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|it| !it.is_hide_set())
}

/// The completions of a program whose command line is all that they need.
#[must_use]
pub fn completions(mut program: Command, name: &str) -> Files {
    let files = [Shell::Bash, Shell::Zsh, Shell::Fish].map(|shell| {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut program, name, &mut script);
        (completion_path(shell, name), script)
    });
    files.into()
}

/// Where a package's completions for a shell are, below its folder.
#[must_use]
pub fn completion_path(shell: Shell, name: &str) -> PathBuf {
    let file = match shell {
        Shell::Zsh => format!("_{name}"),
        other => format!("{name}.{other}"),
    };
    Path::new("completions").join(file)
}

/// Compares the files of a program in a package's folders `man` and `completions`, or writes them (`UPDATE_DOCS=1`).
///
/// # Errors
/// Which file is not what the command line says, is that of a command that was removed, or cannot be read or written.
pub fn compare(folder: &Path, program: &str, files: &Files) -> Result<(), String> {
    let fault = |path: &Path, error: io::Error| format!("{}: {error}", path.display());
    let update = std::env::var_os("UPDATE_DOCS").is_some();
    for (path, content) in files {
        let path = folder.join(path);
        if update {
            let parent = path.parent().unwrap_or(folder);
            std::fs::create_dir_all(parent).map_err(|error| fault(parent, error))?;
            std::fs::write(&path, content).map_err(|error| fault(&path, error))?;
        }
        if std::fs::read(&path).map_err(|error| fault(&path, error))? != *content {
            return Err(format!("{} differs from the command line; UPDATE_DOCS=1 writes it", path.display()));
        }
    }
    for kind in ["man", "completions"] {
        let entries = std::fs::read_dir(folder.join(kind)).map_err(|error| fault(&folder.join(kind), error))?;
        for entry in entries {
            let name = entry.map_err(|error| fault(folder, error))?.file_name();
            let path = Path::new(kind).join(&name);
            if is_of(&name.to_string_lossy(), program) && !files.contains_key(&path) {
                return Err(format!("{} is of a command that is not there; remove it", folder.join(path).display()));
            }
        }
    }
    Ok(())
}

/// Whether a file with this name belongs to the program: `_gpuctl`, `gpuctl.bash` and `gpuctl-nodes.1` to `gpuctl`.
fn is_of(file: &str, program: &str) -> bool {
    let rest = file.trim_start_matches('_').strip_prefix(program);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '-']))
}
