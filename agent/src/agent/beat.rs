//! Heartbeats, at the pace that the control plane sets.

use std::sync::Arc;
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use tracing::{info, warn};
use wire::PROTOCOL;
use wire::VerifierSet;
use wire::bundle::fingerprint;
use wire::heartbeat::{Heartbeat, HeartbeatAnswer, RunningTask, Telemetry};
use wire::task::KINDS;

use super::execute::Stage;
use super::{Agent, BACKOFF_BASE, enroll, held, look};
use crate::backoff::Backoff;
use crate::inventory::{Meter, Watch};

const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// A clock that is off by more makes tasks expire too early or too late.
const CLOCK_TOLERANCE: TimeDelta = TimeDelta::seconds(10);
/// The control plane sets the pace, within reason.
const SHORTEST_PAUSE: Duration = Duration::from_millis(200);

impl Agent {
    pub(super) async fn beat(&self) {
        let meter = Arc::new(Meter::default());
        let mut watch = Watch::of(&self.inventory.gpus);
        let mut backoff = Backoff::new(BACKOFF_BASE, BACKOFF_MAX);
        let mut clock_is_off = false;
        while !self.stop.is_cancelled() {
            let heartbeat = self.heartbeat(&meter, &mut watch).await;
            let api = self.api();
            let answer = tokio::select! {
                answer = api.heartbeat(&heartbeat) => answer,
                () = self.stop.cancelled() => return,
            };
            match answer {
                Ok(answer) => {
                    backoff.reset();
                    clock_is_off = warn_of_clock(&answer, clock_is_off);
                    self.follow_verifiers(&answer.verifier_sets);
                    self.follow_authorities(&answer);
                    self.heard.send_modify(|answers| *answers += 1);
                    self.poll_settings.send_replace(answer.poll);
                    if !self.wait_for_next_beat(answer.next_heartbeat_seconds).await {
                        return;
                    }
                }
                Err(error) => {
                    if !self.recover_from(&api, error, "the heartbeat", &mut backoff).await {
                        return;
                    }
                }
            }
        }
    }

    /// A tenth of jitter on either side keeps a fleet from beating in step.
    async fn wait_for_next_beat(&self, seconds: u32) -> bool {
        let pause =
            Duration::from_secs(u64::from(seconds)).mul_f64(0.9 + 0.2 * rand::random::<f64>()).max(SHORTEST_PAUSE);
        tokio::select! {
            () = tokio::time::sleep(pause) => true,
            () = self.beat_now.notified() => self.pause(SHORTEST_PAUSE).await,
            () = self.stop.cancelled() => false,
        }
    }

    async fn heartbeat(&self, meter: &Arc<Meter>, watch: &mut Watch) -> Heartbeat {
        let look = look(&self.gpus, self.executor.kind(), &self.config.state_dir).await;
        let (inventory, health) = watch.judge(look, Utc::now());
        Heartbeat {
            boot_id: self.boot_id,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: PROTOCOL,
            sent_at: Utc::now(),
            inventory,
            telemetry: self.measure(meter).await,
            health,
            verifier_set_version: held(&self.verifiers).version(),
            running: self.running(),
            // One that cannot be read is said not to be there, and is sent anew.
            task_types: Some(KINDS.map(str::to_owned).to_vec()),
            node_ca_bundle_fingerprint: Some(self.identities.node_cas_fingerprint().ok().flatten().unwrap_or_default()),
        }
    }

    async fn measure(&self, meter: &Arc<Meter>) -> Telemetry {
        let (meter, gpus) = (Arc::clone(meter), Arc::clone(&self.gpus));
        tokio::task::spawn_blocking(move || meter.read(&gpus)).await.unwrap_or_default()
    }

    fn running(&self) -> Vec<RunningTask> {
        held(&self.under_way)
            .iter()
            .filter(|(_, stage)| **stage == Stage::Executing)
            .map(|((task_id, attempt), _)| RunningTask { task_id: *task_id, attempt: *attempt })
            .collect()
    }

    pub(super) fn follow_verifiers(&self, sets: &[VerifierSet]) {
        let mut verifiers = held(&self.verifiers);
        let followed = enroll::follow(&self.identities, &self.config.verifier_set, &mut verifiers, sets);
        drop(verifiers);
        if let Err(fatal) = followed {
            self.fail(fatal);
        }
    }

    fn follow_authorities(&self, answer: &HeartbeatAnswer) {
        if let Some(bundle) = &answer.node_ca_bundle_pem {
            match self.identities.store_node_cas(bundle) {
                Ok(()) => info!(fingerprint = fingerprint(bundle), "the authorities of nodes changed"),
                Err(error) => return self.fail(error.into()),
            }
        }
        if let Some(seconds) = answer.renew_within_seconds {
            self.renew_within.send_replace(Some(Duration::from_secs(seconds.into())));
        }
    }
}

/// Says so once when the clock goes off, and once when it is right again.
fn warn_of_clock(answer: &HeartbeatAnswer, was_off: bool) -> bool {
    let off = (Utc::now() - answer.server_time).abs();
    let is_off = off > CLOCK_TOLERANCE;
    if is_off && !was_off {
        warn!(error_code = "clock_skew", seconds = off.num_seconds(), "the clocks of node and control plane differ");
    }
    is_off
}
