//! The settings of tenants' accounts, of the executor `system`. They have no flags.

use std::path::{Path, PathBuf};

use wire::inventory::{MAX_TENANT_DEVICE_PATH, MAX_TENANT_DEVICES};

use super::{AgentConfigError, Problems, STATE_DIR, Sources};
use crate::system_executor::Settings;
use crate::system_executor::sudoers::SudoCommand;
use crate::system_executor::tenant_limits::LimitSettings;

pub(super) const UIDS: &str = "SVC_NODE_AGENT_UIDS";
pub(super) const HOMES: &str = "SVC_NODE_AGENT_HOMES";
const KEYS: &str = "SVC_NODE_AGENT_AUTHORIZED_KEYS";
pub(super) const SUDO_COMMANDS: &str = "SVC_NODE_AGENT_SUDO_COMMANDS";
pub(super) const SHARED: &str = "SVC_NODE_AGENT_SHARED_FOLDERS";
pub(super) const DEVICES: &str = "SVC_NODE_AGENT_DEVICES";
pub(super) const TENANT_DEVICES: &str = "SVC_NODE_AGENT_TENANT_DEVICES";
pub(super) const SSH_LISTEN: &str = "SVC_NODE_AGENT_SSH_LISTEN";
const LOOPBACK_GUARD: &str = "SVC_NODE_AGENT_LOOPBACK_GUARD";
const TENANT_LIMITS: &str = "SVC_NODE_AGENT_TENANT_LIMITS";
const RESERVED_MEMORY: &str = "SVC_NODE_AGENT_RESERVED_MEMORY_MIB";
const TASKS_PER_GPU: &str = "SVC_NODE_AGENT_TASKS_PER_GPU";
const RESERVED_DISK: &str = "SVC_NODE_AGENT_RESERVED_DISK_GIB";

/// The fewest processes with which a tenant's login and a program of CUDA begin.
const FEWEST_TASKS: u64 = 256;

/// The variables that are no flags and not of the bundle.
pub(crate) const OWN_VARIABLES: [&str; 14] = [
    STATE_DIR,
    UIDS,
    HOMES,
    KEYS,
    SUDO_COMMANDS,
    SHARED,
    DEVICES,
    TENANT_DEVICES,
    SSH_LISTEN,
    LOOPBACK_GUARD,
    TENANT_LIMITS,
    RESERVED_MEMORY,
    TASKS_PER_GPU,
    RESERVED_DISK,
];

/// The settings of tenants' accounts from the environment; the rest is as in [`Settings::default`]. `None` if something is wrong, which
/// is noted.
pub(super) fn gather(sources: &Sources<'_>, problems: &mut Problems) -> Option<Settings> {
    let defaults = Settings::default();
    let folder = |name: &'static str, default: PathBuf| match sources.get(name).map(PathBuf::from) {
        Some(path) if path.is_absolute() && is_plain(&path) => Ok(path),
        Some(_) => Err(AgentConfigError::Value {
            name,
            expected: "an absolute path without quotes, %, \\ and control characters",
        }),
        None => Ok(default),
    };
    let uids = match sources.get(UIDS) {
        Some(text) => uid_range(&text)
            .ok_or(AgentConfigError::Value { name: UIDS, expected: "a range of uids from 1000 on, as 70000-99999" }),
        None => Ok(defaults.uids),
    };
    let (uids, sudo_commands) = (problems.note(uids), problems.note(sudo_commands(sources)));
    let (shared, ssh_listen) = (problems.note(shared_folders(sources)), problems.note(ssh_listen(sources)));
    let homes = problems.note(folder(HOMES, defaults.homes));
    let keys = problems.note(folder(KEYS, defaults.keys));
    let devices = problems.note(folder(DEVICES, defaults.devices));
    let tenant_devices = problems.note(tenant_devices(sources));
    let loopback_guard = problems.note(switch(sources, LOOPBACK_GUARD, defaults.loopback_guard));
    let limits = limit_settings(sources, defaults.limits, problems);
    Some(Settings {
        uids: uids?,
        homes: homes?,
        keys: keys?,
        sudo_commands: sudo_commands?,
        shared: shared?,
        devices: devices?,
        tenant_devices: tenant_devices?,
        program: defaults.program,
        ssh_listen: ssh_listen?,
        loopback_guard: loopback_guard?,
        limits: limits?,
        account_tool_limit: defaults.account_tool_limit,
    })
}

