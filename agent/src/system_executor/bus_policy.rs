//! systemd shows every user the command lines of any unit's processes, on the system bus (`systemctl status user-70001.slice`), whatever
//! `/proc` hides. A policy of the bus closes these methods to all users but root; everything else of systemd stays as it is.

use std::path::Path;
use std::time::Duration;

use crate::atomic_file::{self, FileError};
use crate::bounded_tool::{self, ToolError};

/// The bus reads these policies last, so that they win over those of packages.
const FOLDER: &str = "/etc/dbus-1/system.d";
const FILE: &str = "/etc/dbus-1/system.d/gpuaas-tenants.conf";
/// How long the bus may take to read its policies.
const RELOAD_LIMIT: Duration = Duration::from_secs(90);
/// The kinds of units that have processes.
const KINDS: [&str; 6] = ["Service", "Slice", "Scope", "Socket", "Mount", "Swap"];

/// Why systemd shows tenants the command lines of others.
#[derive(Debug, thiserror::Error)]
pub enum OpenBus {
    #[error(transparent)]
    Store(#[from] FileError),
    #[error("the system bus cannot be reloaded")]
    Reload(#[source] ToolError),
}

/// Writes the policy, and has the bus read it where it is new. A machine without a system bus has nothing to close.
///
/// # Errors
/// [`OpenBus`].
pub fn install() -> Result<(), OpenBus> {
    let has_bus = Path::new(FOLDER).parent().is_some_and(Path::is_dir);
    if !has_bus || atomic_file::read_if_there(FILE.as_ref())?.is_some_and(|text| text == policy()) {
        return Ok(());
    }
    std::fs::create_dir_all(FOLDER).map_err(FileError::at("create", FOLDER.as_ref()))?;
    atomic_file::write_atomically(FILE.as_ref(), policy().as_bytes(), atomic_file::PUBLIC)?;
    reload().map_err(|error| {
        // The next start tries again.
        let _ = atomic_file::remove(FILE.as_ref());
        OpenBus::Reload(error)
    })
}

/// Removes the policy from a machine that leaves the service.
pub fn remove() {
    if Path::new(FILE).exists() {
        let _ = atomic_file::remove(FILE.as_ref());
        let _ = reload();
    }
}

fn policy() -> String {
    // The bus compares members of named interfaces only.
    let deny = |interface: &str, member: &str| {
        format!(
            "    <deny send_destination=\"org.freedesktop.systemd1\" send_interface=\"org.freedesktop.systemd1.{interface}\" \
             send_member=\"{member}\"/>\n"
        )
    };
    let denied: String = KINDS.iter().map(|kind| deny(kind, "GetProcesses")).collect();
    let of_all_units = deny("Manager", "GetUnitProcesses");
    format!(
        "<?xml version=\"1.0\"?>\n\
         <!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN\"\n \
         \"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\">\n\
         <!-- Written by the node agent: no user but root sees the command lines of others. -->\n\
         <busconfig>\n  <policy context=\"default\">\n{of_all_units}{denied}  </policy>\n</busconfig>\n"
    )
}

fn reload() -> Result<(), ToolError> {
    // The name of the service for every program that runs the bus.
    bounded_tool::run_of_path("systemctl", &["reload", "dbus.service"], &[], RELOAD_LIMIT).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_names_an_interface_with_each_method_that_it_closes() {
        let policy = policy();
        let denied: Vec<_> = policy.lines().filter(|line| line.contains("<deny")).collect();
        assert_eq!(denied.len(), 7);
        // Without an interface, dbus-daemon reads nothing of the file.
        assert!(denied.iter().all(|line| line.contains("send_interface=") && line.contains("send_member=\"Get")));
    }
}
