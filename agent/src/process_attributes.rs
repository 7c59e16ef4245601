//! Attributes of processes: those of the agent that a tenant's programs, its children, must not inherit, and where the kernel shows those of a
//! tenant's program.
//!
//! The kernel kills other processes before the agent (`OOMScoreAdjust` of its unit), and the agent's files are readable for itself only
//! (`UMask`). Both are inherited by its children. Attributes that could not be reset here (above all system call filters) are not set in
//! its unit.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Root sets the score, so that no tenant can lower it again. A machine that refuses the write has not protected the agent either.
const RESET: &str = r#"{ echo 0 > /proc/self/oom_score_adj; } 2>/dev/null; umask 022; exec "$@""#;

/// The arguments before a command that give it the defaults of a login on the machine. To be run by root, if the agent is root.
#[must_use]
pub const fn command_prefix() -> [&'static str; 4] {
    ["/bin/sh", "-c", RESET, "sh"]
}

/// The folder in `/proc` that shows the environment and the working folder of this process: its own, or where its main thread has ended, that
/// of a thread that runs.
///
/// # Errors
/// The process has ended, or cannot be read.
pub fn live_thread(process: &Path, main_has_ended: bool) -> io::Result<PathBuf> {
    if !main_has_ended {
        return Ok(process.to_owned());
    }
    for thread in fs::read_dir(process.join("task"))? {
        let thread = thread?.path();
        let stat = fs::read_to_string(thread.join("stat")).unwrap_or_default();
        // After the name in parentheses, which may contain anything.
        let state = stat.rfind(')').and_then(|end| stat.get(end + 2..)?.chars().next());
        if state.is_some_and(|state| !matches!(state, 'Z' | 'X')) {
            return Ok(thread);
        }
    }
    Err(ErrorKind::NotFound.into())
}
