//! The configuration of a control-plane process: all of it from environment variables, read and validated at once, so that a mistake is
//! reported before anything starts.
//!
//! | module | what |
//! | --- | --- |
//! | `variables`, `env_file` | reading variables, and files of them |
//! | `settings_table`, `installed_settings` | the table of all settings; those of an installation |
//! | `database`, `identity`, `ingress`, `node_api` | the database; the identity provider; the proxies in front; the node API |
//! | `agent_package`, `maas`, `mail`, `payments` | the agent's package; the bare-metal provider; e-mail; payments |
//! | `listeners`, `listener_bounds` | the addresses of the listeners; their bounds, and HSTS |
//! | `outside_service` | an outside service by address, authorities and credentials |

mod agent_package;
mod database;
pub mod env_file;
mod identity;
mod ingress;
pub mod installed_settings;
mod listener_bounds;
mod listeners;
mod maas;
mod mail;
mod node_api;
mod outside_service;
mod payments;
pub mod settings_table;
mod variables;

pub use agent_package::AgentPackageSettings;
pub use database::DatabaseArgs;
pub use identity::IdentityConfig;
pub use maas::MaasConfig;
pub use mail::MailSettings;
pub use node_api::NodeProxies;
pub use outside_service::{OutsideClient, OutsideServiceSettings};
pub use payments::PaymentsConfig;
pub use variables::{ConfigError, Problem};

pub(crate) use listener_bounds::CONNECTIONS as LISTENER_CONNECTIONS;
pub(crate) use listeners::{NODE_LISTEN, OPERATIONS_LISTEN, PUBLIC_LISTEN, WEBHOOK_LISTEN, opened as opened_listeners};

use crate::cluster::stream_copies;
use crate::process_roles::{ProcessRole, parse_roles};
use database::database;
use domain::Timestamp;
use edge::auth::internal_route_auth::InternalToken;
use edge::outbound::alertmanager::Alertmanager;
use edge::outbound::log_store::LogStore;
use edge::tls::ingress::Ingress;
use edge::tls::serve::ListenerLimits;
use edge::tls::{ServerTls, server_config};
use edge::trust::node_certificate::TrustDomain;
use env_file::EnvFile;
use identity::{identity, internal_token};
use ingress::ingress;
use ipnet::IpNet;
use node_api::node_proxies;
use outside_service::outside_service;
use persistence::envelope_encryption::KeyRing;
use secrecy::SecretString;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use variables::Variables;
use wire::VerifierSet;
use wire::address::{AgentApiUrl, PageOrigin, PublicUrl, TerminalUrl};

/// The settings of `gpuaas serve`, from `SVC_*`.
#[derive(Debug)]
pub struct Config {
    pub database_url: SecretString,
    pub database_ca: Option<PathBuf>,
    pub nats_url: SecretString,
    pub nats_ca: Option<PathBuf>,
    /// The copies of each stream that a NATS cluster keeps.
    pub nats_stream_copies: usize,
    /// Whether the start expands the schema. Otherwise `gpuaas migrate` has done so before.
    pub migrate_on_start: bool,
    /// Seals secrets at rest. Nothing starts without it.
    pub key_ring: Arc<KeyRing>,
    /// The time until which snapshots without a seal are accepted: while the previous release, which does not seal, still runs.
    pub unsealed_until: Option<Timestamp>,
    pub public_listen: SocketAddr,
    pub node_listen: SocketAddr,
    /// The proxies in front of the node API, if there are any.
    pub node_proxies: Option<NodeProxies>,
    /// The proxies and load balancers that hold connections to the listeners for many clients.
    pub ingress: Ingress,
    /// The bounds of the listeners for users and for nodes.
    pub listener_limits: ListenerLimits,
    /// For how many seconds browsers reach the host of the public URL by HTTPS alone (RFC 6797); `None`: no header is sent.
    pub hsts_seconds: Option<u32>,
    /// The address for the payment processor's webhooks.
    pub webhook_listen: SocketAddr,
    /// The address for operators and their tools (metrics, health), in clear.
    pub operations_listen: SocketAddr,
    /// The token that opens this process's stats to the operator's tools.
    pub stats_token: Option<InternalToken>,
    pub public_url: String,
    /// The URL for users' terminals.
    pub terminal_url: String,
    /// The origins whose pages may open terminals, beside the public URL.
    pub terminal_origins: Vec<String>,
    pub node_public_url: String,
    pub tls_cert: PathBuf,
    pub tls_key: PathBuf,
    /// The trust anchor of the server certificate, for agents and users.
    pub tls_ca: PathBuf,
    pub identity: IdentityConfig,
    pub member_name: String,
    pub trust_domain: TrustDomain,
    pub probe_allowed: Vec<IpNet>,
    /// Ed25519 verifier keys for the bundle; empty: the active one.
    pub bootstrap_verifier_keys: Vec<String>,
    /// The agent's package, as far as it is configured.
    pub agent_package: AgentPackageSettings,
    /// Where the logs of nodes go; `None` where they go nowhere.
    pub log_store: Option<OutsideServiceSettings<LogStore>>,
    /// Where the alerts of the monitoring are; `None` where operators see them elsewhere.
    pub alertmanager: Option<OutsideServiceSettings<Alertmanager>>,
    /// The bare-metal provider, where one is configured.
    pub maas: Option<MaasConfig>,
    /// The payment processor, where one is configured.
    pub payments: Option<PaymentsConfig>,
    /// The mail server for notifications, where one is configured.
    pub mail: Option<MailSettings>,
    /// Private networks in which receivers of webhooks are allowed.
    pub notification_allowed: Vec<IpNet>,
    /// Authorities of mail servers and of webhooks' receivers, beside the system's.
    pub notification_ca: Option<PathBuf>,
    pub roles: BTreeSet<ProcessRole>,
}

