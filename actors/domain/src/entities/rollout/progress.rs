//! What a rollout does next: order updates, ask for nodes, end.

use super::{PAGE, Phase, Reply, Rollout};
use crate::event::Event;
use crate::id::NodeId;
use crate::resend_timer::ResendTimer;
use crate::state_machine::{Transition, TransitionContext};

impl Rollout {
    pub(super) fn enter(&mut self, phase: Phase, ctx: &TransitionContext<'_>) {
        self.phase = phase;
        self.entered_at = ctx.now;
    }

    /// Does what its phase allows now, and returns what is published with that.
    pub(super) fn advance(&mut self, ctx: &TransitionContext<'_>) -> Vec<Event> {
        match self.phase {
            Phase::Running => self.run(ctx),
            Phase::Aborting if self.in_flight.is_empty() => {
                self.enter(Phase::Aborted, ctx);
                self.waiting.clear();
                self.soaking.clear();
                self.soak = None;
                vec![Event::RolloutAborted { rollout_id: self.id }]
            }
            Phase::Paused | Phase::Stopped { .. } | Phase::Aborting | Phase::Aborted | Phase::Completed => Vec::new(),
        }
    }

    fn run(&mut self, ctx: &TransitionContext<'_>) -> Vec<Event> {
        let mut events = Vec::new();
        while self.in_flight.len() < self.most_in_flight()
            && let Some(node_id) = self.waiting.pop_front()
        {
            self.in_flight.insert(node_id, ResendTimer::first(ctx.now));
            events.push(self.update_due(node_id));
        }
        self.begin_soak_after_wave(ctx);
        if self.feed.is_exhausted {
            if self.waiting.is_empty() && self.in_flight.is_empty() && self.soaking.is_empty() {
                self.enter(Phase::Completed, ctx);
                events.push(Event::RolloutCompleted { rollout_id: self.id });
            }
        } else if self.feed.due.is_none() && self.waiting.len() < PAGE.min(self.most_in_flight().max(1)) {
            // The next page is read while the nodes of this one are updated.
            self.feed.due = Some(ResendTimer::first(ctx.now));
            events.push(Event::RolloutNodesDue { rollout_id: self.id });
        }
        events
    }

    /// As many updates as successes that are missing in the wave, of which the canaries are the first. None during a soak.
    fn most_in_flight(&self) -> usize {
        let most = if self.soak.is_some() { 0 } else { self.missing_in_wave().min(self.order.max_unavailable) };
        usize::try_from(most).unwrap_or(usize::MAX)
    }

    /// Resends what has no answer. An update that was ordered is ordered again in every phase: the node may have it.
    pub(super) fn tick(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        let mut events = Vec::new();
        for (node_id, timer) in next.in_flight.iter_mut().filter(|(_, timer)| timer.is_due(ctx.now)) {
            *timer = timer.next(ctx.now);
            events.push(self.update_due(*node_id));
        }
        if let Some(timer) = self.page_due().filter(|timer| timer.is_due(ctx.now)) {
            next.feed.due = Some(timer.next(ctx.now));
            events.push(Event::RolloutNodesDue { rollout_id: self.id });
        }
        events.extend(next.ask_soaked_nodes(ctx));
        if events.is_empty() {
            return Transition::stay(Reply::Done);
        }
        Transition::to(next, Reply::Done, "updates without an answer are resent").with(events, None)
    }

    /// When the page that was asked for is asked for again. Only a running rollout needs one.
    pub(super) fn page_due(&self) -> Option<ResendTimer> {
        self.feed.due.filter(|_| self.phase == Phase::Running)
    }

    fn update_due(&self, node_id: NodeId) -> Event {
        let (soaks, includes_held) = (self.order.soak_seconds > 0, self.order.includes_held);
        Event::RolloutUpdateDue {
            rollout_id: self.id,
            node_id,
            digest: self.order.digest.clone(),
            soaks,
            includes_held,
        }
    }
}
