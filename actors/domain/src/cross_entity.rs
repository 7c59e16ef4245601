//! The upper floor: what follows from the entities together, as the reaction to each event, the order of a flow over several entities,
//! invariants across entities, and the placement of allocations on nodes.

pub mod choreography;
pub mod invariants;
pub mod notification;
pub mod placement;
mod reactions;
