//! The lanes of the committer and of the loader: each is a worker, so that one that fails is restarted alone.

use super::WorkerDependencies;
use crate::supervisor::{WorkerTask, task};
use persistence::{Committer, Loader};

pub(super) fn committer(parts: &WorkerDependencies, lane: usize) -> anyhow::Result<WorkerTask> {
    let run = move |committer: Committer| async move {
        committer.run_lane(lane).await;
        // The committer was closed: the supervisor stops this worker next.
        std::future::pending().await
    };
    Ok(task(&parts.stages.storage.committer, run))
}

pub(super) fn loader(parts: &WorkerDependencies, lane: usize) -> anyhow::Result<WorkerTask> {
    let run = move |loader: Loader| async move {
        loader.run_lane(lane).await;
        anyhow::bail!("its queue is gone")
    };
    Ok(task(&parts.stages.storage.loader, run))
}
