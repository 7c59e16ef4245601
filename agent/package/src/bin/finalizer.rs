//! `gpuaas-finalizer`: carries the update of the agent to its end, from the previous version.

use std::path::PathBuf;
use std::process::ExitCode;

use agent_package::chain;
use agent_package::log_lines::{JsonLogLines, Level};
use agent_package::update::{AgentUpdateOutcome, InstalledMachine, SystemFolders, UpdateFolder, finalize};
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
    // The record is gone at the update's end.
    let record = UpdateFolder::of(&flags.install_root).record().ok().flatten();
    let env_file = record.as_ref().map(|record| record.env_file.as_path());
    let log = JsonLogLines::new("gpuaas_finalizer", |name| std::env::var(name).ok(), env_file);
    let folders = SystemFolders { units: flags.unit_folder, runtime_units: flags.runtime_unit_folder };
    let ended = InstalledMachine::open(&flags.install_root, folders).and_then(|mut machine| finalize(&mut machine));
    match ended {
        Ok(Some(outcome)) => {
            log_outcome(&log, &outcome);
            ExitCode::SUCCESS
        }
        Ok(None) => {
            log.write(Level::Info, "no update is in progress", &[]);
            ExitCode::SUCCESS
        }
        Err(error) => {
            let error = chain(&error);
            let fields: [(&'static str, &str); 2] = [("error_code", "update_unfinished"), ("error", &error)];
            log.write(Level::Warn, "the update is not at its end, and is continued", &fields);
            ExitCode::FAILURE
        }
    }
}

fn log_outcome(log: &JsonLogLines, outcome: &AgentUpdateOutcome) {
    let AgentUpdateOutcome { task_id, to, version, from, rolled_back } = outcome;
    let [task_id, to, from] = [task_id.to_string(), to.to_string(), from.to_string()];
    let known: [(&'static str, &str); 4] =
        [("task_id", &task_id), ("version", version), ("digest", &to), ("digest_before", &from)];
    match rolled_back {
        None => log.write(Level::Info, &format!("version {version} ({to}) is in use"), &known),
        Some(reason) => {
            let message = format!("version {version} ({to}) is rolled back to {from}");
            let why: [(&'static str, &str); 2] = [("error_code", &reason.code), ("error", &reason.message)];
            log.write(Level::Warn, &message, &[&known[..], &why[..]].concat());
        }
    }
}
