//! One process of the control plane, from its configuration to its ordered shutdown.

use crate::cluster::authentication::MemberAuthenticator;
use crate::cluster::bus::{Bus, PeerSignal};
use crate::cluster::ownership::ShardReconciler;
use crate::cluster::{self, ClusterView, nats};
use crate::config::{Config, NodeProxies, ProcessRole};
use crate::metrics::{EventMetrics, ProcessMetrics};
use crate::process_environment::{PgStore, ProcessEnvironment};
use crate::runtime::{ClusterRuntime, Operations};
use crate::supervisor::{Supervisor, WorkerTask};
use crate::traces::TraceExporter;
use crate::tree::{COMMITTER_ROWS, LOADER_ROWS, OPTIONAL_ROWS, SHUTDOWN_ORDER, TREE};
use crate::trust;
use crate::workers::accrual::Accrual;
use crate::workers::audit_seal::{AuditSeal, SealMetrics};
use crate::workers::auditor::Auditor;
use crate::workers::keys::{KeyFollower, NodeAcceptor};
use crate::workers::notification_delivery::NotificationDelivery;
use crate::workers::notification_queue::NotificationQueue;
use crate::workers::notifications::Notifier;
use crate::workers::outbox_poll::OutboxPoll;
use crate::workers::payments::processor_calls::ProcessorCalls;
use crate::workers::payments::reconciliation::Reconciler;
use crate::workers::payments::updates::PaymentUpdater;
use crate::workers::payments::webhooks::ProcessorWebhooks;
use crate::workers::provisioning::Placer;
use crate::workers::reactor::Reactor;
use crate::workers::recordings::RecordingRetention;
use crate::workers::relay::OutboxRelay;
use crate::workers::rewrap::Rewrapper;
use crate::workers::{housekeeping, metrics, policy, timers};
use actors::ports::Effects;
use actors::{Directory, Host, HostConfig};
use anyhow::{Context, ensure};
use arc_swap::ArcSwap;
use domain::event::Stream;
use domain::{Effect, MemberId};
use edge::auth::Authenticator;
use edge::auth::jwks::{Jwks, JwksSettings};
use edge::auth::service_token::ServiceTokens;
use edge::connection_quota::ConnectionQuotas;
use edge::delivery::NotificationSender;
use edge::delivery::webhook::WebhookSettings;
use edge::identity::TrustDomain;
use edge::identity::ingress::Ingress;
use edge::identity::proxies::Proxies;
use edge::keys::{Keys, KeysInForce};
use edge::long_poll::LongPolls;
use edge::metrics::EdgeMetrics;
use edge::notifications::Notifications;
use edge::platform_roles::PlatformRoleCounters;
use edge::probe::{Probe, ProbeTargets, SystemResolver};
use edge::rate_limit::RateLimiter;
use edge::services::{Addresses, Parts, Services};
use edge::terminal::Terminals;
use edge::tls::connections::Connections;
use edge::tls::serve::{ListenerLimits, TlsServer};
use edge::tls::{ServerTls, server_config};
use futures::FutureExt;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use persistence::audit::Sealer;
use persistence::cluster::Member;
use persistence::committer::CommitterMetrics;
use persistence::envelope::KeyRing;
use persistence::pool::PoolConfig;
use persistence::{
    Cluster, Committer, CommitterConfig, Leases, Loader, Outbox, OutboxRow, Reads, Secrets, SnapshotSealer, migrate,
};
use prometheus::Registry;
use rustls::ServerConfig;
use serde_json::json;
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;
use telemetry::Sampling;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

/// Committed events that may wait for the relay; those that do not fit are found by the poll.
const RELAY_QUEUE: usize = 16_384;

/// How long the ordered shutdown may take; a service manager kills a process that takes longer.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(25);

/// How long a probe waits for a node.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// A running control plane process.
struct Process {
    config: Config,
    pool: PgPool,
    reads: Reads,
    environment: Arc<ProcessEnvironment>,
    committer: Committer,
    loader: Loader,
    bus: Bus,
    view: Arc<ClusterView>,
    host: Arc<Host>,
    directory: Directory,
    owner: Arc<ShardReconciler>,
    supervisor: Supervisor,
    operations: Arc<Operations>,
    registry: Registry,
    traces: Option<Arc<TraceExporter>>,
    committed: mpsc::Sender<OutboxRow>,
    relay: Arc<OutboxRelay>,
    audit_seal: Arc<AuditSeal>,
    ring: Arc<KeyRing>,
    key_follower: Arc<KeyFollower>,
    polls: LongPolls,
    terminals: Terminals,
    connections: Connections,
    stop_listening: CancellationToken,
    /// Ends when the last connection of the last listener is closed.
    listeners: TaskTracker,
}

