//! The settings of an installation, for commands that an operator runs beside the service: those of its environment file, then those of
//! the command's own environment, then the files that the unit passes as credentials.

use super::env_file::{self, EnvFile};
use super::variables::{Problem, Variables};
use super::{Config, MaasConfig, MailSettings, OPERATIONS_LISTEN, OutsideServiceSettings, PaymentsConfig};
use super::{database, identity, maas, mail, outside_service, payments, settings_table};
use crate::process_roles::parse_roles;
use edge::outbound::alertmanager::Alertmanager;
use edge::outbound::log_store::LogStore;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

/// The environment file of the Debian package's unit.
pub const ENV_FILE: &str = "/etc/gpuaas/gpuaas.env";

/// The folder of credentials, which systemd names (`systemd.exec(5)`).
const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";

/// The credentials of `gpuaas.service`, and the variables that the unit sets to their paths.
const UNIT_CREDENTIALS: [(&str, &str); 3] =
    [("SVC_KEK_FILE", "kek"), ("SVC_TLS_CERT_PATH", "tls.pem"), ("SVC_TLS_KEY_PATH", "tls.key")];

/// What the unit sets besides.
const UNIT_SETTINGS: [(&str, &str); 1] = [("SVC_MIGRATE_ON_START", "true")];

/// The settings that `gpuaas serve` would have.
#[derive(Clone, Default)]
pub struct InstalledSettings {
    /// The environment file, where there is one.
    pub file: Option<PathBuf>,
    /// What is wrong with the file's lines.
    line_problems: Vec<Problem>,
    values: BTreeMap<String, String>,
    is_of_the_unit: bool,
}

/// The services that the settings name, as far as their own settings can be used.
#[derive(Debug)]
pub struct OutsideServices {
    pub payments: Option<PaymentsConfig>,
    pub mail: Option<MailSettings>,
    pub maas: Option<MaasConfig>,
    pub log_store: Option<OutsideServiceSettings<LogStore>>,
    pub alertmanager: Option<OutsideServiceSettings<Alertmanager>>,
    pub identity: super::IdentityConfig,
}

