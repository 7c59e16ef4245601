//! The upper floor: what follows from the entities together, as the reaction to each event, invariants across entities, and the placement of
//! allocations on nodes.

pub mod invariants;
pub mod notification;
pub mod placement;
pub mod reactions;