/// Runs until SIGTERM or SIGINT, then shuts down in order.
///
/// # Errors
/// Where the process cannot start: a setting is wrong, the database cannot be reached, a port is taken.
pub async fn serve(config: Config, traces: Option<TraceExporter>) -> anyhow::Result<()> {
    let process = Process::start(config, traces).await?;
    let services = process.services().await?;
    process.run(&services).await?;
    tracing::info!(member.id = %process.view.me.id, "{} serves", process.view.me.name);
    stop_signal().await?;
    process.shut_down().await;
    Ok(())
}

/// Begins an incarnation of the cluster on a restored database.
///
/// # Errors
/// Where the database cannot be reached, or a member still lives.
pub async fn begin_incarnation() -> anyhow::Result<i64> {
    let pool = open_database(&Config::from_environment("all")?).await?;
    let cluster = Cluster::new(pool);
    let living = cluster.alive(crate::cluster::FAILURE_TIMEOUT).await?;
    if let Some(heartbeat) = living.first() {
        anyhow::bail!("{} still runs; stop every member first", heartbeat.member.name);
    }
    Ok(cluster.begin_incarnation().await?)
}

impl Process {
    async fn start(config: Config, traces: Option<TraceExporter>) -> anyhow::Result<Self> {
        raise_open_files();
        let registry = Registry::new();
        registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
        edge::idempotency::COUNTERS.register(&registry)?;
        edge::webhook::COUNTERS.register(&registry)?;
        edge::tls::admission::register(&registry)?;
        let pool = open_database(&config).await?;
        let ring = Arc::clone(&config.key_ring);
        let secrets = Secrets::new(pool.clone(), Arc::clone(&ring));
        // Before any secret is opened, so that the error says what to do.
        secrets.rewrap().check().await.context("the key ring does not fit the database")?;
        let seals = trust::seals(&secrets, config.unsealed_until).await?;
        seals.register(&registry)?;
        let reads = Reads::new(pool.clone()).sealed(seals.clone());
        let member = MemberId(Uuid::new_v4());
        let (committed, mut rows) = mpsc::channel(RELAY_QUEUE);
        if !config.roles.contains(&ProcessRole::OutboxRelay) {
            // Without the role, another process's relay reads them from Postgres.
            rows.close();
        }
        let metrics = CommitterMetrics::register(&registry)?;
        let committer = Committer::new(&pool, committer_config(member, seals), metrics, committed.clone());
        let loader = Loader::new(&reads);
        let (view, look) = (Arc::new(ClusterView::new(own_member(member, &config))), Arc::new(Notify::new()));
        let environment = Arc::new(ProcessEnvironment::new(Arc::clone(&view)));
        environment.set_policy_book(reads.policy_book().await.context("the policy values cannot be read")?);
        let (polls, connections, keys_changed) =
            (LongPolls::default(), Connections::default(), Arc::new(Notify::new()));
        let domain = config.trust_domain.clone();
        let keys = Keys::read(&secrets, &reads, &domain).await.context("the keys cannot be read")?;
        let in_force = KeysInForce::new(keys);
        let members = Arc::new(MemberAuthenticator::register(&registry, Arc::clone(&view), in_force.clone())?);
        let client = nats::connect(&config.nats_url, config.nats_ca.as_deref(), &config.member_name).await?;
        let bus = Bus::new(client, &config.member_name, members, Arc::clone(&view), Arc::clone(&look));
        let relay_secret = trust::terminal_relay(&secrets).await?;
        let terminals = Terminals::register(&registry, Some(Arc::new(bus.clone())), relay_secret)?;
        let key_follower = Arc::new(KeyFollower {
            reads: reads.clone(),
            secrets,
            domain,
            in_force,
            changed: Arc::clone(&keys_changed),
            bus: bus.clone(),
            connections: connections.clone(),
            polls: polls.clone(),
            acceptor: OnceLock::new(),
            proxies: OnceLock::new(),
        });
        let effects = ProcessEffects {
            polls: polls.clone(),
            terminals: terminals.clone(),
            connections: connections.clone(),
            environment: Arc::clone(&environment),
            keys_changed,
            bus: bus.clone(),
        };
        let event_metrics = EventMetrics::register(&registry)?;
        // A pool of its own, so that a busy pool never makes a living member look dead.
        let cluster = Cluster::new(persistence::pool::open(&PoolConfig { connections: 2, ..database(&config) })?);
        let store = PgStore {
            committer: committer.clone(),
            reads: reads.clone(),
            loader: loader.clone(),
            fenced: Arc::clone(&look),
            cluster: cluster.clone(),
            metrics: event_metrics,
        };
        let host_environment = Arc::clone(&environment);
        let host = Host::new(HostConfig::default(), Arc::new(store), Arc::new(effects), host_environment);
        let directory = Directory::new(Arc::clone(&host), Arc::new(bus.clone()));
        let supervisor = Supervisor::start().await?;
        let takes_shards = config.roles.contains(&ProcessRole::Entities);
        let owner = ShardReconciler::new(
            Arc::clone(&view),
            cluster.clone(),
            Arc::clone(&host),
            directory.clone(),
            bus.clone(),
            look,
            takes_shards,
        );
        *owner.parent.lock().unwrap_or_else(PoisonError::into_inner) = Some(supervisor.root());
        let operations = Operations {
            view: Arc::clone(&view),
            bus: bus.clone(),
            host: Arc::clone(&host),
            supervisor: supervisor.clone(),
            committer: committer.clone(),
            reads: reads.clone(),
            cluster,
            metrics: Arc::new(ProcessMetrics::register(&registry, &config.member_name, &roles(&config))?),
            pool: pool.clone(),
            polls: polls.clone(),
            connections: connections.clone(),
            keys: key_follower.in_force.clone(),
            seals_with: ring.active().to_owned(),
            committed: committed.clone(),
            been_ready: AtomicBool::new(false),
        };
        let audit_key = trust::audit_key(&key_follower.secrets).await?;
        let sealer = Sealer::new(pool.clone(), member, audit_key);
        let audit_seal = AuditSeal::new(Arc::clone(&host), bus.clone(), sealer, SealMetrics::register(&registry)?);
        if let Some(traces) = &traces {
            traces.register(&registry)?;
        }
        let relay = Arc::new(OutboxRelay::new(bus.clone(), Outbox::new(pool.clone()), rows));
        Ok(Self {
            config,
            pool,
            reads,
            environment,
            committer,
            loader,
            bus,
            view,
            host,
            directory,
            owner: Arc::new(owner),
            supervisor,
            operations: Arc::new(operations),
            registry,
            traces: traces.map(Arc::new),
            committed,
            relay,
            audit_seal: Arc::new(audit_seal),
            ring,
            key_follower,
            polls,
            terminals,
            connections,
            stop_listening: CancellationToken::new(),
            listeners: TaskTracker::new(),
        })
    }

