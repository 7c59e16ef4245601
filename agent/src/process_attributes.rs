//! Process attributes of the agent that a tenant's programs, its children, must not inherit.
//!
//! The kernel kills other processes before the agent (`OOMScoreAdjust` of its unit), and the agent's files are readable for itself only
//! (`UMask`). Both are inherited by its children. Attributes that could not be reset here (above all system call filters) are not set in
//! its unit.

/// Root sets the score, so that no tenant can lower it again. A machine that refuses the write has not protected the agent either.
const RESET: &str = r#"{ echo 0 > /proc/self/oom_score_adj; } 2>/dev/null; umask 022; exec "$@""#;

/// The arguments before a command that give it the defaults of a login on the machine. To be run by root, if the agent is root.
#[must_use]
pub const fn command_prefix() -> [&'static str; 4] {
    ["/bin/sh", "-c", RESET, "sh"]
}
