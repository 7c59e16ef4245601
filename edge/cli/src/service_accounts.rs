//! Service accounts: programs that act for their owner, with keys of their own. `gpuctl login --service-account` logs in with such a key.

use crate::api::{Api, Query};
use crate::completion;
use crate::confirmation::Confirm;
use crate::failure::Failure;
use crate::output::Column;
use crate::resource_ref::{Ref, ResourceKind, SERVICE_ACCOUNT};
use serde_json::{Value, json};
use uuid::Uuid;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists your service accounts.
    #[command(visible_alias = "ls")]
    List {
        /// Administrators: list those of this user.
        #[arg(long, value_name = "ID")]
        user: Option<String>,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Makes a service account; it gets its keys with `add-key`.
    Create {
        name: String,
        /// A role of yours that it has; repeatable; `user` by default.
        #[arg(long = "role", value_name = "ROLE", value_parser = ["user", "admin"])]
        roles: Vec<String>,
    },
    /// Shows one service account, with its keys.
    Show {
        #[arg(value_name = "SERVICE-ACCOUNT", add = completion::of(&SERVICE_ACCOUNT))]
        account: Ref,
    },
    /// Deletes a service account. Its keys and tokens end with the answer.
    #[command(visible_alias = "rm")]
    Delete {
        #[arg(value_name = "SERVICE-ACCOUNT", add = completion::of(&SERVICE_ACCOUNT))]
        account: Ref,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Makes a key, and prints its id and secret: once, here.
    AddKey {
        #[arg(value_name = "SERVICE-ACCOUNT", add = completion::of(&SERVICE_ACCOUNT))]
        account: Ref,
    },
    /// Revokes a key. Tokens that were issued for it end with the answer.
    RevokeKey {
        #[arg(value_name = "SERVICE-ACCOUNT", add = completion::of(&SERVICE_ACCOUNT))]
        account: Ref,
        key: Ref,
    },
}

/// A key of one account.
const KEY: ResourceKind = ResourceKind {
    noun: "key",
    listed_by: "gpuctl service-accounts show",
    path: SERVICE_ACCOUNT.path,
    names: &[],
    shown: &["/created_at"],
};

const IN_A_LIST: [Column; 5] =
    [("ID", "/id"), ("NAME", "/name"), ("ROLES", "/roles"), ("OWNER", "/owner_user_id"), ("CREATED", "/created_at")];

const ALONE: [Column; 9] = [
    ("id", "/id"),
    ("name", "/name"),
    ("roles", "/roles"),
    ("owner", "/owner_user_id"),
    ("organisation", "/org_id"),
    ("project", "/project_id"),
    ("plan", "/plan"),
    ("created", "/created_at"),
    ("by", "/created_by"),
];

const KEYS: [Column; 3] = [("KEY", "/id"), ("CREATED", "/created_at"), ("BY", "/created_by")];

const ISSUED: [Column; 4] =
    [("key", "/id"), ("client id", "/client_id"), ("client secret", "/client_secret"), ("created", "/created_at")];

fn path(account: Uuid) -> String {
    format!("{}/{account}", SERVICE_ACCOUNT.path)
}

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { user, limit } => {
            let query: Query<'_> = user.map(|user| ("user_id", user)).into_iter().collect();
            api.out.list(&api.list(SERVICE_ACCOUNT.path, &query, limit.into()).await?, &IN_A_LIST)
        }
        Command::Create { name, roles } => {
            let mut body = json!({ "name": name });
            if !roles.is_empty() {
                body["roles"] = json!(roles);
            }
            let made = api.post(SERVICE_ACCOUNT.path, &body).await?;
            api.out.show(&made, &ALONE)?;
            api.out.notice(&format!(
                "Give it a key: gpuctl service-accounts add-key {}",
                crate::printable::cell(&made["id"])
            ));
            Ok(())
        }
        Command::Show { account } => {
            let found = api.get(&path(account.id(&SERVICE_ACCOUNT, api).await?), &[]).await?;
            if api.out.is_json() {
                return api.out.json(&found);
            }
            api.out.show(&found, &ALONE)?;
            api.out.rows_below(&found["keys"], &KEYS)
        }
        Command::Delete { account, confirm } => {
            let id = account.id(&SERVICE_ACCOUNT, api).await?;
            confirm.ask(&format!("Delete service account {account} ({id}) with all its keys?"))?;
            let deleted = api.delete(&path(id), &[]).await?;
            api.out.done(&deleted, &format!("Service account {account} is deleted."))
        }
        Command::AddKey { account } => {
            let id = account.id(&SERVICE_ACCOUNT, api).await?;
            let issued = api.post_empty(&format!("{}/keys", path(id))).await?;
            api.out.show(&issued, &ISSUED)?;
            api.out.notice("The secret is shown this once. Log in with it: gpuctl login --service-account CLIENT-ID");
            Ok(())
        }
        Command::RevokeKey { account, key } => {
            let id = account.id(&SERVICE_ACCOUNT, api).await?;
            let key = match key.to_string().parse() {
                Ok(key) => key,
                Err(_) => key.resolve_among(&KEY, keys(&api.get(&path(id), &[]).await?))?,
            };
            let revoked = api.delete(&format!("{}/keys/{key}", path(id)), &[]).await?;
            api.out.done(&revoked, &format!("Key {key} is revoked."))
        }
    }
}

fn keys(account: &Value) -> &[Value] {
    account["keys"].as_array().map_or(&[], Vec::as_slice)
}