    /// The services that the edge's handlers use.
    async fn services(&self) -> anyhow::Result<Services> {
        let config = &self.config;
        let KeyFollower { secrets, domain, in_force, .. } = &*self.key_follower;
        let (domain, keys, ring) = (domain.clone(), in_force.clone(), Arc::clone(&self.ring));
        let api_ca = read_text(&config.tls_ca).await?;
        let trust = trust::load(secrets, domain, keys, &config.bootstrap_verifier_keys, api_ca, ring).await?;
        let authenticator = authenticator(config, in_force.clone(), self.reads.clone()).await?;
        let targets = ProbeTargets { allowed: config.probe_allowed.clone() };
        Ok(Services::new(Parts {
            directory: self.directory.clone(),
            reads: self.reads.clone(),
            environment: Arc::clone(&self.environment) as Arc<dyn actors::ports::Environment>,
            runtime: Arc::new(ClusterRuntime(Arc::clone(&self.operations))),
            authenticator: Arc::new(authenticator),
            limiter: RateLimiter::register(self.directory.clone(), &self.registry)?,
            jwks_refresh_token: config.identity.jwks_refresh_token.clone(),
            probe: Probe::new(targets, Arc::new(SystemResolver), PROBE_TIMEOUT),
            polls: self.polls.clone(),
            terminals: self.terminals.clone(),
            notifications: Notifications::register(&self.registry, Some(Arc::new(self.bus.clone())))?,
            delivery: delivery(config, Arc::clone(&self.ring)).await?,
            connection_quotas: ConnectionQuotas::new(self.directory.clone()),
            connections: self.connections.clone(),
            metrics: EdgeMetrics::register(&self.registry)?,
            sampling: self.traces.as_ref().map_or(Sampling::NEVER, |traces| traces.sampling),
            stats_token: config.stats_token.clone(),
            trust,
            platform_roles: PlatformRoleCounters::register(&self.registry)?,
            addresses: Addresses {
                public_url: config.public_url.clone(),
                node_url: config.node_public_url.clone(),
                terminal_url: config.terminal_url.clone(),
                terminal_origins: config.terminal_origins.clone(),
            },
            payments: config.payments.as_ref().map(crate::config::PaymentsConfig::open).transpose()?,
            package: config.package.clone(),
            stopping: self.stop_listening.clone(),
        }))
    }

