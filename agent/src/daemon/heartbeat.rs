//! Heartbeats, at the interval that the control plane sets.

use std::sync::Arc;
use std::time::Duration;

use reqwest::StatusCode;
use tracing::{info, warn};
use wire::VerifierSet;
use wire::bundle::fingerprint;
use wire::heartbeat::{Heartbeat, HeartbeatAnswer, RunningTask};
use wire::task::TASK_TYPES;

use super::execute::AttemptStage;
use super::{Agent, BACKOFF_BASE, UnstoredFile, enroll, locked};
use crate::bounded_reading::{BoundedReading, Reading};
use crate::chain;
use crate::finding_log::Condition;
use crate::full_jitter::Backoff;
use crate::health::{HealthMonitor, MonitoredMachine};
use crate::identity::IdentityError;
use crate::inventory::InventoryReadings;
use crate::logging;
use crate::ssh::TenantAccess;
use crate::unproved_gpus;

const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// The lower bound of the interval that the control plane sets.
const SHORTEST_PAUSE: Duration = Duration::from_millis(200);

/// What a heartbeat reads beside the probes of health.
struct HeartbeatReadings {
    inventory: InventoryReadings,
    /// Of the file of nodes' authorities in the state folder.
    authorities: BoundedReading<Option<String>>,
    last_authorities: Option<String>,
    authorities_storing: BoundedReading<Result<(), IdentityError>>,
    /// The proof of an update in the folder of the package.
    update_proof: BoundedReading<()>,
}

impl Agent {
    pub(super) async fn send_heartbeats(&self, inventory: InventoryReadings) {
        let mut readings = HeartbeatReadings {
            inventory,
            authorities: BoundedReading::of("the file of nodes' authorities"),
            last_authorities: None,
            authorities_storing: BoundedReading::of("the stored authorities of nodes"),
            update_proof: BoundedReading::of("the proof of an update"),
        };
        let heartbeat_now = Arc::clone(&self.heartbeat_now);
        let machine = MonitoredMachine {
            state_dir: &self.config.state_dir,
            kernel_log: &self.config.kernel_log,
            boot_id: self.boot_id,
            gpu_source: self.gpus.source(),
            listed: &self.inventory.gpus,
            guards_device_files: self.config.system.is_some(),
        };
        let on_new_event = move || heartbeat_now.notify_one();
        let mut monitor = HealthMonitor::start(&machine, self.integrity.clone(), self.stop.clone(), on_new_event);
        let mut backoff = Backoff::new(BACKOFF_BASE, BACKOFF_MAX);
        let mut is_in_contact = false;
        let mut reads_later_fields = false;
        while !self.stop.is_cancelled() {
            logging::report_dropped_lines();
            let mut heartbeat = self.heartbeat(&mut readings, &mut monitor).await;
            if !reads_later_fields {
                heartbeat = heartbeat.without_later_fields();
            }
            let api = self.api();
            let answer = tokio::select! {
                answer = api.heartbeat(&heartbeat) => answer,
                () = self.stop.cancelled() => return,
            };
            match answer {
                Ok(answer) => {
                    backoff.reset();
                    reads_later_fields = answer.reads_later_fields();
                    if !std::mem::replace(&mut is_in_contact, true) {
                        info!("in contact");
                    }
                    self.prove_update(&mut readings.update_proof).await;
                    self.follow_authorities(&answer, &mut readings.authorities_storing).await;
                    self.follow_verifiers(answer.verifier_sets).await;
                    monitor.accept(&answer.accepted_findings);
                    self.heartbeats_answered.send_modify(|answers| *answers += 1);
                    self.poll_settings.send_replace(answer.poll);
                    if !self.wait_for_next_heartbeat(answer.next_heartbeat_seconds).await {
                        return;
                    }
                }
                Err(error) => {
                    is_in_contact = false;
                    // A replica of an earlier release refuses them. Without an answer, the control plane is what it was.
                    reads_later_fields &= !error.is_refused_with(&[StatusCode::BAD_REQUEST]);
                    if !self.retry_after_failure(&api, error, "the heartbeat", &mut backoff).await {
                        return;
                    }
                }
            }
        }
    }

