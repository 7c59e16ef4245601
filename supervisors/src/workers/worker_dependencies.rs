//! What the workers are made of: the stages of the start, and the parts that several rows of the tree share.

use super::audit_seal::{AuditSeal, SealMetrics};
use super::bare_metal::BareMetalWorker;
use super::event_delivery::ReactionContext;
use super::event_reactions::Reactor;
use super::keys::KeyFollower;
use super::notification_relay::Notifier;
use super::payments::payment_updater::PaymentUpdater;
use super::payments::processor_calls::ProcessorCalls;
use super::payments::processor_events::ProcessorEventHandler;
use super::placement_index::FreeGpuIndex;
use super::provisioning::Placer;
use super::rewrap::Rewrapper;
use crate::cluster_keys;
use crate::startup::Stages;
use persistence::audit::Sealer;
use persistence::{Leases, Outbox};
use std::sync::Arc;

/// See the module.
pub struct WorkerDependencies {
    pub stages: Stages,
    pub audit_seal: Arc<AuditSeal>,
    pub(super) key_follower: Arc<KeyFollower>,
    pub(super) rewrapper: Arc<Rewrapper>,
    pub(super) notifier: Notifier,
    pub(super) leases: Leases,
    /// `None` where no payment processor is configured.
    pub(super) payments: Option<PaymentUpdater>,
    pub(super) reactor: Reactor,
    pub(super) free_gpus: Arc<FreeGpuIndex>,
}

impl WorkerDependencies {
    /// # Errors
    /// Where the audit key cannot be opened.
    pub async fn new(stages: Stages) -> anyhow::Result<Self> {
        let Stages { registry, storage, keys, membership, actors, services, listeners, .. } = &stages;
        let audit_key = cluster_keys::audit_key(&storage.secrets).await?;
        let sealer = Sealer::new(storage.pool.clone(), storage.member, audit_key);
        let (host, bus) = (Arc::clone(&actors.host), membership.bus.clone());
        let audit_seal = Arc::new(AuditSeal::new(host, bus, sealer, SealMetrics::register(registry)?));
        let key_follower = Arc::new(KeyFollower {
            reads: storage.reads.clone(),
            secrets: storage.secrets.clone(),
            domain: keys.domain.clone(),
            current: keys.current.clone(),
            changed: Arc::clone(&actors.effects.keys_changed),
            bus: membership.bus.clone(),
            connections: actors.effects.connections.clone(),
            polls: actors.effects.polls.clone(),
            acceptor: listeners.node_acceptor.clone(),
            proxies: listeners.node_proxies.clone(),
        });
        let (directory, host, reads) = (actors.directory.clone(), Arc::clone(&actors.host), storage.reads.clone());
        let rewrapper = Arc::new(Rewrapper::register(registry, directory, host, reads, storage.secrets.rewrap())?);
        let notifier = Notifier {
            reads: storage.reads.clone(),
            environment: Arc::clone(&actors.environment),
            bus: membership.bus.clone(),
        };
        let leases = Leases::new(storage.pool.clone(), storage.member);
        let processor = services.services.payments.as_ref().map(|payments| Arc::clone(&payments.processor));
        let payments = processor.map(|it| PaymentUpdater::new(actors.directory.clone(), it, "payments")).transpose()?;
        let processor_calls = payments.clone().map(|updater| ProcessorCalls::new(updater, leases.clone()));
        let processor_events =
            payments.clone().map(|updater| ProcessorEventHandler::new(updater, Arc::clone(&storage.ring)));
        let outbox = Outbox::new(storage.pool.clone());
        let context = ReactionContext::new(&actors.directory, storage.reads.clone(), outbox, "provisioning")?;
        let bare_metal = BareMetalWorker::new(services.services.clone(), leases.clone());
        let free_gpus = Arc::new(FreeGpuIndex::new(registry, storage.reads.clone())?);
        let placer = Arc::new(Placer::new(registry, Arc::clone(&free_gpus))?);
        let reactor = Reactor::new(context, placer, bare_metal, processor_calls, processor_events);
        Ok(Self { audit_seal, key_follower, rewrapper, notifier, leases, payments, reactor, free_gpus, stages })
    }
}