impl Config {
    /// Reads the environment, and the files that it names.
    ///
    /// # Errors
    /// [`ConfigError`] lists every variable that is missing or wrong, and every file that cannot be used.
    pub fn from_environment(roles: &str) -> Result<Self, ConfigError> {
        Self::gather(roles, &|name| std::env::var(name).ok())
    }

    /// As [`from_environment`](Self::from_environment), with the database of a command line, where that names one.
    ///
    /// # Errors
    /// As there.
    pub fn with_database(roles: &str, database: &DatabaseArgs) -> Result<Self, ConfigError> {
        Self::gather(roles, &|name| database.value(name).or_else(|| std::env::var(name).ok()))
    }

    /// Checks the text of an environment file, beside the variables that `outside` finds. Returns how many settings the file has.
    ///
    /// # Errors
    /// [`ConfigError`] lists every line, name and value that is wrong, and what is missing.
    pub fn check(text: &str, outside: &dyn Fn(&str) -> Option<String>) -> Result<usize, ConfigError> {
        let mut file = EnvFile::parse(text);
        let mistakes = file.values.keys().filter_map(|name| settings_table::mistake(name)).map(Problem::of);
        file.problems.extend(mistakes.collect::<Vec<_>>());
        let (values, count) = (file.values.clone(), file.values.len());
        let find = |name: &str| values.get(name).cloned().or_else(|| outside(name));
        let roles = find("SVC_ROLES").filter(|roles| !roles.trim().is_empty()).unwrap_or_else(|| "all".to_owned());
        let read = Self::gather(&roles, &find).map(drop);
        let logging = crate::logging::check(find).map_err(|error| ConfigError::of(format!("{error:#}")));
        let read = match (read, logging) {
            (Err(wrong), Err(more)) => Err(wrong.and(more)),
            (read, logging) => read.and(logging),
        };
        file.with_problems_of(read).map(|()| count)
    }

    fn gather(roles: &str, find: &dyn Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let mut variables = Variables::new(find);
        let config = Self::read(roles, &mut variables);
        variables.finish(config)
    }

