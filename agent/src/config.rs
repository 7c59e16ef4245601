//! The agent's configuration: flags, environment, and the bootstrap bundle's environment file.
//!
//! A flag wins over the environment, the environment over the file. Secrets have no flag, since every user of a machine can read the
//! flags of its processes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use uuid::Uuid;
use wire::address::{AddressError, AgentApiUrl};
use wire::bundle::{EnvFileError, fingerprint, names};
use wire::verifier_set::SetError;
use wire::{SecretToken, VerifierSet};

use crate::agent_user::RunAsError;
use crate::atomic_file::{self, FileError};
use crate::gpus::GpuSimulation;
use crate::integrity::{IntegritySettings, PrivilegeSettings};
use crate::simulated_faults::SimulatedFaults;
use crate::system_executor::Settings;

mod flags;
mod sources;
mod system_settings;

pub use flags::{AgentCommand, AgentDoctorArgs, ExecutorChoice, FindingsOutput, Flags, IntegrityChecks};
pub(crate) use sources::Sources;
pub(crate) use system_settings::OWN_VARIABLES;

const STATE_DIR: &str = "SVC_NODE_AGENT_STATE_DIR";
const DEFAULT_STATE_DIR: &str = "/var/lib/gpuaas-agent";

/// A complete configuration.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    pub node_id: Uuid,
    /// Required until the node is enrolled.
    pub enrollment_token: Option<SecretToken>,
    /// Without a trailing slash.
    pub api_url: String,
    /// Trust anchors for the API's server certificate; no other root counts.
    pub ca_bundle_pem: String,
    /// The environment file of the bundle, where the configuration came from one.
    pub env_file: Option<PathBuf>,
    pub node_cert_ca_bundle_path: PathBuf,
    pub cert_path: PathBuf,
    pub key_path: PathBuf,
    /// The bundle's verifier keys, version 0.
    pub verifier_set: VerifierSet,
    pub state_dir: PathBuf,
    /// Folder of `nvidia-smi`.
    pub driver_tools: PathBuf,
    /// Folder of the tools of `node.validate`.
    pub validation_tools: PathBuf,
    /// Where it tests the disk.
    pub validation_folder: PathBuf,
    pub max_concurrent_tasks: usize,
    pub recording_spool_bytes: u64,
    /// Settings of the `system` executor; `None` for `sandbox`.
    pub system: Option<Settings>,
    pub simulated_gpus: Option<GpuSimulation>,
    pub simulated_faults: SimulatedFaults,
    /// After this time without an answer, the GPU driver counts as hung.
    pub gpu_deadline: Duration,
    pub kernel_log: PathBuf,
    /// `None`: the integrity of the machine is not watched.
    pub integrity: Option<IntegritySettings>,
}