/// Where a client on this machine reaches a listener: one of all addresses is reached on loopback.
pub(crate) fn reached(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// The path of the credential that the unit passes as this variable, in a folder where it is there.
fn credential(folder: &Path, name: &str) -> Option<String> {
    let (_, credential) = UNIT_CREDENTIALS.into_iter().find(|(variable, _)| *variable == name)?;
    let path = folder.join(credential);
    path.exists().then(|| path.display().to_string())
}

/// What the unit sets the variable to, beside what its environment file sets: its credentials are beside that file.
#[must_use]
pub fn set_by_the_unit(file: &Path, name: &str) -> Option<String> {
    let setting = UNIT_SETTINGS.into_iter().find(|(variable, _)| *variable == name);
    setting.map(|(_, value)| value.to_owned()).or_else(|| credential(file.parent()?, name))
}

impl InstalledSettings {
    /// Reads the file, or without one the package's where the environment itself names no database.
    #[must_use]
    pub fn open(file: Option<&Path>) -> Self {
        Self::from_sources(
            file,
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))),
        )
    }

    fn from_sources(file: Option<&Path>, environment: impl Iterator<Item = (String, String)>) -> Self {
        let environment: BTreeMap<String, String> = environment.collect();
        let default = Path::new(ENV_FILE);
        let file = match file {
            Some(file) => Some(file),
            None => (!environment.contains_key("SVC_DATABASE_URL") && default.exists()).then_some(default),
        };
        let mut settings = Self { file: file.map(Path::to_owned), ..Self::default() };
        if let Some(file) = file {
            match env_file::read(file) {
                Ok(text) => {
                    let read = EnvFile::parse(&text);
                    (settings.values, settings.line_problems) = (read.values, read.problems);
                }
                Err(error) => settings.line_problems = error.problems,
            }
        }
        let credentials = environment.get(CREDENTIALS).map(PathBuf::from);
        for (name, value) in environment {
            settings.values.entry(name).or_insert(value);
        }
        settings.is_of_the_unit = file == Some(default) || credentials.is_some();
        if settings.is_of_the_unit {
            for (name, value) in UNIT_SETTINGS {
                settings.values.entry(name.to_owned()).or_insert_with(|| value.to_owned());
            }
        }
        let folders = [credentials, file.and_then(Path::parent).map(Path::to_owned)];
        for folder in folders.into_iter().flatten() {
            for (name, _) in UNIT_CREDENTIALS {
                if settings.get(name).is_none()
                    && let Some(path) = credential(&folder, name)
                {
                    settings.values.insert(name.to_owned(), path);
                }
            }
        }
        settings
    }

    /// Whether they are those of `gpuaas.service`: its environment file, or the credentials that it passes.
    #[must_use]
    pub fn is_of_the_unit(&self) -> bool {
        self.is_of_the_unit
    }

    /// The operators' address, where a client on this machine reaches it.
    ///
    /// # Errors
    /// Where the setting is no address.
    pub fn operations_address(&self) -> Result<SocketAddr, String> {
        let (name, default) = OPERATIONS_LISTEN;
        let text = self.get(name).unwrap_or_else(|| default.to_owned());
        let address: SocketAddr = text.parse().map_err(|_| format!("{name} is no address"))?;
        Ok(reached(address))
    }

    /// The value; a blank one counts as not set.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<String> {
        self.values.get(name).filter(|value| !value.trim().is_empty()).cloned()
    }

    /// The settings of `gpuaas serve` that are set, by name.
    pub fn set(&self) -> impl Iterator<Item = (&str, &str)> {
        let is_ours = |(name, value): &(&str, &str)| settings_table::is_known(name) && !value.trim().is_empty();
        self.values.iter().map(|(name, value)| (name.as_str(), value.as_str())).filter(is_ours)
    }

    /// What keeps `gpuaas serve` from starting with them.
    #[must_use]
    pub fn problems(&self) -> Vec<Problem> {
        // Blank values, too: some settings may not be blank.
        let find = |name: &str| self.values.get(name).cloned();
        let mut problems = self.line_problems.clone();
        if let Err(error) = Config::gather(&self.roles(), &find) {
            problems.extend(error.problems);
        }
        if let Err(error) = crate::logging::check(find) {
            problems.push(Problem::of(format!("{error:#}")));
        }
        problems
    }

    /// Names that are probably mistakes, with what was meant.
    #[must_use]
    pub fn unknown_names(&self) -> Vec<String> {
        self.values.keys().filter_map(|name| settings_table::mistake(name)).collect()
    }

    #[must_use]
    pub fn roles(&self) -> String {
        self.get("SVC_ROLES").unwrap_or_else(|| "all".to_owned())
    }

    /// Whether this process has the role; all of them where the setting cannot be read.
    #[must_use]
    pub fn has_role(&self, role: crate::process_roles::ProcessRole) -> bool {
        parse_roles(&self.roles()).map_or(true, |roles| roles.contains(&role))
    }

    /// The settings of services outside, where they can be used; what is wrong with them is among [`Self::problems`].
    #[must_use]
    pub fn outside_services(&self) -> OutsideServices {
        let find = |name: &str| self.get(name);
        let mut it = Variables::new(&find);
        let public_url = self.get("SVC_PUBLIC_URL").unwrap_or_default();
        let ca = mail::notification_ca(&mut it);
        OutsideServices {
            payments: payments::payments(&mut it),
            mail: mail::mail(&mut it, ca.as_deref(), &public_url),
            maas: maas::maas(&mut it),
            log_store: outside_service(&mut it),
            alertmanager: outside_service(&mut it),
            identity: identity::identity(&mut it),
        }
    }

    /// The database's URL and authorities; `None` where it is not set, or cannot be used.
    #[must_use]
    pub fn database(&self) -> Option<persistence::pool::PoolConfig> {
        let find = |name: &str| self.get(name);
        let mut it = Variables::new(&find);
        let (url, ca) = database(&mut it);
        let config = persistence::pool::PoolConfig::new(url.clone().into(), ca);
        (!url.is_empty() && persistence::pool::check(&config).is_ok()).then_some(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(file: Option<&Path>, environment: &[(&str, &str)]) -> InstalledSettings {
        InstalledSettings::from_sources(
            file,
            environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
        )
    }

    #[test]
    fn file_goes_before_the_environment_and_credentials_are_found_as_the_unit_passes_them() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gpuaas.env");
        std::fs::write(&file, "SVC_ROLES=api\nSVC_NATS_URL=\nSVC_DATABSE_URL=x\nexport A=b\n").unwrap();
        std::fs::write(folder.path().join("kek"), "").unwrap();
        let read = settings(Some(&file), &[("SVC_ROLES", "all"), ("SVC_MEMBER_NAME", "replica-1"), ("PATH", "/bin")]);
        assert_eq!((read.roles().as_str(), read.get("SVC_NATS_URL")), ("api", None));
        assert_eq!(read.get("SVC_KEK_FILE"), Some(folder.path().join("kek").display().to_string()));
        assert_eq!(read.get("SVC_TLS_KEY_PATH"), None, "there is no such file");
        let names: Vec<_> = read.set().map(|(name, _)| name).collect();
        assert_eq!(names, ["SVC_KEK_FILE", "SVC_MEMBER_NAME", "SVC_ROLES"]);
        assert_eq!(read.unknown_names().len(), 1);
        assert!(read.problems().iter().any(|problem| problem.to_string().starts_with("line 4 begins with `export`")));

        let passed = tempfile::tempdir().unwrap();
        std::fs::write(passed.path().join("kek"), "").unwrap();
        let read = settings(Some(&file), &[(CREDENTIALS, passed.path().to_str().unwrap())]);
        assert_eq!(read.get("SVC_KEK_FILE"), Some(passed.path().join("kek").display().to_string()));
    }

    #[test]
    fn file_that_cannot_be_read_is_a_problem_and_no_panic() {
        let read = settings(Some(Path::new("/nowhere/gpuaas.env")), &[]);
        assert!(read.problems()[0].to_string().contains("/nowhere/gpuaas.env cannot be read"), "{:?}", read.problems());
        assert!(read.database().is_none());
    }
}
