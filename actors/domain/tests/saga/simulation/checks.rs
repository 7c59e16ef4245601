//! The invariants that hold after each step, and what a failed run shows.

use super::Simulation;
use domain::invariants;
use domain::node::Phase;
use domain::state_machine::Machine as _;

impl Simulation {
    pub(crate) fn the_books_add_up(&self) {
        for (holder, it) in &self.accounts {
            let postings = self.ledger.get(&it.id).map_or(&[][..], Vec::as_slice);
            assert!(invariants::i3_the_balance_is_the_sum_of_its_entries(it, postings), "I3 {holder} {it:?}");
        }
    }

    #[track_caller]
    pub(crate) fn check(&self) {
        assert!(invariants::i2_a_gpu_has_one_tenant(&self.nodes, &self.allocations), "I2\n{}", self.picture());
        assert!(invariants::i4_a_token_is_consumed_once(&self.bought), "I4");
        for node in self.nodes.values() {
            assert!(node.has_deadline_where_transient(), "I8 {node:?}");
        }
        for it in self.allocations.values() {
            assert!(it.has_deadline_where_transient(), "I8 {it:?}");
        }
        for (holder, it) in &self.accounts {
            let postings = self.ledger.get(&it.id).map_or(&[][..], Vec::as_slice);
            // All of them are summed when the simulation is idle.
            let last = postings.last().map(|last| (last.number, last.balance)).unwrap_or_default();
            assert_eq!((it.postings, it.balance), last, "I3 {holder}");
            assert!(it.has_deadline_where_transient(), "I8 {it:?}");
        }
        self.failures_close_their_nodes();
        for (id, agent) in &self.agents {
            assert!(invariants::i5_a_task_takes_effect_once(&agent.effects), "I5");
            let node = &self.nodes[id];
            if node.lifecycle.phase.is_gone() {
                continue;
            }
            // A tenant of an active allocation is set up on its GPUs.
            for it in self.allocations.values().filter(|it| it.state() == "active") {
                let here = it.placement().is_some_and(|(node_id, _)| node_id == *id);
                assert!(!here || agent.ready.contains(&it.id), "active and not set up\n{}", self.picture());
            }
            // I2 on the machine: every tenant on it has a hold, on its own GPUs.
            for (tenant, gpus) in &agent.tenants {
                let held: Option<Vec<_>> = node
                    .tenancy
                    .holds
                    .get(tenant)
                    .map(|hold| hold.placed.devices.iter().map(|device| device.uuid.clone()).collect());
                assert_eq!(held.as_ref(), Some(gpus), "a tenant without an allocation\n{}", self.picture());
            }
        }
    }

    /// A node with a failed release takes no new tenant, once it has received all events about it.
    #[track_caller]
    fn failures_close_their_nodes(&self) {
        for it in self.allocations.values().filter(|it| it.state() == "release_failed") {
            let open = it.placement().is_some_and(|(node_id, _)| self.nodes[&node_id].gpus_free() > 0);
            let id = it.id.to_string();
            let unheard = || {
                let on_their_way = self.bus.iter().chain(&self.stranded).chain(&self.lost);
                on_their_way.into_iter().any(|message| format!("{:?}", message.event).contains(&id))
            };
            assert!(!open || unheard(), "a failed release on an open node\n{}", self.picture());
        }
    }

    /// Loses the oldest message of that subject, if there is one.
    pub(crate) fn lose_a(&mut self, subject: &str) -> bool {
        let found = self.bus.iter().position(|message| message.event.subject() == subject);
        self.lost.extend(found.map(|which| self.bus.remove(which)));
        found.is_some()
    }

    /// Releases the delayed messages.
    pub(crate) fn find_all(&mut self) {
        self.bus.append(&mut self.stranded);
    }

    /// The states of the `n`th allocation, in order.
    pub(crate) fn history(&self, n: usize) -> impl Iterator<Item = &str> {
        self.allocations.values().nth(n).unwrap().history.iter().map(|entry| entry.state.into_str())
    }

    pub(crate) fn picture(&self) -> String {
        let nodes = self.nodes.values().map(|node| {
            let holds: Vec<_> =
                node.tenancy.holds.iter().map(|(id, hold)| format!("    {id} {:?}", hold.phase)).collect();
            let life = if let Phase::Quarantined { was } = &node.lifecycle.phase {
                format!("quarantined, was {}", was.name())
            } else {
                node.state().to_owned()
            };
            format!("{} {life} fenced by {:?}\n{}", node.id, node.tenancy.fenced_by, holds.join("\n"))
        });
        let allocations = self
            .allocations
            .values()
            .filter(|it| it.state() != "released")
            .map(|it| format!("{} {:?} {:?}", it.id, it.phase, it.history));
        let bus = self.bus.iter().map(|message| format!("{:?}", message.event));
        nodes.chain(allocations).chain(bus).collect::<Vec<_>>().join("\n")
    }
}
