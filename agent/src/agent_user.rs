//! The user as which the agent runs. With the `sandbox` executor a tenant's processes are the agent's own user, so that must not be root:
//! an agent that root starts becomes another user first, or does not start.

use nix::unistd::{Gid, User, setgid, setgroups, setuid};

/// Why the agent cannot run as its user.
#[derive(Debug, thiserror::Error)]
pub enum RunAsError {
    #[error(
        "the sandbox executor would run tenants' processes as root: name the user that the agent is to become with --user, or make users \
         of the tenants with --executor system"
    )]
    SandboxIsRoot,
    #[error("the system executor makes users of its tenants and stays root; leave --user out")]
    SystemStaysRoot,
    #[error("there is no user {0:?}, or it is root")]
    NoUser(String),
    #[error("only root becomes another user; leave --user out")]
    NotRoot,
    #[error("the agent cannot become {user:?}")]
    NotChanged {
        user: String,
        #[source]
        source: nix::errno::Errno,
    },
}

/// Becomes the user for tenants of the sandbox executor. To be called before there is a second thread.
///
/// # Errors
/// [`RunAsError`]
pub fn become_sandbox_user(user: Option<&str>) -> Result<(), RunAsError> {
    let is_root = nix::unistd::Uid::effective().is_root();
    match user {
        None if is_root => Err(RunAsError::SandboxIsRoot),
        None => Ok(()),
        Some(name) => change_to(name, is_root),
    }
}

/// Stays root, for tenants of the system executor.
///
/// # Errors
/// [`RunAsError::SystemStaysRoot`] where the flags name a user.
pub fn stay_root(user: Option<&str>) -> Result<(), RunAsError> {
    user.map_or(Ok(()), |_| Err(RunAsError::SystemStaysRoot))
}

fn change_to(name: &str, is_root: bool) -> Result<(), RunAsError> {
    let found = User::from_name(name).ok().flatten().filter(|user| !user.uid.is_root());
    let user = found.ok_or_else(|| RunAsError::NoUser(name.to_owned()))?;
    if user.uid == nix::unistd::Uid::effective() {
        return Ok(());
    }
    if !is_root {
        return Err(RunAsError::NotRoot);
    }
    let changed = setgroups(&[] as &[Gid]).and_then(|()| setgid(user.gid)).and_then(|()| setuid(user.uid));
    changed.map_err(|source| RunAsError::NotChanged { user: name.to_owned(), source })
}