/// `None` if something is wrong, which is noted.
fn limit_settings(sources: &Sources<'_>, defaults: LimitSettings, problems: &mut Problems) -> Option<LimitSettings> {
    let number = |name: &'static str, least: u64, expected: &'static str| match sources.get(name) {
        Some(text) => match text.trim().parse::<u64>() {
            Ok(number) if number >= least => Ok(Some(number)),
            Ok(_) | Err(_) => Err(AgentConfigError::Value { name, expected }),
        },
        None => Ok(None),
    };
    let is_on = problems.note(switch(sources, TENANT_LIMITS, defaults.is_on));
    let reserved = problems.note(number(RESERVED_MEMORY, 0, "a number of MiB"));
    let tasks = problems.note(number(TASKS_PER_GPU, FEWEST_TASKS, "a number of processes from 256 on"));
    let reserved_disk = problems.note(number(RESERVED_DISK, 0, "a number of GiB"));
    Some(LimitSettings {
        is_on: is_on?,
        reserved_memory_mib: reserved?.or(defaults.reserved_memory_mib),
        tasks_per_gpu: tasks?.unwrap_or(defaults.tasks_per_gpu),
        reserved_disk_gib: reserved_disk?.or(defaults.reserved_disk_gib),
    })
}

fn switch(sources: &Sources<'_>, name: &'static str, default: bool) -> Result<bool, AgentConfigError> {
    match sources.get(name).as_deref() {
        None => Ok(default),
        Some("on") => Ok(true),
        Some("off") => Ok(false),
        Some(_) => Err(AgentConfigError::Value { name, expected: "on or off" }),
    }
}

fn sudo_commands(sources: &Sources<'_>) -> Result<Vec<SudoCommand>, AgentConfigError> {
    let commands = sources.get(SUDO_COMMANDS).unwrap_or_default();
    let commands = commands.split(',').map(str::trim).filter(|command| !command.is_empty());
    commands
        .map(str::parse)
        .collect::<Result<_, _>>()
        .map_err(|_| AgentConfigError::Value { name: SUDO_COMMANDS, expected: "absolute paths of programs, by commas" })
}

/// systemd reads them in the slice of each tenant.
fn tenant_devices(sources: &Sources<'_>) -> Result<Vec<PathBuf>, AgentConfigError> {
    let devices = sources.get(TENANT_DEVICES).unwrap_or_default();
    let devices = devices.split(',').map(str::trim).filter(|path| !path.is_empty()).map(PathBuf::from);
    let devices: Vec<PathBuf> = devices.collect();
    let is_device = |path: &PathBuf| {
        let is_whole = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
        let is_word = path
            .to_str()
            .is_some_and(|text| text.len() <= MAX_TENANT_DEVICE_PATH && !text.contains(char::is_whitespace));
        path.starts_with("/dev") && path.parent() != Some(Path::new("/")) && is_whole && is_word && is_plain(path)
    };
    if devices.len() <= MAX_TENANT_DEVICES && devices.iter().all(is_device) {
        return Ok(devices);
    }
    Err(AgentConfigError::Value {
        name: TENANT_DEVICES,
        expected: "32 device nodes below /dev at most, of 128 bytes each, by commas, as /dev/fuse,/dev/infiniband/uverbs0",
    })
}

fn shared_folders(sources: &Sources<'_>) -> Result<Vec<PathBuf>, AgentConfigError> {
    let shared = sources.get(SHARED).unwrap_or_default();
    let shared = shared.split(',').map(str::trim).filter(|path| !path.is_empty()).map(PathBuf::from);
    let shared: Vec<PathBuf> = shared.collect();
    if shared.iter().all(|path| path.is_absolute() && path.parent().is_some()) {
        return Ok(shared);
    }
    Err(AgentConfigError::Value { name: SHARED, expected: "absolute paths of folders, by commas" })
}

fn ssh_listen(sources: &Sources<'_>) -> Result<Option<std::net::SocketAddr>, AgentConfigError> {
    let Some(text) = sources.get(SSH_LISTEN) else { return Ok(None) };
    let parsed = text.parse().map(Some);
    parsed
        .map_err(|_| AgentConfigError::Value { name: SSH_LISTEN, expected: "an address with a port, as 0.0.0.0:2222" })
}

/// Whether a path can be written into a file of sshd or systemd without escaping.
fn is_plain(path: &Path) -> bool {
    let means_more = |c: char| c.is_control() || matches!(c, '"' | '\'' | '%' | '\\');
    path.to_str().is_some_and(|text| !text.chars().any(means_more))
}

fn uid_range(text: &str) -> Option<std::ops::RangeInclusive<u32>> {
    let (first, last) = text.split_once('-')?;
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    // Uids below 1000 are the system's own; the last two mean "nobody" and "no change".
    (first >= 1000 && first <= last && last < u32::MAX - 1).then_some(first..=last)
}
