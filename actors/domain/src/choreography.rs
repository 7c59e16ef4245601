//! The upper floor: what follows from the entities together, as the reaction to each event, invariants across entities, the placement of
//! allocations on nodes, and the state machine of each kind.

pub mod invariant;
pub mod kinds;
pub mod notification;
pub mod placement;
pub mod reactions;
