//! Node agents: `gpuaas-agent` as child processes with simulated GPUs, each with a folder of its own.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use wire::bundle::BootstrapBundle;

use super::files;
use super::process::{ChildProcess, Launch};

const STOPS_WITHIN: Duration = Duration::from_secs(10);

/// The GPUs that an agent makes up.
#[derive(Debug, Clone)]
pub struct SimulatedGpus {
    pub count: u32,
    pub model: String,
    pub memory_mib: u64,
}

/// What all agents of one environment share.
#[derive(Debug, Clone)]
pub struct AgentSettings {
    /// The `gpuaas-agent` program.
    pub executable: PathBuf,
    /// Each agent's state lies in a folder here that bears its name.
    pub folder: PathBuf,
    /// Where the logs go.
    pub logs: PathBuf,
    pub gpus: SimulatedGpus,
    /// Further flags.
    pub flags: Vec<String>,
}

/// One agent. Dropping it stops it; its state stays.
pub struct AgentProcess {
    name: String,
    settings: AgentSettings,
    process: ChildProcess,
}

impl AgentProcess {
    /// Writes the bundle's environment file and starts the agent with it.
    pub fn start(name: &str, settings: &AgentSettings, bundle: &BootstrapBundle) -> anyhow::Result<Self> {
        let folder = settings.folder.join(name);
        files::private_folder(&folder)?;
        files::write_private(&folder.join("agent.env"), bundle.to_env_file()?.as_bytes())?;
        let process = launch(name, settings).spawn()?;
        Ok(Self { name: name.to_owned(), settings: settings.clone(), process })
    }

    /// Starts a stopped or killed agent on the state that it had.
    pub fn start_again(&mut self) -> anyhow::Result<()> {
        if !self.is_running() {
            self.process = launch(&self.name, &self.settings).spawn()?;
        }
        Ok(())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Environment file, identity, journal and allocations.
    pub fn folder(&self) -> PathBuf {
        self.settings.folder.join(&self.name)
    }

    pub fn log(&self) -> &Path {
        self.process.log()
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub fn is_running(&mut self) -> bool {
        self.process.is_running()
    }

    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.process.exit_status()
    }

    /// SIGKILL to the agent alone: what it runs for tenants lives on.
    pub fn kill9(&mut self) {
        self.process.kill9();
    }

    /// An orderly end.
    pub async fn stop(&mut self) {
        self.process.stop(STOPS_WITHIN).await;
    }
}

/// The bundle's paths are those of a machine with one agent; here each agent keeps everything in its folder.
fn launch(name: &str, settings: &AgentSettings) -> Launch {
    let folder = settings.folder.join(name);
    let log = settings.logs.join(format!("{name}.log"));
    let mut launch = Launch::new(name, &settings.executable, log);
    for (flag, file) in [
        ("--env-file", "agent.env"),
        ("--ca-bundle-path", "ca.pem"),
        ("--node-cert-ca-bundle-path", "node-ca.pem"),
        ("--cert-path", "node.pem"),
        ("--key-path", "node.key"),
        ("--state-dir", "state"),
    ] {
        launch = launch.argument(flag).argument(folder.join(file));
    }
    let gpus = &settings.gpus;
    launch
        .argument("--simulate-gpus")
        .argument(gpus.count.to_string())
        .argument("--gpu-model")
        .argument(&gpus.model)
        .argument("--gpu-memory-mib")
        .argument(gpus.memory_mib.to_string())
        .arguments(&settings.flags)
        .variable("RUST_LOG", std::env::var_os("RUST_LOG").unwrap_or_else(|| "info".into()))
}
