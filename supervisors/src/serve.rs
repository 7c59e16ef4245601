//! One process of the control plane, from its configuration to its ordered end.

use crate::cluster::authentication::MemberAuthenticator;
use crate::cluster::bus::{Bus, Nudge};
use crate::cluster::ownership::Owner;
use crate::cluster::{self, View, nats};
use crate::config::{Config, NodeProxies, Role};
use crate::figures::{EventFigures, ProcessFigures};
use crate::runtime::{Operations, Reported};
use crate::supervisor::{Supervisor, Work};
use crate::traces::Traces;
use crate::tree::{COMMITTER, LOADER, SHUTDOWN, TREE, WHERE_CONFIGURED};
use crate::trust;
use crate::workers::accrual::Accrual;
use crate::workers::audit_seal::{AuditSeal, SealMetrics};
use crate::workers::auditor::Auditor;
use crate::workers::keys::{Keeper, NodeAcceptor};
use crate::workers::notification_delivery::NotificationDelivery;
use crate::workers::notification_queue::NotificationQueue;
use crate::workers::notifications::Notifier;
use crate::workers::outbox_poll::OutboxPoll;
use crate::workers::payments::errands::Errands;
use crate::workers::payments::reconciliation::Reconciler;
use crate::workers::payments::told::Teller;
use crate::workers::payments::webhooks::Webhooks;
use crate::workers::provisioning::Placer;
use crate::workers::reactor::Reactor;
use crate::workers::recordings::Retention;
use crate::workers::relay::Relay;
use crate::workers::rewrap::Rewrapper;
use crate::workers::{figures, housekeeping, policy, timers};
use crate::world::{Durable, Here};
use actors::ports::Effects;
use actors::{Directory, Host, HostConfig};
use anyhow::{Context, ensure};
use arc_swap::ArcSwap;
use domain::event::Stream;
use domain::{Effect, MemberId};
use edge::auth::Authenticator;
use edge::auth::jwks::{Jwks, JwksSettings};
use edge::auth::service_token::ServiceTokens;
use edge::delivery::Delivery;
use edge::delivery::webhook::WebhookSettings;
use edge::figures::Figures;
use edge::identity::TrustDomain;
use edge::identity::ingress::Ingress;
use edge::identity::proxies::Proxies;
use edge::keys::{Keys, KeysInForce};
use edge::notifications::Notifications;
use edge::places::Places;
use edge::platform_roles::PlatformRoleCounters;
use edge::polls::Polls;
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
    Cluster, Committer, CommitterConfig, Leases, Loader, Outbox, OutboxRow, Reads, Seals, Secrets, migrate,
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

/// Committed events that may wait for the relay; what does not fit is found by the poll.
const RELAY_QUEUE: usize = 16_384;

/// How long the ordered end may take; a service manager kills what takes longer.
const END_WITHIN: Duration = Duration::from_secs(25);

/// How long a probe waits for a node.
const PROBE_PATIENCE: Duration = Duration::from_secs(3);

/// A control plane process that runs.
struct Process {
    config: Config,
    pool: PgPool,
    reads: Reads,
    here: Arc<Here>,
    committer: Committer,
    loader: Loader,
    bus: Bus,
    view: Arc<View>,
    host: Arc<Host>,
    directory: Directory,
    owner: Arc<Owner>,
    supervisor: Supervisor,
    operations: Arc<Operations>,
    registry: Registry,
    traces: Option<Arc<Traces>>,
    committed: mpsc::Sender<OutboxRow>,
    relay: Arc<Relay>,
    audit_seal: Arc<AuditSeal>,
    ring: Arc<KeyRing>,
    keeper: Arc<Keeper>,
    polls: Polls,
    terminals: Terminals,
    connections: Connections,
    stop_listening: CancellationToken,
    /// Ends when the last connection of the last listener is closed.
    listeners: TaskTracker,
}

/// Runs until SIGTERM or SIGINT, then ends in order.
///
/// # Errors
/// Where the process cannot start: a setting is wrong, the database cannot be reached, a port is taken.
pub async fn serve(config: Config, traces: Option<Traces>) -> anyhow::Result<()> {
    let process = Process::start(config, traces).await?;
    let services = process.services().await?;
    process.run(&services).await?;
    tracing::info!(member.id = %process.view.me.id, "{} serves", process.view.me.name);
    stop_signal().await?;
    process.end().await;
    Ok(())
}

