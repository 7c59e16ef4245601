//! The exchange with the payment processor: calls to it, webhooks from it, reconciliation with it.

pub mod payment_updater;
pub mod processor_calls;
pub mod processor_events;
pub mod reconciliation;
#[cfg(test)]
mod testing;
