//! Which keys open an allocation (specification, *SSH key*: a per-user default, and a set per allocation that can override it).

use actors::place::id_of_name;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use domain::allocation::{Allocation, Command, Rejection};
use domain::tenant::Tenant;
use domain::{Kind, SshKeyId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{replayed, shown, visible};
use crate::answer::not_answered;
use crate::api::asking::ByUser;
use crate::api::field::set_or_none;
use crate::api::stored::find;
use crate::body::{self, Path};
use crate::error::ApiError;
use crate::services::Services;
use actors::AskError;

/// How often keys that change meanwhile are read again.
const READINGS: usize = 4;

/// The keys that are to open an allocation.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct ChosenSshKeys {
    /// Keys of the allocation's user, these and no others; none: nobody logs in. Null: the user's default key, whichever that is.
    #[serde(deserialize_with = "set_or_none::<_, _, 32>")]
    #[schema(max_items = 32, required = true)]
    ssh_key_ids: Option<Vec<Uuid>>,
}

/// Chooses the keys that open an allocation, in place of its user's default key.
///
/// They replace those of before on the machine, which takes a moment: `ssh.keys_written` of the allocation says when it is done. Whoever
/// is logged in stays. A key that is deleted opens nothing any more, wherever it was chosen.
#[utoipa::path(
    put,
    path = "/",
    params(("id" = Uuid, Path, description = "The allocation's id")),
    request_body = ChosenSshKeys,
    responses((status = 200, description = "The allocation.", body = super::view::AllocationView)),
)]
pub(in crate::api) async fn choose_ssh_keys(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    body::Json(new): body::Json<ChosenSshKeys>,
) -> Result<Response, ApiError> {
    let user_id = visible(&services, &asking, id).await?.it.asked.user_id.clone();
    let chosen: Option<Vec<_>> = new.ssh_key_ids.as_ref().map(|ids| ids.iter().copied().map(SshKeyId).collect());
    let mut readings = 0;
    loop {
        readings += 1;
        let tenant = find::<Tenant>(&services, id_of_name(Kind::Tenant, &user_id)).await?.map(|found| found.it);
        let logins = tenant.map(|tenant| (tenant.logins(chosen.as_deref()), tenant.logins_revision));
        let (keys, logins_revision) = logins.unwrap_or_default();
        let command = Command::ChooseLogins { chosen: chosen.clone(), keys, logins_revision };
        match asking.try_ask::<Allocation>(id, command).await? {
            Ok(answered) => {
                return shown(&services, StatusCode::OK, replayed(&answered), &answered.reply, answered.version).await;
            }
            // The allocation has heard of a later change of the keys than was read.
            Err(AskError::Rejected(Rejection::KeysMoved)) if readings < READINGS => {}
            Err(error) => return Err(not_answered(error)),
        }
    }
}
