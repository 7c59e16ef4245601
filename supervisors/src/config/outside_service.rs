//! The settings of a service outside that its address, its certificate's authorities and its way to authenticate describe: the
//! Alertmanager, and the log store behind the gateway for nodes' logs.

use super::variables::Variables;
use anyhow::Context as _;
use edge::outbound::alertmanager::Alertmanager;
use edge::outbound::log_store::LogStore;
use edge::outbound::service_access::{ServiceAccess, ServiceAccessError, ServiceCredential};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

/// The client of such a service, and the names of its settings.
pub trait OutsideClient: Sized {
    /// The variable of its address, to which the client adds the path of its API.
    const URL: &'static str;
    /// The variable of a file with authorities beside the system's.
    const CA: &'static str;
    const ACCESS: AccessVariables;

    /// # Errors
    /// Where the address, the authorities or the access cannot be used.
    fn connect(url: &str, authorities_pem: Option<&str>, access: &ServiceAccess) -> anyhow::Result<Self>;
}

/// The variables by which a service admits requests. Those that end in `_PATH` name a file with the secret.
#[derive(Clone, Copy, Debug)]
pub struct AccessVariables {
    pub tenant: &'static str,
    pub user: &'static str,
    pub password: &'static str,
    pub password_path: &'static str,
    pub token: &'static str,
    pub token_path: &'static str,
}

/// Without it the API lists no alerts, and says so.
impl OutsideClient for Alertmanager {
    const URL: &'static str = "SVC_ALERTMANAGER_URL";
    const CA: &'static str = "SVC_ALERTMANAGER_CA_PATH";
    const ACCESS: AccessVariables = AccessVariables {
        tenant: "SVC_ALERTMANAGER_TENANT",
        user: "SVC_ALERTMANAGER_USER",
        password: "SVC_ALERTMANAGER_PASSWORD",
        password_path: "SVC_ALERTMANAGER_PASSWORD_PATH",
        token: "SVC_ALERTMANAGER_TOKEN",
        token_path: "SVC_ALERTMANAGER_TOKEN_PATH",
    };

    fn connect(url: &str, authorities_pem: Option<&str>, access: &ServiceAccess) -> anyhow::Result<Self> {
        Ok(Self::new(url, authorities_pem, access)?)
    }
}

/// Without it the gateway answers every batch with `service_unavailable`.
impl OutsideClient for LogStore {
    const URL: &'static str = "SVC_LOG_STORE_URL";
    const CA: &'static str = "SVC_LOG_STORE_CA_PATH";
    const ACCESS: AccessVariables = AccessVariables {
        tenant: "SVC_LOG_STORE_TENANT",
        user: "SVC_LOG_STORE_USER",
        password: "SVC_LOG_STORE_PASSWORD",
        password_path: "SVC_LOG_STORE_PASSWORD_PATH",
        token: "SVC_LOG_STORE_TOKEN",
        token_path: "SVC_LOG_STORE_TOKEN_PATH",
    };

    fn connect(url: &str, authorities_pem: Option<&str>, access: &ServiceAccess) -> anyhow::Result<Self> {
        Ok(Self::new(url, authorities_pem, access)?)
    }
}

/// Where a service is, for its client `C`.
#[derive(Debug)]
pub struct OutsideServiceSettings<C> {
    pub url: String,
    /// Authorities beside the system's.
    pub ca: Option<PathBuf>,
    /// Read at the start, also from files.
    pub access: ServiceAccess,
    client: PhantomData<fn() -> C>,
}

impl<C: OutsideClient> OutsideServiceSettings<C> {
    /// The client.
    ///
    /// # Errors
    /// Names the variable that cannot be used.
    pub fn open(&self) -> anyhow::Result<C> {
        let authorities_pem = authorities_pem(C::CA, self.ca.as_deref())?;
        C::connect(&self.url, authorities_pem.as_deref(), &self.access).context(C::URL)
    }
}

