//! The idempotency context of a POST with an `Idempotency-Key`.
//!
//! ```text
//! layer ──▶ caller known, key read ──▶ body read ──▶ handler: resolve, ask ──▶ answer ──▶ follows from the commit's row? ──yes──▶ sent
//!   ▲                                                        └──refused: answered before? ──yes──▶ that answer            │no
//!   └──────────────────────────────────────── stores the answer before it is sent ◀─────────────────────────────────────┘
//! ```
//!
//! A command's commit stores its id, digest and reply, and what was resolved before it ([`domain::commit::CommandRecord`]). A commit under an
//! id that has a row is a duplicate: its reply is the first one's. So nothing is read before a command ([`IdempotentCommand`]), and where the
//! answer follows from the row ([`IdempotencyContext::answer_follows_from_commit`]) nothing is written after it. Any other answer is added
//! to the row; a handler whose command does not find repetitions, since it acts before it, looks for the answer first ([`Idempotent`]).
//! Where the process ends before the answer is stored, a repetition is answered from the state machine's reply, and resolves nothing. A
//! refusal, or a response to a request that changed nothing, is a row of its own under the same id; a commit and such a row exclude each
//! other.

use actors::CommandKey;
use axum::extract::{FromRequest, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use domain::CommandId;
use domain::authz::CallerIdentity;
use persistence::idempotency::{IdempotencyRecord, IdempotencyRecords};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::stored_response::{self, is_final, kind_of, read};
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
    /// The stored answer of an earlier request: this one is answered with it, whatever its handler responds.
    earlier_answer: OnceLock<String>,
    committed: AtomicBool,
    answer_changes: AtomicBool,
    follows_from_commit: AtomicBool,
}

/// Known once the caller is.
struct CallerKey {
    id: CommandId,
    line: RequestLine,
    caller: CallerIdentity,
    answers: IdempotencyRecords,
}

/// Known once the body is read.
struct KeyedCommand {
    command: CommandKey,
    /// The machine's reply, where an earlier request with this key was committed and its answer was not stored.
    earlier_reply: OnceLock<String>,
}

/// What is stored under the key of a request.
enum Earlier {
    Answer(String),
    /// It was committed, and its answer is not stored.
    Reply,
}

impl IdempotencyContext {
    pub(crate) fn set_caller(&self, id: CommandId, line: RequestLine, caller: CallerIdentity, app: &AppState) {
        // A request has one caller.
        let _ = self.0.caller.set(CallerKey { id, line, caller, answers: app.reads.idempotency_records() });
    }

    /// The digest of the request; `None` where it has no key.
    fn digest(&self, body: &impl Serialize) -> Result<Option<[u8; 32]>, ApiError> {
        self.0.caller.get().map(|by| by.line.digest(&by.caller, body)).transpose()
    }

    fn start(&self, digest: Option<[u8; 32]>) {
        if let (Some(by), Some(digest)) = (self.0.caller.get(), digest) {
            let command = CommandKey::repeatable(by.id, digest);
            // A request has one body.
            let _ = self.0.started.set(KeyedCommand { command, earlier_reply: OnceLock::new() });
        }
    }

    /// Looks for an earlier request with this key; its reply is there from then on. `None` where there is none, or the request has no key.
    async fn find_earlier(&self) -> Result<Option<Earlier>, ApiError> {
        let (Some(by), Some(started)) = (self.0.caller.get(), self.0.started.get()) else { return Ok(None) };
        match by.answers.find(by.id).await? {
            None => Ok(None),
            Some(stored) if stored.digest != started.command.digest => Err(key_reused()),
            Some(IdempotencyRecord { answer: Some(answer), .. }) => Ok(Some(Earlier::Answer(answer))),
            Some(IdempotencyRecord { reply: Some(reply), .. }) => {
                let _ = started.earlier_reply.set(reply);
                Ok(Some(Earlier::Reply))
            }
            Some(IdempotencyRecord { reply: None, .. }) => Err(answer_not_stored()),
        }
    }

    /// Replays the stored response, if there is one.
    pub(crate) async fn replay(&self) -> Result<Option<Response>, ApiError> {
        let Some(Earlier::Answer(answer)) = self.find_earlier().await? else { return Ok(None) };
        let response = stored_response::replay(&answer)?;
        let _ = self.0.earlier_answer.set(answer);
        Ok(Some(response))
    }

