//! How a control-plane process is set up: everything from the environment, read once and checked at once, so that a mistake is
//! named before anything starts.

mod payments;

pub use payments::Payments;

use anyhow::{Context, bail};
use edge::auth::internal::InternalToken;
use edge::auth::{Algorithm, TokenRules};
use edge::identity::forwarded::Forwarding;
use ipnet::IpNet;
use secrecy::SecretString;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use wire::bundle::{Package, names};

/// What `gpuaas serve` reads from `SVC_*`.
#[derive(Debug)]
pub struct Config {
    pub database_url: SecretString,
    pub database_ca: Option<PathBuf>,
    pub nats_url: SecretString,
    pub nats_ca: Option<PathBuf>,
    /// The key ring that seals secrets at rest. Nothing starts without it.
    pub kek_file: PathBuf,
    pub public_listen: SocketAddr,
    pub node_listen: SocketAddr,
    /// Who stands in front of the node API, if anybody does.
    pub node_proxies: Option<NodeProxies>,
    /// Where the payment processor sends its events.
    pub webhook_listen: SocketAddr,
    /// Where operators and their tools ask for figures, in clear.
    pub operations_listen: SocketAddr,
    /// Lets the operator's tools read this process's stats.
    pub stats_token: Option<InternalToken>,
    pub public_url: String,
    /// Where users' terminals connect.
    pub terminal_url: String,
    /// Whose pages may open terminals, beside those of the public URL.
    pub terminal_origins: Vec<String>,
    pub node_public_url: String,
    pub tls_cert: PathBuf,
    pub tls_key: PathBuf,
    /// What agents and users trust the server certificate by.
    pub tls_ca: PathBuf,
    pub identity: Identity,
    pub member_name: String,
    pub trust_domain: String,
    pub probe_allowed: Vec<IpNet>,
    /// Ed25519 verifier keys for the bundle; empty: the active one.
    pub bootstrap_verifier_keys: Vec<String>,
    /// The agent's package, as bundles name it.
    pub package: Package,
    /// The payment processor, where one is configured.
    pub payments: Option<Payments>,
    pub roles: BTreeSet<Role>,
}

/// The identity provider, and what its tokens look like.
#[derive(Debug)]
pub struct Identity {
    /// Its authorities, where the system's do not know its certificate.
    pub ca: Option<PathBuf>,
    pub rules: TokenRules,
    /// Opens `POST /internal/auth/jwks/refresh`; without it that route is not there.
    pub jwks_refresh_token: Option<InternalToken>,
}

/// Proxies that end TLS for the node API, and how they forward a client's certificate.
#[derive(Debug, PartialEq, Eq)]
pub struct NodeProxies {
    pub forwarding: Forwarding,
    pub networks: Vec<IpNet>,
}

/// A part of the control plane that can run in a process of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// The public API.
    Api,
    /// The API for node agents, over mutual TLS.
    NodeApi,
    /// Users' terminals.
    TerminalGateway,
    /// Shards and the entities in them.
    Entities,
    /// Charges billing accounts.
    Billing,
    /// Turns events into commands.
    Provisioning,
    /// Publishes what was committed.
    OutboxRelay,
    /// Tells people of events.
    NotificationRelay,
    /// Takes in what the payment processor says.
    Webhook,
}

impl Role {
    pub const ALL: [Self; 9] = [
        Self::Api,
        Self::NodeApi,
        Self::TerminalGateway,
        Self::Entities,
        Self::Billing,
        Self::Provisioning,
        Self::OutboxRelay,
        Self::NotificationRelay,
        Self::Webhook,
    ];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::NodeApi => "node-api",
            Self::TerminalGateway => "terminal-gateway",
            Self::Entities => "entities",
            Self::Billing => "billing",
            Self::Provisioning => "provisioning",
            Self::OutboxRelay => "outbox-relay",
            Self::NotificationRelay => "notification-relay",
            Self::Webhook => "webhook",
        }
    }

    fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

/// What `--roles` takes, for people.
#[must_use]
pub fn roles_help() -> String {
    format!("All, or any of {}, with commas", Role::names())
}

impl FromStr for Role {
    type Err = anyhow::Error;
    fn from_str(name: &str) -> anyhow::Result<Self> {
        Self::ALL
            .into_iter()
            .find(|role| role.name() == name)
            .with_context(|| format!("there is no role {name:?}; the roles are {}, or all", Self::names()))
    }
}

