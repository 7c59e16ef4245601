//! The fifth stage: the services of the edge's handlers, and the operator's view of this process.

use super::actors::ActorStage;
use super::keys::KeyStage;
use super::membership::MembershipStage;
use super::storage::StorageStage;
use crate::cluster_keys;
use crate::cluster_runtime::store_check::StoreCheck;
use crate::cluster_runtime::{ClusterRuntime, OperatorView};
use crate::config::{Config, MaasConfig, MailSettings, OutsideServiceSettings, PaymentsConfig};
use crate::metrics::ProcessMetrics;
use crate::traces::TraceExporter;
use anyhow::Context;
use edge::app_state::{Addresses, AppState, Parts};
use edge::auth::Authenticator;
use edge::auth::browser_session::SessionReader;
use edge::auth::jwks::{Jwks, JwksSettings};
use edge::auth::openid_provider::OpenIdProvider;
use edge::auth::platform_role_metrics::PlatformRoleCounters;
use edge::auth::signed_tokens::service_account::ServiceTokens;
use edge::fleet_telemetry::{FleetDirectory, FleetTelemetry};
use edge::http::request_rates::EdgeMetrics;
use edge::limits::connection_quota::ConnectionQuotas;
use edge::limits::rate_limit::RateLimiter;
use edge::notifications::Notifications;
use edge::notifications::delivery::NotificationSender;
use edge::notifications::delivery::outbound_webhook::{WebhookSettings, Webhooks};
use edge::outbound::node_probe::{Probe, ProbeTargets, SystemResolver};
use edge::trust::current_keys::CurrentKeys;
use persistence::Reads;
use persistence::envelope_encryption::KeyRing;
use prometheus::Registry;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use telemetry::Sampling;
use tokio_util::sync::CancellationToken;

/// How long a probe waits for a node.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// What the listeners serve with.
pub struct ServiceStage {
    pub operator_view: Arc<OperatorView>,
    pub services: AppState,
}

impl ServiceStage {
    /// # Errors
    /// Where a file of the configuration or a secret cannot be used.
    pub async fn assemble(
        config: &Config,
        registry: &Registry,
        traces: Option<&TraceExporter>,
        storage: &StorageStage,
        keys: &KeyStage,
        membership: &MembershipStage,
        actors: &ActorStage,
    ) -> anyhow::Result<Self> {
        let fleet = FleetTelemetry::default();
        let view = operator_view(config, registry, storage, keys, membership, actors, fleet.clone())?;
        let operator_view = Arc::new(view);
        if let Some(traces) = traces {
            traces.register(registry)?;
        }
        let (current_keys, ring, api_ca) = (&keys.current, &storage.ring, read_text(&config.tls_ca).await?);
        let verifiers = &config.bootstrap_verifier_keys;
        let (domain, at_rest) = (keys.domain.clone(), Arc::clone(ring));
        let trust =
            cluster_keys::load(&storage.secrets, domain, current_keys.clone(), verifiers, api_ca, at_rest).await?;
        let identity_ca = identity_authorities(config).await?;
        let sessions = SessionReader::new(storage.reads.clone(), Arc::clone(ring));
        let authenticator = authenticator(config, identity_ca.clone(), current_keys.clone(), storage.reads.clone())?;
        let services = AppState::new(Parts {
            member: storage.member,
            directory: actors.directory.clone(),
            reads: storage.reads.clone(),
            environment: Arc::clone(&actors.environment) as Arc<dyn ::actors::shell_dependencies::Environment>,
            runtime: Arc::new(ClusterRuntime(Arc::clone(&operator_view))),
            authenticator: Arc::new(authenticator.with_browser_sessions(sessions)),
            limiter: RateLimiter::register(actors.directory.clone(), registry)?,
            jwks_refresh_token: config.identity.jwks_refresh_token.clone(),
            probe: Probe::new(
                ProbeTargets { allowed: config.probe_allowed.clone() },
                Arc::new(SystemResolver),
                PROBE_TIMEOUT,
            ),
            polls: actors.effects.polls.clone(),
            terminals: actors.effects.terminals.clone(),
            notifications: Notifications::register(registry, Some(Arc::new(membership.bus.clone())))?,
            delivery: delivery(config, Arc::clone(ring)).await?,
            connection_quotas: ConnectionQuotas::new(actors.directory.clone()),
            connections: actors.effects.connections.clone(),
            metrics: EdgeMetrics::register(registry)?,
            sampling: traces.map_or(Sampling::NEVER, |traces| traces.sampling),
            stats_token: config.stats_token.clone(),
            trust,
            platform_roles: PlatformRoleCounters::register(registry)?,
            addresses: Addresses {
                public_url: config.public_url.clone(),
                node_url: config.node_public_url.clone(),
                terminal_url: config.terminal_url.clone(),
                terminal_origins: config.terminal_origins.clone(),
            },
            payments: config.payments.as_ref().map(PaymentsConfig::open).transpose()?,
            agent_package: config.agent_package.open()?,
            console_provider: console_provider(config, identity_ca.as_deref())?,
            maas: config.maas.as_ref().map(MaasConfig::open).transpose()?,
            log_store: config.log_store.as_ref().map(OutsideServiceSettings::open).transpose()?,
            alertmanager: config.alertmanager.as_ref().map(OutsideServiceSettings::open).transpose()?,
            fleet,
            fleet_directory: FleetDirectory::new(storage.reads.clone()),
            stopping: CancellationToken::new(),
        });
        Ok(Self { operator_view, services })
    }
}