    /// `None` where a value is missing that has no placeholder.
    fn read(roles: &str, it: &mut Variables<'_>) -> Option<Self> {
        let (database_url, database_ca) = database(it);
        let nats_url = it.required("SVC_NATS_URL", "a URL such as tls://user:password@nats.example:4222");
        if !nats_url.is_empty() {
            let checked = crate::cluster::nats::check_url(&nats_url);
            it.take(checked);
        }
        let nats_ca = it.optional_certificates("SVC_NATS_CA_PATH");
        let (key_ring, trust_domain) = (key_ring(it), trust_domain(it));
        let public_url =
            it.required_address("SVC_PUBLIC_URL", "the URL under which users reach the public API", PublicUrl::parse);
        let node_public_url = it.required_address(
            "SVC_NODE_PUBLIC_URL",
            "the URL under which agents reach the node API",
            AgentApiUrl::parse,
        );
        let own_terminals = public_url.as_ref().map(TerminalUrl::at);
        let terminal_url = it.optional_address(TERMINAL_URL, TerminalUrl::parse).or(own_terminals);
        let terminal_origins = terminal_origins(it);
        let public_url = public_url.map(|url| url.as_str().to_owned()).unwrap_or_default();
        let tls = tls_files(it);
        let notification_ca = mail::notification_ca(it);
        let bootstrap_verifier_keys = it.list(VERIFIER_KEYS);
        if !bootstrap_verifier_keys.is_empty()
            && let Err(error) = VerifierSet::from_env_value(&bootstrap_verifier_keys.join(","))
        {
            it.wrong(format!("{VERIFIER_KEYS} is not a list of Ed25519 public keys: {error}"));
        }
        let roles: BTreeSet<ProcessRole> = it.take(parse_roles(roles).map_err(|error| format!("SVC_ROLES: {error:#}")));
        let payments = payments::payments(it);
        let [public_listen, node_listen, webhook_listen, operations_listen] =
            listen_addresses(it, &roles, payments.is_some());
        Some(Self {
            database_url: database_url.into(),
            database_ca,
            nats_url: nats_url.into(),
            nats_ca,
            nats_stream_copies: nats_stream_copies(it),
            migrate_on_start: it.switch("SVC_MIGRATE_ON_START"),
            public_listen,
            node_listen,
            node_proxies: node_proxies(it),
            ingress: ingress(it),
            listener_limits: listener_bounds::limits(it),
            hsts_seconds: listener_bounds::hsts_seconds(it),
            webhook_listen,
            operations_listen,
            stats_token: internal_token(it, "INTERNAL_STATS_TOKEN"),
            terminal_url: terminal_url.map(|url| url.as_str().to_owned()).unwrap_or_default(),
            terminal_origins,
            mail: mail::mail(it, notification_ca.as_deref(), &public_url),
            notification_allowed: it.networks("SVC_NOTIFICATION_ALLOWED_CIDRS"),
            notification_ca,
            public_url,
            node_public_url: node_public_url.map(|url| url.as_str().to_owned()).unwrap_or_default(),
            tls_cert: tls.certificate,
            tls_key: tls.key,
            tls_ca: tls.authorities,
            identity: identity(it),
            member_name: it.optional("SVC_MEMBER_NAME").unwrap_or_else(default_member_name),
            probe_allowed: it.networks("NODE_PROBE_ALLOWED_CIDRS"),
            bootstrap_verifier_keys,
            agent_package: agent_package::agent_package(it),
            log_store: outside_service(it),
            alertmanager: outside_service(it),
            maas: maas::maas(it),
            payments,
            roles,
            unsealed_until: unsealed_until(it),
            // Last, so that everything else is read where one of them is missing.
            key_ring: key_ring?,
            trust_domain: trust_domain?,
        })
    }
}

const TERMINAL_URL: &str = "SVC_TERMINAL_URL";
const TERMINAL_ORIGINS: &str = "SVC_TERMINAL_ORIGINS";
const VERIFIER_KEYS: &str = "NODE_BOOTSTRAP_TASK_SIGNING_PUBKEYS";

/// The addresses of the public API, the node API, the payment processor's webhooks and the operators.
fn listen_addresses(
    variables: &mut Variables<'_>,
    roles: &BTreeSet<ProcessRole>,
    has_payments: bool,
) -> [SocketAddr; 4] {
    let all = [PUBLIC_LISTEN, NODE_LISTEN, WEBHOOK_LISTEN, OPERATIONS_LISTEN];
    let addresses = all.map(|(name, default)| variables.address(name, default));
    let opened = opened_listeners(|role| roles.contains(&role), has_payments);
    let listeners: Vec<_> = all.into_iter().zip(addresses).filter(|(listener, _)| opened.contains(listener)).collect();
    listeners::check_apart(variables, &listeners);
    addresses
}

/// An instant in RFC 3339's form, where the variable is set.
fn unsealed_until(variables: &mut Variables<'_>) -> Option<Timestamp> {
    const NAME: &str = "SVC_UNSEALED_SNAPSHOTS_UNTIL";
    let text = variables.optional(NAME)?;
    let read = text.parse::<Timestamp>();
    if read.is_err() {
        variables.wrong(format!("{NAME} is {text:?}; it must be a time such as 2026-01-31T12:00:00Z"));
    }
    read.ok()
}

