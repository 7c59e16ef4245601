//! The settings of the log store behind the gateway for nodes' logs.

use super::variables::Variables;
use anyhow::Context;
use edge::outbound::log_store::LogStore;
use std::path::PathBuf;

const URL: &str = "SVC_LOG_STORE_URL";
const CA: &str = "SVC_LOG_STORE_CA_PATH";

/// The log store. Without it the gateway answers every batch with `service_unavailable`.
#[derive(Debug)]
pub struct LogStoreSettings {
    /// Its address, to which the path of the push API is added.
    pub url: String,
    /// Authorities beside the system's.
    pub ca: Option<PathBuf>,
}

impl LogStoreSettings {
    /// The client of the store.
    ///
    /// # Errors
    /// Names the variable that cannot be used.
    pub fn open(&self) -> anyhow::Result<LogStore> {
        let authorities_pem = match &self.ca {
            Some(path) => Some(std::fs::read_to_string(path).with_context(|| format!("{CA}: {}", path.display()))?),
            None => None,
        };
        LogStore::new(&self.url, authorities_pem.as_deref()).context(URL)
    }
}

pub(super) fn log_store(variables: &mut Variables<'_>) -> Option<LogStoreSettings> {
    let ca = variables.optional_certificates(CA);
    let url = variables.optional(URL)?;
    if let Err(error) = LogStore::new(&url, None) {
        variables.wrong(format!("{URL}: {error}"));
    }
    Some(LogStoreSettings { url, ca })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::read_from;

    #[test]
    fn log_store_is_optional_and_its_address_has_no_push_path() {
        assert!(read_from(&[], log_store).unwrap().is_none());
        let store = read_from(&[(URL, "https://logs.example/tenant")], log_store).unwrap().unwrap();
        store.open().unwrap();
        for (address, named) in [
            ("https://logs.example/loki/api/v1/push", "/loki/api/v1/push"),
            ("http://logs.example", "https"),
            ("logs.example", "https"),
        ] {
            let error = read_from(&[(URL, address)], log_store).unwrap_err().to_string();
            assert!(error.contains(URL) && error.contains(named), "{error}");
        }
    }
}