/// `all`, or a list with commas.
///
/// # Errors
/// Where a name is no role's, or a role stands without one that it needs.
pub fn parse_roles(text: &str) -> anyhow::Result<BTreeSet<Role>> {
    if text.trim() == "all" {
        return Ok(Role::ALL.into());
    }
    let roles: BTreeSet<Role> = text.split(',').map(|name| name.trim().parse()).collect::<anyhow::Result<_>>()?;
    // The relay publishes what its own process has committed.
    if roles.contains(&Role::Entities) != roles.contains(&Role::OutboxRelay) {
        bail!("the roles entities and outbox-relay go together: name both or neither");
    }
    // Accounts are charged where they live, each through its own mailbox; without the role nobody would charge them.
    if roles.contains(&Role::Entities) != roles.contains(&Role::Billing) {
        bail!(
            "the roles entities and billing go together, since accounts are charged where they live: name both or neither"
        );
    }
    Ok(roles)
}

impl Config {
    /// Reads the environment.
    ///
    /// # Errors
    /// Names the variable that is missing or wrong, and what it wants.
    pub fn from_environment() -> anyhow::Result<Self> {
        let public_url = required("SVC_PUBLIC_URL", "the URL under which users reach the public API")?;
        let node_public_url = required("SVC_NODE_PUBLIC_URL", "the URL under which agents reach the node API")?;
        let member_name = optional("SVC_MEMBER_NAME").unwrap_or_else(default_member_name);
        Ok(Self {
            database_url: required("SVC_DATABASE_URL", "a postgres:// URL")?.into(),
            database_ca: optional("SVC_DATABASE_CA_PATH").map(PathBuf::from),
            nats_url: required("SVC_NATS_URL", "a tls:// or nats:// URL with credentials")?.into(),
            nats_ca: optional("SVC_NATS_CA_PATH").map(PathBuf::from),
            kek_file: required("SVC_KEK_FILE", "the key ring that seals secrets at rest")?.into(),
            public_listen: address("SVC_PUBLIC_LISTEN", "0.0.0.0:8443")?,
            node_listen: address("SVC_NODE_LISTEN", "0.0.0.0:9443")?,
            node_proxies: node_proxies(optional)?,
            webhook_listen: address("SVC_WEBHOOK_LISTEN", "0.0.0.0:7443")?,
            operations_listen: address("SVC_OPERATIONS_LISTEN", "127.0.0.1:9464")?,
            stats_token: internal_token("INTERNAL_STATS_TOKEN")?,
            terminal_url: optional("SVC_TERMINAL_URL").unwrap_or_else(|| terminal_url(&public_url)),
            terminal_origins: list("SVC_TERMINAL_ORIGINS"),
            public_url,
            node_public_url,
            tls_cert: required("SVC_TLS_CERT_PATH", "the server certificate chain, PEM")?.into(),
            tls_key: required("SVC_TLS_KEY_PATH", "the server certificate's key, PEM")?.into(),
            tls_ca: required("SVC_TLS_CA_PATH", "the CA bundle by which agents verify the server, PEM")?.into(),
            identity: identity(optional)?,
            member_name,
            trust_domain: optional("SVC_TRUST_DOMAIN").unwrap_or_else(|| "gpuaas".to_owned()),
            probe_allowed: networks("NODE_PROBE_ALLOWED_CIDRS")?,
            bootstrap_verifier_keys: list("NODE_BOOTSTRAP_TASK_SIGNING_PUBKEYS"),
            package: package(optional)?,
            payments: payments::payments(optional)?,
            roles: parse_roles(&optional("SVC_ROLES").unwrap_or_else(|| "all".to_owned()))?,
        })
    }
}