fn nats_stream_copies(variables: &mut Variables<'_>) -> usize {
    let Some(text) = variables.optional(stream_copies::SETTING) else { return 1 };
    match text.trim().parse() {
        Ok(copies) if (1..=stream_copies::COPIES_MAX).contains(&copies) => copies,
        Ok(_) | Err(_) => {
            variables.wrong(format!(
                "{} is {text:?}; it must be the number of copies of each stream, from 1 to {}, and at most the servers of the NATS cluster",
                stream_copies::SETTING,
                stream_copies::COPIES_MAX
            ));
            1
        }
    }
}

fn key_ring(variables: &mut Variables<'_>) -> Option<Arc<KeyRing>> {
    const FILE: &str = "SVC_KEK_FILE";
    let path = variables.required(FILE, "the file of the key ring that seals secrets at rest");
    if path.is_empty() {
        return None;
    }
    let loaded = KeyRing::load(path.as_ref()).map(Arc::new);
    loaded.map_err(|error| variables.wrong(format!("{FILE} cannot be used: {:#}", anyhow::Error::from(error)))).ok()
}

/// Of the listeners.
struct TlsFiles {
    certificate: PathBuf,
    key: PathBuf,
    authorities: PathBuf,
}

fn tls_files(variables: &mut Variables<'_>) -> TlsFiles {
    const CERTIFICATE: &str = "SVC_TLS_CERT_PATH";
    const KEY: &str = "SVC_TLS_KEY_PATH";
    const AUTHORITIES: &str = "SVC_TLS_CA_PATH";
    let (certificate, chain_pem) = variables.file(CERTIFICATE, "the server certificate chain, PEM");
    let (key, key_pem) = variables.file(KEY, "the server certificate's key, PEM");
    let (authorities, authorities_pem) =
        variables.file(AUTHORITIES, "the authorities by which agents verify the server certificate, PEM");
    variables.check_certificates(AUTHORITIES, &authorities, &authorities_pem);
    if !chain_pem.is_empty() && !key_pem.is_empty() {
        let settings = ServerTls {
            certificate_chain_pem: &chain_pem,
            key_pem: &key_pem,
            client_authorities_pem: None,
            tickets: None,
        };
        if let Err(error) = server_config(&settings) {
            let error = anyhow::Error::from(error);
            variables.wrong(format!("{CERTIFICATE} and {KEY} cannot be used together: {error:#}"));
        }
    }
    TlsFiles { certificate, key, authorities }
}

fn trust_domain(variables: &mut Variables<'_>) -> Option<TrustDomain> {
    const NAME: &str = "SVC_TRUST_DOMAIN";
    let text = variables.optional(NAME).unwrap_or_else(|| "gpuaas".to_owned());
    let parsed = TrustDomain::parse(&text);
    if parsed.is_none() {
        variables
            .wrong(format!("{NAME} is {text:?}; it must be lower-case letters, digits, dots, hyphens and underscores"));
    }
    parsed
}

/// Pages of these may open terminals, beside the public URL's.
fn terminal_origins(variables: &mut Variables<'_>) -> Vec<String> {
    let listed = variables.list(TERMINAL_ORIGINS);
    let read = listed.iter().filter_map(|text| variables.check_address(TERMINAL_ORIGINS, text, PageOrigin::parse));
    read.map(|origin| origin.as_str().to_owned()).collect()
}