    /// Starts every row of the tree that this process's roles include.
    async fn run(&self, services: &Services) -> anyhow::Result<()> {
        let mut tasks = self.tasks(services).await?;
        for row in TREE.iter().filter(|row| row.roles.iter().any(|role| self.config.roles.contains(role))) {
            match tasks.remove(row.name) {
                Some(task) => self.supervisor.add(*row, task),
                None if TREE.iter().any(|below| below.parent == row.name) => self.supervisor.group(*row),
                None => ensure!(OPTIONAL_ROWS.contains(&row.name), "nothing does the work of `{}`", row.name),
            }
        }
        let stray = tasks.into_keys().find(|name| !TREE.iter().any(|row| row.name == *name));
        ensure!(stray.is_none(), "the tree has no row for the work {stray:?}");
        Ok(())
    }

    async fn tasks(&self, services: &Services) -> anyhow::Result<BTreeMap<&'static str, WorkerTask>> {
        let outbox = Outbox::new(self.pool.clone());
        let placer = Arc::new(Placer::new(&self.registry)?);
        let leases = Leases::new(self.pool.clone(), self.view.me.id);
        let updater = services
            .payments
            .as_ref()
            .map(|payments| PaymentUpdater::new(self.directory.clone(), Arc::clone(&payments.processor), "payments"));
        let updater = updater.transpose()?;
        let processor_calls = updater.clone().map(|updater| ProcessorCalls::new(updater, leases.clone()));
        let webhooks = updater.clone().map(|updater| ProcessorWebhooks::new(updater, Arc::clone(&self.ring)));
        let (directory, reads) = (self.directory.clone(), self.reads.clone());
        let reactor = Reactor::new(directory, reads, outbox, placer, processor_calls, webhooks, "provisioning")?;
        let mut tasks: BTreeMap<&'static str, WorkerTask> = BTreeMap::new();
        for (number, name) in COMMITTER_ROWS.into_iter().enumerate() {
            let run = move |committer: Committer| async move {
                committer.run_lane(number).await;
                // The committer was closed: the supervisor stops this worker next.
                std::future::pending().await
            };
            tasks.insert(name, task(&self.committer, run));
        }
        for (number, name) in LOADER_ROWS.into_iter().enumerate() {
            let run = move |loader: Loader| async move {
                loader.run_lane(number).await;
                anyhow::bail!("its queue is gone")
            };
            tasks.insert(name, task(&self.loader, run));
        }
        tasks.insert("heartbeat", task(&self.owner, |owner| async move { owner.run_heartbeat().await }));
        tasks.insert("peer-listener", task(&self.owner, |owner| async move { owner.run_listener().await }));
        tasks.insert("ownership", task(&self.owner, |owner| async move { owner.run().await }));
        tasks.insert("command-answers", task(&self.bus, |bus| async move { bus.receive_answers().await }));
        tasks.insert("peer-rpc", task(&self.operations, |operations| async move { operations.serve_peers().await }));
        tasks.insert("outbox-relay", task(&self.relay, |relay| async move { relay.run().await }));
        let (view, reads, relay) = (Arc::clone(&self.view), self.reads.clone(), self.committed.clone());
        let poll = Arc::new(OutboxPoll { view, reads, relay });
        tasks.insert("outbox-poll", task(&poll, |poll| async move { poll.run().await }));
        let (host, reads) = (Arc::clone(&self.host), self.reads.clone());
        tasks.insert("timers", task(&(host, reads), |(host, reads)| timers::run(host, reads)));
        let environment = Arc::clone(&self.environment) as Arc<dyn actors::ports::Environment>;
        let (directory, view) = (self.directory.clone(), Arc::clone(&self.view));
        let accrual = Accrual::register(&self.registry, directory, view, self.reads.clone(), environment)?;
        tasks.insert("accrual", task(&accrual, Accrual::run));
        tasks.insert("audit-seal", task(&self.audit_seal, |seal| async move { seal.run().await }));
        tasks.insert("idle-passivation", task(&self.host, housekeeping::passivate_idle));
        let metrics =
            (Arc::clone(&self.operations.metrics), Arc::clone(&self.host), self.reads.clone(), self.bus.clone());
        tasks.insert("metrics", task(&metrics, |(metrics, host, reads, bus)| metrics::run(metrics, host, reads, bus)));
        let auditor = (Arc::new(Auditor::register(&self.registry, self.reads.clone())?), Arc::clone(&self.host));
        tasks.insert("auditor", task(&auditor, |(auditor, host)| async move { auditor.run(host).await }));
        if let Some(traces) = &self.traces {
            tasks.insert("trace-export", task(traces, |traces| async move { traces.run().await }));
        }
        tasks.insert("sweep", task(&self.pool, housekeeping::sweep));
        let values = (Arc::clone(&self.environment), self.reads.clone(), self.bus.clone());
        tasks.insert("policy", task(&values, |(environment, reads, bus)| policy::run(environment, reads, bus)));
        tasks.insert("policy-invalidation", task(&values, |(environment, _, bus)| policy::listen(environment, bus)));
        tasks.insert("keys", task(&self.key_follower, |key_follower| async move { key_follower.run().await }));
        tasks.insert(
            "key-invalidation",
            task(&self.key_follower, |key_follower| async move { key_follower.listen().await }),
        );
        let values = self.key_follower.secrets.rewrap();
        let (directory, host) = (self.directory.clone(), Arc::clone(&self.host));
        let rewrapper = Rewrapper::register(&self.registry, directory, host, self.reads.clone(), values)?;
        let rewrapper = (Arc::new(rewrapper), self.bus.clone());
        tasks.insert("rewrap", task(&rewrapper, |(rewrapper, _)| async move { rewrapper.run().await }));
        tasks
            .insert("rewrap-listener", task(&rewrapper, |(rewrapper, bus)| async move { rewrapper.listen(bus).await }));
        let (host, reads) = (Arc::clone(&self.host), self.reads.clone());
        let (recordings, environment) = (
            self.key_follower.secrets.recordings(),
            Arc::clone(&self.environment) as Arc<dyn actors::ports::Environment>,
        );
        let retention =
            Arc::new(RecordingRetention::new(self.directory.clone(), host, reads, recordings, environment)?);
        tasks.insert("recordings", task(&retention, |retention| async move { retention.run().await }));
        if let (Some(updater), Some(payments)) = (updater, &self.config.payments) {
            let reconciler = Reconciler::register(&self.registry, updater, leases, payments.reconciles_every)?;
            let reconciler = Arc::new(reconciler);
            tasks.insert("reconciliation", task(&reconciler, |reconciler| async move { reconciler.run().await }));
        }
        let orphans = (reactor.clone(), self.bus.clone(), Arc::clone(&self.host), self.committed.clone());
        tasks.insert(
            "orphans",
            task(&orphans, |(reactor, bus, host, relay)| async move { reactor.poll(&bus, &host, &relay).await }),
        );
        for (name, stream) in [
            ("provisioning-events", Stream::Provisioning),
            ("node-events", Stream::Nodes),
            ("terminal-events", Stream::Terminals),
            ("billing-events", Stream::Billing),
        ] {
            let consumer = (reactor.clone(), self.bus.clone());
            tasks.insert(
                name,
                task(&consumer, move |(reactor, bus)| async move { reactor.consume(&bus, stream).await }),
            );
        }
        let notifier =
            Notifier { reads: self.reads.clone(), environment: Arc::clone(&self.environment), bus: self.bus.clone() };
        tasks.insert("notification-relay", task(&notifier, Notifier::run));
        let has_mail = services.delivery.mailer.is_some();
        let queue = NotificationQueue::new(notifier, self.directory.clone(), has_mail)?;
        tasks.insert("notification-queue", task(&queue, NotificationQueue::run));
        let environment = Arc::clone(&self.environment) as Arc<dyn actors::ports::Environment>;
        let (directory, view, reads) = (self.directory.clone(), Arc::clone(&self.view), self.reads.clone());
        let delivery = services.delivery.clone();
        let delivery = NotificationDelivery::register(&self.registry, directory, view, reads, environment, delivery)?;
        tasks.insert("notification-delivery", task(&delivery, NotificationDelivery::run));
        let peers = (self.bus.clone(), self.polls.clone(), self.terminals.clone(), self.connections.clone());
        tasks.insert(
            "wake-listener",
            task(&peers, |(bus, polls, terminals, connections)| async move {
                bus.on_signals(|signal| apply_signal(signal, &polls, &terminals, &connections)).await
            }),
        );
        let keys = (self.bus.clone(), services.authenticator.jwks().clone());
        tasks.insert(
            "provider-keys",
            task(&keys, |(bus, jwks)| async move { bus.on_provider_keys_changed(|| refresh_keys(&jwks)).await }),
        );
        tasks.extend(self.listener_tasks(services).await?);
        Ok(tasks)
    }

    async fn listener_tasks(&self, services: &Services) -> anyhow::Result<BTreeMap<&'static str, WorkerTask>> {
        let config = &self.config;
        let certificate_chain_pem = read_text(&config.tls_cert).await?;
        let key_pem = read_text(&config.tls_key).await?;
        let tickets = trust::tickets(&self.key_follower.secrets).await?;
        let tls = server_config(&ServerTls {
            certificate_chain_pem: &certificate_chain_pem,
            key_pem: &key_pem,
            client_authorities_pem: None,
            tickets: Some(Arc::new(tickets.under([0; 32]))),
        })?;
        let tls = Arc::new(ArcSwap::from_pointee(tls));
        let ingress = Arc::new(config.ingress.clone());
        let mut listening = Vec::new();
        let public =
            match (config.roles.contains(&ProcessRole::Api), config.roles.contains(&ProcessRole::TerminalGateway)) {
                (true, true) => Some(edge::terminal::beside(edge::api::router(services.clone()), services.clone())),
                (true, false) => Some(edge::api::router(services.clone())),
                (false, true) => Some(edge::terminal::router(services.clone())),
                (false, false) => None,
            };
        if let Some(router) = public {
            listening.push((
                "public-api",
                BoundListener {
                    at: bind("SVC_PUBLIC_LISTEN", config.public_listen).await?,
                    tls: Arc::clone(&tls),
                    router,
                    limits: ListenerLimits::default(),
                    connections: self.connections.clone(),
                    trust_domain: None,
                    proxies: None,
                    ingress: Arc::clone(&ingress),
                    stop: self.stop_listening.clone(),
                    open: self.listeners.clone(),
                },
            ));
        }
        if config.roles.contains(&ProcessRole::NodeApi) {
            let keys = self.key_follower.in_force.load();
            let acceptor = NodeAcceptor::new(certificate_chain_pem, key_pem, tickets, &keys)?;
            let proxies = proxies(config, services)?;
            listening.push((
                "node-api",
                BoundListener {
                    at: bind("SVC_NODE_LISTEN", config.node_listen).await?,
                    tls: self.key_follower.acceptor.get_or_init(|| acceptor).config(),
                    router: edge::node_api::router(services.clone()),
                    limits: ListenerLimits::default(),
                    connections: self.connections.clone(),
                    trust_domain: Some(services.trust.domain.clone()),
                    proxies: self.key_follower.proxies.get_or_init(|| proxies).clone(),
                    ingress: Arc::clone(&ingress),
                    stop: self.stop_listening.clone(),
                    open: self.listeners.clone(),
                },
            ));
        }
        if config.roles.contains(&ProcessRole::Webhook) && services.payments.is_some() {
            listening.push((
                "webhook",
                BoundListener {
                    at: bind("SVC_WEBHOOK_LISTEN", config.webhook_listen).await?,
                    tls,
                    router: edge::webhook::router(services.clone()),
                    limits: edge::webhook::listener_limits(),
                    connections: self.connections.clone(),
                    trust_domain: None,
                    proxies: None,
                    ingress: Arc::clone(&ingress),
                    stop: self.stop_listening.clone(),
                    open: self.listeners.clone(),
                },
            ));
        }
        let mut tasks: BTreeMap<_, _> = listening
            .into_iter()
            .map(|(name, listening)| {
                (name, task(&Arc::new(listening), |listening| async move { listening.serve().await }))
            })
            .collect();
        let operations = (
            Arc::new(bind("SVC_OPERATIONS_LISTEN", config.operations_listen).await?),
            edge::api::operations(services.clone()),
        );
        tasks.insert("operations", task(&operations, |(at, router)| async move { serve_plaintext(&at, router).await }));
        Ok(tasks)
    }

    /// The ordered shutdown: the listeners stop, long polls are answered, shards are handed over, committed events are published.
    async fn shut_down(&self) {
        tracing::info!("stopping");
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, self.shut_down_in_order()).await.is_err() {
            tracing::warn!("the ordered end took too long; what is left is taken over by others");
        }
        tracing::info!("stopped");
    }

    async fn shut_down_in_order(&self) {
        self.stop_listening.cancel();
        self.listeners.close();
        self.listeners.wait().await;
        for name in SHUTDOWN_ORDER {
            match *name {
                // From here on no member relies on this one; its shards are closed and handed over, commands in flight first.
                "entities" => {
                    self.supervisor.stop("heartbeat").await;
                    self.supervisor.stop("ownership").await;
                    // Where no member takes over, the log is left sealed.
                    while self.audit_seal.seal_pending().await {}
                    self.owner.leave().await;
                }
                "outbox-relay" => self.committer.close().await,
                _ => {}
            }
            self.supervisor.stop(name).await;
        }
        if let Some(traces) = &self.traces {
            traces.finish().await;
        }
    }
}