/// The settings of the service; `None` where its address is not set.
pub(super) fn outside_service<C: OutsideClient>(variables: &mut Variables<'_>) -> Option<OutsideServiceSettings<C>> {
    let ca = variables.optional_certificates(C::CA);
    let access = access(&C::ACCESS, variables);
    let Some(url) = variables.optional(C::URL) else {
        let AccessVariables { tenant, user, password, password_path, token, token_path } = C::ACCESS;
        let all = [tenant, user, password, password_path, token, token_path];
        if let Some(name) = all.into_iter().find(|name| variables.optional(name).is_some()) {
            variables.wrong(format!("{name} is set, but {} is not; set both or neither", C::URL));
        }
        return None;
    };
    if let Err(error) = C::connect(&url, None, &ServiceAccess::default()) {
        variables.wrong(format!("{}: {error}", C::URL));
    }
    Some(OutsideServiceSettings { url, ca, access, client: PhantomData })
}

/// One way to authenticate at most: a service that gets two takes either.
fn access(names: &AccessVariables, variables: &mut Variables<'_>) -> ServiceAccess {
    let user = variables.credential(names.user);
    let password = variables.secret(names.password, names.password_path);
    let token = variables.secret(names.token, names.token_path);
    let (user_name, password_name, token_name) = (names.user, names.password, names.token);
    let credential = match (user, password, token) {
        (None, None, None) => None,
        (Some(user), Some(password), None) => Some(ServiceCredential::Basic { user, password }),
        (None, None, Some(token)) => Some(ServiceCredential::Bearer(token)),
        (Some(_), None, None) => {
            variables.wrong(format!(
                "{user_name} is set, but its password is not; set {password_name} or {}",
                names.password_path
            ));
            None
        }
        (None, Some(_), None) => {
            variables.wrong(format!("{password_name} or {} is set, but {user_name} is not", names.password_path));
            None
        }
        (_, _, Some(_)) => {
            variables.wrong(format!(
                "{token_name} or {} is set beside {user_name} or its password; set one of them",
                names.token_path
            ));
            None
        }
    };
    let access = ServiceAccess { tenant: variables.optional(names.tenant), credential };
    if let Err(error) = access.check() {
        let name = match error {
            ServiceAccessError::Tenant => names.tenant,
            ServiceAccessError::User => names.user,
            ServiceAccessError::Password => names.password,
            ServiceAccessError::Token => names.token,
        };
        variables.wrong(format!("{name}: {error}"));
    }
    access
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
        expect_access_of::<C>(good);
    }

    /// Tenant and one credential, as a value or in a file; what is incomplete or cannot be carried is named, and no secret shown.
    fn expect_access_of<C: OutsideClient + std::fmt::Debug>(good: &str) {
        let names = C::ACCESS;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("secret");
        std::fs::write(&file, "hunter2\n").unwrap();
        let (file, url) = (file.to_str().unwrap(), (C::URL, good));
        let read = |variables: &[(&str, &str)]| read_from(variables, outside_service::<C>);
        for variables in [
            vec![url, (names.tenant, "fleet")],
            vec![url, (names.user, "ops"), (names.password, "hunter2")],
            vec![url, (names.user, "ops"), (names.password_path, file)],
            vec![url, (names.tenant, "fleet"), (names.token_path, file)],
            vec![url, (names.token, "hunter2")],
        ] {
            let settings = read(&variables).unwrap().unwrap();
            assert!(!format!("{settings:?} {:?}", settings.open().unwrap()).contains("hunter2"));
        }
        let by_file = read(&[url, (names.token_path, file)]).unwrap().unwrap();
        let Some(ServiceCredential::Bearer(token)) = by_file.access.credential else { unreachable!("it is a token") };
        assert_eq!(secrecy::ExposeSecret::expose_secret(&token), "hunter2", "without the line's end");
        for (variables, named) in [
            (vec![(names.tenant, "fleet")], C::URL),
            (vec![(names.token_path, file)], C::URL),
            (vec![url, (names.user, "ops")], names.password),
            (vec![url, (names.password, "hunter2")], names.user),
            (vec![url, (names.user, "ops"), (names.password, "hunter2"), (names.token, "hunter2")], names.token),
            (vec![url, (names.token, "hunter2"), (names.token_path, file)], names.token_path),
            (vec![url, (names.token_path, "/absent")], names.token_path),
            (vec![url, (names.tenant, "a|b")], names.tenant),
            (vec![url, (names.token, "Bearer hunter2")], names.token),
        ] {
            let error = read(&variables).unwrap_err().to_string();
            assert!(error.contains(named) && !error.contains("hunter2"), "{error}");
        }
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
