//! The collector's configuration: its own variables, and what of the agent's it needs to speak for the node.

use crate::atomic_file::{self, FileError};
use crate::config::{AgentConfig, AgentConfigError, Flags, Sources};
use std::path::PathBuf;
use wire::address::{AddressError, AgentApiUrl};
use wire::bundle::names;
use wire::package::{DEFAULT_UNIT, is_service_unit};

const ENABLED: &str = "SVC_NODE_LOG_COLLECTOR_ENABLED";
const CA_FILE: &str = "SVC_NODE_LOG_COLLECTOR_CA_FILE";
const ENDPOINT: &str = "SVC_NODE_LOG_COLLECTOR_ENDPOINT";
const SPOOL_MIB: &str = "SVC_NODE_LOG_COLLECTOR_SPOOL_MIB";
const STATE_DIR: &str = "SVC_NODE_LOG_COLLECTOR_STATE_DIR";
const DEFAULT_STATE_DIR: &str = "/var/lib/gpuaas-log-collector";
const DEFAULT_SPOOL_MIB: u64 = 64;
const SPOOL_MIB_MAX: u64 = 65_536;

/// What the collector adds to its endpoint.
pub(super) const PUSH_PATH: &str = "/loki/api/v1/push";
/// Where the gateway is at the control plane.
const GATEWAY_PATH: &str = "/internal/v1/node-logs";

/// A complete configuration.
#[derive(Clone, Debug)]
pub struct CollectorConfig {
    /// The node's identity and the control plane's address.
    pub agent: AgentConfig,
    /// The name of the agent's unit.
    pub agent_unit: String,
    /// The gateway's base, without a trailing slash.
    pub endpoint: String,
    /// The authorities by which the gateway's certificate is trusted; no other root counts. Those of the node API, unless a file is named.
    pub gateway_ca_pem: String,
    pub spool_bytes: u64,
    pub state_dir: PathBuf,
    /// The program that reads the journal.
    pub journalctl: PathBuf,
}

