//! What a tenant may run as root: a list of single commands, checked by `visudo` before sudo reads it. Never everything.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use wire::cleanup_proof::{CleanupCheck, CleanupFinding};

use crate::atomic_file;
use crate::bounded_tool::{SHORT_LIMIT, Tool};
use crate::cleanup_checks::check_path_removed;
use crate::task_outcome::TaskFailure;

const FOLDER: &str = "/etc/sudoers.d";
const MODE: u32 = 0o440;

/// One command, by its absolute path, with any arguments. Nothing in it has a special meaning for sudo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SudoCommand(String);

/// Why a command cannot be allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the absolute path of one program without wildcards")]
pub struct InvalidSudoCommand(String);

impl FromStr for SudoCommand {
    type Err = InvalidSudoCommand;

    fn from_str(text: &str) -> Result<Self, InvalidSudoCommand> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '-' | '_' | '.' | '+');
        let is_program = text.starts_with('/') && !text.ends_with('/') && text.len() > 1 && text.chars().all(plain);
        let climbs = text.split('/').any(|part| part == ".." || part == ".");
        if is_program && !climbs { Ok(Self(text.to_owned())) } else { Err(InvalidSudoCommand(text.to_owned())) }
    }
}

/// The path of the tenant's file. sudo skips names with a dot or a tilde; a tenant's name has neither.
#[must_use]
pub fn path_of(user_name: &str) -> PathBuf {
    Path::new(FOLDER).join(format!("gpuaas-{user_name}"))
}

/// Allows the tenant these commands. Without sudo on the node, or without commands, there is nothing to write.
///
/// # Errors
/// `sudoers` if `visudo` refuses the file, `node_storage`.
pub fn allow(user_name: &str, commands: &[SudoCommand]) -> Result<bool, TaskFailure> {
    if commands.is_empty() || !Path::new(FOLDER).is_dir() {
        return Ok(false);
    }
    let text = render(user_name, commands);
    // Checked under a name that sudo does not read, then renamed into place.
    let draft = Path::new(FOLDER).join(format!(".gpuaas-{user_name}.draft"));
    atomic_file::write_without_sync(&draft, text.as_bytes(), MODE)?;
    let checked =
        Tool::new("visudo").args(["--check", "--strict", "--quiet", "--file"]).arg(&draft).run_to_end(SHORT_LIMIT);
    let outcome = match checked {
        Ok(ran) if ran.status.success() => {
            Ok(atomic_file::write_atomically(&path_of(user_name), text.as_bytes(), MODE)?)
        }
        Ok(ran) => {
            let complaint = ran.stdout + &ran.stderr;
            Err(TaskFailure::new("sudoers", format!("visudo refuses it: {}", complaint.trim())))
        }
        Err(error) => Err(TaskFailure::new("sudoers", error.to_string())),
    };
    atomic_file::remove(&draft)?;
    outcome.map(|()| true)
}

/// Removes the tenant's file.
pub fn forbid(user_name: &str) {
    // A file that could not be removed is found by the check.
    let _ = atomic_file::remove(&path_of(user_name));
}

/// Whether the tenant's file is there.
#[must_use]
pub fn check_removed(user_name: &str) -> CleanupFinding {
    check_path_removed(CleanupCheck::SudoersFile, &path_of(user_name))
}

/// The content of the tenant's file.
#[must_use]
pub fn render(user_name: &str, commands: &[SudoCommand]) -> String {
    let commands: Vec<&str> = commands.iter().map(|command| command.0.as_str()).collect();
    format!("{user_name} ALL=(root) NOPASSWD: {}\n", commands.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_single_programs_are_allowed_in_sudoers() {
        for refused in
            ["", "ALL", "/", "nvidia-smi", "/usr/bin/*", "/bin/sh, ALL", "/a\nb", "!/bin/sh", "/usr/../bin/sh", "/a/"]
        {
            assert!(refused.parse::<SudoCommand>().is_err(), "{refused:?}");
        }
        let allowed: Vec<SudoCommand> =
            ["/usr/bin/nvidia-smi", "/usr/sbin/reboot"].map(|it| it.parse().unwrap()).to_vec();
        assert_eq!(render("tena", &allowed), "tena ALL=(root) NOPASSWD: /usr/bin/nvidia-smi, /usr/sbin/reboot\n");
    }
}
