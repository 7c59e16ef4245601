//! What every executor sets a tenant up with, whatever isolation it enforces: the checks of the name and the keys, the environment, and the
//! login shell.

use std::path::Path;

use uuid::Uuid;
use wire::bundle::Variables;
use wire::inventory::DeviceRef;
use wire::task::Provision;

use super::TaskFailure;
use crate::terminal::ShellCommand;

/// The mark of a tenant's processes: this environment variable, with the allocation's id as value.
pub const MARKER: &str = "GPUAAS_ALLOCATION_ID";

const KEY_TYPES: [&str; 7] = [
    "ssh-ed25519",
    "ssh-rsa",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
];

/// Refuses a task with values that could be more than a name and keys when they are written to a file.
///
/// # Errors
/// `invalid_task`.
pub fn check(task: &Provision) -> Result<(), TaskFailure> {
    check_user_name(&task.user_name)?;
    check_authorized_keys(&task.authorized_keys)
}

/// # Errors
/// `invalid_task` if one of them is not exactly one key on one line.
pub fn check_authorized_keys(keys: &[String]) -> Result<(), TaskFailure> {
    keys.iter().try_for_each(|key| check_authorized_key(key))
}

/// # Errors
/// `invalid_task` if not every tool accepts the name as a user name.
pub fn check_user_name(name: &str) -> Result<(), TaskFailure> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    let begins_well = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    if begins_well && name.len() <= 32 && name.chars().all(plain) {
        Ok(())
    } else {
        Err(TaskFailure::new("invalid_task", "the user name is not [a-z_][a-z0-9_-]* of 32 characters at most"))
    }
}

/// One key on one line, without options: those could run commands as the tenant's login.
fn check_authorized_key(key: &str) -> Result<(), TaskFailure> {
    let mut words = key.split(' ');
    let known = words.next().is_some_and(|kind| KEY_TYPES.contains(&kind)) && words.next().is_some();
    if known && !key.chars().any(char::is_control) {
        Ok(())
    } else {
        Err(TaskFailure::new("invalid_task", "an authorized key is not one line of `type base64 [comment]`"))
    }
}

/// The file that sshd reads the tenant's keys from.
#[must_use]
pub fn authorized_keys(keys: &[String]) -> String {
    keys.iter().flat_map(|key| [key.as_str(), "\n"]).collect()
}

/// The environment of the tenant's processes. `CUDA_VISIBLE_DEVICES` is a convenience and protects nothing.
#[must_use]
pub fn environment(allocation_id: Uuid, user_name: &str, devices: &[DeviceRef], home: &str, tmp: &str) -> Variables {
    let allocation_id = allocation_id.to_string();
    let devices: Vec<&str> = devices.iter().map(|device| device.uuid.as_str()).collect();
    let devices = devices.join(",");
    [
        (MARKER, allocation_id.as_str()),
        ("HOME", home),
        ("TMPDIR", tmp),
        ("USER", user_name),
        ("LOGNAME", user_name),
        ("CUDA_VISIBLE_DEVICES", &devices),
    ]
    .into_iter()
    .collect()
}

/// A login shell on a terminal, in the tenant's home.
#[must_use]
pub fn login_shell(environment: &Variables, home: &Path, user: Option<u32>) -> ShellCommand {
    let program = if Path::new("/bin/bash").exists() { "/bin/bash" } else { "/bin/sh" };
    let own = environment.iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
    let of_a_terminal = [
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ("SHELL", program),
        ("TERM", "xterm-256color"),
        ("LANG", "C.UTF-8"),
    ];
    let of_a_terminal = of_a_terminal.map(|(name, value)| (name.to_owned(), value.to_owned()));
    ShellCommand {
        program: program.into(),
        arguments: vec!["-l".to_owned()],
        launcher: Vec::new(),
        user,
        folder: home.to_owned(),
        environment: own.chain(of_a_terminal).collect(),
    }
}
