//! Task results. A result is recorded once; the same result again is answered as recorded, a different one is refused.

use super::admission::AuthenticatedNode;
use super::cleanup_proof::verdict;
use super::rejection_response::refused;
use super::strict_body::StrictJson;
use super::task_output;
use super::{NodeApi, NodeAskError};
use crate::http::correlation::Scope;
use crate::http::error::{ApiError, Code};
use crate::http::request_body::Path;
use actors::sharding::{command_id, digest_of};
use actors::{AskError, CommandKey};
use axum::Json;
use axum::extract::State;
use domain::node::{Node, Request, TaskOutcome};
use domain::{EntityKind, EntityRef, NodeId, TaskId};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use tracing::{info, warn};
use uuid::Uuid;
use wire::task::{ResultAnswer, ResultReceipt, TaskResult, TaskStatus};

/// `POST /internal/v1/nodes/{id}/tasks/{task_id}/result`.
pub(super) async fn record(
    State(api): State<NodeApi>,
    AuthenticatedNode(node): AuthenticatedNode,
    scope: Scope,
    Path((_, task_id)): Path<(Uuid, Uuid)>,
    StrictJson(result): StrictJson<TaskResult>,
) -> Result<Json<ResultAnswer>, ApiError> {
    let (node_id, task_id, attempt) = (NodeId(node.node_id), TaskId(task_id), result.attempt);
    let key = CommandKey::repeatable(
        command_id(&[b"task-result", node_id.0.as_bytes(), task_id.0.as_bytes(), &attempt.to_be_bytes()]),
        digest_of(&[&canonical(&result).map_err(ApiError::internal)?]),
    );
    // Only a proof needs the node's key, and only releases have one.
    let state = match (result.status, &result.proof) {
        (TaskStatus::Succeeded, Some(_)) => api.node(node_id).await?,
        (TaskStatus::Succeeded, None) | (TaskStatus::Failed, _) => None,
    };
    let (verdict, unproved) = verdict(&result, node_id, task_id, state.as_deref());
    let output = task_output::bounded(&result.output);
    let command = Request::Report { serial: node.serial, task_id, attempt, verdict: verdict.clone(), output, unproved };
    match api.ask_until_certain(&scope, node_id, command, key).await {
        Ok(answered) if answered.replayed => Ok(Json(ResultAnswer { recorded: ResultReceipt::Already })),
        Ok(_) => {
            match verdict {
                TaskOutcome::Succeeded { .. } => info!(%task_id, attempt, "task succeeded on node {node_id}"),
                TaskOutcome::Failed { code, message } => {
                    warn!(%task_id, attempt, error_code = code, "task failed on node {node_id}: {message}");
                }
            }
            Ok(Json(ResultAnswer { recorded: ResultReceipt::New }))
        }
        // It was recorded so long ago that the reply has expired; the result is the same.
        Err(NodeAskError::Asking(AskError::AlreadyDone)) => Ok(Json(ResultAnswer { recorded: ResultReceipt::Already })),
        Err(NodeAskError::Asking(AskError::Reused)) => Err(ApiError::new(
            Code::StateConflict,
            format!("Another result of attempt {attempt} is recorded already; this one was refused."),
        )),
        Err(why) => Err(refused(why)),
    }
}

impl NodeApi {
    /// The node as it was committed last.
    pub(super) async fn node(&self, node_id: NodeId) -> Result<Option<Arc<Node>>, ApiError> {
        if let Some((node, _)) = self.app.directory.host().committed_state::<Node>(node_id.0) {
            return Ok(Some(node));
        }
        let entity = EntityRef { kind: EntityKind::Node, id: node_id.0 };
        let snapshot = self.app.reads.snapshot(entity).await.map_err(ApiError::unavailable)?;
        let node = snapshot.map(|snapshot| serde_json::from_str(&snapshot.body)).transpose();
        Ok(node.map_err(ApiError::internal)?.map(Arc::new))
    }
}

/// A result as bytes that do not depend on how its JSON was written.
fn canonical(result: &TaskResult) -> Result<Vec<u8>, serde_json::Error> {
    serde_json::to_vec(&sorted(serde_json::to_value(result)?))
}

fn sorted(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields: BTreeMap<_, _> = fields.into_iter().map(|(key, value)| (key, sorted(value))).collect();
            Value::Object(fields.into_iter().collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        scalar @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => scalar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_digest_is_independent_of_field_order() {
        let read = |text: &str| canonical(&serde_json::from_str(text).unwrap()).unwrap();
        let one = read(
            r#"{"attempt":1,"status":"succeeded","output":{"a":{"x":1,"y":[{"p":1,"q":2}]},"b":2},
                "started_at":"2026-11-21T08:00:00Z","finished_at":"2026-11-21T08:00:01Z"}"#,
        );
        let same = read(
            r#"{"finished_at":"2026-11-21T09:00:01+01:00","output":{"b":2,"a":{"y":[{"q":2,"p":1}],"x":1}},
                "started_at":"2026-11-21T08:00:00Z","status":"succeeded","attempt":1}"#,
        );
        let other = read(
            r#"{"attempt":1,"status":"succeeded","output":{"a":{"x":1,"y":[{"p":1,"q":3}]},"b":2},
                "started_at":"2026-11-21T08:00:00Z","finished_at":"2026-11-21T08:00:01Z"}"#,
        );
        assert_eq!(one, same);
        assert_ne!(one, other);
    }
}