/// Raises the soft limit of open files to the hard one: the usual 1,024 are used up by fewer connections than the listeners accept, and
/// then the database cannot be reached either.
fn raise_open_files() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) });
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files stays as it was");
    }
}

/// The proxies that may forward a node's certificate; it is verified against the same authorities as on direct connections.
fn proxies(config: &Config, services: &Services) -> anyhow::Result<Option<Arc<Proxies>>> {
    let Some(NodeProxies { forwarding, networks }) = &config.node_proxies else { return Ok(None) };
    tracing::info!(%forwarding, ?networks, "the node API takes the word of proxies for client certificates");
    let authorities = services.trust.keys.load().node.bundle_pem();
    Ok(Some(Arc::new(Proxies::new(*forwarding, networks.clone(), &authorities)?)))
}

/// Serves operators, on an address that is for them alone. Health reports the shutdown until the last connection is closed.
async fn serve_plaintext(at: &std::net::TcpListener, router: axum::Router) -> anyhow::Result<()> {
    let listener = TcpListener::from_std(at.try_clone()?)?;
    axum::serve(listener, router).await?;
    Ok(())
}

/// A bound socket with its router. It is bound before anything else starts, so that a taken port fails at once; a restarted worker serves
/// on the same socket.
struct BoundListener {
    at: std::net::TcpListener,
    tls: Arc<ArcSwap<ServerConfig>>,
    router: axum::Router,
    limits: ListenerLimits,
    connections: Connections,
    trust_domain: Option<TrustDomain>,
    proxies: Option<Arc<Proxies>>,
    ingress: Arc<Ingress>,
    stop: CancellationToken,
    open: TaskTracker,
}