/// Why the collector cannot start, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum CollectorConfigError {
    #[error(
        "{CA_FILE} names {}, which is not there; without it the authority of the node API is trusted. There is no way to leave the \
         certificate unchecked",
        .0.display()
    )]
    MissingCaFile(PathBuf),
    #[error("{ENDPOINT}: {0}")]
    Endpoint(AddressError),
    #[error("{ENDPOINT} ends in {PUSH_PATH}, which the collector adds itself; leave that away, so that it is {base}")]
    PushEndpoint { base: String },
    #[error("{SPOOL_MIB} is not a whole number from 1 to {SPOOL_MIB_MAX}")]
    Spool,
    #[error("{} is not the name of a systemd unit, such as {DEFAULT_UNIT}", names::SYSTEMD_UNIT)]
    Unit,
    #[error(transparent)]
    Agent(#[from] AgentConfigError),
    #[error(transparent)]
    Store(#[from] FileError),
}

impl CollectorConfig {
    /// Assembles the configuration; `None` where the collector is not enabled.
    ///
    /// # Errors
    /// [`CollectorConfigError`] says what is missing or wrong, and what to do.
    pub fn gather(
        flags: &Flags,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, CollectorConfigError> {
        let sources = Sources::open(flags, &environment)?;
        if sources.get(ENABLED).as_deref() != Some("1") {
            return Ok(None);
        }
        let own_ca_pem = sources.get(CA_FILE).map(|path| ca_file(path.into())).transpose()?;
        let spool_mib = match sources.get(SPOOL_MIB) {
            Some(text) => text.parse().ok().filter(|mib| (1..=SPOOL_MIB_MAX).contains(mib)),
            None => Some(DEFAULT_SPOOL_MIB),
        };
        let spool_bytes = spool_mib.ok_or(CollectorConfigError::Spool)? * 1024 * 1024;
        let state_dir = sources.get(STATE_DIR).unwrap_or_else(|| DEFAULT_STATE_DIR.to_owned()).into();
        let named = sources.get(ENDPOINT).map(|text| endpoint(&text)).transpose()?;
        let agent_unit = sources.get(names::SYSTEMD_UNIT).unwrap_or_else(|| DEFAULT_UNIT.to_owned());
        if !is_service_unit(&agent_unit) {
            return Err(CollectorConfigError::Unit);
        }
        // The agent writes the authority's file; the collector can write its own folder alone.
        let agent = AgentConfig::peek(flags, &environment)?;
        let gateway_ca_pem = own_ca_pem.unwrap_or_else(|| agent.ca_bundle_pem.clone());
        let endpoint = named.unwrap_or_else(|| format!("{}{GATEWAY_PATH}", agent.api_url));
        Ok(Some(Self {
            agent,
            agent_unit,
            endpoint,
            gateway_ca_pem,
            spool_bytes,
            state_dir,
            journalctl: "journalctl".into(),
        }))
    }
}

/// A file that is named has to be there: another authority than the named one is not trusted in its place.
fn ca_file(path: PathBuf) -> Result<String, CollectorConfigError> {
    atomic_file::read_if_there(&path)?.ok_or(CollectorConfigError::MissingCaFile(path))
}

/// The gateway's base, without a trailing slash.
fn endpoint(text: &str) -> Result<String, CollectorConfigError> {
    let url = AgentApiUrl::parse(text).map_err(CollectorConfigError::Endpoint)?;
    let base = url.as_str();
    match base.strip_suffix(PUSH_PATH) {
        Some(base) => Err(CollectorConfigError::PushEndpoint { base: base.to_owned() }),
        None => Ok(base.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn gather(variables: &[(&str, &str)]) -> Result<Option<CollectorConfig>, CollectorConfigError> {
        let variables: BTreeMap<_, _> = variables.iter().copied().collect();
        CollectorConfig::gather(&Flags::default(), |name| variables.get(name).map(|value| (*value).to_owned()))
    }

    #[test]
    fn endpoint_with_the_push_path_is_refused_by_name_and_the_right_one_is_shown() {
        for text in [
            "https://n.example/internal/v1/node-logs/loki/api/v1/push",
            "https://n.example/internal/v1/node-logs/loki/api/v1/push//",
        ] {
            let error = endpoint(text).unwrap_err().to_string();
            assert!(error.contains("SVC_NODE_LOG_COLLECTOR_ENDPOINT ends in /loki/api/v1/push"), "{error}");
            assert!(error.ends_with("so that it is https://n.example/internal/v1/node-logs"), "{error}");
        }
        assert_eq!(endpoint("https://n.example/a/").unwrap(), "https://n.example/a");
        for text in ["http://n.example", "n.example", "https://n.example/?insecure=1", "file:///etc/passwd", ""] {
            assert!(matches!(endpoint(text), Err(CollectorConfigError::Endpoint(_))), "{text}");
        }
    }

    #[test]
    fn collector_is_off_unless_it_is_enabled_and_a_wrong_setting_is_named() {
        for value in ["0", "true", "yes", ""] {
            assert!(gather(&[(ENABLED, value)]).unwrap().is_none(), "{value}");
        }
        let missing = gather(&[(ENABLED, "1"), (CA_FILE, "/nowhere/ca.pem")]);
        assert!(matches!(missing, Err(CollectorConfigError::MissingCaFile(_))));
        for spool in ["0", "65537", "-1", "many"] {
            let given = gather(&[(ENABLED, "1"), (SPOOL_MIB, spool)]);
            assert!(matches!(given, Err(CollectorConfigError::Spool)), "{spool}");
        }
        for unit in ["gpuaas-agent", "--all", "*.service"] {
            let given = gather(&[(ENABLED, "1"), (names::SYSTEMD_UNIT, unit)]);
            assert!(matches!(given, Err(CollectorConfigError::Unit)), "{unit}");
        }
        assert!(matches!(gather(&[(ENABLED, "1")]), Err(CollectorConfigError::Agent(_))), "it speaks for a node");
    }

    /// The variables of a bundle whose authority is in this file.
    fn bundle(ca: &str) -> [(&'static str, String); 4] {
        let key = wire::PublicKey::from(&ed25519_dalek::SigningKey::from_bytes(&[7; 32])).to_string();
        [
            (names::NODE_ID, uuid::Uuid::nil().to_string()),
            (names::API_URL, "https://n.example".to_owned()),
            (names::TASK_SIGNING_PUBKEYS, key),
            (names::CA_BUNDLE_PATH, ca.to_owned()),
        ]
    }

    #[test]
    fn enabling_it_is_enough_beside_the_bundle_and_the_node_apis_authority_is_trusted_unless_a_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let [of_bundle, own] = ["bundle.pem", "own.pem"].map(|name| folder.path().join(name).display().to_string());
        for file in [&of_bundle, &own] {
            std::fs::write(file, file).unwrap();
        }
        let bundle = bundle(&of_bundle);
        let enabled: Vec<(&str, &str)> =
            bundle.iter().map(|(name, value)| (*name, value.as_str())).chain([(ENABLED, "1")]).collect();
        let config = gather(&enabled).unwrap().unwrap();
        assert_eq!((config.gateway_ca_pem, config.agent_unit), (of_bundle.clone(), DEFAULT_UNIT.to_owned()));
        assert_eq!(config.endpoint, "https://n.example/internal/v1/node-logs");
        let named = [&enabled[..], &[(CA_FILE, own.as_str()), (names::SYSTEMD_UNIT, "rented.service")]].concat();
        let config = gather(&named).unwrap().unwrap();
        assert_eq!((config.gateway_ca_pem, config.agent_unit), (own, "rented.service".to_owned()));
    }
}