/// Why the agent cannot start, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum AgentConfigError {
    #[error("the environment file {} is not there; write the bootstrap bundle to it, or name another with --env-file", .0.display())]
    NoEnvFile(PathBuf),
    #[error("the environment file {} cannot be used", path.display())]
    EnvFile {
        path: PathBuf,
        #[source]
        source: EnvFileError,
    },
    #[error(
        "{name} is not set; take it from the node's bootstrap bundle (ask an administrator to reissue it if it is lost)"
    )]
    Missing { name: &'static str },
    #[error("{name} is not {expected}")]
    Value { name: &'static str, expected: &'static str },
    #[error("{name}: {error}")]
    Address { name: &'static str, error: AddressError },
    #[error("SVC_TASK_SIGNING_PUBKEYS cannot be used; take it from the node's bootstrap bundle")]
    Verifiers(#[from] SetError),
    #[error(
        "the CA bundle {} is not there and the environment has no SVC_CA_BUNDLE_PEM to write it from; install the bootstrap \
         bundle again",
        .0.display()
    )]
    NoCaBundle(PathBuf),
    #[error(
        "the CA bundle has fingerprint {found}, the bootstrap bundle says {expected}; if the bootstrap bundle is the newer one, \
         remove {} to have it written again",
        path.display()
    )]
    Fingerprint { path: PathBuf, found: String, expected: String },
    #[error(transparent)]
    User(#[from] RunAsError),
    /// Two or more, so that an operator corrects them in one pass.
    #[error("{} problems: {}", .0.len(), listed(.0))]
    Several(Vec<Self>),
    #[error(transparent)]
    Store(#[from] FileError),
}

fn listed(problems: &[AgentConfigError]) -> String {
    problems.iter().map(|problem| crate::chain(problem)).collect::<Vec<_>>().join("; ")
}

/// Collected configuration errors.
#[derive(Default)]
struct Problems(Vec<AgentConfigError>);

impl Problems {
    fn note<T>(&mut self, result: Result<T, AgentConfigError>) -> Option<T> {
        result.map_err(|problem| self.0.push(problem)).ok()
    }

    /// Requires at least one problem.
    fn into_error(mut self) -> AgentConfigError {
        match self.0.pop() {
            Some(only) if self.0.is_empty() => only,
            Some(last) => {
                self.0.push(last);
                AgentConfigError::Several(self.0)
            }
            None => AgentConfigError::Several(self.0),
        }
    }
}

impl AgentConfig {
    /// Assembles the configuration and writes the CA bundle's file if it is missing.
    ///
    /// # Errors
    /// [`AgentConfigError`] lists everything that is missing or wrong, and what to do.
    pub fn gather(flags: &Flags, environment: impl Fn(&str) -> Option<String>) -> Result<Self, AgentConfigError> {
        Self::assemble(flags, &environment, true)
    }

    /// The same, and nothing is written.
    ///
    /// # Errors
    /// As [`Self::gather`].
    pub fn peek(flags: &Flags, environment: impl Fn(&str) -> Option<String>) -> Result<Self, AgentConfigError> {
        Self::assemble(flags, &environment, false)
    }

    fn assemble(
        flags: &Flags,
        environment: &dyn Fn(&str) -> Option<String>,
        writes: bool,
    ) -> Result<Self, AgentConfigError> {
        let sources = Sources::open(flags, environment)?;
        let state_dir = flags
            .state_dir
            .clone()
            .or_else(|| sources.get(STATE_DIR).map(PathBuf::from))
            .unwrap_or_else(|| PathBuf::from(DEFAULT_STATE_DIR));
        let mut problems = Problems::default();
        let node_id = problems.note(node_id(flags, &sources));
        let api_url = problems.note(api_url(flags, &sources));
        let keys = sources.flag_or(flags.task_signing_pubkeys.as_ref(), names::TASK_SIGNING_PUBKEYS);
        let keys = keys.and_then(|keys| Ok(VerifierSet::from_env_value(&keys)?));
        let verifier_set = problems.note(keys);
        let path = |flag: &Option<PathBuf>, name: &str, default: &str| {
            flag.clone().or_else(|| sources.get(name).map(PathBuf::from)).unwrap_or_else(|| state_dir.join(default))
        };
        let ca_bundle_path = path(&flags.ca_bundle_path, names::CA_BUNDLE_PATH, "ca.pem");
        let (pem, expected) = (sources.get(names::CA_BUNDLE_PEM), sources.get(names::CA_BUNDLE_FINGERPRINT));
        let ca_bundle_pem = problems.note(ca_bundle(&ca_bundle_path, pem, expected, writes));
        let system = match flags.executor {
            ExecutorChoice::Sandbox => Some(None),
            ExecutorChoice::System => system_settings::gather(&sources, &mut problems).map(Some),
        };
        let (Some(node_id), Some(api_url), Some(verifier_set), Some(ca_bundle_pem), Some(system)) =
            (node_id, api_url, verifier_set, ca_bundle_pem, system)
        else {
            return Err(problems.into_error());
        };
        let integrity = integrity_settings(flags, system.as_ref(), &state_dir);
        Ok(Self {
            node_id,
            enrollment_token: sources.get(names::ENROLLMENT_TOKEN).map(SecretToken::new),
            api_url,
            ca_bundle_pem,
            env_file: sources.env_file.clone(),
            node_cert_ca_bundle_path: path(
                &flags.node_cert_ca_bundle_path,
                names::NODE_CERT_CA_BUNDLE_PATH,
                "node-ca.pem",
            ),
            cert_path: path(&flags.cert_path, names::CERT_PATH, "node.pem"),
            key_path: path(&flags.key_path, names::KEY_PATH, "node.key"),
            verifier_set,
            max_concurrent_tasks: usize::from(flags.max_concurrent_tasks),
            recording_spool_bytes: u64::from(flags.recording_spool_mib) * 1024 * 1024,
            system,
            simulated_gpus: flags.simulate_gpus.map(|count| GpuSimulation {
                count,
                model: flags.gpu_model.clone(),
                memory_mib: flags.gpu_memory_mib,
            }),
            simulated_faults: SimulatedFaults {
                provision_delay: Duration::from_millis(flags.simulate_provision_delay_ms),
                failure: flags.simulate_failure,
            },
            gpu_deadline: Duration::from_secs(flags.gpu_deadline_seconds),
            kernel_log: flags.kernel_log.clone(),
            integrity,
            driver_tools: flags.driver_tools.clone(),
            validation_tools: flags.validation_tools.clone(),
            validation_folder: flags.validation_folder.clone().unwrap_or_else(|| state_dir.clone()),
            state_dir,
        })
    }
}

/// Privileges are compared on machines that are tenants' alone.
fn integrity_settings(flags: &Flags, system: Option<&Settings>, state_dir: &Path) -> Option<IntegritySettings> {
    let privileges = system.map(|system| PrivilegeSettings {
        root: PathBuf::from("/"),
        state_dir: state_dir.to_owned(),
        homes: system.homes.clone(),
        keys: system.keys.clone(),
        ssh_listen: system.ssh_listen,
        ignored_ports: flags.ignored_ports.clone(),
    });
    let interval = Duration::from_secs(flags.integrity_interval_seconds);
    (flags.integrity_checks == IntegrityChecks::On).then_some(IntegritySettings { privileges, interval })
}

fn node_id(flags: &Flags, sources: &Sources<'_>) -> Result<Uuid, AgentConfigError> {
    match flags.node_id {
        Some(node_id) => Ok(node_id),
        None => sources
            .require(names::NODE_ID)?
            .parse()
            .map_err(|_| AgentConfigError::Value { name: names::NODE_ID, expected: "a UUID" }),
    }
}

/// Without a trailing slash.
fn api_url(flags: &Flags, sources: &Sources<'_>) -> Result<String, AgentConfigError> {
    let api_url = sources.flag_or(flags.api_url.as_ref(), names::API_URL)?;
    let read = AgentApiUrl::parse(&api_url);
    let read = read.map_err(|error| AgentConfigError::Address { name: names::API_URL, error })?;
    Ok(read.as_str().to_owned())
}
fn ca_bundle(
    path: &Path,
    pem: Option<String>,
    expected: Option<String>,
    writes: bool,
) -> Result<String, AgentConfigError> {
    let (found, is_new) = match atomic_file::read_if_there(path)? {
        Some(text) => (text, false),
        None => (pem.ok_or_else(|| AgentConfigError::NoCaBundle(path.to_owned()))?, true),
    };
    if let Some(expected) = expected
        && fingerprint(&found) != expected
    {
        return Err(AgentConfigError::Fingerprint { path: path.to_owned(), found: fingerprint(&found), expected });
    }
    if is_new && writes {
        atomic_file::write_atomically(path, found.as_bytes(), atomic_file::PUBLIC)?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
