//! What this service and the payment processor tell each other.

pub mod errands;
pub mod reconciliation;
#[cfg(test)]
mod testing;
pub mod told;
pub mod webhooks;
