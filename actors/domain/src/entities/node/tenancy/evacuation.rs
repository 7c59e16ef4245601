//! Tenants whose GPU or machine is about to leave service: the time that they get, and what ends it.
//!
//! The node decides at the deadline, since it alone knows whether the finding is still open: a finding that was cleared or has ended before
//! releases no allocation.

use super::{Hold, HoldPhase, Tenancy};
use crate::entities::node::outcome;
use crate::event::{Event, GpuDevice};
use crate::id::AllocationId;
use crate::policy::{PolicyKey, Scopes};
use crate::resend_timer::ResendTimer;
use crate::state_machine::{Timestamp, TransitionContext};
use serde::{Deserialize, Serialize};

/// A tenant that is asked to leave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evacuation {
    pub begun_at: Timestamp,
    /// When its allocation is released. A later change of the policy does not move it.
    pub release_at: Timestamp,
    /// `gpu_maintenance` or `machine_maintenance`.
    pub reason: String,
    /// When the release is requested again, once it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    again: Option<ResendTimer>,
}

impl Evacuation {
    fn due_at(&self) -> Timestamp {
        self.again.map_or(self.release_at, |again| again.at)
    }
}

impl Hold {
    /// True while the tenant can use its GPUs.
    const fn is_used(&self) -> bool {
        match self.phase {
            HoldPhase::Ready => true,
            HoldPhase::Reserved
            | HoldPhase::Provisioning { .. }
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. }
            | HoldPhase::Abandoned { .. } => false,
        }
    }
}

impl Tenancy {
    /// The time that the tenant of an allocation has to leave, where it is asked to.
    pub(in crate::entities::node) fn evacuation_of(&self, allocation_id: AllocationId) -> Option<&Evacuation> {
        self.holds.get(&allocation_id).filter(|hold| hold.is_used())?.evacuation.as_ref()
    }

    /// Begins, ends and completes evacuations as the open findings require.
    /// `reason_of` says why the tenant of these GPUs has to leave.
    pub(in crate::entities::node) fn update_evacuations(
        &mut self,
        reason_of: impl Fn(&[GpuDevice]) -> Option<&'static str>,
        ctx: &TransitionContext<'_>,
    ) -> Vec<Event> {
        let limit = ctx.policy.seconds(PolicyKey::NodeEvacuate, &Scopes::global(), ctx.now);
        let (node_id, now) = (outcome::node_id(ctx), ctx.now);
        let mut events = Vec::new();
        for (allocation_id, hold) in &mut self.holds {
            let allocation_id = *allocation_id;
            let reason = reason_of(&hold.placed.devices).map(str::to_owned);
            if !hold.is_used() {
                hold.evacuation = None;
                continue;
            }
            match (reason, &mut hold.evacuation) {
                (Some(reason), None) => {
                    let release_at = now + limit;
                    let begun = Evacuation { begun_at: now, release_at, reason: reason.clone(), again: None };
                    hold.evacuation = Some(begun);
                    events.push(Event::EvacuationBegun { node_id, allocation_id, release_at, reason });
                }
                // A release that was requested cannot be taken back: it is requested again also when the finding is over.
                (reason, Some(evacuation)) if reason.is_some() || evacuation.again.is_some() => {
                    if now >= evacuation.due_at() {
                        evacuation.again = Some(match evacuation.again {
                            Some(again) => again.next(now),
                            None => ResendTimer::first(now),
                        });
                        let reason = evacuation.reason.clone();
                        events.push(Event::EvacuationDue { node_id, allocation_id, reason });
                    }
                }
                (None, None) => {}
                // The finding is over before the deadline.
                (_, Some(_)) => {
                    hold.evacuation = None;
                    events.push(Event::EvacuationEnded { node_id, allocation_id });
                }
            }
        }
        events
    }

    /// When the next evacuation is due.
    pub(in crate::entities::node) fn evacuation_due_at(&self) -> Option<Timestamp> {
        let used = self.holds.values().filter(|hold| hold.is_used());
        used.filter_map(|hold| hold.evacuation.as_ref()).map(Evacuation::due_at).min()
    }
}