fn default_member_name() -> String {
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    format!("{}-{}", host.unwrap_or_else(|| "member".to_owned()), std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems_of(variables: &[(&str, &str)]) -> Vec<String> {
        let find =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        let error = Config::gather("api,webshop", &find).unwrap_err().to_string();
        error.lines().skip(1).map(|line| line.trim().to_owned()).collect()
    }

    #[test]
    fn every_missing_and_wrong_variable_is_named_in_one_message() {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let problems = problems_of(&[
            ("SVC_DATABASE_URL", "postgres://gpuaas:hunter2@db.example/gpuaas"),
            ("SVC_NATS_URL", "nats.example"),
            ("SVC_PUBLIC_LISTEN", "8443"),
            ("SVC_PUBLIC_URL", "gpu.example"),
            ("SVC_TLS_KEY_PATH", "/nowhere/tls.key"),
            ("SVC_NODE_CLIENT_IDENTITY", "rfc9440"),
            ("SVC_PAYMENTS_CURRENCY", "EUR"),
            ("SVC_SMTP_URL", "smtp://gpuaas:hunter2@mail.example"),
            ("SVC_SMTP_FROM", "no-reply@example.com"),
            ("SVC_NOTIFICATION_CA_PATH", "/nowhere/mail.pem"),
            ("SVC_TRUST_DOMAIN", "GPU"),
        ]);
        for named in [
            "SVC_DATABASE_CA_PATH is not set",
            "SVC_NATS_URL is no URL",
            "SVC_KEK_FILE is not set",
            "SVC_TRUST_DOMAIN is \"GPU\"",
            "SVC_PUBLIC_URL: \"gpu.example\" names no scheme; it must be like https://gpu.example:8443",
            "SVC_NODE_PUBLIC_URL is not set",
            "SVC_TLS_CERT_PATH is not set",
            "SVC_TLS_KEY_PATH is /nowhere/tls.key, which cannot be read (No such file",
            "SVC_TLS_CA_PATH is not set",
            "SVC_PUBLIC_LISTEN is \"8443\"; it must be an address and a port, for example 0.0.0.0:8443",
            "SVC_NODE_TRUSTED_PROXIES must name",
            "SVC_OIDC_ISSUER is not set",
            "SVC_OIDC_AUDIENCE is not set",
            "SVC_PAYMENTS_SECRET_KEY is not",
            "SVC_SMTP_URL: the URL of the mail server would send mails in clear",
            "SVC_NOTIFICATION_CA_PATH is /nowhere/mail.pem, which cannot be read (No such file",
            "SVC_ROLES: there is no role \"webshop\"",
        ] {
            assert_eq!(problems.iter().filter(|problem| problem.contains(named)).count(), 1, "{named}: {problems:#?}");
        }
        assert_eq!(problems.len(), 17, "{problems:#?}");
        assert!(!problems.concat().contains("hunter2"));
    }

    /// Whatever else is missing, a wrong address is one problem that names its variable and the form that it needs.
    #[test]
    fn addresses_that_are_nearly_right_are_refused_by_name_and_form() {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        for (name, text, why, form) in [
            ("SVC_PUBLIC_URL", "http://gpu.example", "begins with http://", "https://gpu.example:8443"),
            ("SVC_PUBLIC_URL", "https://0.0.0.0:8443", "unspecified address", "https://gpu.example:8443"),
            ("SVC_PUBLIC_URL", "https://gpu.example/gpuaas", "has the path", "https://gpu.example:8443"),
            ("SVC_PUBLIC_URL", "\"https://gpu.example\"", "quotes", "https://gpu.example:8443"),
            ("SVC_NODE_PUBLIC_URL", "http://127.0.0.1:9443", "begins with http://", "https://nodes.example:9443"),
            ("SVC_NODE_PUBLIC_URL", "https://nodes.example ", "blank", "https://nodes.example:9443"),
            ("SVC_TERMINAL_URL", "wss://gpu.example", "does not end in the path", "/ws/v1/terminal"),
            ("SVC_TERMINAL_URL", "https://gpu.example/ws/v1/terminal", "begins with https://", "wss://"),
            ("SVC_TERMINAL_ORIGINS", "https://portal.example, https://b.example/", "as browsers send it", "origin"),
            (
                "SVC_LOG_STORE_URL",
                "https://ops:hunter2@logs.example",
                "a user or a password",
                "https://service.example",
            ),
            ("SVC_ALERTMANAGER_URL", "https://alerts.example#a", "fragment", "https://service.example"),
            ("MAAS_API_BASE_URL", "maas.example/MAAS", "names no scheme", "https://service.example"),
            ("SVC_PAYMENTS_API_BASE", "https://api.stripe.com?a=b", "query", "https://service.example"),
            ("SVC_PAYMENTS_SCRIPT_URL", "js.stripe.com/v3/", "names no scheme", "https://service.example"),
        ] {
            let others = [
                ("MAAS_API_TOKEN", "consumer:token:s3cret"),
                ("MAAS_API_BASE_URL", "https://maas.example/MAAS"),
                ("SVC_PAYMENTS_SECRET_KEY", "sk_test_0123456789"),
                ("SVC_PAYMENTS_WEBHOOK_SECRETS", "whsec_0123456789abcdef"),
            ];
            let problems = problems_of(&[&[(name, text)], others.as_slice()].concat());
            let named: Vec<_> = problems.iter().filter(|problem| problem.starts_with(&format!("{name}: "))).collect();
            assert!(
                named.len() == 1 && named[0].contains(why) && named[0].contains(form),
                "{name}={text}: {problems:#?}"
            );
            assert!(!named[0].contains("hunter2"), "{named:?}");
        }
    }
}