/// Reads how the identity provider is known, from `variable`.
fn identity(variable: impl Fn(&str) -> Option<String>) -> anyhow::Result<Identity> {
    let needed =
        |name: &str, what: &str| variable(name).with_context(|| format!("{name} is not set; it must name {what}"));
    let issuer = needed("SVC_OIDC_ISSUER", "the identity provider's issuer URL")?;
    let audiences = items(&needed("SVC_OIDC_AUDIENCE", "the audience that tokens must name, or several with commas")?);
    let mut rules = TokenRules::new(issuer, audiences.first().context("SVC_OIDC_AUDIENCE names no audience")?);
    rules.audiences = audiences;
    if let Some(names) = variable("SVC_OIDC_ALGORITHMS") {
        rules.algorithms = items(&names).iter().map(|name| algorithm(name)).collect::<anyhow::Result<_>>()?;
    }
    let claims = &mut rules.claims;
    for (name, path) in [
        ("SVC_OIDC_CLAIM_USER_ID", &mut claims.user_id),
        ("SVC_OIDC_CLAIM_ROLES", &mut claims.roles),
        ("SVC_OIDC_CLAIM_ORG_ID", &mut claims.org_id),
        ("SVC_OIDC_CLAIM_PROJECT_ID", &mut claims.project_id),
        ("SVC_OIDC_CLAIM_PLAN", &mut claims.plan),
    ] {
        if let Some(configured) = variable(name) {
            *path = configured;
        }
    }
    let jwks_refresh_token = variable("INTERNAL_JWKS_REFRESH_TOKEN")
        .map(|text| {
            InternalToken::new(&text).context("INTERNAL_JWKS_REFRESH_TOKEN needs 32 characters or more, no spaces")
        })
        .transpose()?;
    Ok(Identity { ca: variable("SVC_OIDC_CA_PATH").map(PathBuf::from), rules, jwks_refresh_token })
}

/// An algorithm by which a provider may sign. A shared secret is none: whoever verifies with it could sign, too.
fn algorithm(name: &str) -> anyhow::Result<Algorithm> {
    let known = [
        Algorithm::RS256,
        Algorithm::RS384,
        Algorithm::RS512,
        Algorithm::PS256,
        Algorithm::PS384,
        Algorithm::PS512,
        Algorithm::ES256,
        Algorithm::ES384,
        Algorithm::EdDSA,
    ];
    known.into_iter().find(|algorithm| format!("{algorithm:?}") == name).with_context(|| {
        let known = known.map(|algorithm| format!("{algorithm:?}")).join(", ");
        format!("SVC_OIDC_ALGORITHMS: {name:?} is not one of {known}")
    })
}

/// Reads who stands in front of the node API.
fn node_proxies(variable: impl Fn(&str) -> Option<String>) -> anyhow::Result<Option<NodeProxies>> {
    const WAY: &str = "SVC_NODE_CLIENT_IDENTITY";
    const NETWORKS: &str = "SVC_NODE_TRUSTED_PROXIES";
    let way = variable(WAY).unwrap_or_else(|| "tls".to_owned());
    let networks = parsed_networks(NETWORKS, &variable(NETWORKS).unwrap_or_default())?;
    if way == "tls" {
        if !networks.is_empty() {
            bail!("{NETWORKS} is set, but {WAY} does not say how those proxies forward a certificate");
        }
        return Ok(None);
    }
    let forwarding = Forwarding::ALL.into_iter().find(|known| known.name() == way).with_context(|| {
        let known = Forwarding::ALL.map(Forwarding::name).join(", ");
        format!("{WAY} is {way:?}; it must be tls, or one of {known}")
    })?;
    if networks.is_empty() {
        bail!("{WAY} is {way}; {NETWORKS} must name the proxies' networks: only their word is taken");
    }
    if let Some(everybody) = networks.iter().find(|network| network.prefix_len() == 0) {
        bail!("{NETWORKS}: {everybody} would let everybody be any node");
    }
    Ok(Some(NodeProxies { forwarding, networks }))
}

