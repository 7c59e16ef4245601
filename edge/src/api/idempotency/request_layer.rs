//! The idempotency context of a POST with an `Idempotency-Key`.
//!
//! ```text
//! layer ──▶ caller known, key read ──▶ body read ──▶ stored? ──yes──▶ the stored answer
//!   ▲                                                  └──no──▶ handler: resolve, ask ──▶ answer
//!   └──────────────── stores the answer before it is sent ◀──────────────────────────────┘
//! ```
//!
//! A command's commit stores its id, digest and reply ([`domain::commit::CommandRecord`]); the response is added to that row. Where the
//! process ends in between, a repetition is answered from the state machine's reply, and resolves nothing. A refusal, or a response to a
//! request that changed nothing, is a row of its own under the same id; a commit and such a row exclude each other.

use actors::CommandKey;
use axum::extract::{FromRequest, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use domain::CommandId;
use persistence::idempotency::{IdempotencyRecord, IdempotencyRecords};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::stored_response::{self, is_final, read};
use super::{COUNTERS, IDEMPOTENCY_REPLAYED, RequestLine, answer_not_stored, in_progress, key_reused};
use crate::app_state::AppState;
use crate::http::error::ApiError;
use crate::http::request_body::{Json, JsonOrDefault, NoBody};

/// The state that the layer, the extractors and the handler of one request share. Empty where the request has no key.
#[derive(Clone, Default)]
pub(crate) struct IdempotencyContext(Arc<IdempotencyState>);

#[derive(Default)]
struct IdempotencyState {
    caller: OnceLock<CallerKey>,
    started: OnceLock<KeyedCommand>,
    committed: AtomicBool,
    answer_changes: AtomicBool,
}

/// Known once the caller is.
struct CallerKey {
    id: CommandId,
    line: RequestLine,
    answers: IdempotencyRecords,
}

/// Known once the body is read, where no answer is stored.
struct KeyedCommand {
    command: CommandKey,
    /// The machine's reply, where an earlier request with this key was committed and its answer was not stored.
    earlier_reply: Option<String>,
}

impl IdempotencyContext {
    pub(crate) fn set_caller(&self, id: CommandId, line: RequestLine, app: &AppState) {
        // A request has one caller.
        let _ = self.0.caller.set(CallerKey { id, line, answers: app.reads.idempotency_records() });
    }

    /// The digest of the request; `None` where it has no key.
    fn digest(&self, body: &impl Serialize) -> Result<Option<[u8; 32]>, ApiError> {
        self.0.caller.get().map(|by| by.line.digest(body)).transpose()
    }

    /// Replays the stored response, if there is one.
    async fn start(&self, digest: Option<[u8; 32]>) -> Result<Option<Response>, ApiError> {
        let (Some(CallerKey { id, answers, .. }), Some(digest)) = (self.0.caller.get(), digest) else {
            return Ok(None);
        };
        let earlier = answers.find(*id).await?;
        let earlier_reply = match earlier {
            Some(stored) if stored.digest != digest => return Err(key_reused()),
            Some(IdempotencyRecord { answer: Some(answer), .. }) => {
                COUNTERS.replays_served.inc();
                return stored_response::replay(&answer).map(Some);
            }
            Some(IdempotencyRecord { reply: None, .. }) => return Err(answer_not_stored()),
            Some(IdempotencyRecord { reply, .. }) => reply,
            None => None,
        };
        let _ = self.0.started.set(KeyedCommand { command: CommandKey::repeatable(*id, digest), earlier_reply });
        Ok(None)
    }

    /// The command's key; `None` where the request has none.
    ///
    /// # Errors
    /// `internal_error` where the handler of a keyed route does not read its body through [`Idempotent`].
    pub(crate) fn command(&self) -> Result<Option<CommandKey>, ApiError> {
        match (self.0.caller.get(), self.0.started.get()) {
            (None, _) => Ok(None),
            (Some(_), Some(started)) => Ok(Some(started.command.clone())),
            (Some(_), None) => {
                Err(ApiError::internal("the handler of a keyed route does not read its body through Once"))
            }
        }
    }

    /// The machine's reply to an earlier request with this key, which was committed.
    pub(crate) fn earlier_reply(&self) -> Option<&str> {
        self.0.started.get().and_then(|started| started.earlier_reply.as_deref())
    }

    /// A command was committed under the key, by this request or an earlier one: whatever is answered is its answer.
    pub(crate) fn mark_committed(&self) {
        self.0.committed.store(true, Ordering::Release);
    }

    /// The response to a committed command is computed again at each repetition. A refusal that commits nothing is stored all the same.
    pub(crate) fn answer_changes(&self) {
        self.0.answer_changes.store(true, Ordering::Release);
    }

    async fn finish(&self, response: Response) -> Response {
        let (Some(by), Some(started)) = (self.0.caller.get(), self.0.started.get()) else { return response };
        if response.headers().contains_key(IDEMPOTENCY_REPLAYED) {
            COUNTERS.replays_served.inc();
        }
        if !is_final(&response) {
            return response;
        }
        self.store(by, started, response).await.unwrap_or_else(ApiError::into_response)
    }

    /// Stores the answer and gives it, or the one that is stored already.
    async fn store(&self, by: &CallerKey, started: &KeyedCommand, response: Response) -> Result<Response, ApiError> {
        let committed = self.0.committed.load(Ordering::Acquire);
        if committed && self.0.answer_changes.load(Ordering::Acquire) {
            return Ok(response);
        }
        let stored_response::BufferedResponse { kind, text, response } = read(response).await?;
        let is_stored = match (committed, &text) {
            (true, Some(text)) => by.answers.store_for_committed(by.id, text).await?,
            // A repetition is answered from the machine's reply.
            (true, None) => true,
            (false, text) => by.answers.store_for_uncommitted(by.id, started.command.digest, text.as_deref()).await?,
        };
        COUNTERS.stored(&kind, is_stored);
        if is_stored { Ok(response) } else { self.stored_by_another(by, started, committed, response).await }
    }

    /// Another request with this key stored its answer first: that answer is the one. The request that was carried out sends it as its own, even if
    /// a repetition, which read the machine's reply, stored it.
    async fn stored_by_another(
        &self,
        by: &CallerKey,
        started: &KeyedCommand,
        committed: bool,
        response: Response,
    ) -> Result<Response, ApiError> {
        match by.answers.find(by.id).await? {
            Some(stored) if stored.digest != started.command.digest => Err(key_reused()),
            Some(IdempotencyRecord { answer: Some(answer), .. }) => {
                let is_repetition = !committed || response.headers().contains_key(IDEMPOTENCY_REPLAYED);
                let mut replay = stored_response::replay(&answer)?;
                if is_repetition {
                    COUNTERS.replays_served.inc();
                } else {
                    replay.headers_mut().remove(IDEMPOTENCY_REPLAYED);
                }
                Ok(replay)
            }
            // Its command is committed, and its response is not stored yet.
            Some(IdempotencyRecord { reply: Some(_), .. }) if !committed => Err(in_progress()),
            Some(IdempotencyRecord { reply: None, .. }) if !committed => Err(answer_not_stored()),
            // Its day has passed.
            Some(_) | None => Ok(response),
        }
    }
}

/// The layer of the routes that store their answers.
pub(crate) async fn store_response(mut request: Request, next: Next) -> Response {
    let context = IdempotencyContext::default();
    request.extensions_mut().insert(context.clone());
    let response = next.run(request).await;
    context.finish(response).await
}

/// The body `E` of a request whose response is stored. A repetition ends here, with the stored response: whatever a handler resolves comes
/// later.
#[derive(Debug)]
pub(crate) struct Idempotent<E>(pub(crate) E);

/// Why a handler does not run.
pub(crate) enum HandlerSkipped {
    Refused(ApiError),
    /// The request was answered before.
    Answered(Response),
}

impl IntoResponse for HandlerSkipped {
    fn into_response(self) -> Response {
        match self {
            Self::Refused(error) => error.into_response(),
            Self::Answered(response) => response,
        }
    }
}

impl<E> FromRequest<AppState> for Idempotent<E>
where
    E: FromRequest<AppState, Rejection = ApiError> + Content + Send,
{
    type Rejection = HandlerSkipped;

    async fn from_request(request: Request, app: &AppState) -> Result<Self, HandlerSkipped> {
        let context = request.extensions().get::<IdempotencyContext>().cloned().unwrap_or_default();
        let body = E::from_request(request, app).await.map_err(HandlerSkipped::Refused)?;
        let digest = context.digest(body.content()).map_err(HandlerSkipped::Refused)?;
        match context.start(digest).await {
            Ok(None) => Ok(Self(body)),
            Ok(Some(answer)) => Err(HandlerSkipped::Answered(answer)),
            Err(error) => Err(HandlerSkipped::Refused(error)),
        }
    }
}

/// The content of a body, for the digest of its request.
pub(crate) trait Content {
    type Of: Serialize;

    fn content(&self) -> &Self::Of;
}

impl<T: Serialize> Content for Json<T> {
    type Of = T;

    fn content(&self) -> &T {
        &self.0
    }
}

impl<T: Serialize> Content for JsonOrDefault<T> {
    type Of = T;

    fn content(&self) -> &T {
        &self.0
    }
}

impl Content for NoBody {
    type Of = ();

    fn content(&self) -> &() {
        &()
    }
}