impl BoundListener {
    async fn serve(&self) -> anyhow::Result<()> {
        let listener = TcpListener::from_std(self.at.try_clone()?)?;
        let server = TlsServer {
            tls: Arc::clone(&self.tls),
            router: self.router.clone(),
            limits: self.limits.clone(),
            connections: self.connections.clone(),
            trust_domain: self.trust_domain.clone(),
            proxies: self.proxies.clone(),
            ingress: Arc::clone(&self.ingress),
        };
        let open = self.open.token();
        server.serve(listener, self.stop.clone()).await?;
        drop(open);
        // The listener was stopped: the supervisor stops this worker next.
        self.stop.cancelled().await;
        std::future::pending().await
    }
}

/// Performs the effects of a commit: in this process directly, at the other replicas by a message over NATS.
struct ProcessEffects {
    polls: LongPolls,
    terminals: Terminals,
    connections: Connections,
    environment: Arc<ProcessEnvironment>,
    keys_changed: Arc<Notify>,
    bus: Bus,
}

impl Effects for ProcessEffects {
    fn perform(&self, effect: Effect) {
        let signal = match effect {
            Effect::WakeNode(node) => PeerSignal::Wake(node),
            Effect::CloseNode(node) => PeerSignal::Close(node),
            Effect::WakeTerminal(session) => PeerSignal::Terminal(session),
            // The others receive the event.
            Effect::ReadPolicy => return self.environment.policy_written.notify_one(),
            Effect::ReadKeys => return self.keys_changed.notify_one(),
        };
        apply_signal(signal, &self.polls, &self.terminals, &self.connections);
        let bus = self.bus.clone();
        tokio::spawn(async move { bus.send_signal(signal).await });
    }
}

