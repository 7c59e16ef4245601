//! `gpuaas-agent doctor`: looks at everything that the agent needs on its machine, and says what to do about what is wrong. It changes
//! nothing, and what hangs is a finding.

mod machine;
mod node_api;
mod service;
mod settings;

use crate::config::{AgentDoctorArgs, FindingsOutput, Flags};
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use telemetry::diagnosis::{DiagnosticCheck, DiagnosticFinding, examine};

/// The environment file of the agent's unit.
const ENV_FILE: &str = "/etc/gpuaas/agent.env";

/// What to do where a file system hangs.
const DISK: &str =
    "a file system does not answer: look for a dead mount, and at the kernel's log for errors of the disk";
/// What to do where systemd hangs.
const SYSTEMD: &str = "systemd does not answer: look at `journalctl -b -p warning`, then reboot the machine";
/// A wait for a local resource.
const LOCAL: Duration = Duration::from_secs(5);
/// A connection and a request.
const REMOTE: Duration = Duration::from_secs(15);
/// The driver's first answer may take twice its deadline.
const DRIVER: Duration = Duration::from_secs(25);

/// Prints the findings, and returns 0 where nothing is wrong, 1 for warnings, 2 for errors.
#[must_use]
pub fn run(args: &AgentDoctorArgs, mut flags: Flags) -> ExitCode {
    // Fails only if one is installed already, which is this one.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let default = Path::new(ENV_FILE);
    let is_named = flags.env_file.is_some() || std::env::var_os(wire::bundle::names::ENV_FILE).is_some();
    if !is_named && default.exists() {
        flags.env_file = Some(default.to_owned());
    }
    let report = examine("gpuaas-agent", env!("CARGO_PKG_VERSION"), checks(&Arc::new(flags)));
    let mut out = std::io::stdout().lock();
    let printed = match args.output {
        FindingsOutput::Text => write!(out, "{}", report.as_text()),
        FindingsOutput::Json => writeln!(out, "{:#}", report.as_json()),
    };
    match printed {
        Ok(()) => ExitCode::from(report.level() as u8),
        Err(_) => ExitCode::from(2),
    }
}

/// The table of checks.
fn checks(flags: &Arc<Flags>) -> Vec<DiagnosticCheck> {
    const NETWORK: &str = "the control plane accepts connections and does not answer: look at its readiness";
    const HUNG: &str = "the driver hangs: look at the kernel's log for Xids, then reboot the machine";
    let local = |name, subject, limit, if_late, look: fn(&Flags) -> Vec<DiagnosticFinding>| {
        let flags = Arc::clone(flags);
        DiagnosticCheck::blocking(name, subject, limit, if_late, move || look(&flags))
    };
    vec![
        local("settings", "the environment file and all variables", LOCAL, DISK, settings::examine),
        local("service", "whether its unit runs, and why it has ended", LOCAL, SYSTEMD, service::examine),
        local("files", "the state's folder, and who may read secrets", LOCAL, DISK, settings::examine_files),
        local(
            "certificates",
            "the node's certificate and the authorities, and their ends",
            LOCAL,
            DISK,
            settings::certificates,
        ),
        DiagnosticCheck::new(
            "control-plane",
            "the node API, its certificate, and the clock",
            REMOTE,
            NETWORK,
            node_api::examine(Arc::clone(flags)),
        ),
        local("driver", "NVIDIA's driver and its GPUs", DRIVER, HUNG, machine::driver),
        local("cgroups", "control groups, by which units are bounded", LOCAL, DISK, machine::cgroups),
        local("tools", "the programs that tasks run", LOCAL, DISK, machine::tools),
        local("ssh-port", "the address of tenants' log-ins", LOCAL, DISK, machine::ssh_port),
        local("open-files", "the limit of open files", LOCAL, DISK, machine::open_files),
        local("disks", "the file systems of the state and of logs", LOCAL, DISK, machine::disks),
    ]
}

/// A variable of the process, as the agent reads it.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
