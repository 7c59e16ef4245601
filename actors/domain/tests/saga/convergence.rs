//! The end of every run: messages are delivered, agents work, operators act, time advances. Then the simulation must become idle, with
//! nothing left behind.

use crate::simulation::{Simulation, admin};
use chrono::TimeDelta;
use domain::allocation::{self, Phase, ReleaseRetry};
use domain::node::{self, Phase as NodePhase};
use domain::resend_timer;
use domain::state_machine::Machine;
use domain::{AllocationId, NodeId};

/// More rounds than any saga takes: each advances to the next timer.
const ROUNDS: usize = 400;

impl Simulation {
    /// The same, with the first event of that subject lost.
    pub(crate) fn settle_losing(&mut self, subject: &'static str) {
        self.to_be_lost = Some(subject);
        self.settle();
        assert_eq!(self.to_be_lost, None, "no event of that subject was published");
    }

    pub(crate) fn settle(&mut self) {
        self.find_all();
        self.want_at_least(0);
        self.come_to_rest("every allocation is had, or is over", |world| {
            world.allocations.values().all(|it| matches!(it.phase, Phase::Active { .. } | Phase::Released { .. }))
        });
        self.come_to_rest("every node has written who may log in", |world| {
            world.allocations.values().filter(|it| it.state() == "active").all(|it| world.logins_are_right(it))
        });
        let had: Vec<AllocationId> =
            self.allocations.values().filter(|it| it.state() == "active").map(|it| it.id).collect();
        for id in had {
            self.release(id);
        }
        self.come_to_rest("everything is given back", |world| {
            world.allocations.values().all(|it| matches!(it.phase, Phase::Released { .. }))
                && world.nodes.values().all(|node| node.tenancy.holds.is_empty())
                && world.tenants.values().all(|tenant| tenant.live.is_empty())
                && world.accounts.values().all(|account| account.meters.is_empty())
        });
        for (id, agent) in &self.agents {
            assert!(agent.tenants.is_empty() || self.nodes[id].lifecycle.phase.is_gone(), "a tenant is left on {id}");
        }
        self.the_books_add_up();
        self.come_back();
    }

    /// The keys on the machine are the user's current and chosen ones.
    fn logins_are_right(&self, allocation: &allocation::Allocation) -> bool {
        let logins = allocation.ssh_access();
        let tenant = self.tenants.get(&allocation.asked.owner.user_id);
        let wanted = tenant.map(|it| it.authorized_keys(logins.chosen.as_deref())).unwrap_or_default();
        let written = allocation.placement().and_then(|(node_id, _)| self.agents[&node_id].logins.get(&allocation.id));
        let wanted: Vec<_> = wanted.iter().map(|key| key.id).collect();
        logins.keys.iter().map(|key| key.id).eq(wanted.iter().copied()) && written == Some(&wanted)
    }

    fn come_to_rest(&mut self, what: &str, rested: impl Fn(&Self) -> bool) {
        for _ in 0..ROUNDS {
            self.deliver_but_what_is_lost();
            let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
            nodes.into_iter().for_each(|id| self.healthy(id));
            self.operators_do_their_part();
            self.check();
            self.deliver_but_what_is_lost();
            let idle = self.agents.values().all(|agent| agent.is_idle());
            if self.bus_is_empty() && idle && rested(self) {
                return;
            }
            self.pass(self.until_something_happens());
        }
        panic!("never came to this: {what}\n{}", self.picture());
    }

    pub(crate) fn deliver_but_what_is_lost(&mut self) {
        while !self.bus_is_empty() {
            match self.to_be_lost {
                None => self.deliver(0, false),
                Some(subject) => {
                    if self.lose_a(subject) {
                        self.to_be_lost = None;
                    } else {
                        self.deliver(0, false);
                    }
                }
            }
        }
    }

    /// While sagas are in progress time advances in small steps. After that everything is resent once an hour at least.
    fn until_something_happens(&self) -> TimeDelta {
        let under_way = self.allocations.values().filter_map(Machine::timer).min();
        let (next, longest) = match under_way {
            Some(at) => (Some(at), TimeDelta::seconds(30)),
            None => (self.next_timer(), resend_timer::LONGEST),
        };
        next.map_or(TimeDelta::zero(), |at| at - self.now).clamp(TimeDelta::seconds(1), longest)
    }

    /// A failed release that waits for a person gets its person, and so does a node whose validation failed.
    fn operators_do_their_part(&mut self) {
        let waiting: Vec<AllocationId> = self
            .allocations
            .values()
            .filter(|it| matches!(it.phase, Phase::ReleaseFailed { next: ReleaseRetry::Operator(_), .. }))
            .map(|it| it.id)
            .collect();
        for id in waiting {
            let retry = allocation::Request::RetryRelease { reason: "repaired".into() };
            self.tell_allocation(id, &admin(), retry).unwrap();
        }
        let active = self.nodes.values().filter(|node| node.lifecycle.phase == NodePhase::Active);
        let failed: Vec<_> = active.filter_map(|node| Some((node.id, node.failed_level()?))).collect();
        for (id, level) in failed {
            // Refused while one is in progress.
            let _ = self.tell_node(id, &admin(), node::Request::Validate { level, reason: "repaired".into() });
        }
    }

    /// A node that is not removed can be reactivated, and has all its GPUs.
    fn come_back(&mut self) {
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        for id in nodes {
            self.healthy(id);
            if matches!(self.nodes[&id].lifecycle.phase, NodePhase::Quarantined { .. }) {
                let release = node::Request::ReleaseQuarantine { reason: "repaired".into() };
                // A node whose identity expired in quarantine cannot authenticate: it is retired and removed.
                if let Err(refused) = self.tell_node(id, &admin(), release) {
                    assert!(matches!(refused, node::Rejection::NotInOrder { .. }), "{refused}");
                    self.tell_node(id, &admin(), node::Request::Retire { reason: "r".into(), drain: false }).unwrap();
                    self.tell_node(id, &admin(), node::Request::Remove { reason: "r".into() }).unwrap();
                }
            }
            match self.nodes[&id].lifecycle.phase {
                NodePhase::Registered | NodePhase::BootstrapIssued { .. } | NodePhase::Enrolling { .. } => {
                    self.onboard(id);
                }
                NodePhase::Retired => {
                    // Retired before it was active, it has no identity.
                    if self.nodes[&id].identity.certificates.is_empty() {
                        self.reinstate(id);
                    }
                    let _ = self.tell_node(id, &admin(), node::Request::Reactivate { reason: "r".into() });
                }
                NodePhase::Active
                | NodePhase::Offline
                | NodePhase::Draining { .. }
                | NodePhase::Quarantined { .. }
                | NodePhase::Removing { .. }
                | NodePhase::Removed => {}
            }
            self.healthy(id);
        }
        // A task that an agent had under an identity that ended is handed out again once its lease is over.
        self.come_to_rest("every node that is not gone has all its GPUs", |world| {
            world
                .nodes
                .values()
                .all(|node| node.lifecycle.phase.is_gone() || node.gpus_free() == node.machine.registration.gpus_total)
        });
        assert_eq!(self.on_the_bus().count(), 0);
    }
}
