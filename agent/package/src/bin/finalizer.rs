//! `gpuaas-finalizer`: carries the update of the agent to its end, from the previous version.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use agent_package::chain;
use agent_package::update::{AgentUpdateOutcome, InstalledMachine, SystemFolders, finalize};
use clap::Parser;

/// Carries the update of the agent that is in progress to its end, and ends at once where there is none.
///
/// It makes the new version the current one, restarts the agent, and waits until the control plane has answered a heartbeat of the new
/// agent. Without that in time it puts the previous version back, and remembers the new one as failed. It may be killed at any point and
/// started again.
#[derive(Debug, Parser)]
#[command(name = "gpuaas-finalizer", version)]
struct Flags {
    /// The installation's folder
    #[arg(long, default_value = wire::package::DEFAULT_INSTALL_ROOT)]
    install_root: PathBuf,
    /// Where systemd's units are written
    #[arg(long, default_value = "/etc/systemd/system")]
    unit_folder: PathBuf,
    /// Where systemd's settings are written that end with the boot
    #[arg(long, default_value = "/run/systemd/system")]
    runtime_unit_folder: PathBuf,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    let folders = SystemFolders { units: flags.unit_folder, runtime_units: flags.runtime_unit_folder };
    let ended = InstalledMachine::open(&flags.install_root, folders).and_then(|mut machine| finalize(&mut machine));
    match ended {
        Ok(outcome) => {
            say(&outcome.map_or_else(|| "no update is in progress".to_owned(), |outcome| describe(&outcome)));
            ExitCode::SUCCESS
        }
        Err(error) => {
            say(&format!("the update is not at its end, and is continued: {}", chain(&error)));
            ExitCode::FAILURE
        }
    }
}

fn describe(outcome: &AgentUpdateOutcome) -> String {
    let AgentUpdateOutcome { to, version, from, rolled_back, .. } = outcome;
    match rolled_back {
        None => format!("version {version} ({to}) is in use"),
        Some(reason) => {
            format!("version {version} ({to}) is rolled back to {from}: {}: {}", reason.code, reason.message)
        }
    }
}

fn say(text: &str) {
    // A closed output changes nothing.
    let _ = writeln!(std::io::stderr(), "gpuaas-finalizer: {text}");
}
