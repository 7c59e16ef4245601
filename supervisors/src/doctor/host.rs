//! This machine: ports of the listeners, open files, disks.

use crate::config::installed_settings::InstalledSettings;
use crate::config::{LISTENER_CONNECTIONS, opened_listeners};
use edge::tls::serve::ListenerLimits;
use nix::sys::resource::{Resource, getrlimit};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use telemetry::diagnosis::{DiagnosticFinding, machine};

/// The name of the service's process.
const PROGRAM: &str = "gpuaas";

/// For each connection that a listener admits: there are two listeners, and a terminal has two connections.
const OPEN_FILES_PER_CONNECTION: u64 = 4;
const LEAST_OPEN_FILES: u64 = 4096;

/// What became of an attempt to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PortUse {
    Free,
    /// The name and the id of the process, where this user may see it.
    Taken(Option<(String, i32)>),
    NoSuchAddress,
    Refused(String),
}

pub(super) fn ports(settings: &InstalledSettings) -> Vec<DiagnosticFinding> {
    let first_unprivileged = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
    let first_unprivileged = first_unprivileged.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(1024);
    listeners(settings)
        .into_iter()
        .map(|(name, address)| judge_port(name, address, &port_use(address), first_unprivileged))
        .collect()
}

/// The listeners of the roles, by their variables. Values that are no addresses are among the problems of settings.
pub(super) fn listeners(settings: &InstalledSettings) -> Vec<(&'static str, SocketAddr)> {
    let has_payments = settings.get("SVC_PAYMENTS_SECRET_KEY").is_some();
    opened_listeners(|role| settings.has_role(role), has_payments)
        .into_iter()
        .filter_map(|(name, default)| {
            let address = settings.get(name).unwrap_or_else(|| default.to_owned()).parse().ok()?;
            Some((name, address))
        })
        .collect()
}

fn port_use(address: SocketAddr) -> PortUse {
    match TcpListener::bind(address) {
        Ok(_) => PortUse::Free,
        Err(error) => match error.kind() {
            ErrorKind::AddrInUse => PortUse::Taken(machine::port_holder(address.port())),
            ErrorKind::AddrNotAvailable => PortUse::NoSuchAddress,
            _ => PortUse::Refused(error.to_string()),
        },
    }
}

fn judge_port(name: &str, address: SocketAddr, used: &PortUse, first_unprivileged: u16) -> DiagnosticFinding {
    match used {
        PortUse::Free if address.port() < first_unprivileged && address.port() != 0 => DiagnosticFinding::error(
            format!("{name}: {address} is a privileged port, which the service's user may not take"),
            format!("take a port from {first_unprivileged} on, and forward the other one to it"),
        ),
        PortUse::Free => DiagnosticFinding::ok(format!("{name}: {address} is free (the service does not run here)")),
        PortUse::Taken(Some((program, pid))) if program == PROGRAM => {
            DiagnosticFinding::ok(format!("{name}: {address} is held by {program} (process {pid})"))
        }
        PortUse::Taken(Some((program, pid))) => DiagnosticFinding::error(
            format!("{name}: {address} is held by {program} (process {pid})"),
            format!("stop {program}, or set {name} to another address"),
        ),
        PortUse::Taken(None) => DiagnosticFinding::warning(
            format!("{name}: {address} is held by a process that this user may not see"),
            "run this command as root to see which",
        ),
        PortUse::NoSuchAddress => DiagnosticFinding::error(
            format!("{name}: this machine has no address {}", address.ip()),
            format!("set {name} to one of its addresses, or to 0.0.0.0:{}", address.port()),
        ),
        PortUse::Refused(why) => DiagnosticFinding::error(
            format!("{name}: cannot listen on {address}: {why}"),
            format!("set {name} to an address and a port that this user may take"),
        ),
    }
}

