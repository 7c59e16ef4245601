//! A `/proc` of each session's own, which shows a tenant its own processes and no others: command lines, environments and open files of
//! neighbours are secrets more often than not.
//!
//! It is mounted over the machine's in the mount namespace that a session has for its `/tmp` ([`super::private_tmp`]). The machine's own
//! `/proc` stays as it is: polkit, logind and monitoring read it without being root.
//!
//! The option is written as text, `hidepid=invisible`, which kernels before 5.8 do not understand. They would apply it to every `/proc` of
//! the machine, and with the text they refuse the mount.

use std::io;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::chain;

/// The options of the mount, beside those of any `/proc`.
const HIDES: &str = "hidepid=invisible";
/// The command that mounts it.
pub const MOUNT: &str = "mount -n -t proc -o nosuid,nodev,noexec,hidepid=invisible proc /proc";

/// Why tenants see the processes of others.
#[derive(Debug, thiserror::Error)]
pub enum VisibleProcesses {
    #[error("the kernel is older than 5.8 and cannot hide processes in one mount of /proc alone")]
    OldKernel,
    #[error("a /proc that hides processes cannot be mounted")]
    Mount(#[source] io::Error),
}

impl VisibleProcesses {
    /// For an operator.
    #[must_use]
    pub fn as_text(&self) -> String {
        chain(self)
    }
}

/// Mounts it once, in a namespace that ends with this function.
///
/// # Errors
/// [`VisibleProcesses`].
pub fn check() -> Result<(), VisibleProcesses> {
    let apart = || {
        unshare(CloneFlags::CLONE_NEWNS)?;
        // No mount propagates to the machine.
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("proc"), "/proc", Some("proc"), flags, Some(HIDES))
    };
    // A mount namespace belongs to a thread.
    let mounted = std::thread::scope(|scope| scope.spawn(apart).join());
    match mounted {
        Ok(Ok(())) => Ok(()),
        Ok(Err(nix::Error::EINVAL)) => Err(VisibleProcesses::OldKernel),
        Ok(Err(error)) => Err(VisibleProcesses::Mount(error.into())),
        Err(_) => Err(VisibleProcesses::Mount(io::Error::other("the attempt ended without an answer"))),
    }
}

/// The program that pam_namespace(8) runs in the namespace of a login. A login for which it fails does not begin.
#[must_use]
pub fn script() -> String {
    format!("#!/bin/sh\n# Written by the node agent: shows a tenant its own processes only.\nexec {MOUNT}\n")
}