/// Begins an incarnation of the cluster on a restored database.
///
/// # Errors
/// Where the database cannot be reached, or a member still lives.
pub async fn begin_incarnation() -> anyhow::Result<i64> {
    let pool = open_database(&Config::from_environment("all")?).await?;
    let cluster = Cluster::new(pool);
    let living = cluster.living(crate::cluster::SILENCE).await?;
    if let Some(heard) = living.first() {
        anyhow::bail!("{} still runs; stop every member first", heard.member.name);
    }
    Ok(cluster.begin_incarnation().await?)
}

impl Process {
    async fn start(config: Config, traces: Option<Traces>) -> anyhow::Result<Self> {
        raise_open_files();
        let registry = Registry::new();
        registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
        edge::idempotency::COUNTERS.register(&registry)?;
        edge::webhook::COUNTERS.register(&registry)?;
        edge::tls::admission::register(&registry)?;
        let pool = open_database(&config).await?;
        let ring = Arc::clone(&config.key_ring);
        let secrets = Secrets::new(pool.clone(), Arc::clone(&ring));
        // Before any secret is opened, so that what is wrong is said with what to do.
        secrets.rewrap().check().await.context("the key ring does not fit the database")?;
        let seals = trust::seals(&secrets, config.unsealed_until).await?;
        seals.register(&registry)?;
        let reads = Reads::new(pool.clone()).sealed(seals.clone());
        let member = MemberId(Uuid::new_v4());
        let (committed, mut rows) = mpsc::channel(RELAY_QUEUE);
        if !config.roles.contains(&Role::OutboxRelay) {
            // A process with the relay reads them from Postgres.
            rows.close();
        }
        let metrics = CommitterMetrics::register(&registry)?;
        let committer = Committer::new(&pool, committer_config(member, seals), metrics, committed.clone());
        let loader = Loader::new(&reads);
        let (view, look) = (Arc::new(View::new(me(member, &config))), Arc::new(Notify::new()));
        let here = Arc::new(Here::new(Arc::clone(&view)));
        here.learn(reads.policy_book().await.context("the policy values cannot be read")?);
        let (polls, connections, keys_changed) = (Polls::default(), Connections::default(), Arc::new(Notify::new()));
        let domain = config.trust_domain.clone();
        let keys = Keys::read(&secrets, &reads, &domain).await.context("the keys cannot be read")?;
        let in_force = KeysInForce::new(keys);
        let members = Arc::new(MemberAuthenticator::register(&registry, Arc::clone(&view), in_force.clone())?);
        let client = nats::connect(&config.nats_url, config.nats_ca.as_deref(), &config.member_name).await?;
        let bus = Bus::new(client, &config.member_name, members, Arc::clone(&view), Arc::clone(&look));
        let relay_secret = trust::terminal_relay(&secrets).await?;
        let terminals = Terminals::register(&registry, Some(Arc::new(bus.clone())), relay_secret)?;
        let keeper = Arc::new(Keeper {
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
        let effects = Nudges {
            polls: polls.clone(),
            terminals: terminals.clone(),
            connections: connections.clone(),
            here: Arc::clone(&here),
            keys_changed,
            bus: bus.clone(),
        };
        let told = EventFigures::register(&registry)?;
        // Of its own, so that a busy pool never makes a living member look dead.
        let cluster = Cluster::new(persistence::pool::open(&PoolConfig { connections: 2, ..database(&config) })?);
        let store = Durable {
            committer: committer.clone(),
            reads: reads.clone(),
            loader: loader.clone(),
            fenced: Arc::clone(&look),
            cluster: cluster.clone(),
            told,
        };
        let world = Arc::clone(&here);
        let host = Host::new(HostConfig::default(), Arc::new(store), Arc::new(effects), world);
        let directory = Directory::new(Arc::clone(&host), Arc::new(bus.clone()));
        let supervisor = Supervisor::start().await?;
        let takes_shards = config.roles.contains(&Role::Entities);
        let owner = Owner::new(
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
            figures: Arc::new(ProcessFigures::register(&registry, &config.member_name, &roles(&config))?),
            pool: pool.clone(),
            polls: polls.clone(),
            connections: connections.clone(),
            keys: keeper.in_force.clone(),
            seals_with: ring.active().to_owned(),
            committed: committed.clone(),
            been_ready: AtomicBool::new(false),
        };
        let audit_key = trust::audit_key(&keeper.secrets).await?;
        let sealer = Sealer::new(pool.clone(), member, audit_key);
        let audit_seal = AuditSeal::new(Arc::clone(&host), bus.clone(), sealer, SealMetrics::register(&registry)?);
        if let Some(traces) = &traces {
            traces.register(&registry)?;
        }
        let relay = Arc::new(Relay::new(bus.clone(), Outbox::new(pool.clone()), rows));
        Ok(Self {
            config,
            pool,
            reads,
            here,
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
            keeper,
            polls,
            terminals,
            connections,
            stop_listening: CancellationToken::new(),
            listeners: TaskTracker::new(),
        })
    }

    /// What the handlers of the edge are given.
    async fn services(&self) -> anyhow::Result<Services> {
        let config = &self.config;
        let Keeper { secrets, domain, in_force, .. } = &*self.keeper;
        let (domain, keys, ring) = (domain.clone(), in_force.clone(), Arc::clone(&self.ring));
        let api_ca = read_text(&config.tls_ca).await?;
        let trust = trust::load(secrets, domain, keys, &config.bootstrap_verifier_keys, api_ca, ring).await?;
        let authenticator = authenticator(config, in_force.clone(), self.reads.clone()).await?;
        let targets = ProbeTargets { allowed: config.probe_allowed.clone() };
        Ok(Services::new(Parts {
            directory: self.directory.clone(),
            reads: self.reads.clone(),
            world: Arc::clone(&self.here) as Arc<dyn actors::ports::World>,
            runtime: Arc::new(Reported(Arc::clone(&self.operations))),
            authenticator: Arc::new(authenticator),
            limiter: RateLimiter::register(self.directory.clone(), &self.registry)?,
            jwks_refresh_token: config.identity.jwks_refresh_token.clone(),
            probe: Probe::new(targets, Arc::new(SystemResolver), PROBE_PATIENCE),
            polls: self.polls.clone(),
            terminals: self.terminals.clone(),
            notifications: Notifications::register(&self.registry, Some(Arc::new(self.bus.clone())))?,
            delivery: delivery(config, Arc::clone(&self.ring)).await?,
            places: Places::new(self.directory.clone()),
            connections: self.connections.clone(),
            figures: Figures::register(&self.registry)?,
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
            payments: config.payments.as_ref().map(crate::config::Payments::open).transpose()?,
            package: config.package.clone(),
            stopping: self.stop_listening.clone(),
        }))
    }

    /// Starts every row of the tree that this process's roles have.
    async fn run(&self, services: &Services) -> anyhow::Result<()> {
        let mut works = self.works(services).await?;
        for row in TREE.iter().filter(|row| row.roles.iter().any(|role| self.config.roles.contains(role))) {
            match works.remove(row.name) {
                Some(work) => self.supervisor.add(*row, work),
                None if TREE.iter().any(|below| below.under == row.name) => self.supervisor.group(*row),
                None => ensure!(WHERE_CONFIGURED.contains(&row.name), "nothing does the work of `{}`", row.name),
            }
        }
        let stray = works.into_keys().find(|name| !TREE.iter().any(|row| row.name == *name));
        ensure!(stray.is_none(), "the tree has no row for the work {stray:?}");
        Ok(())
    }

    async fn works(&self, services: &Services) -> anyhow::Result<BTreeMap<&'static str, Work>> {
        let outbox = Outbox::new(self.pool.clone());
        let placer = Arc::new(Placer::new(&self.registry)?);
        let leases = Leases::new(self.pool.clone(), self.view.me.id);
        let teller = services
            .payments
            .as_ref()
            .map(|payments| Teller::new(self.directory.clone(), Arc::clone(&payments.processor), "payments"));
        let teller = teller.transpose()?;
        let errands = teller.clone().map(|teller| Errands::new(teller, leases.clone()));
        let webhooks = teller.clone().map(|teller| Webhooks::new(teller, Arc::clone(&self.ring)));
        let (directory, reads) = (self.directory.clone(), self.reads.clone());
        let reactor = Reactor::new(directory, reads, outbox, placer, errands, webhooks, "provisioning")?;
        let mut works: BTreeMap<&'static str, Work> = BTreeMap::new();
        for (number, name) in COMMITTER.into_iter().enumerate() {
            let run = move |committer: Committer| async move {
                committer.run_lane(number).await;
                // It was closed: the supervisor stops this worker next.
                std::future::pending().await
            };
            works.insert(name, work(&self.committer, run));
        }
        for (number, name) in LOADER.into_iter().enumerate() {
            let run = move |loader: Loader| async move {
                loader.run_lane(number).await;
                anyhow::bail!("its queue is gone")
            };
            works.insert(name, work(&self.loader, run));
        }
        works.insert("beat", work(&self.owner, |owner| async move { owner.beat().await }));
        works.insert("listen", work(&self.owner, |owner| async move { owner.listen().await }));
        works.insert("ownership", work(&self.owner, |owner| async move { owner.run().await }));
        works.insert("command-answers", work(&self.bus, |bus| async move { bus.receive_answers().await }));
        works.insert("answers", work(&self.operations, |operations| async move { operations.answer().await }));
        works.insert("outbox-relay", work(&self.relay, |relay| async move { relay.run().await }));
        let (view, reads, relay) = (Arc::clone(&self.view), self.reads.clone(), self.committed.clone());
        let poll = Arc::new(OutboxPoll { view, reads, relay });
        works.insert("outbox-poll", work(&poll, |poll| async move { poll.run().await }));
        let (host, reads) = (Arc::clone(&self.host), self.reads.clone());
        works.insert("timers", work(&(host, reads), |(host, reads)| timers::run(host, reads)));
        let world = Arc::clone(&self.here) as Arc<dyn actors::ports::World>;
        let (directory, view) = (self.directory.clone(), Arc::clone(&self.view));
        let accrual = Accrual::register(&self.registry, directory, view, self.reads.clone(), world)?;
        works.insert("accrual", work(&accrual, Accrual::run));
        works.insert("audit-seal", work(&self.audit_seal, |seal| async move { seal.run().await }));
        works.insert("rest", work(&self.host, housekeeping::rest));
        let figures =
            (Arc::clone(&self.operations.figures), Arc::clone(&self.host), self.reads.clone(), self.bus.clone());
        works.insert("figures", work(&figures, |(figures, host, reads, bus)| figures::run(figures, host, reads, bus)));
        let auditor = (Arc::new(Auditor::register(&self.registry, self.reads.clone())?), Arc::clone(&self.host));
        works.insert("auditor", work(&auditor, |(auditor, host)| async move { auditor.run(host).await }));
        if let Some(traces) = &self.traces {
            works.insert("trace-export", work(traces, |traces| async move { traces.run().await }));
        }
        works.insert("sweep", work(&self.pool, housekeeping::sweep));
        let values = (Arc::clone(&self.here), self.reads.clone(), self.bus.clone());
        works.insert("policy", work(&values, |(here, reads, bus)| policy::keep(here, reads, bus)));
        works.insert("policy-words", work(&values, |(here, _, bus)| policy::listen(here, bus)));
        works.insert("keys", work(&self.keeper, |keeper| async move { keeper.keep().await }));
        works.insert("keys-words", work(&self.keeper, |keeper| async move { keeper.listen().await }));
        let values = self.keeper.secrets.rewrap();
        let (directory, host) = (self.directory.clone(), Arc::clone(&self.host));
        let rewrapper = Rewrapper::register(&self.registry, directory, host, self.reads.clone(), values)?;
        let rewrapper = (Arc::new(rewrapper), self.bus.clone());
        works.insert("rewrap", work(&rewrapper, |(rewrapper, _)| async move { rewrapper.run().await }));
        works.insert("rewrap-words", work(&rewrapper, |(rewrapper, bus)| async move { rewrapper.listen(bus).await }));
        let (host, reads) = (Arc::clone(&self.host), self.reads.clone());
        let (recordings, world) =
            (self.keeper.secrets.recordings(), Arc::clone(&self.here) as Arc<dyn actors::ports::World>);
        let retention = Arc::new(Retention::new(self.directory.clone(), host, reads, recordings, world)?);
        works.insert("recordings", work(&retention, |retention| async move { retention.run().await }));
        if let (Some(teller), Some(payments)) = (teller, &self.config.payments) {
            let reconciler = Reconciler::register(&self.registry, teller, leases, payments.reconciles_every)?;
            let reconciler = Arc::new(reconciler);
            works.insert("reconciliation", work(&reconciler, |reconciler| async move { reconciler.run().await }));
        }
        let orphans = (reactor.clone(), self.bus.clone(), Arc::clone(&self.host), self.committed.clone());
        works.insert(
            "orphans",
            work(&orphans, |(reactor, bus, host, relay)| async move { reactor.poll(&bus, &host, &relay).await }),
        );
        for (name, stream) in [
            ("provisioning-events", Stream::Provisioning),
            ("node-events", Stream::Nodes),
            ("terminal-events", Stream::Terminals),
            ("billing-events", Stream::Billing),
        ] {
            let consumer = (reactor.clone(), self.bus.clone());
            works.insert(
                name,
                work(&consumer, move |(reactor, bus)| async move { reactor.consume(&bus, stream).await }),
            );
        }
        let notifier = Notifier { reads: self.reads.clone(), here: Arc::clone(&self.here), bus: self.bus.clone() };
        works.insert("notification-relay", work(&notifier, Notifier::run));
        let has_mail = services.delivery.mailer.is_some();
        let queue = NotificationQueue::new(notifier, self.directory.clone(), has_mail)?;
        works.insert("notification-queue", work(&queue, NotificationQueue::run));
        let world = Arc::clone(&self.here) as Arc<dyn actors::ports::World>;
        let (directory, view, reads) = (self.directory.clone(), Arc::clone(&self.view), self.reads.clone());
        let delivery = services.delivery.clone();
        let delivery = NotificationDelivery::register(&self.registry, directory, view, reads, world, delivery)?;
        works.insert("notification-delivery", work(&delivery, NotificationDelivery::run));
        let nudges = (self.bus.clone(), self.polls.clone(), self.terminals.clone(), self.connections.clone());
        works.insert(
            "nudges",
            work(&nudges, |(bus, polls, terminals, connections)| async move {
                bus.on_nudges(|nudge| act(nudge, &polls, &terminals, &connections)).await
            }),
        );
        let keys = (self.bus.clone(), services.authenticator.jwks().clone());
        works.insert(
            "provider-keys",
            work(&keys, |(bus, jwks)| async move { bus.on_provider_keys_changed(|| refresh_keys(&jwks)).await }),
        );
        works.extend(self.listeners(services).await?);
        Ok(works)
    }

    async fn listeners(&self, services: &Services) -> anyhow::Result<BTreeMap<&'static str, Work>> {
        let config = &self.config;
        let certificate_chain_pem = read_text(&config.tls_cert).await?;
        let key_pem = read_text(&config.tls_key).await?;
        let tickets = trust::tickets(&self.keeper.secrets).await?;
        let tls = server_config(&ServerTls {
            certificate_chain_pem: &certificate_chain_pem,
            key_pem: &key_pem,
            client_authorities_pem: None,
            tickets: Some(Arc::new(tickets.under([0; 32]))),
        })?;
        let tls = Arc::new(ArcSwap::from_pointee(tls));
        let ingress = Arc::new(config.ingress.clone());
        let mut listening = Vec::new();
        let public = match (config.roles.contains(&Role::Api), config.roles.contains(&Role::TerminalGateway)) {
            (true, true) => Some(edge::terminal::beside(edge::api::router(services.clone()), services.clone())),
            (true, false) => Some(edge::api::router(services.clone())),
            (false, true) => Some(edge::terminal::router(services.clone())),
            (false, false) => None,
        };
        if let Some(router) = public {
            listening.push((
                "public-api",
                Listening {
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
        if config.roles.contains(&Role::NodeApi) {
            let keys = self.keeper.in_force.load();
            let acceptor = NodeAcceptor::new(certificate_chain_pem, key_pem, tickets, &keys)?;
            let proxies = proxies(config, services)?;
            listening.push((
                "node-api",
                Listening {
                    at: bind("SVC_NODE_LISTEN", config.node_listen).await?,
                    tls: self.keeper.acceptor.get_or_init(|| acceptor).config(),
                    router: edge::node_api::router(services.clone()),
                    limits: ListenerLimits::default(),
                    connections: self.connections.clone(),
                    trust_domain: Some(services.trust.domain.clone()),
                    proxies: self.keeper.proxies.get_or_init(|| proxies).clone(),
                    ingress: Arc::clone(&ingress),
                    stop: self.stop_listening.clone(),
                    open: self.listeners.clone(),
                },
            ));
        }
        if config.roles.contains(&Role::Webhook) && services.payments.is_some() {
            listening.push((
                "webhook",
                Listening {
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
        let mut works: BTreeMap<_, _> = listening
            .into_iter()
            .map(|(name, listening)| {
                (name, work(&Arc::new(listening), |listening| async move { listening.serve().await }))
            })
            .collect();
        let operations = (
            Arc::new(bind("SVC_OPERATIONS_LISTEN", config.operations_listen).await?),
            edge::api::operations(services.clone()),
        );
        works.insert("operations", work(&operations, |(at, router)| async move { serve_in_clear(&at, router).await }));
        Ok(works)
    }

    /// Nothing new comes in, parked polls are answered, shards are handed over, what was committed is published.
    async fn end(&self) {
        tracing::info!("stopping");
        if tokio::time::timeout(END_WITHIN, self.end_in_order()).await.is_err() {
            tracing::warn!("the ordered end took too long; what is left is taken over by others");
        }
        tracing::info!("stopped");
    }

    async fn end_in_order(&self) {
        self.stop_listening.cancel();
        self.listeners.close();
        self.listeners.wait().await;
        for name in SHUTDOWN {
            match *name {
                // From here on nobody counts on this member; its shards go one by one, and what is under way is answered first.
                "entities" => {
                    self.supervisor.stop("beat").await;
                    self.supervisor.stop("ownership").await;
                    // Where nobody takes over, the log is left sealed.
                    while self.audit_seal.turn().await {}
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

/// Takes all the open files that the process may have: the usual soft limit of 1,024 is used up by fewer connections than the listeners
/// take, and then the database cannot be reached either.
fn raise_open_files() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) });
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files stays as it was");
    }
}

/// Whose word for a node's certificate is taken; verified against the same authorities as on direct connections.
fn proxies(config: &Config, services: &Services) -> anyhow::Result<Option<Arc<Proxies>>> {
    let Some(NodeProxies { forwarding, networks }) = &config.node_proxies else { return Ok(None) };
    tracing::info!(%forwarding, ?networks, "the node API takes the word of proxies for client certificates");
    let authorities = services.trust.keys.load().node.bundle_pem();
    Ok(Some(Arc::new(Proxies::new(*forwarding, networks.clone(), &authorities)?)))
}

/// For operators, on an address that they keep to themselves. It says that the process is stopping until the last connection is closed.
async fn serve_in_clear(at: &std::net::TcpListener, router: axum::Router) -> anyhow::Result<()> {
    let listener = TcpListener::from_std(at.try_clone()?)?;
    axum::serve(listener, router).await?;
    Ok(())
}

/// A bound socket and what is served on it. Bound before anything else starts, so that a taken port is named at once; a restart of its
/// worker serves on the same socket.
struct Listening {
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

impl Listening {
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
        // It was told to stop: the supervisor stops this worker next.
        self.stop.cancelled().await;
        std::future::pending().await
    }
}

/// What is done at once after a commit: here directly, at the other replicas by a word over NATS.
struct Nudges {
    polls: Polls,
    terminals: Terminals,
    connections: Connections,
    here: Arc<Here>,
    keys_changed: Arc<Notify>,
    bus: Bus,
}

impl Effects for Nudges {
    fn perform(&self, effect: Effect) {
        let nudge = match effect {
            Effect::WakeNode(node) => Nudge::Wake(node),
            Effect::CloseNode(node) => Nudge::Close(node),
            Effect::WakeTerminal(session) => Nudge::Terminal(session),
            // The others hear of the event.
            Effect::ReadPolicy => return self.here.policy_written.notify_one(),
            Effect::ReadKeys => return self.keys_changed.notify_one(),
        };
        act(nudge, &self.polls, &self.terminals, &self.connections);
        let bus = self.bus.clone();
        tokio::spawn(async move { bus.nudge(nudge).await });
    }
}

fn act(nudge: Nudge, polls: &Polls, terminals: &Terminals, connections: &Connections) {
    match nudge {
        Nudge::Wake(node) => polls.wake(node),
        Nudge::Terminal(session) => terminals.wake(session),
        Nudge::Close(node) => {
            polls.wake(node);
            connections.close_node(node.0);
        }
    }
}

/// One that fails is logged where it fails; the member that was asked says so to whoever asked.
fn refresh_keys(jwks: &Jwks) {
    let jwks = jwks.clone();
    tokio::spawn(async move { jwks.refresh().await });
}

/// A worker's work over something shared, as often as it is started.
fn work<T, F>(shared: &T, run: impl Fn(T) -> F + Send + Sync + 'static) -> Work
where
    T: Clone + Send + Sync + 'static,
    F: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let shared = shared.clone();
    Arc::new(move || run(shared.clone()).boxed())
}

/// One worker for each row of the tree.
fn committer_config(member: MemberId, seals: Seals) -> CommitterConfig {
    CommitterConfig { workers: COMMITTER.len(), seals: Some(seals), ..CommitterConfig::new(member) }
}

const _: () = assert!(LOADER.len() == persistence::loader::LANES, "each lane of the loader has a row in the tree");

fn roles(config: &Config) -> String {
    config.roles.iter().map(|role| role.name()).collect::<Vec<_>>().join(",")
}

fn me(id: MemberId, config: &Config) -> Member {
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
            // The others believe none of its messages without a stamp.
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
    persistence::pool::reach(&database(config)).await?;
    let pool = persistence::pool::open(&database(config))?;
    migrate::run(&pool).await.context("the database cannot be brought to this release's schema")?;
    persistence::sweep::make_partitions(&pool, 2).await?;
    Ok(pool)
}

/// What sends webhooks and e-mails.
async fn delivery(config: &Config, at_rest: Arc<KeyRing>) -> anyhow::Result<Delivery> {
    let authorities_pem = match &config.notification_ca {
        Some(path) => Some(read_text(path).await.context("SVC_NOTIFICATION_CA_PATH")?),
        None => None,
    };
    let settings = WebhookSettings { allowed: config.notification_allowed.clone(), authorities_pem };
    let mailer = config.mail.as_ref().map(crate::config::Mail::open).transpose()?;
    Ok(Delivery { webhooks: edge::delivery::webhook::Webhooks::new(settings)?, mailer, at_rest })
}

/// Who believes the identity provider's tokens, and those that this cluster signs for service accounts.
async fn authenticator(config: &Config, keys: KeysInForce, reads: Reads) -> anyhow::Result<Authenticator> {
    let identity = &config.identity;
    let authorities_pem = match &identity.ca {
        Some(path) => Some(read_text(path).await.context("SVC_OIDC_CA_PATH")?),
        None => None,
    };
    let jwks = Jwks::new(JwksSettings { authorities_pem, ..JwksSettings::new(identity.rules.issuer.clone()) })
        .context("the identity provider of SVC_OIDC_ISSUER cannot be used")?;
    let service_tokens = ServiceTokens::new(config.public_url.clone(), keys, reads);
    Ok(Authenticator::new(identity.rules.clone(), jwks).issuing(service_tokens))
}

/// `variable` names the setting that an operator changes where the address cannot be had.
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