    /// To be called where the request would be refused before its command: it may have been answered before, when it was not. Returns
    /// the refusal, unless a command was committed under the key; its reply is there from then on. An answer that is stored is sent in
    /// place of the refusal.
    pub(crate) async fn refuse_unless_committed(&self, refusal: ApiError) -> Result<(), ApiError> {
        match self.find_earlier().await? {
            Some(Earlier::Reply) => Ok(()),
            Some(Earlier::Answer(answer)) => {
                let _ = self.0.earlier_answer.set(answer);
                Err(refusal)
            }
            None => Err(refusal),
        }
    }

    /// What was resolved before the command of the earlier request, as it was stored with its commit.
    pub(crate) async fn resolved(&self) -> Result<Option<String>, ApiError> {
        let Some(by) = self.0.caller.get() else { return Ok(None) };
        Ok(by.answers.find(by.id).await?.and_then(|stored| stored.resolved))
    }

    /// The command's key; `None` where the request has none.
    ///
    /// # Errors
    /// `internal_error` where the handler of a keyed route does not read its body through [`Idempotent`].
    pub(crate) fn command(&self) -> Result<Option<CommandKey>, ApiError> {
        match (self.0.caller.get(), self.0.started.get()) {
            (None, _) => Ok(None),
            (Some(_), Some(started)) => Ok(Some(started.command.clone())),
            (Some(_), None) => Err(ApiError::internal(
                "the handler of a keyed route does not read its body through Idempotent or IdempotentCommand",
            )),
        }
    }

    /// The machine's reply to an earlier request with this key, which was committed.
    pub(crate) fn earlier_reply(&self) -> Option<&str> {
        self.0.started.get().and_then(|started| started.earlier_reply.get().map(String::as_str))
    }

    /// A command was committed under the key, by this request or an earlier one: whatever is answered is its answer.
    pub(crate) fn mark_committed(&self) {
        self.0.committed.store(true, Ordering::Release);
    }

    /// The response to a committed command is computed again at each repetition. A refusal that commits nothing is stored all the same.
    pub(crate) fn answer_changes(&self) {
        self.0.answer_changes.store(true, Ordering::Release);
    }

    /// The response to the committed command is a function of what the commit stored: a repetition computes the same one. So it is sent
    /// without a further write. The first repetition stores its response: later ones, on any release, replay it.
    pub(crate) fn answer_follows_from_commit(&self) {
        self.0.follows_from_commit.store(true, Ordering::Release);
    }

    async fn finish(&self, response: Response) -> Response {
        let (Some(by), Some(started)) = (self.0.caller.get(), self.0.started.get()) else { return response };
        if let Some(answer) = self.0.earlier_answer.get() {
            COUNTERS.replays_served.inc();
            return stored_response::replay(answer).unwrap_or_else(ApiError::into_response);
        }
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
        let is_first = committed && !response.headers().contains_key(IDEMPOTENCY_REPLAYED);
        if is_first && self.0.follows_from_commit.load(Ordering::Acquire) {
            COUNTERS.stored(&kind_of(&response), true);
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

/// The body `E` of a request whose command finds repetitions: nothing is read before it. What the handler does before the command is done
/// again at a repetition, and a refusal before the command goes through [`IdempotencyContext::refuse_unless_committed`]. A handler whose
/// permission depends on its body checks it, and looks for the stored response then ([`IdempotencyContext::replay`]).
#[derive(Debug)]
pub(crate) struct IdempotentCommand<E>(pub(crate) E);

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
        let IdempotentCommand(body) =
            IdempotentCommand::from_request(request, app).await.map_err(HandlerSkipped::Refused)?;
        match context.replay().await {
            Ok(None) => Ok(Self(body)),
            Ok(Some(answer)) => Err(HandlerSkipped::Answered(answer)),
            Err(error) => Err(HandlerSkipped::Refused(error)),
        }
    }
}

impl<E> FromRequest<AppState> for IdempotentCommand<E>
where
    E: FromRequest<AppState, Rejection = ApiError> + Content + Send,
{
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &AppState) -> Result<Self, ApiError> {
        let context = request.extensions().get::<IdempotencyContext>().cloned().unwrap_or_default();
        let body = E::from_request(request, app).await?;
        context.start(context.digest(body.content())?);
        Ok(Self(body))
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
