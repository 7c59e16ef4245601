//! `gpuaas serve`: one process of the control plane, from its configuration to its ordered shutdown.

use crate::cluster::FAILURE_TIMEOUT;
use crate::config::Config;
use crate::shutdown;
use crate::startup::Stages;
use crate::startup::actors::ActorStage;
use crate::startup::keys::KeyStage;
use crate::startup::listeners::ListenerStage;
use crate::startup::membership::MembershipStage;
use crate::startup::services::ServiceStage;
use crate::startup::storage::{StorageStage, open_database};
use crate::traces::TraceExporter;
use crate::workers::{WorkerDependencies, start_all};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use persistence::Cluster;
use prometheus::Registry;
use prometheus::process_collector::ProcessCollector;
use std::sync::Arc;

/// Runs until SIGTERM or SIGINT, then shuts down in order.
///
/// # Errors
/// Where the process cannot start: a setting is wrong, the database cannot be reached, a port is taken.
pub async fn serve(config: Config, traces: Option<TraceExporter>) -> anyhow::Result<()> {
    raise_open_files();
    let registry = process_registry()?;
    let storage = StorageStage::open(&config, &registry).await?;
    let keys = KeyStage::read(&config, &storage).await?;
    let membership = MembershipStage::connect(&config, &registry, &storage, &keys).await?;
    let actors = ActorStage::start(&config, &registry, &storage, &membership).await?;
    let services =
        ServiceStage::assemble(&config, &registry, traces.as_ref(), &storage, &keys, &membership, &actors).await?;
    let listeners = ListenerStage::bind(&config, &storage, &keys, &actors, &services).await?;
    let traces = traces.map(Arc::new);
    let stages = Stages { config, registry, traces, storage, keys, membership, actors, services, listeners };
    let workers = WorkerDependencies::new(stages).await?;
    start_all(&workers)?;
    let me = &workers.stages.membership.view.me;
    tracing::info!(member.id = %me.id, "{} serves", me.name);
    stop_signal().await?;
    shutdown::shut_down(&workers).await;
    Ok(())
}

/// Begins an incarnation of the cluster on a restored database.
///
/// # Errors
/// Where the database cannot be reached, or a member still lives.
pub async fn begin_incarnation() -> anyhow::Result<i64> {
    let pool = open_database(&Config::from_environment("all")?).await?;
    let cluster = Cluster::new(pool);
    let living = cluster.alive(FAILURE_TIMEOUT).await?;
    if let Some(heartbeat) = living.first() {
        anyhow::bail!("{} still runs; stop every member first", heartbeat.member.name);
    }
    Ok(cluster.begin_incarnation().await?)
}

/// The metrics of this process, with those that belong to no stage.
fn process_registry() -> anyhow::Result<Registry> {
    let registry = Registry::new();
    registry.register(Box::new(ProcessCollector::for_self()))?;
    edge::api::idempotency::COUNTERS.register(&registry)?;
    edge::payment_webhook::COUNTERS.register(&registry)?;
    edge::log_gateway::COUNTERS.register(&registry)?;
    edge::fleet_telemetry::TELEMETRY_COUNTERS.register(&registry)?;
    edge::tls::admission::register(&registry)?;
    Ok(registry)
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

async fn stop_signal() -> anyhow::Result<()> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        interrupted = tokio::signal::ctrl_c() => interrupted?,
    }
    Ok(())
}
