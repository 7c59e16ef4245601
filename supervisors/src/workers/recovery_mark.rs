//! Raises the recovery mark of the database and publishes it, and ends this member where another database has a later incarnation.

use super::WorkerDependencies;
use crate::cluster::bus::Bus;
use crate::cluster::recovery_stream::{self, PublishedMark};
use crate::restore_gate;
use crate::startup::Stages;
use crate::startup::membership::Supersession;
use crate::supervisor::{WorkerTask, task};
use chrono::Utc;
use futures::StreamExt as _;
use persistence::RecoveryMarks;
use persistence::envelope_encryption::KeyRing;
use persistence::recovery_mark::RecoveryMark;
use prometheus::{Gauge, Registry};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// What is committed within it before a crash is not covered by a mark.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { registry, storage, membership, .. } = &parts.stages;
    let publisher = MarkPublisher {
        marks: RecoveryMarks::new(storage.pool.clone()),
        ring: Arc::clone(&storage.ring),
        bus: membership.bus.clone(),
        member: membership.view.me.name.clone(),
        superseded: membership.superseded.clone(),
        published_at: published_at(registry)?,
    };
    Ok(task(&Arc::new(publisher), |publisher| async move { publisher.run().await }))
}

fn published_at(registry: &Registry) -> Result<Gauge, prometheus::Error> {
    let gauge = Gauge::new(
        "recovery_mark_published_timestamp_seconds",
        "When this member last published how far the database's commits have come; 0: not since its start.",
    )?;
    registry.register(Box::new(gauge.clone())).map(|()| gauge)
}

struct MarkPublisher {
    marks: RecoveryMarks,
    ring: Arc<KeyRing>,
    bus: Bus,
    member: String,
    superseded: Supersession,
    published_at: Gauge,
}

impl MarkPublisher {
    async fn run(&self) -> anyhow::Result<()> {
        let mut ticker = interval(INTERVAL);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut others = recovery_stream::subscribe(self.bus.client()).await?;
        let mut own = None;
        let mut has_stream = false;
        loop {
            tokio::select! {
                _ = ticker.tick() => {
                    // What fails is retried in the next round; the age of the last success is a metric.
                    match self.marks.raise().await {
                        Ok(mark) => {
                            own = Some(mark);
                            has_stream = self.publish(&mark, has_stream).await;
                        }
                        Err(error) => tracing::debug!(%error, "the recovery mark was not raised"),
                    }
                }
                message = others.next() => {
                    let Some(message) = message else { anyhow::bail!("the subscription ended") };
                    let published = PublishedMark::open(&self.ring, &message.payload);
                    let finding = own.as_ref().zip(published).and_then(|(own, it)| restore_gate::superseded(own, &it));
                    if let Some(finding) = finding {
                        tracing::error!(%finding, "this member ends");
                        self.superseded.report(finding);
                    }
                }
            }
        }
    }

    /// Returns whether the stream is there.
    async fn publish(&self, mark: &RecoveryMark, has_stream: bool) -> bool {
        if !self.bus.is_connected() {
            return false;
        }
        let publishing = async {
            if !has_stream {
                recovery_stream::make(self.bus.client(), self.bus.stream_copies()).await?;
            }
            let mark = PublishedMark::new(mark, &self.member, Utc::now());
            recovery_stream::publish(self.bus.client(), &self.ring, &mark).await
        };
        match publishing.await {
            Ok(()) => {
                self.published_at.set(Utc::now().timestamp_millis() as f64 / 1000.0);
                true
            }
            Err(error) => {
                tracing::debug!(error = format!("{error:#}"), "the recovery mark was not published");
                false
            }
        }
    }
}
