//! SSH access: which keys open an allocation (specification, *SSH key*: a per-user default, and a set per allocation that can override
//! it).

use actors::sharding::id_of_name;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use domain::allocation::{Allocation, Rejection, Request};
use domain::tenant::Tenant;
use domain::{EntityKind, SshKeyId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{replayed, response, visible};
use crate::api::rejection_response::not_answered;
use crate::api::request_context::UserRequest;
use crate::api::request_fields::set_or_none;
use crate::app_state::AppState;
use crate::app_state::read_model::find;
use crate::http::error::ApiError;
use crate::http::request_body::{self, Path};
use actors::AskError;

/// How often the keys are read again when they change concurrently.
const MAX_READS: usize = 4;

/// The keys that are to open an allocation.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct ChosenSshKeys {
    /// Exactly these keys of the allocation's user; an empty list: no login. Null: the user's default key, whichever that is.
    #[serde(deserialize_with = "set_or_none::<_, _, 32>")]
    #[schema(max_items = 32, required = true)]
    ssh_key_ids: Option<Vec<Uuid>>,
}

/// Chooses the keys that open an allocation, in place of its user's default key.
///
/// They replace the earlier ones on the machine, which takes a moment: `ssh.keys_written` of the allocation says when it is done. Open SSH
/// sessions stay. A key that is deleted opens nothing any more, wherever it was chosen.
#[utoipa::path(
    put,
    path = "/",
    request_body = ChosenSshKeys,
    responses((status = 200, description = "The allocation.", body = super::view::AllocationView)),
)]
pub(in crate::api) async fn choose_ssh_keys(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    request_body::Json(new): request_body::Json<ChosenSshKeys>,
) -> Result<Response, ApiError> {
    let user_id = visible(&app, &context, id).await?.it.asked.owner.user_id.clone();
    let chosen: Option<Vec<_>> = new.ssh_key_ids.as_ref().map(|ids| ids.iter().copied().map(SshKeyId).collect());
    let mut reads = 0;
    loop {
        reads += 1;
        let tenant = find::<Tenant>(&app, id_of_name(EntityKind::Tenant, &user_id)).await?.map(|found| found.it);
        let logins = tenant.map(|tenant| (tenant.authorized_keys(chosen.as_deref()), tenant.logins_revision));
        let (keys, logins_revision) = logins.unwrap_or_default();
        let command = Request::ChooseLogins { chosen: chosen.clone(), keys, logins_revision };
        match context.try_ask::<Allocation>(id, command).await? {
            Ok(answered) => {
                return response(&app, StatusCode::OK, replayed(&answered), &answered.reply, answered.version).await;
            }
            // The allocation knows a later revision of the keys than was read.
            Err(AskError::Rejected(Rejection::KeysMoved)) if reads < MAX_READS => {}
            Err(error) => return Err(not_answered(error)),
        }
    }
}
