//! Forwarding of commands between members: a request on the shard's subject, to the process that owns the shard, and its answer.

use super::authentication::{HEADER, MacInput, MessageOrigin, MessagePurpose, MessageStamp};
use super::bus::Bus;
use actors::Directory;
use actors::shell_dependencies::{Remote, RemoteError};
use anyhow::bail;
use async_nats::{HeaderMap, StatusCode};
use dashmap::DashMap;
use domain::Shard;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

/// Commands from other members that are processed at once, per shard. More wait in the subscription, and above its bound NATS drops
/// them, which the sender sees as a timeout.
const MAX_CONCURRENT: usize = 256;

/// Messages that wait for one sender; at most one of them is the owner's.
const REPLY_BUFFER: usize = 8;

/// The requests of this process that are in flight.
pub(super) struct PendingRequests {
    /// The prefix of the answers' subjects; only this process's credentials may subscribe to them.
    prefix: String,
    waiting: DashMap<u128, mpsc::Sender<async_nats::Message>>,
    receives: AtomicBool,
}

impl PendingRequests {
    pub(super) fn new(prefix: String) -> Self {
        Self { prefix, waiting: DashMap::new(), receives: AtomicBool::new(false) }
    }
}

/// One request in flight; removed when it is dropped.
struct PendingRequest<'a> {
    requests: &'a PendingRequests,
    token: u128,
    answers: mpsc::Receiver<async_nats::Message>,
}

impl<'a> PendingRequest<'a> {
    fn of(requests: &'a PendingRequests) -> Self {
        // Random, so that a client that has not seen the request cannot answer it.
        let (token, (sender, answers)) = (rand::random(), mpsc::channel(REPLY_BUFFER));
        requests.waiting.insert(token, sender);
        Self { requests, token, answers }
    }

    fn reply(&self) -> String {
        format!("{}.{:032x}", self.requests.prefix, self.token)
    }
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        self.requests.waiting.remove(&self.token);
    }
}

/// Marks that answers are received, while it lives.
struct ReceivingGuard<'a>(&'a AtomicBool);

impl Drop for ReceivingGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Bus {
    /// Receives the answers to this process's requests.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn receive_answers(&self) -> anyhow::Result<()> {
        let requests = &*self.requests;
        let mut answers = self.client().subscribe(format!("{}.*", requests.prefix)).await?;
        // The server has the subscription before the first request is sent.
        self.client().flush().await?;
        let _receiving = ReceivingGuard(&requests.receives);
        requests.receives.store(true, Ordering::SeqCst);
        while let Some(message) = answers.next().await {
            let token = message.subject.rsplit_once('.').and_then(|(_, token)| u128::from_str_radix(token, 16).ok());
            if let Some(waiting) = token.and_then(|token| requests.waiting.get(&token)) {
                let _ = waiting.try_send(message);
            }
        }
        bail!("the subscription ended")
    }

    /// Serves commands for `shard` until `until` is cancelled, and then drains the subscription. Where it ends earlier, it cancels `until`.
    pub fn serve_shard(&self, shard: Shard, directory: Directory, until: CancellationToken) {
        let bus = self.clone();
        let permits = Arc::new(Semaphore::new(MAX_CONCURRENT));
        // A task of its own: without a connection the subscription waits, and must not block the caller.
        tokio::spawn(async move {
            // However the task ends, the token shows it, and the owner starts it again.
            let _over = until.clone().drop_guard();
            let subscribed = tokio::select! {
                () = until.cancelled() => return,
                subscribed = bus.client().subscribe(subject_of(shard)) => subscribed,
            };
            let mut commands = match subscribed {
                Ok(commands) => commands,
                Err(error) => {
                    return tracing::warn!(%error, %shard, "commands for the shard cannot be received; trying again");
                }
            };
            let mut draining = false;
            loop {
                let message = tokio::select! {
                    () = until.cancelled(), if !draining => {
                        draining = true;
                        if commands.drain().await.is_err() {
                            break;
                        }
                        continue;
                    }
                    message = commands.next() => message,
                };
                let Some(message) = message else { break };
                let Some(request) = bus.accept_request(message).await else { continue };
                let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { break };
                let (bus, directory) = (bus.clone(), directory.clone());
                tokio::spawn(async move {
                    let in_transit = bus.members.in_transit(&request.origin);
                    let answer = directory.serve(&request.payload, in_transit).await;
                    bus.answer(&request, answer).await;
                    drop(permit);
                });
            }
        });
    }

    /// An authentic request that is addressed to this process. A sender that addressed another process, since it does not know the owner
    /// yet, gets an empty answer.
    async fn accept_request(&self, message: async_nats::Message) -> Option<ReceivedRequest> {
        let reply = message.reply?;
        let checked = MacInput {
            purpose: MessagePurpose::Request,
            subject: &message.subject,
            reply: Some(&reply),
            payload: &message.payload,
        };
        let header = message.headers.as_ref().and_then(|headers| headers.get(HEADER)).map(|value| value.as_str());
        let request = |origin| ReceivedRequest { origin, reply: reply.to_string(), payload: message.payload.to_vec() };
        match self.members.check_request(&checked, header) {
            Ok((origin, true)) => Some(request(origin)),
            Ok((origin, false)) => {
                self.answer(&request(origin), Vec::new()).await;
                None
            }
            Err(_) => None,
        }
    }

    pub(super) async fn answer(&self, request: &ReceivedRequest, payload: Vec<u8>) {
        let mut headers = HeaderMap::new();
        if let MessageOrigin::Stamped(MessageStamp { sender, tag, .. }) = &request.origin {
            let message = MacInput {
                purpose: MessagePurpose::Answer { to: *tag },
                subject: &request.reply,
                reply: None,
                payload: &payload,
            };
            self.stamp(&message, Some(*sender), &mut headers);
        }
        if let Err(error) = self.client().publish_with_headers(request.reply.clone(), headers, payload.into()).await {
            tracing::warn!(%error, "a reply could not be sent; its caller retries");
        }
    }
}