fn apply_signal(signal: PeerSignal, polls: &LongPolls, terminals: &Terminals, connections: &Connections) {
    match signal {
        PeerSignal::Wake(node) => polls.wake(node),
        PeerSignal::Terminal(session) => terminals.wake(session),
        PeerSignal::Close(node) => {
            polls.wake(node);
            connections.close_node(node.0);
        }
    }
}

/// A failure is logged where it happens; the caller gets the result from the member that it asked.
fn refresh_keys(jwks: &Jwks) {
    let jwks = jwks.clone();
    tokio::spawn(async move { jwks.refresh().await });
}

/// The task of a worker over a shared value, for every start.
fn task<T, F>(shared: &T, run: impl Fn(T) -> F + Send + Sync + 'static) -> WorkerTask
where
    T: Clone + Send + Sync + 'static,
    F: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let shared = shared.clone();
    Arc::new(move || run(shared.clone()).boxed())
}

/// One lane for each row of the tree.
fn committer_config(member: MemberId, seals: SnapshotSealer) -> CommitterConfig {
    CommitterConfig { workers: COMMITTER_ROWS.len(), seals: Some(seals), ..CommitterConfig::new(member) }
}

const _: () = assert!(LOADER_ROWS.len() == persistence::loader::LANES, "each lane of the loader has a row in the tree");

