//! The settings of a service outside that its address and its certificate's authorities describe: the Alertmanager, and the log store behind
//! the gateway for nodes' logs.

use super::variables::Variables;
use anyhow::Context as _;
use edge::outbound::alertmanager::Alertmanager;
use edge::outbound::log_store::LogStore;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

/// The client of such a service, and the names of its settings.
pub trait OutsideClient: Sized {
    /// The variable of its address, to which the client adds the path of its API.
    const URL: &'static str;
    /// The variable of a file with authorities beside the system's.
    const CA: &'static str;

    /// # Errors
    /// Where the address or the authorities cannot be used.
    fn connect(url: &str, authorities_pem: Option<&str>) -> anyhow::Result<Self>;
}

/// Without it the API lists no alerts, and says so.
impl OutsideClient for Alertmanager {
    const URL: &'static str = "SVC_ALERTMANAGER_URL";
    const CA: &'static str = "SVC_ALERTMANAGER_CA_PATH";

    fn connect(url: &str, authorities_pem: Option<&str>) -> anyhow::Result<Self> {
        Ok(Self::new(url, authorities_pem)?)
    }
}

/// Without it the gateway answers every batch with `service_unavailable`.
impl OutsideClient for LogStore {
    const URL: &'static str = "SVC_LOG_STORE_URL";
    const CA: &'static str = "SVC_LOG_STORE_CA_PATH";

    fn connect(url: &str, authorities_pem: Option<&str>) -> anyhow::Result<Self> {
        Ok(Self::new(url, authorities_pem)?)
    }
}

/// Where a service is, for its client `C`.
#[derive(Debug)]
pub struct OutsideServiceSettings<C> {
    pub url: String,
    /// Authorities beside the system's.
    pub ca: Option<PathBuf>,
    client: PhantomData<fn() -> C>,
}

impl<C: OutsideClient> OutsideServiceSettings<C> {
    /// The client.
    ///
    /// # Errors
    /// Names the variable that cannot be used.
    pub fn open(&self) -> anyhow::Result<C> {
        let authorities_pem = authorities_pem(C::CA, self.ca.as_deref())?;
        C::connect(&self.url, authorities_pem.as_deref()).context(C::URL)
    }
}

/// The settings of the service; `None` where its address is not set.
pub(super) fn outside_service<C: OutsideClient>(variables: &mut Variables<'_>) -> Option<OutsideServiceSettings<C>> {
    let ca = variables.optional_certificates(C::CA);
    let url = variables.optional(C::URL)?;
    if let Err(error) = C::connect(&url, None) {
        variables.wrong(format!("{}: {error}", C::URL));
    }
    Some(OutsideServiceSettings { url, ca, client: PhantomData })
}

/// The text of the file of authorities that the variable names.
///
/// # Errors
/// Names the variable and the file that cannot be read.
pub(super) fn authorities_pem(variable: &str, path: Option<&Path>) -> anyhow::Result<Option<String>> {
    let Some(path) = path else { return Ok(None) };
    let text = std::fs::read_to_string(path).with_context(|| format!("{variable}: {}", path.display()))?;
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::read_from;

    /// The service is optional, a wrong address names its variable, and so does a file of authorities that is gone.
    fn expect_settings_of<C: OutsideClient + std::fmt::Debug>(good: &str, wrong: &[(&str, &str)]) {
        assert!(read_from(&[], outside_service::<C>).unwrap().is_none());
        let settings = read_from(&[(C::URL, good)], outside_service::<C>).unwrap().unwrap();
        settings.open().unwrap();
        for &(address, named) in wrong {
            let error = read_from(&[(C::URL, address)], outside_service::<C>).unwrap_err().to_string();
            assert!(error.contains(C::URL) && error.contains(named), "{address}: {error}");
        }
        let error = read_from(&[(C::CA, "/absent.pem")], outside_service::<C>).unwrap_err().to_string();
        assert!(error.contains(C::CA) && error.contains("/absent.pem"), "{error}");
        let settings = OutsideServiceSettings { ca: Some("/absent.pem".into()), ..settings };
        let error = format!("{:#}", settings.open().unwrap_err());
        assert!(error.contains(C::CA) && error.contains("/absent.pem"), "{error}");
    }

    #[test]
    fn alertmanager_is_optional_and_a_wrong_setting_is_named() {
        expect_settings_of::<Alertmanager>(
            "https://alerts.example/alertmanager",
            &[("http://alerts.example", "https"), ("https://alerts.example/api/v2", "leave /api out")],
        );
    }

    #[test]
    fn log_store_is_optional_and_its_address_has_no_push_path() {
        expect_settings_of::<LogStore>(
            "https://logs.example/tenant",
            &[
                ("https://logs.example/loki/api/v1/push", "/loki/api/v1/push"),
                ("http://logs.example", "https"),
                ("logs.example", "https"),
            ],
        );
    }
}
