//! The collector's configuration: its own variables, and what of the agent's it needs to speak for the node.

use crate::atomic_file::{self, FileError};
use crate::config::{AgentConfig, AgentConfigError, Flags, Sources};
use reqwest::Url;
use std::path::PathBuf;

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
    /// The gateway's base, without a trailing slash.
    pub endpoint: String,
    /// The authorities by which the gateway's certificate is trusted; no other root counts.
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
        "{CA_FILE} is not set; set it to the file with the authority of the log gateway's certificate, PEM. There is no way to leave the \
         certificate unchecked"
    )]
    NoCaFile,
    #[error("{CA_FILE} names {}, which is not there", .0.display())]
    MissingCaFile(PathBuf),
    #[error("{ENDPOINT} is not an https URL without query and fragment")]
    Endpoint,
    #[error("{ENDPOINT} ends in {PUSH_PATH}, which the collector adds itself; leave that away, so that it is {base}")]
    PushEndpoint { base: String },
    #[error("{SPOOL_MIB} is not a whole number from 1 to {SPOOL_MIB_MAX}")]
    Spool,
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
        let ca_file = sources.get(CA_FILE).map(PathBuf::from).ok_or(CollectorConfigError::NoCaFile)?;
        let pem = atomic_file::read_if_there(&ca_file)?;
        let gateway_ca_pem = pem.ok_or(CollectorConfigError::MissingCaFile(ca_file))?;
        let spool_mib = match sources.get(SPOOL_MIB) {
            Some(text) => text.parse().ok().filter(|mib| (1..=SPOOL_MIB_MAX).contains(mib)),
            None => Some(DEFAULT_SPOOL_MIB),
        };
        let spool_bytes = spool_mib.ok_or(CollectorConfigError::Spool)? * 1024 * 1024;
        let state_dir = sources.get(STATE_DIR).unwrap_or_else(|| DEFAULT_STATE_DIR.to_owned()).into();
        let named = sources.get(ENDPOINT).map(|text| endpoint(&text)).transpose()?;
        let agent = AgentConfig::gather(flags, &environment)?;
        let endpoint = named.unwrap_or_else(|| format!("{}{GATEWAY_PATH}", agent.api_url));
        Ok(Some(Self { agent, endpoint, gateway_ca_pem, spool_bytes, state_dir, journalctl: "journalctl".into() }))
    }
}

/// The gateway's base, without a trailing slash.
fn endpoint(text: &str) -> Result<String, CollectorConfigError> {
    let url = Url::parse(text)
        .ok()
        .filter(|url| url.scheme() == "https" && url.has_host() && url.query().is_none() && url.fragment().is_none());
    let url = url.ok_or(CollectorConfigError::Endpoint)?;
    let base = url.as_str().trim_end_matches('/');
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
            assert!(matches!(endpoint(text), Err(CollectorConfigError::Endpoint)), "{text}");
        }
    }

    #[test]
    fn collector_is_off_unless_it_is_enabled_and_then_needs_its_authority() {
        for value in ["0", "true", "yes", ""] {
            assert!(gather(&[(ENABLED, value)]).unwrap().is_none(), "{value}");
        }
        assert!(matches!(gather(&[(ENABLED, "1")]), Err(CollectorConfigError::NoCaFile)));
        let missing = gather(&[(ENABLED, "1"), (CA_FILE, "/nowhere/ca.pem")]);
        assert!(matches!(missing, Err(CollectorConfigError::MissingCaFile(_))));
        let here = [(ENABLED, "1"), (CA_FILE, concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))];
        for spool in ["0", "65537", "-1", "many"] {
            let given = gather(&[here[0], here[1], (SPOOL_MIB, spool)]);
            assert!(matches!(given, Err(CollectorConfigError::Spool)), "{spool}");
        }
        assert!(matches!(gather(&here), Err(CollectorConfigError::Agent(_))), "it speaks for a node");
    }
}
