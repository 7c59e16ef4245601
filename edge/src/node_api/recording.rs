//! Upload of an agent's recording of a terminal session: chunk after chunk, each stored once.

use super::NodeApi;
use super::admission::AuthenticatedNode;
use super::rejection_response::refused;
use crate::app_state::read_model::current;
use crate::http::correlation::Scope;
use crate::http::error::{ApiError, Code};
use crate::http::request_body::{Path, read_body};
use crate::terminal::recording::{ChunkSummary, summary};
use axum::Json;
use axum::extract::{Request, State};
use axum::http::header;
use chrono::TimeDelta;
use domain::node;
use domain::policy::PolicyKey;
use domain::terminal_session::{Phase, TerminalSession};
use domain::{NodeId, TerminalSessionId};
use persistence::recordings::{Chunk, ChunkOutcome, ChunkOwner, ChunkRejected, RecordingError};
use uuid::Uuid;
use wire::recording::ChunkAnswer;
use wire::task::ResultReceipt;

/// How long after its session an agent that was away may bring the rest.
const UPLOAD_DEADLINE: TimeDelta = TimeDelta::days(7);

/// The media type of a chunk.
const MEDIA_TYPE: &str = "application/octet-stream";

/// `PUT /internal/v1/nodes/{id}/terminals/{session_id}/recording/{seq}`.
pub(super) async fn store(
    State(api): State<NodeApi>,
    AuthenticatedNode(node): AuthenticatedNode,
    scope: Scope,
    Path((_, session, seq)): Path<(Uuid, Uuid, u32)>,
    request: Request,
) -> Result<Json<ChunkAnswer>, ApiError> {
    let (node_id, session_id) = (NodeId(node.node_id), TerminalSessionId(session));
    scope.record_resource(format_args!("terminal_session/{session_id}"));
    let identify = node::Request::Identify { serial: node.serial };
    api.ask(&scope, node_id, identify, |context| context).await.map_err(refused)?;
    let media_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if media_type != Some(MEDIA_TYPE) {
        return Err(ApiError::new(Code::UnsupportedMediaType, format!("Send the chunk as {MEDIA_TYPE}.")));
    }
    let recording_intake = api.app.terminals.recording_intake().clone();
    let stored = api.store(session_id, node_id, seq, request).await;
    match &stored {
        Ok((ChunkOutcome::New, bytes)) => recording_intake.count_stored(*bytes),
        Ok((ChunkOutcome::Duplicate, _)) => {}
        Err(_) => recording_intake.count_refused(),
    }
    stored.map(|(stored, _)| match stored {
        ChunkOutcome::New => Json(ChunkAnswer { recorded: ResultReceipt::New }),
        ChunkOutcome::Duplicate => Json(ChunkAnswer { recorded: ResultReceipt::Already }),
    })
}

impl NodeApi {
    async fn store(
        &self,
        session_id: TerminalSessionId,
        node_id: NodeId,
        seq: u32,
        request: Request,
    ) -> Result<(ChunkOutcome, usize), ApiError> {
        let app = &self.app;
        let found = current::<TerminalSession>(app, session_id.0).await?;
        let found = found.filter(|found| found.it.node_id == node_id);
        let session = found.ok_or_else(|| {
            // By the detail an agent distinguishes this from a replica that has no such route.
            ApiError::not_found("terminal session").detail("session_id", session_id.to_string())
        })?;
        let session = session.it;
        if !session.has_recording() {
            return Err(conflict("This session is not recorded; delete what there is of it."));
        }
        if let Phase::Closed { at, .. } = &session.phase
            && app.environment.now() > *at + UPLOAD_DEADLINE
        {
            return Err(conflict("The session has been over for too long; delete what there is of its recording."));
        }
        let frames = read_body(request).await?;
        let ChunkSummary { lost_bytes, micros, ends } = summary(seq, &frames)?;
        let scopes = session.scopes();
        let (environment, recordings) = (app.environment.as_ref(), app.trust.secrets.recordings());
        app.terminals.recording_intake().check_room(environment, &recordings, &session.owner.user_id, &scopes).await?;
        let most = app.environment.policy().int(PolicyKey::TerminalRecordingMaxSession, &scopes, app.environment.now());
        let most = most.unsigned_abs() * 1024 * 1024;
        let of = ChunkOwner {
            session: session_id,
            owner: &session.owner.user_id,
            allocation: session.allocation_id,
            node: node_id,
        };
        let chunk = Chunk { seq, frames: &frames, lost_bytes, micros, ends };
        match app.trust.secrets.recordings().store_chunk(&of, &chunk, most).await {
            Ok(kept) => Ok((kept, frames.len())),
            Err(RecordingError::Rejected(why)) => Err(chunk_refused(why)),
            Err(RecordingError::Store(error)) if error.is_unavailable() => Err(ApiError::unavailable(error)),
            Err(RecordingError::Store(error)) => Err(ApiError::internal(error)),
            Err(error @ RecordingError::Sealed { .. }) => Err(ApiError::internal(error)),
        }
    }
}

fn chunk_refused(why: ChunkRejected) -> ApiError {
    match why {
        ChunkRejected::Differs { seq } => {
            conflict("Another chunk of this number is stored already; this one was refused.").detail("seq", seq)
        }
        ChunkRejected::OutOfOrder { next } => {
            conflict("The chunks before this one are not there; send them first, each once.").detail("next_seq", next)
        }
        ChunkRejected::Ended => conflict("The recording has ended; nothing is added to it."),
        ChunkRejected::Full => {
            ApiError::new(Code::PayloadTooLarge, "The recording is as long as a policy lets it be; end it here.")
                .detail("policy_key", PolicyKey::TerminalRecordingMaxSession.name())
        }
    }
}

fn conflict(message: &'static str) -> ApiError {
    ApiError::new(Code::StateConflict, message)
}