    /// Jitter of a tenth on either side keeps a fleet from sending heartbeats in step.
    async fn wait_for_next_heartbeat(&self, seconds: u32) -> bool {
        let pause =
            Duration::from_secs(u64::from(seconds)).mul_f64(0.9 + 0.2 * rand::random::<f64>()).max(SHORTEST_PAUSE);
        tokio::select! {
            () = tokio::time::sleep(pause) => true,
            () = self.heartbeat_now.notified() => self.pause(SHORTEST_PAUSE).await,
            () = self.stop.cancelled() => false,
        }
    }

    async fn heartbeat(&self, readings: &mut HeartbeatReadings, monitor: &mut HealthMonitor) -> Heartbeat {
        readings.inventory.read().await;
        let mut known = readings.inventory.conditions();
        known.extend(unproved_gpus::conditions(&self.executor.unproved_gpus()));
        known.extend(self.executor.unbounded_tenants());
        known.extend(self.journal.condition());
        let unavailable = self.tenant_access.as_ref().and_then(TenantAccess::unavailable);
        known.extend(unavailable.map(|why| Condition::of_machine("ssh", "unavailable", why)));
        let observed = monitor.observe(&self.gpus, &self.clock, known).await;
        let node_ca_bundle_fingerprint = self.authorities(readings).await;
        let (source, executor) = (self.gpus.source(), self.executor.kind());
        Heartbeat {
            boot_id: self.boot_id,
            session: Some(self.process),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            package_digest: self.updates.digest(),
            protocol: self.config.simulated_faults.protocol(),
            sent_at: self.clock.now(),
            inventory: readings.inventory.inventory(observed.gpus, (source, observed.driver_version), executor),
            telemetry: readings.inventory.telemetry(observed.load),
            health: observed.health,
            verifier_set_version: locked(&self.verifiers).version(),
            running: self.running(),
            task_types: Some(TASK_TYPES.map(str::to_owned).to_vec()),
            node_ca_bundle_fingerprint,
            findings: Some(observed.findings),
        }
    }

    /// A bundle that cannot be read is reported as absent, and the control plane sends it again; nothing is reported of one whose disk has
    /// not answered yet.
    async fn authorities(&self, readings: &mut HeartbeatReadings) -> Option<String> {
        let identities = self.identities.clone();
        let read = move || Some(identities.node_cas_fingerprint().ok().flatten().unwrap_or_default());
        if let Reading::Fresh(fingerprint) = readings.authorities.read(read).await {
            readings.last_authorities = fingerprint;
        }
        readings.last_authorities.clone()
    }

    fn running(&self) -> Vec<RunningTask> {
        locked(&self.in_flight)
            .iter()
            .filter(|(_, stage)| **stage == AttemptStage::Executing)
            .map(|((task_id, attempt), _)| RunningTask { task_id: *task_id, attempt: *attempt })
            .collect()
    }

    /// Trusts newer sets of task-signing keys at once. A disk that does not answer is waited for no longer than a moment.
    pub(super) async fn follow_verifiers(&self, sets: Vec<VerifierSet>) {
        let Some(current) = enroll::follow_verifier_sets(&mut locked(&self.verifiers), &sets) else { return };
        let (identities, bundle) = (self.identities.clone(), self.config.verifier_set.clone());
        let store = move || enroll::store_verifier_set(&identities, &bundle, &current);
        self.verifiers_storing.lock().await.read(store).await;
    }

    async fn follow_authorities(
        &self,
        answer: &HeartbeatAnswer,
        storing: &mut BoundedReading<Result<(), IdentityError>>,
    ) {
        if let Some(bundle) = answer.node_ca_bundle_pem.clone() {
            let (identities, fingerprint) = (self.identities.clone(), fingerprint(&bundle));
            match storing.read(move || identities.store_node_cas(&bundle)).await {
                Reading::Fresh(Ok(())) => {
                    self.unstored.retain(|file| *file != UnstoredFile::Authorities);
                    info!(fingerprint, "the authorities of nodes changed");
                }
                // The control plane sends them again with the answer to each heartbeat.
                Reading::Fresh(Err(error)) => {
                    let error = chain(&error);
                    if self.unstored.is_to_be_logged(UnstoredFile::Authorities, &error) {
                        warn!(error_code = "node_storage", error, "the authorities of nodes cannot be stored");
                    }
                }
                Reading::Late { .. } => {}
            }
        }
        if let Some(seconds) = answer.renew_within_seconds {
            self.renew_within.send_replace(Some(Duration::from_secs(seconds.into())));
        }
    }
}
