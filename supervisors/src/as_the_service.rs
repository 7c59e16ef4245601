//! A command of this program as the service's own user. Postgres' socket may admit that user alone (`peer`), and root has to look all the
//! same. systemd makes the user of `DynamicUser=` exist, also while the service does not run.

use crate::config::installed_settings::InstalledSettings;
use failures::chain;
use persistence::pool::ConnectionError;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use telemetry::diagnosis::unit::is_booted_by_systemd;
use tokio::process::Command;

const SYSTEMD_RUN: &str = "/usr/bin/systemd-run";
const USER: &str = "gpuaas";

/// Whether the server admits the service's user alone, by the user of the process that connects.
pub(crate) fn is_needed(error: &ConnectionError) -> bool {
    chain(error).contains("Peer authentication failed")
}

/// Whether this process can start one.
pub(crate) fn is_possible(settings: &InstalledSettings) -> bool {
    nix::unistd::geteuid().is_root()
        && settings.file.is_some()
        && is_booted_by_systemd()
        && Path::new(SYSTEMD_RUN).exists()
}

/// What the command prints to its standard output, whatever its exit status.
///
/// # Errors
/// Where it cannot be started, does not end in time, or prints nothing.
pub(crate) async fn output(
    settings: &InstalledSettings,
    arguments: &[&str],
    within: Duration,
) -> Result<Vec<u8>, String> {
    let file = settings.file.as_deref().ok_or("the settings are not in a file")?;
    let program = std::env::current_exe().map_err(|error| format!("this program is not found: {error}"))?;
    let mut command = Command::new(SYSTEMD_RUN);
    command.args(["--wait", "--pipe", "--collect", "--quiet", "--property=DynamicUser=yes"]);
    command.arg(format!("--property=User={USER}")).arg(format!("--property=EnvironmentFile={}", file.display()));
    // It ends with its time also where this process is killed.
    command.arg(format!("--property=RuntimeMaxSec={}", within.as_secs().max(1)));
    if let Some(ring) = settings.get("SVC_KEK_FILE").filter(|path| Path::new(path).exists()) {
        command.arg(format!("--property=LoadCredential=kek:{ring}"));
    }
    command.arg("--").arg(program).args(arguments);
    command.stdin(Stdio::null()).kill_on_drop(true);
    let failed = |why: &dyn std::fmt::Display| format!("the command as the user {USER} failed: {why}");
    let output = match tokio::time::timeout(within, command.output()).await {
        Ok(output) => output.map_err(|error| failed(&error))?,
        Err(_) => return Err(failed(&format_args!("it did not end within {} s", within.as_secs()))),
    };
    match output.stdout.is_empty() {
        false => Ok(output.stdout),
        true => Err(failed(&format_args!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))),
    }
}