fn operator_view(
    config: &Config,
    registry: &Registry,
    storage: &StorageStage,
    keys: &KeyStage,
    membership: &MembershipStage,
    actors: &ActorStage,
    fleet: FleetTelemetry,
) -> anyhow::Result<OperatorView> {
    let roles = config.roles.iter().map(|role| role.name()).collect::<Vec<_>>().join(",");
    Ok(OperatorView {
        view: Arc::clone(&membership.view),
        bus: membership.bus.clone(),
        host: Arc::clone(&actors.host),
        supervisor: actors.supervisor.clone(),
        committer: storage.committer.clone(),
        reads: storage.reads.clone(),
        cluster: membership.cluster.clone(),
        metrics: Arc::new(ProcessMetrics::register(registry, &config.member_name, &roles)?),
        pool: storage.pool.clone(),
        polls: actors.effects.polls.clone(),
        connections: actors.effects.connections.clone(),
        keys: keys.current.clone(),
        seals_with: storage.ring.active().to_owned(),
        committed: storage.committed.clone(),
        been_ready: AtomicBool::new(false),
        store_check: StoreCheck::default(),
        fleet,
    })
}

/// Sends webhooks and e-mails.
async fn delivery(config: &Config, at_rest: Arc<KeyRing>) -> anyhow::Result<NotificationSender> {
    let authorities_pem = match &config.notification_ca {
        Some(path) => Some(read_text(path).await.context("SVC_NOTIFICATION_CA_PATH")?),
        None => None,
    };
    let settings = WebhookSettings { allowed: config.notification_allowed.clone(), authorities_pem };
    let mailer = config.mail.as_ref().map(MailSettings::open).transpose()?;
    Ok(NotificationSender { webhooks: Webhooks::new(settings)?, mailer, at_rest })
}

/// The authorities of the identity provider's certificate, where the system does not trust it.
async fn identity_authorities(config: &Config) -> anyhow::Result<Option<String>> {
    match &config.identity.ca {
        Some(path) => Ok(Some(read_text(path).await.context("SVC_OIDC_CA_PATH")?)),
        None => Ok(None),
    }
}

/// Verifies the identity provider's tokens, and those that this cluster signs for service accounts.
fn authenticator(
    config: &Config,
    authorities_pem: Option<String>,
    keys: CurrentKeys,
    reads: Reads,
) -> anyhow::Result<Authenticator> {
    let rules = &config.identity.rules;
    let jwks = Jwks::new(JwksSettings { authorities_pem, ..JwksSettings::new(rules.issuer.clone()) })
        .context("the identity provider of SVC_OIDC_ISSUER cannot be used")?;
    let service_tokens = ServiceTokens::new(config.public_url.clone(), keys, reads);
    Ok(Authenticator::new(rules.clone(), jwks).with_service_tokens(service_tokens))
}

/// Logs people in to the web console, where a client is configured for it.
fn console_provider(config: &Config, authorities_pem: Option<&str>) -> anyhow::Result<Option<Arc<OpenIdProvider>>> {
    let Some(settings) = &config.identity.console else { return Ok(None) };
    let redirect_uri = format!("{}/console/callback", config.public_url.trim_end_matches('/'));
    let issuer = config.identity.rules.issuer.as_str();
    let provider = OpenIdProvider::new(issuer, redirect_uri, authorities_pem, settings.clone());
    Ok(Some(Arc::new(provider.map_err(anyhow::Error::msg).context("SVC_OIDC_CA_PATH")?)))
}

pub(super) async fn read_text(path: &Path) -> anyhow::Result<String> {
    tokio::fs::read_to_string(path).await.with_context(|| format!("cannot read {}", path.display()))
}
