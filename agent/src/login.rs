//! What a tenant's programs must not inherit of the agent, whose children they are.
//!
//! The kernel ends others before the agent (`OOMScoreAdjust` of its unit), and what the agent writes is nobody else's (`UMask`). Both go to
//! whatever it starts. What could not be taken back here (filters of system calls above all) its unit does not have.

/// The score is set by root, so that no tenant can set it lower again. A machine that refuses has not preferred the agent either.
const RESET: &str = r#"{ echo 0 > /proc/self/oom_score_adj; } 2>/dev/null; umask 022; exec "$@""#;

/// The words before a command by which it begins like any login of the machine. To be run by root, where the agent is root.
#[must_use]
pub const fn words() -> [&'static str; 4] {
    ["/bin/sh", "-c", RESET, "sh"]
}
