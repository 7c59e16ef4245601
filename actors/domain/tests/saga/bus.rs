//! The bus and the workers: at least once, in any order, at any time.

use crate::world::{Delivery, World};
use domain::allocation;
use domain::billing_account;
use domain::event::Reaction;
use domain::machine::Command as _;
use domain::node;
use domain::placement::{self, Candidate, Wanted};
use domain::tenant::{self, AskedScopes};
use domain::{AllocationId, Event, NodeId, Principal};
use uuid::Uuid;

/// A message on its way, and how far its reaction has come.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) id: u64,
    pub(crate) event: Event,
    pub(crate) placing: Placing,
}

/// A placement takes several steps, between which anything may happen.
#[derive(Clone, Debug)]
pub(crate) enum Placing {
    Admit,
    Ask { nodes: Vec<NodeId>, suggestion: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Done {
    Wholly,
    /// More is to be done.
    Partly(Vec<NodeId>, String),
}

impl World {
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

    /// Delivers the oldest message of that subject until its reaction is complete; `again` leaves it on its way.
    pub(crate) fn deliver_a(&mut self, subject: &str, again: bool) {
        let oldest = |bus: &[Message]| bus.iter().position(|message| message.event.subject() == subject);
        let id = oldest(&self.bus).map(|which| self.bus[which].id).expect("a message of that subject");
        loop {
            let which = self.bus.iter().position(|message| message.id == id).expect("it is on its way");
            self.deliver(which, again);
            match self.bus.iter().find(|message| message.id == id) {
                Some(Message { placing: Placing::Ask { .. }, .. }) => {}
                Some(Message { placing: Placing::Admit, .. }) | None => return,
            }
        }
    }

    pub(crate) fn deliver(&mut self, which: usize, again: bool) {
        if self.bus.is_empty() {
            return;
        }
        let message = self.bus.remove(which % self.bus.len());
        match self.react(&message) {
            Done::Wholly if again => self.bus.push(Message { placing: Placing::Admit, ..message }),
            Done::Wholly => {}
            Done::Partly(nodes, suggestion) => {
                self.bus.push(Message { placing: Placing::Ask { nodes, suggestion }, ..message });
            }
        }
    }

    /// True the first time, or whenever nothing counts.
    fn first(&mut self, message: &Message, entity: Uuid, command: &'static str) -> bool {
        self.delivery != Delivery::Once || !self.applied.contains(&(message.id, entity, command))
    }

    fn react(&mut self, message: &Message) -> Done {
        let worker = Principal::system("provisioning");
        match message.event.reaction() {
            // Terminal sessions have a world of their own: no saga waits for them.
            // Nobody pays in this world.
            Reaction::Payment(..) | Reaction::AskProcessor(_) | Reaction::HeedProcessor(_) => {
                panic!("no payment was made")
            }
            Reaction::Nothing
            | Reaction::CloseTerminals { .. }
            | Reaction::CutTerminals { .. }
            | Reaction::Terminal(..) => {}
            Reaction::Place(allocation_id) => return self.place(message, allocation_id),
            Reaction::Node(id, command) => {
                if self.first(message, id.0, "") {
                    self.tell_node(id, &worker, command).expect("the saga's orders are never refused");
                    self.applied.insert((message.id, id.0, ""));
                }
            }
            Reaction::Allocation(id, command) => {
                if self.first(message, id.0, "") {
                    self.tell_allocation(id, &worker, command).expect("the saga's facts are never refused");
                    self.applied.insert((message.id, id.0, ""));
                }
            }
            Reaction::Billing { holder, command } => {
                if self.first(message, Uuid::max(), "") {
                    self.tell_account(&holder, command).expect("the saga's facts are never refused");
                    self.applied.insert((message.id, Uuid::max(), ""));
                }
            }
            Reaction::ResolveLogins { allocation_id, user_id } => self.resolve_logins(message, allocation_id, &user_id),
            Reaction::TellLogins { allocation_id, node_id } => self.tell_logins(message, allocation_id, node_id),
            Reaction::Tenant { user_id, command } => {
                if self.first(message, Uuid::nil(), "") {
                    self.tell_tenant(&user_id, command).unwrap();
                    self.applied.insert((message.id, Uuid::nil(), ""));
                }
            }
        }
        Done::Wholly
    }

    /// One step of the provisioning worker: count, or ask one node, or say how it went. It reads the allocation once, when it
    /// begins; what happens meanwhile it does not see.
    fn place(&mut self, message: &Message, id: AllocationId) -> Done {
        let asked = self.allocations[&id].asked.clone();
        let logins = self.allocations[&id].logins();
        match &message.placing {
            Placing::Admit => {
                let hold = billing_account::Command::Hold {
                    holder: asked.holder(),
                    allocation_id: id,
                    user_id: asked.user_id.clone(),
                    price: asked.price.clone(),
                    gpu_count: asked.gpu_count,
                };
                if let Err(refused) = self.tell_account(&asked.holder(), hold) {
                    self.reached.insert("account without money".to_owned());
                    return self.conclude(
                        message,
                        id,
                        allocation::Command::Unaffordable { message: refused.to_string() },
                    );
                }
                let command = tenant::Command::Admit {
                    user_id: asked.user_id.clone(),
                    allocation_id: id,
                    scopes: AskedScopes { org_id: None, project_id: None, plan: None },
                    logins_revision: logins.as_of,
                };
                if self.first(message, Uuid::nil(), "admit") {
                    match self.tell_tenant(&asked.user_id, command) {
                        Ok(()) => {
                            self.applied.insert((message.id, Uuid::nil(), "admit"));
                        }
                        Err(tenant::Rejection::OverQuota { limit }) => {
                            self.reached.insert("tenant over quota".to_owned());
                            return self.conclude(message, id, allocation::Command::OverQuota { limit });
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
                let candidates: Vec<_> = self.nodes.values().map(|node| Candidate::of(node, id)).collect();
                let wanted = Wanted {
                    node_id: asked.node_id,
                    region_code: asked.region_code.as_deref(),
                    gpu_count: asked.gpu_count,
                };
                let nodes = placement::order(&candidates, &wanted, u128::from(message.id));
                Done::Partly(nodes, placement::suggestion(&candidates, &wanted))
            }
            Placing::Ask { nodes, suggestion } => {
                let Some((first, rest)) = nodes.split_first() else {
                    let suggestion = Some(suggestion.clone());
                    return self.conclude(message, id, allocation::Command::NoCapacity { suggestion });
                };
                if !self.first(message, first.0, "reserve") {
                    return Done::Wholly;
                }
                let (keys, revision) = (logins.keys, logins.revision);
                let command = node::Command::Reserve { allocation_id: id, gpu_count: asked.gpu_count, keys, revision };
                match self.tell_node(*first, &Principal::system("provisioning"), command) {
                    Ok(_) => {
                        self.applied.insert((message.id, first.0, "reserve"));
                        Done::Wholly
                    }
                    Err(node::Rejection::NotSchedulable { .. } | node::Rejection::NotEnoughGpus { .. }) => {
                        Done::Partly(rest.to_vec(), suggestion.clone())
                    }
                    Err(other) => panic!("{other}"),
                }
            }
        }
    }

    /// The worker reads the tenant and the allocation, and says what the one comes to for the other.
    fn resolve_logins(&mut self, message: &Message, id: AllocationId, user_id: &str) {
        let chosen = self.allocations[&id].logins().chosen;
        let Some(tenant) = self.tenants.get(user_id) else { return };
        let (keys, logins_revision) = (tenant.logins(chosen.as_deref()), tenant.logins_revision);
        if self.first(message, id.0, "") {
            let command = allocation::Command::AdoptLogins { chosen, keys, logins_revision };
            self.tell_allocation(id, &Principal::system("provisioning"), command).unwrap();
            self.applied.insert((message.id, id.0, ""));
        }
    }

    /// The worker reads the allocation, and tells its node.
    fn tell_logins(&mut self, message: &Message, id: AllocationId, node_id: NodeId) {
        let logins = self.allocations[&id].logins();
        if self.first(message, node_id.0, "") {
            let command =
                node::Command::ReconcileLogins { allocation_id: id, revision: logins.revision, keys: logins.keys };
            self.tell_node(node_id, &Principal::system("provisioning"), command).unwrap();
            self.applied.insert((message.id, node_id.0, ""));
        }
    }

    fn conclude(&mut self, message: &Message, id: AllocationId, command: allocation::Command) -> Done {
        // Each conclusion under its own id: a placement that begins anew may conclude differently, and must be heard.
        let name = command.name();
        if self.first(message, id.0, name) {
            self.tell_allocation(id, &Principal::system("provisioning"), command).unwrap();
            self.applied.insert((message.id, id.0, name));
        }
        Done::Wholly
    }
}
