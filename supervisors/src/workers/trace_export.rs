//! The worker that sends spans to the collector ([`crate::traces`]).

use super::WorkerDependencies;
use crate::supervisor::{WorkerTask, task};

/// `None` where no collector is configured.
pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<Option<WorkerTask>> {
    let traces = parts.stages.traces.as_ref();
    Ok(traces.map(|traces| task(traces, |traces| async move { traces.run().await })))
}