/// Reads where the agent's package is and goes. What is not set is null in the bundle.
fn package(variable: impl Fn(&str) -> Option<String>) -> anyhow::Result<Package> {
    let told = |name: &str, what: &str, is_one: fn(&str) -> bool| match variable(name) {
        Some(value) if is_one(&value) => Ok(Some(value)),
        Some(value) => bail!("{name} is {value:?}; it must be {what}"),
        None => Ok(None),
    };
    let is_word = |text: &str| !text.contains(|character: char| character.is_whitespace() || character.is_control());
    let is_digest = |text: &str| {
        text.strip_prefix("sha256:")
            .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
    };
    let is_path = |text: &str| text.starts_with('/') && !text.contains(char::is_control);
    let is_unit = |text: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b":-_.@\\".contains(&byte);
        text.ends_with(".service") && !text.starts_with('-') && text.bytes().all(allowed)
    };
    let package = Package {
        oci_ref: told(names::PACKAGE_OCI_REF, "a reference in an OCI registry", is_word)?,
        digest: told(names::PACKAGE_DIGEST, "sha256: and 64 hexadecimal digits", is_digest)?,
        pull_delivery_mode: told(names::PACKAGE_PULL_DELIVERY_MODE, "one word", is_word)?,
        install_root: told(names::INSTALL_ROOT, "an absolute path", is_path)?,
        env_file_path: told(names::ENV_FILE, "an absolute path", is_path)?,
        systemd_unit_name: told(
            names::SYSTEMD_UNIT,
            "the name of a systemd unit, such as gpuaas-agent.service",
            is_unit,
        )?,
    };
    // A reference alone is whatever the registry says today.
    if package.oci_ref.is_some() != package.digest.is_some() {
        bail!(
            "{} and {} go together: a package is pulled by its digest",
            names::PACKAGE_OCI_REF,
            names::PACKAGE_DIGEST
        );
    }
    Ok(package)
}

