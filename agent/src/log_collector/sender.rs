//! Pushes the spool's batches, oldest first, until the gateway has answered for each.

use super::entry::{Line, NodeLabels, push_body};
use super::gateway::{Gateway, PushOutcome, TokenError};
use super::{CollectorConfig, CollectorError, Shared};
use crate::chain;
use crate::full_jitter::Backoff;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

const RETRY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// A refused batch is split into at most so many pushes; what is refused then is dropped together.
const SPLIT_PUSHES: usize = 64;

pub(super) struct Sender {
    shared: Arc<Shared>,
    gateway: Gateway,
    labels: NodeLabels,
    backoff: Backoff,
    /// Since when the gateway takes nothing.
    outage: Option<Instant>,
}

impl Sender {
    pub(super) fn new(config: &CollectorConfig, shared: Arc<Shared>) -> Result<Self, CollectorError> {
        let own_name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        let host_name = own_name.filter(|name| !name.is_empty()).unwrap_or_else(|| "unknown".to_owned());
        Ok(Self {
            shared,
            gateway: Gateway::new(config)?,
            labels: NodeLabels { node_id: config.agent.node_id, host_name },
            backoff: Backoff::new(RETRY.0, RETRY.1),
            outage: None,
        })
    }

    /// # Errors
    /// Where the node was removed.
    pub(super) async fn run(mut self) -> Result<(), CollectorError> {
        loop {
            let found = self.shared.spool().oldest();
            let (next, lost) = match found {
                Ok(found) => found,
                Err(error) => {
                    warn!(error_code = "node_storage", error = chain(&error), "the spool cannot be read");
                    sleep(RETRY.1).await;
                    continue;
                }
            };
            self.shared.count_lost(lost, "a file of the spool cannot be read");
            let Some((number, batch)) = next else {
                self.shared.filled.notified().await;
                continue;
            };
            self.deliver(&batch.lines).await?;
            self.settle(number, &batch).await;
        }
    }

    /// Pushes until each line is accepted or refused. A refused batch is halved, so that one bad line takes few others with it.
    async fn deliver(&mut self, lines: &[Line]) -> Result<(), CollectorError> {
        let mut parts = VecDeque::from([lines]);
        let mut pushes = 0;
        while let Some(part) = parts.pop_front() {
            if part.is_empty() {
                continue;
            }
            pushes += 1;
            let Err((status, message)) = self.push(part).await? else { continue };
            if part.len() > 1 && pushes < SPLIT_PUSHES {
                let (first, second) = part.split_at(part.len() / 2);
                parts.push_front(second);
                parts.push_front(first);
            } else {
                let why = format!("the log gateway refuses them with {status}: {message}");
                self.shared.count_lost(part.len() as u64, &why);
            }
        }
        Ok(())
    }

    /// Pushes until there is an answer for these lines: `Err` with the gateway's refusal.
    async fn push(&mut self, lines: &[Line]) -> Result<Result<(), (reqwest::StatusCode, String)>, CollectorError> {
        loop {
            let (retry_after, why) = match self.gateway.push(push_body(lines, &self.labels)).await {
                Ok(PushOutcome::Accepted) => {
                    self.answered();
                    return Ok(Ok(()));
                }
                Ok(PushOutcome::Refused { status, message }) => {
                    self.answered();
                    return Ok(Err((status, message)));
                }
                Err(TokenError::NodeRemoved) => return Err(CollectorError::NodeRemoved),
                Ok(PushOutcome::Later { retry_after, why }) | Err(TokenError::Later { retry_after, why }) => {
                    (retry_after, why)
                }
            };
            // Once for an outage: these lines are for the gateway too.
            if self.outage.is_none() {
                self.outage = Some(Instant::now());
                warn!(
                    error_code = "log_gateway",
                    why, "the log gateway takes no lines; they are spooled until it does"
                );
            }
            sleep(self.backoff.next(rand::random(), retry_after)).await;
        }
    }

    fn answered(&mut self) {
        self.backoff.reset();
        if let Some(since) = self.outage.take() {
            info!(seconds = since.elapsed().as_secs(), "the log gateway takes lines again");
        }
    }

    async fn settle(&mut self, number: u64, batch: &super::spool::Batch) {
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        loop {
            let settled = self.shared.spool().settle(number, batch);
            match settled {
                Ok(()) => return,
                Err(error) => {
                    warn!(error_code = "node_storage", error = chain(&error), "the cursor cannot be saved yet");
                }
            }
            sleep(backoff.next(rand::random(), None)).await;
        }
    }
}
