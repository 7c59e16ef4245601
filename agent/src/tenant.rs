//! What every executor checks and finds out about a tenant, whatever it can enforce.

use std::io;
use std::path::Path;

use serde_json::json;
use uuid::Uuid;
use wire::bundle::Variables;
use wire::inventory::Device;
use wire::proof::{Checked, Finding, Outcome};
use wire::task::Provision;

use crate::executor::{Failure, Output};
use crate::gpus::{DeviceUse, Gpus, MemoryUse};
use crate::terminal::Shell;

/// The mark of a tenant's processes: this variable in their environment, with the allocation's id as value.
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

/// Refuses a task whose values could mean something else than a name and keys once they stand in a file.
///
/// # Errors
/// `invalid_task`.
pub fn check(task: &Provision) -> Result<(), Failure> {
    check_user_name(&task.user_name)?;
    check_authorized_keys(&task.authorized_keys)
}

/// # Errors
/// `invalid_task` where one of them is more, or less, than a key on a line.
pub fn check_authorized_keys(keys: &[String]) -> Result<(), Failure> {
    keys.iter().try_for_each(|key| check_authorized_key(key))
}

/// # Errors
/// `invalid_task` where the name is none that every tool takes for a name.
pub fn check_user_name(name: &str) -> Result<(), Failure> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    let begins_well = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    if begins_well && name.len() <= 32 && name.chars().all(plain) {
        Ok(())
    } else {
        Err(Failure::new("invalid_task", "the user name is not [a-z_][a-z0-9_-]* of 32 characters at most"))
    }
}

/// One key on one line, without options: those could run commands as the tenant's login.
fn check_authorized_key(key: &str) -> Result<(), Failure> {
    let mut words = key.split(' ');
    let known = words.next().is_some_and(|kind| KEY_TYPES.contains(&kind)) && words.next().is_some();
    if known && !key.chars().any(char::is_control) {
        Ok(())
    } else {
        Err(Failure::new("invalid_task", "an authorized key is not one line of `type base64 [comment]`"))
    }
}

/// The file that sshd reads the tenant's keys from.
#[must_use]
pub fn authorized_keys(keys: &[String]) -> String {
    keys.iter().flat_map(|key| [key.as_str(), "\n"]).collect()
}

/// What the tenant's processes start with. `CUDA_VISIBLE_DEVICES` is a convenience and protects nothing.
#[must_use]
pub fn environment(allocation_id: Uuid, user_name: &str, devices: &[Device], home: &str, tmp: &str) -> Variables {
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
pub fn login_shell(environment: &Variables, home: &Path, user: Option<u32>) -> Shell {
    let program = if Path::new("/bin/bash").exists() { "/bin/bash" } else { "/bin/sh" };
    let own = environment.iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
    let of_a_terminal = [
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ("SHELL", program),
        ("TERM", "xterm-256color"),
        ("LANG", "C.UTF-8"),
    ];
    let of_a_terminal = of_a_terminal.map(|(name, value)| (name.to_owned(), value.to_owned()));
    Shell {
        program: program.into(),
        arguments: vec!["-l".to_owned()],
        launcher: Vec::new(),
        user,
        folder: home.to_owned(),
        environment: own.chain(of_a_terminal).collect(),
    }
}

/// The fields of an output.
pub fn output<const N: usize>(pairs: [(&str, serde_json::Value); N]) -> Output {
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The UUIDs of devices, as they go into an output.
#[must_use]
pub fn uuids(devices: &[Device]) -> serde_json::Value {
    json!(devices.iter().map(|device| device.uuid.as_str()).collect::<Vec<_>>())
}

/// Whether anything still computes on the devices.
#[must_use]
pub fn look_at_processes(gpus: &Gpus, devices: &[Device]) -> Finding {
    look(gpus, devices, Checked::GpuProcesses, |uuid| match gpus.look_at(uuid) {
        DeviceUse::Idle => (Outcome::Gone, None),
        DeviceUse::BusyWith(pids) => (Outcome::Present, Some(format!("{uuid} is used by processes {pids:?}"))),
        DeviceUse::Unknown(why) => (Outcome::Unknown, Some(format!("{uuid}: {why}"))),
    })
}

/// Whether anything is still kept in the devices' memory.
#[must_use]
pub fn look_at_memory(gpus: &Gpus, devices: &[Device]) -> Finding {
    look(gpus, devices, Checked::GpuMemory, |uuid| match gpus.memory_of(uuid) {
        MemoryUse::DriverOnly => (Outcome::Gone, None),
        MemoryUse::Held { mib } => (Outcome::Present, Some(format!("{uuid} holds {mib} MiB"))),
        MemoryUse::Unknown(why) => (Outcome::Unknown, Some(format!("{uuid}: {why}"))),
    })
}

/// The worst of what is found on each device.
fn look(gpus: &Gpus, devices: &[Device], what: Checked, at: impl Fn(&str) -> (Outcome, Option<String>)) -> Finding {
    let looked_for = devices.iter().map(|device| device.uuid.as_str()).collect::<Vec<_>>().join(" ");
    let (outcomes, details): (Vec<_>, Vec<_>) = devices.iter().map(|device| at(&device.uuid)).unzip();
    let outcome = [Outcome::Present, Outcome::Unknown].into_iter().find(|worse| outcomes.contains(worse));
    let mut details: Vec<String> = details.into_iter().flatten().collect();
    if details.is_empty() {
        match gpus {
            Gpus::Simulated(_) => details.push("simulated devices run no processes".to_owned()),
            Gpus::Absent { .. } => details.push("the node has no GPU driver".to_owned()),
            Gpus::Nvml(_) => {}
        }
    }
    let detail = (!details.is_empty()).then(|| details.join("; "));
    Finding { what, looked_for, outcome: outcome.unwrap_or(Outcome::Gone), detail }
}

/// What a look found: nothing, these, or that it could not look.
pub fn finding(what: Checked, looked_for: String, found: io::Result<Vec<String>>) -> Finding {
    let (outcome, detail) = match found {
        Ok(left) if left.is_empty() => (Outcome::Gone, None),
        Ok(left) => (Outcome::Present, Some(left.join(", "))),
        Err(error) => (Outcome::Unknown, Some(error.to_string())),
    };
    Finding { what, looked_for, outcome, detail }
}

/// Whether anything is at `path`.
#[must_use]
pub fn look_at_path(what: Checked, path: &Path) -> Finding {
    let found = match path.symlink_metadata() {
        Ok(_) => Ok(vec![path.display().to_string()]),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    };
    finding(what, path.display().to_string(), found)
}
