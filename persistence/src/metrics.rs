//! Metrics of this crate, and of those above it.

use prometheus::Registry;
use prometheus::core::Collector;

/// A metric, once the registry has it.
///
/// # Errors
/// Where the metric is invalid, or the registry has one of its name.
pub fn registered<M: Collector + Clone + 'static>(
    registry: &Registry,
    metric: prometheus::Result<M>,
) -> prometheus::Result<M> {
    let metric = metric?;
    registry.register(Box::new(metric.clone())).map(|()| metric)
}
