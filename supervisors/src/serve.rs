//! `gpuaas serve`: one process of the control plane, from its configuration to its ordered shutdown.

use crate::config::Config;
use crate::logging::LogFilter;
use crate::reload::{self, Reloader};
use crate::service_manager::SystemdNotifier;
use crate::shutdown;
use crate::startup::Stages;
use crate::startup::actors::ActorStage;
use crate::startup::keys::KeyStage;
use crate::startup::listeners::ListenerStage;
use crate::startup::membership::MembershipStage;
use crate::startup::services::ServiceStage;
use crate::startup::storage::StorageStage;
use crate::traces::TraceExporter;
use crate::workers::{WorkerDependencies, start_all};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use prometheus::Registry;
use prometheus::process_collector::ProcessCollector;
use std::sync::Arc;

/// Runs until SIGTERM or SIGINT, then shuts down in order. SIGHUP reloads what can be.
///
/// # Errors
/// Where the process cannot start: a setting is wrong, the database cannot be reached, a port is taken.
pub async fn serve(config: Config, log_filter: LogFilter, traces: Option<TraceExporter>) -> anyhow::Result<()> {
    let hangups = reload::hangups()?;
    let manager = SystemdNotifier::from_environment();
    manager.spawn_keep_alive();
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
    let workers = Arc::new(WorkerDependencies::new(stages).await?);
    start_all(&workers)?;
    let reloader = Reloader::new(Arc::clone(&workers), log_filter, &workers.stages.registry)?;
    tokio::spawn(reloader.run(hangups, manager.clone()));
    let me = &workers.stages.membership.view.me;
    tracing::info!(member.id = %me.id, "{} serves", me.name);
    let view = Arc::clone(&workers.stages.services.operator_view);
    manager.spawn_ready_notification(move || {
        let view = Arc::clone(&view);
        async move { view.check_readiness().await.ready }
    });
    let superseded = tokio::select! {
        stopped = stop_signal() => stopped.map(|()| None)?,
        finding = workers.stages.membership.superseded.reported() => Some(finding),
    };
    manager.notify_stopping();
    shutdown::shut_down(&workers).await;
    superseded.map_or(Ok(()), |finding| Err(finding.into()))
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
    edge::tls::forwarded_client::register(&registry)?;
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