/// An accepted request of another member.
pub(super) struct ReceivedRequest {
    pub(super) origin: MessageOrigin,
    pub(super) reply: String,
    pub(super) payload: Vec<u8>,
}

impl Remote for Bus {
    fn request(
        &self,
        shard: Shard,
        payload: Vec<u8>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Vec<u8>, RemoteError>> {
        async move {
            if !self.is_connected() {
                return Err(RemoteError::Unreachable("there is no connection to NATS".to_owned()));
            }
            let mut owners = self.view.owners();
            let owner = owners.borrow_and_update().of(shard);
            let Some(owner) = owner.filter(|owner| owner.member != self.view.me.id) else {
                return Err(RemoteError::NoResponders);
            };
            if !self.requests.receives.load(Ordering::SeqCst) {
                return Err(RemoteError::NoResponders);
            }
            let mut waiting = PendingRequest::of(&self.requests);
            let (subject, reply, mut headers) = (subject_of(shard), waiting.reply(), HeaderMap::new());
            let request = MacInput {
                purpose: MessagePurpose::Request,
                subject: &subject,
                reply: Some(&reply),
                payload: &payload,
            };
            let Some(to) = self.stamp(&request, Some(owner.member), &mut headers) else {
                return Err(RemoteError::Unreachable("there is no key for messages between members".to_owned()));
            };
            let answered = async {
                let client = self.client();
                client
                    .publish_with_reply_and_headers(subject.clone(), reply.clone(), headers, payload.into())
                    .await
                    .map_err(|error| RemoteError::Unreachable(error.to_string()))?;
                loop {
                    let Some(message) = waiting.answers.recv().await else { return Err(RemoteError::TimedOut) };
                    let no_responders = message.status == Some(StatusCode::NO_RESPONDERS);
                    if !no_responders && !self.is_authentic(MessagePurpose::Answer { to }, &message) {
                        continue;
                    }
                    if no_responders || message.payload.is_empty() {
                        self.request_ownership_read();
                        return Err(RemoteError::NoResponders);
                    }
                    return Ok(message.payload.to_vec());
                }
            };
            let lost = owners.wait_for(|now| now.of(shard) != Some(owner)).map(drop);
            tokio::select! {
                biased;
                answer = answered => answer,
                () = lost => Err(RemoteError::OwnerChanged),
                () = tokio::time::sleep(timeout) => Err(RemoteError::TimedOut),
            }
        }
        .boxed()
    }
}

fn subject_of(shard: Shard) -> String {
    format!("gpuaas.shard.{shard}")
}