fn optional(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

fn required(name: &str, what: &str) -> anyhow::Result<String> {
    optional(name).with_context(|| format!("{name} is not set; it must name {what}"))
}

fn address(name: &str, default: &str) -> anyhow::Result<SocketAddr> {
    let text = optional(name).unwrap_or_else(|| default.to_owned());
    text.parse().with_context(|| format!("{name} is {text:?}; it must be an address and port, for example {default}"))
}

fn internal_token(name: &str) -> anyhow::Result<Option<InternalToken>> {
    let token = optional(name).map(|text| {
        InternalToken::new(&text).with_context(|| format!("{name} needs 32 characters or more, no spaces"))
    });
    token.transpose()
}

fn list(name: &str) -> Vec<String> {
    items(&optional(name).unwrap_or_default())
}

fn items(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(ToOwned::to_owned).collect()
}

fn networks(name: &str) -> anyhow::Result<Vec<IpNet>> {
    parsed_networks(name, &optional(name).unwrap_or_default())
}

fn parsed_networks(name: &str, text: &str) -> anyhow::Result<Vec<IpNet>> {
    let parse =
        |text: String| text.parse().with_context(|| format!("{name}: {text:?} is no network such as 10.0.0.0/8"));
    items(text).into_iter().map(parse).collect()
}

/// The gateway at the public URL.
fn terminal_url(public_url: &str) -> String {
    format!("{}{}", public_url.trim_end_matches('/').replacen("http", "ws", 1), edge::terminal::PATH)
}

fn default_member_name() -> String {
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    format!("{}-{}", host.unwrap_or_else(|| "member".to_owned()), std::process::id())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_all_or_named_and_a_wrong_one_is_told_the_right_ones() {
        assert_eq!(parse_roles("all").unwrap(), Role::ALL.into());
        assert_eq!(parse_roles("api, node-api").unwrap(), [Role::Api, Role::NodeApi].into());
        let error = parse_roles("api,webshop").unwrap_err().to_string();
        assert!(error.contains("webshop") && error.contains("outbox-relay"), "{error}");
    }

    fn identity_of(variables: &[(&str, &str)]) -> anyhow::Result<Identity> {
        let needed = [("SVC_OIDC_ISSUER", "https://idp.example"), ("SVC_OIDC_AUDIENCE", "gpu, https://gpu.example")];
        let find = |name: &str| {
            let mut all = variables.iter().chain(&needed);
            all.find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        identity(find)
    }

    #[test]
    fn a_provider_other_than_keycloak_is_told_where_its_claims_are() {
        let plain = identity_of(&[]).unwrap();
        assert_eq!(plain.rules.audiences, ["gpu", "https://gpu.example"]);
        assert_eq!(plain.rules.claims.roles, "realm_access.roles");
        assert!(plain.jwks_refresh_token.is_none());
        let told = identity_of(&[
            ("SVC_OIDC_CLAIM_ROLES", "https://gpu.example/roles"),
            ("SVC_OIDC_CLAIM_USER_ID", "uid"),
            ("SVC_OIDC_CLAIM_PROJECT_ID", "tenancy.project"),
            ("SVC_OIDC_ALGORITHMS", "ES256, EdDSA"),
            ("INTERNAL_JWKS_REFRESH_TOKEN", "0123456789abcdef0123456789abcdef"),
        ])
        .unwrap();
        let claims = &told.rules.claims;
        assert_eq!(
            (claims.roles.as_str(), claims.user_id.as_str(), claims.project_id.as_str(), claims.org_id.as_str()),
            ("https://gpu.example/roles", "uid", "tenancy.project", "org_id")
        );
        assert_eq!(told.rules.algorithms, [Algorithm::ES256, Algorithm::EdDSA]);
        assert!(told.jwks_refresh_token.is_some());
    }

    #[test]
    fn a_shared_secret_no_algorithm_and_a_guessable_token_are_refused_by_name() {
        for (name, value) in [
            ("SVC_OIDC_ALGORITHMS", "HS256"),
            ("SVC_OIDC_ALGORITHMS", "none"),
            ("SVC_OIDC_ALGORITHMS", "ES256,es256"),
            ("SVC_OIDC_AUDIENCE", " , "),
            ("INTERNAL_JWKS_REFRESH_TOKEN", "changeme"),
        ] {
            let error = identity_of(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name) && !error.contains("changeme"), "{error}");
        }
    }

    fn of<'a>(variables: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn the_node_api_ends_tls_itself_unless_proxies_and_their_way_are_named() {
        const WAY: &str = "SVC_NODE_CLIENT_IDENTITY";
        const NETWORKS: &str = "SVC_NODE_TRUSTED_PROXIES";
        assert_eq!(node_proxies(of(&[])).unwrap(), None);
        assert_eq!(node_proxies(of(&[(WAY, "tls")])).unwrap(), None);
        let proxies = node_proxies(of(&[(WAY, "rfc9440"), (NETWORKS, "10.0.0.7/32, fd00::/64")])).unwrap().unwrap();
        assert_eq!((proxies.forwarding, proxies.networks.len()), (Forwarding::Rfc9440, 2));
        for (variables, named) in [
            (vec![(WAY, "rfc9440")], NETWORKS),
            (vec![(NETWORKS, "10.0.0.0/8")], WAY),
            (vec![(WAY, "spiffe"), (NETWORKS, "10.0.0.0/8")], "xfcc"),
            (vec![(WAY, "xfcc"), (NETWORKS, "10.0.0.0/8, 0.0.0.0/0")], "everybody"),
            (vec![(WAY, "nginx"), (NETWORKS, "proxy.internal")], "proxy.internal"),
        ] {
            let error = node_proxies(of(&variables)).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn a_package_is_null_where_unset_and_goes_by_its_digest() {
        assert_eq!(package(of(&[])).unwrap(), Package::default());
        let digest = format!("sha256:{}", "0f".repeat(32));
        let told = [
            (names::PACKAGE_OCI_REF, "registry.example/gpuaas/agent:1"),
            (names::PACKAGE_DIGEST, digest.as_str()),
            (names::ENV_FILE, "/srv/agent.env"),
        ];
        let read = package(of(&told)).unwrap();
        assert_eq!((read.digest.as_deref(), read.install_root), (Some(digest.as_str()), None));
        for (name, value) in [
            (names::PACKAGE_OCI_REF, "registry.example/agent:1"),
            (names::PACKAGE_DIGEST, "sha256:0f"),
            (names::PACKAGE_PULL_DELIVERY_MODE, "in a letter"),
            (names::INSTALL_ROOT, "opt/gpuaas"),
            (names::ENV_FILE, "/etc/a\nb"),
            (names::SYSTEMD_UNIT, "--now.service"),
            (names::SYSTEMD_UNIT, "gpuaas agent.service"),
        ] {
            let error = package(of(&[(name, value)])).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn terminals_are_at_the_public_url_unless_told() {
        assert_eq!(terminal_url("https://gpu.example/"), "wss://gpu.example/ws/v1/terminal");
    }

    #[test]
    fn entities_do_not_run_without_the_relay_that_speaks_for_them_or_without_who_charges_them() {
        for (roles, missing) in [
            ("entities,billing", "outbox-relay"),
            ("entities,outbox-relay", "billing"),
            ("billing", "entities and billing go together"),
        ] {
            let error = parse_roles(roles).unwrap_err().to_string();
            assert!(error.contains(missing) && error.contains("name both or neither"), "{error}");
        }
        assert!(parse_roles("entities,billing,outbox-relay").is_ok());
    }
}
