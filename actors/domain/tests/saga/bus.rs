//! The bus and the workers: at-least-once delivery in any order.

use crate::simulation::{Delivery, Simulation};
use domain::allocation;
use domain::billing_account;
use domain::choreography::Reaction;
use domain::node;
use domain::placement::{NodeCapacity, PlacementIndex, PlacementRequest};
use domain::state_machine::CommandSort as _;
use domain::tenant::{self, QuotaScopes};
use domain::{AllocationId, Event, NodeId, Principal, UserId};
use std::collections::BTreeSet;
use uuid::Uuid;

/// A message on its way, and how far its reaction has come.
#[derive(Clone, Debug)]
pub(crate) struct BusMessage {
    pub(crate) id: u64,
    pub(crate) event: Event,
    pub(crate) placing: PlacementProgress,
}

/// A placement takes several steps, between which anything may happen.
#[derive(Clone, Debug)]
pub(crate) enum PlacementProgress {
    Admit,
    Ask { nodes: Vec<NodeId>, suggestion: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ReactionProgress {
    Wholly,
    /// More steps follow.
    Partly(Vec<NodeId>, String),
}

impl Simulation {
    pub(crate) fn bus_is_empty(&self) -> bool {
        self.bus.is_empty()
    }

    pub(crate) fn on_the_bus(&self) -> impl Iterator<Item = &Event> {
        self.bus.iter().map(|message| &message.event)
    }

    pub(crate) fn deliver_all(&mut self) {
        while !self.bus.is_empty() {
            self.deliver(0, false);
        }
    }

    /// Delivers the oldest message of that subject until its reaction is complete; `again` keeps it in flight.
    pub(crate) fn deliver_a(&mut self, subject: &str, again: bool) {
        let oldest = |bus: &[BusMessage]| bus.iter().position(|message| message.event.subject() == subject);
        let id = oldest(&self.bus).map(|which| self.bus[which].id).expect("a message of that subject");
        loop {
            let which = self.bus.iter().position(|message| message.id == id).expect("it is on its way");
            self.deliver(which, again);
            match self.bus.iter().find(|message| message.id == id) {
                Some(BusMessage { placing: PlacementProgress::Ask { .. }, .. }) => {}
                Some(BusMessage { placing: PlacementProgress::Admit, .. }) | None => return,
            }
        }
    }

    pub(crate) fn deliver(&mut self, which: usize, again: bool) {
        if self.bus.is_empty() {
            return;
        }
        let message = self.bus.remove(which % self.bus.len());
        match self.react(&message) {
            ReactionProgress::Wholly if again => {
                self.bus.push(BusMessage { placing: PlacementProgress::Admit, ..message });
            }
            ReactionProgress::Wholly => {}
            ReactionProgress::Partly(nodes, suggestion) => {
                self.bus.push(BusMessage { placing: PlacementProgress::Ask { nodes, suggestion }, ..message });
            }
        }
    }

    /// True at the first delivery, or where duplicates are applied.
    fn first(&mut self, message: &BusMessage, entity: Uuid, command: &'static str) -> bool {
        self.delivery != Delivery::Once || !self.applied.contains(&(message.id, entity, command))
    }

    fn react(&mut self, message: &BusMessage) -> ReactionProgress {
        let worker = Principal::system("provisioning");
        match message.event.reaction() {
            // Neither terminal sessions nor payments are simulated here: no saga depends on them.
            Reaction::Payment(..) | Reaction::CallProcessor(_) | Reaction::ApplyProcessorEvent(_) => {
                panic!("no payment was made")
            }
            Reaction::DriveMachine(_) => panic!("no node has a bare-metal provider"),
            Reaction::Rollout(..) | Reaction::FindRolloutNodes(_) => panic!("no rollout was ordered"),
            Reaction::Nothing
            | Reaction::CloseTerminals { .. }
            | Reaction::CloseNodeTerminals { .. }
            | Reaction::CloseBrowserTerminals { .. }
            | Reaction::Terminal(..) => {}
            Reaction::Place(allocation_id) => return self.place(message, allocation_id),
            Reaction::Node(id, instruction) => {
                if self.first(message, id.0, "") {
                    self.tell_node(id, &worker, instruction).expect("the saga's orders are never refused");
                    self.applied.insert((message.id, id.0, ""));
                }
            }
            Reaction::Allocation(id, fact) => {
                if self.first(message, id.0, "") {
                    self.tell_allocation(id, &worker, fact).expect("the saga's facts are never refused");
                    self.applied.insert((message.id, id.0, ""));
                }
            }
            Reaction::Billing { holder, instruction } => {
                if self.first(message, Uuid::max(), "") {
                    self.tell_account(&holder, instruction).expect("the saga's instructions are never refused");
                    self.applied.insert((message.id, Uuid::max(), ""));
                }
            }
            Reaction::ResolveSshKeys { allocation_id, user_id } => {
                self.resolve_logins(message, allocation_id, &user_id);
            }
            Reaction::SendSshKeys { allocation_id, node_id } => self.tell_logins(message, allocation_id, node_id),
            Reaction::Tenant { user_id, instruction } => {
                if self.first(message, Uuid::nil(), "") {
                    self.tell_tenant(&user_id, instruction).unwrap();
                    self.applied.insert((message.id, Uuid::nil(), ""));
                }
            }
        }
        ReactionProgress::Wholly
    }

    /// One step of the provisioning worker: count, or ask one node, or conclude. It reads the allocation once at its start, and does not
    /// see later changes.
    fn place(&mut self, message: &BusMessage, id: AllocationId) -> ReactionProgress {
        let asked = self.allocations[&id].asked.clone();
        let logins = self.allocations[&id].ssh_access();
        match &message.placing {
            PlacementProgress::Admit => {
                let hold = billing_account::Instruction::Hold {
                    holder: asked.holder(),
                    allocation_id: id,
                    user_id: asked.owner.user_id.clone(),
                    price: asked.price.clone(),
                    gpu_count: asked.gpu_count,
                    plan: None,
                };
                if let Err(refused) = self.tell_account(&asked.holder(), hold) {
                    self.reached.insert("account without money".to_owned());
                    return self.conclude(message, id, allocation::Fact::Unaffordable { message: refused.to_string() });
                }
                let command = tenant::Instruction::Admit {
                    user_id: asked.owner.user_id.clone(),
                    allocation_id: id,
                    scopes: QuotaScopes { org_id: None, project_id: None, plan: None },
                    logins_revision: logins.as_of,
                };
                if self.first(message, Uuid::nil(), "admit") {
                    match self.tell_tenant(&asked.owner.user_id, command) {
                        Ok(()) => {
                            self.applied.insert((message.id, Uuid::nil(), "admit"));
                        }
                        Err(tenant::Rejection::OverQuota { limit }) => {
                            self.reached.insert("tenant over quota".to_owned());
                            return self.conclude(message, id, allocation::Fact::OverQuota { limit });
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
                let mut index = PlacementIndex::default();
                for node in self.nodes.values() {
                    index.apply(1, NodeCapacity::of(node));
                }
                let wanted = PlacementRequest {
                    allocation_id: id,
                    sku_id: asked.sku_id,
                    node_id: asked.node_id,
                    region_code: asked.region_code.as_deref(),
                    gpu_count: asked.gpu_count,
                    reimages: false,
                };
                let (mut nodes, mut known) = (Vec::new(), BTreeSet::new());
                while let Some(node_id) = index.next(&wanted, &known) {
                    known.insert(node_id);
                    nodes.push(node_id);
                }
                ReactionProgress::Partly(nodes, index.suggestion(&wanted))
            }
            PlacementProgress::Ask { nodes, suggestion } => {
                let Some((first, rest)) = nodes.split_first() else {
                    let suggestion = Some(suggestion.clone());
                    return self.conclude(message, id, allocation::Fact::NoCapacity { suggestion });
                };
                if !self.first(message, first.0, "reserve") {
                    return ReactionProgress::Wholly;
                }
                let (keys, revision) = (logins.keys, logins.revision);
                let (gpu_count, reimages) = (asked.gpu_count, false);
                let command = node::Instruction::Reserve { allocation_id: id, gpu_count, keys, revision, reimages };
                match self.tell_node(*first, &Principal::system("provisioning"), command) {
                    Ok(_) => {
                        self.applied.insert((message.id, first.0, "reserve"));
                        ReactionProgress::Wholly
                    }
                    Err(node::Rejection::NotSchedulable { .. } | node::Rejection::NotEnoughGpus { .. }) => {
                        ReactionProgress::Partly(rest.to_vec(), suggestion.clone())
                    }
                    Err(other) => panic!("{other}"),
                }
            }
        }
    }

    /// The worker reads the tenant and the allocation, and sends the resolved keys to the allocation.
    fn resolve_logins(&mut self, message: &BusMessage, id: AllocationId, user_id: &UserId) {
        let chosen = self.allocations[&id].ssh_access().chosen;
        let Some(tenant) = self.tenants.get(user_id) else { return };
        let (keys, logins_revision) = (tenant.authorized_keys(chosen.as_deref()), tenant.logins_revision);
        if self.first(message, id.0, "") {
            let command = allocation::Fact::LoginsResolved { chosen, keys, logins_revision };
            self.tell_allocation(id, &Principal::system("provisioning"), command).unwrap();
            self.applied.insert((message.id, id.0, ""));
        }
    }

    /// The worker reads the allocation, and sends its keys to the node.
    fn tell_logins(&mut self, message: &BusMessage, id: AllocationId, node_id: NodeId) {
        let logins = self.allocations[&id].ssh_access();
        if self.first(message, node_id.0, "") {
            let command =
                node::Instruction::ReconcileLogins { allocation_id: id, revision: logins.revision, keys: logins.keys };
            self.tell_node(node_id, &Principal::system("provisioning"), command).unwrap();
            self.applied.insert((message.id, node_id.0, ""));
        }
    }

    fn conclude(&mut self, message: &BusMessage, id: AllocationId, fact: allocation::Fact) -> ReactionProgress {
        // Each conclusion has an id of its own: a restarted placement may conclude differently, and must be applied.
        let name = fact.tag();
        if self.first(message, id.0, name) {
            self.tell_allocation(id, &Principal::system("provisioning"), fact).unwrap();
            self.applied.insert((message.id, id.0, name));
        }
        ReactionProgress::Wholly
    }
}