fn roles(config: &Config) -> String {
    config.roles.iter().map(|role| role.name()).collect::<Vec<_>>().join(",")
}

fn own_member(id: MemberId, config: &Config) -> Member {
    let roles: Vec<_> = config.roles.iter().map(|role| role.name()).collect();
    Member {
        id,
        name: config.member_name.clone(),
        started_at: chrono::Utc::now(),
        details: json!({
            "roles": roles,
            "process": cluster::process::current(),
            "version": env!("CARGO_PKG_VERSION"),
            "public_url": config.public_url,
            // The others refuse its messages without a stamp.
            "authenticates": true,
        }),
    }
}

fn database(config: &Config) -> PoolConfig {
    let mut pool = PoolConfig::new(config.database_url.clone(), config.database_ca.clone());
    pool.application_name = format!("gpuaas {}", config.member_name);
    pool
}

async fn open_database(config: &Config) -> anyhow::Result<PgPool> {
    persistence::pool::check_connection(&database(config)).await?;
    let pool = persistence::pool::open(&database(config))?;
    migrate::run(&pool).await.context("the database cannot be brought to this release's schema")?;
    persistence::sweep::make_partitions(&pool, 2).await?;
    Ok(pool)
}

/// Sends webhooks and e-mails.
async fn delivery(config: &Config, at_rest: Arc<KeyRing>) -> anyhow::Result<NotificationSender> {
    let authorities_pem = match &config.notification_ca {
        Some(path) => Some(read_text(path).await.context("SVC_NOTIFICATION_CA_PATH")?),
        None => None,
    };
    let settings = WebhookSettings { allowed: config.notification_allowed.clone(), authorities_pem };
    let mailer = config.mail.as_ref().map(crate::config::MailSettings::open).transpose()?;
    Ok(NotificationSender { webhooks: edge::delivery::webhook::Webhooks::new(settings)?, mailer, at_rest })
}

/// Verifies the identity provider's tokens, and those that this cluster signs for service accounts.
async fn authenticator(config: &Config, keys: KeysInForce, reads: Reads) -> anyhow::Result<Authenticator> {
    let identity = &config.identity;
    let authorities_pem = match &identity.ca {
        Some(path) => Some(read_text(path).await.context("SVC_OIDC_CA_PATH")?),
        None => None,
    };
    let jwks = Jwks::new(JwksSettings { authorities_pem, ..JwksSettings::new(identity.rules.issuer.clone()) })
        .context("the identity provider of SVC_OIDC_ISSUER cannot be used")?;
    let service_tokens = ServiceTokens::new(config.public_url.clone(), keys, reads);
    Ok(Authenticator::new(identity.rules.clone(), jwks).with_service_tokens(service_tokens))
}

/// Binds a socket. `variable` names the setting that an operator changes where the address cannot be bound.
async fn bind(variable: &str, address: SocketAddr) -> anyhow::Result<std::net::TcpListener> {
    let listener =
        TcpListener::bind(address).await.with_context(|| format!("{variable}: cannot listen on {address}"))?;
    Ok(listener.into_std()?)
}

async fn read_text(path: &Path) -> anyhow::Result<String> {
    tokio::fs::read_to_string(path).await.with_context(|| format!("cannot read {}", path.display()))
}

async fn stop_signal() -> anyhow::Result<()> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        interrupted = tokio::signal::ctrl_c() => interrupted?,
    }
    Ok(())
}