/// Of the service, where it runs here, and otherwise of this command.
pub(super) fn open_files(settings: &InstalledSettings) -> Vec<DiagnosticFinding> {
    let service = listeners(settings).into_iter().find_map(|(_, address)| machine::port_holder(address.port()));
    let service = service.filter(|(program, _)| program == PROGRAM).and_then(|(_, pid)| {
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
        Some((limit_of(&limits)?, format!("the service (process {pid})")))
    });
    let (limit, whose) = service.unwrap_or_else(|| {
        let own = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(_, hard)| hard);
        (own, "this command".to_owned())
    });
    let connections = settings.get(LISTENER_CONNECTIONS).and_then(|text| text.trim().parse().ok());
    let connections = connections.unwrap_or(ListenerLimits::default().connections as u64);
    vec![judge_open_files(limit, &whose, connections)]
}

/// The hard limit, to which the service raises its own.
fn limit_of(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_whitespace().nth(1)? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

fn judge_open_files(limit: u64, whose: &str, connections: u64) -> DiagnosticFinding {
    let enough = connections.saturating_mul(OPEN_FILES_PER_CONNECTION).max(LEAST_OPEN_FILES);
    let summary = format!("{whose} may have {limit} files open");
    let action = format!(
        "set LimitNOFILE={enough} or more in the unit (`systemctl edit gpuaas`), or `ulimit -Hn` before the start"
    );
    match limit {
        0..LEAST_OPEN_FILES => DiagnosticFinding::error(format!("{summary}: users' connections use them up"), action),
        _ if limit < enough => DiagnosticFinding::warning(summary, action),
        _ => DiagnosticFinding::ok(summary),
    }
}

/// The file systems that logs, temporary files and settings are on.
pub(super) fn disks(settings: &InstalledSettings) -> Vec<DiagnosticFinding> {
    let settings = settings.file.as_deref().and_then(Path::parent).map(Path::to_owned);
    let folders = [Some(PathBuf::from("/")), Some(PathBuf::from("/var/log")), Some(std::env::temp_dir()), settings];
    let mut seen = BTreeSet::new();
    let is_new = |folder: &PathBuf| std::fs::metadata(folder).is_ok_and(|it| seen.insert(it.dev()));
    folders
        .into_iter()
        .flatten()
        .filter(is_new)
        .collect::<Vec<_>>()
        .iter()
        .map(|folder| machine::disk(folder))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use telemetry::diagnosis::DiagnosticLevel::{Error, Ok, Warning};

    #[test]
    fn port_is_free_or_held_by_the_service_and_otherwise_named_with_its_holder() {
        let address: SocketAddr = "0.0.0.0:8443".parse().unwrap();
        let judge = |used: PortUse| judge_port("SVC_PUBLIC_LISTEN", address, &used, 1024);
        assert_eq!(judge(PortUse::Free).level, Ok);
        assert_eq!(judge(PortUse::Taken(Some(("gpuaas".to_owned(), 7)))).level, Ok);
        let taken = judge(PortUse::Taken(Some(("nginx".to_owned(), 42))));
        assert!(taken.level == Error && taken.summary.contains("nginx (process 42)"), "{taken:?}");
        assert_eq!(judge(PortUse::Taken(None)).level, Warning);
        assert_eq!(judge(PortUse::NoSuchAddress).level, Error);
        assert_eq!(judge(PortUse::Refused("denied".to_owned())).level, Error);
        let privileged = judge_port("SVC_PUBLIC_LISTEN", "0.0.0.0:443".parse().unwrap(), &PortUse::Free, 1024);
        assert_eq!(privileged.level, Error);
    }

    #[test]
    fn holder_of_a_port_is_found_by_its_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let PortUse::Taken(Some((_, pid))) = port_use(address) else { panic!("it is taken") };
        assert_eq!(pid, i32::try_from(std::process::id()).unwrap());
    }

    #[test]
    fn low_limit_of_open_files_is_read_and_judged() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max open files            1024                 4095                 files\n";
        assert_eq!(limit_of(limits), Some(4095));
        assert_eq!(judge_open_files(4095, "it", 16_384).level, Error);
        assert_eq!(judge_open_files(4096, "it", 16_384).level, Warning);
        assert_eq!(judge_open_files(65_536, "it", 16_384).level, Ok);
        assert_eq!(judge_open_files(65_536, "it", 100_000).level, Warning);
        assert_eq!(judge_open_files(4096, "it", 64).level, Ok);
    }
}
