//! Policies, for administrators: limits, lifetimes and switches that are read at run time.

use crate::api::{Api, Query};
use crate::completion;
use crate::failure::{ExitStatus, Failure};
use crate::instant;
use crate::output::Column;
use crate::resource_ref::{Ref, ResourceKind, items};
use chrono::{DateTime, Utc};
use serde_json::{Value, json};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists every key, with its bounds and default.
    Catalog,
    /// Lists the values that are set, and their scopes.
    #[command(visible_alias = "ls")]
    List {
        /// List values of this key alone.
        #[arg(long, add = completion::policy_keys())]
        key: Option<String>,
        #[command(flatten)]
        scope: Scope,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Shows one value, while it is in force or lies ahead.
    Show {
        /// Its id, the beginning of it, or its key where it has one value alone.
        policy_value: Ref,
    },
    /// Sets a value: globally, or in the given scope.
    Set {
        #[arg(add = completion::policy_keys())]
        key: String,
        /// A number, true, false, or one of the key's choices.
        value: String,
        #[command(flatten)]
        scope: Scope,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// From when on (2026-11-22T12:00:00Z); at once where it is left out.
        #[arg(long, value_name = "INSTANT", value_parser = instant::parse)]
        effective_at: Option<DateTime<Utc>>,
        /// The value that you expect now: where it is another, nothing is set.
        #[arg(long, value_name = "VALUE")]
        old_value: Option<String>,
    },
    /// Takes a value back: the less specific one holds again, or one that lies ahead never comes into force.
    Unset {
        #[arg(add = completion::policy_keys())]
        key: String,
        #[command(flatten)]
        scope: Scope,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// The instant of one that lies ahead, as the list shows it; the one in force where it is left out.
        #[arg(long, value_name = "INSTANT", value_parser = instant::parse)]
        effective_at: Option<DateTime<Utc>>,
        /// The value that you expect: where it is another, nothing is taken back.
        #[arg(long, value_name = "VALUE")]
        old_value: Option<String>,
    },
    /// Shows the value that applies to a caller, and its source.
    Resolve {
        #[arg(add = completion::policy_keys())]
        key: String,
        #[command(flatten)]
        scope: Scope,
    },
}

/// The scope of a value.
#[derive(Debug, clap::Args)]
pub(crate) struct Scope {
    /// The value for this user.
    #[arg(long, value_name = "ID")]
    user: Option<String>,
    /// The value for this project.
    #[arg(long, value_name = "ID")]
    project: Option<String>,
    /// The value for this organisation.
    #[arg(long, value_name = "ID")]
    org: Option<String>,
    /// The value for all users on this plan.
    #[arg(long)]
    plan: Option<String>,
}

impl Scope {
    fn fields(self) -> impl Iterator<Item = (&'static str, String)> {
        let Self { user, project, org, plan } = self;
        let named = [("user_id", user), ("project_id", project), ("org_id", org), ("plan", plan)];
        named.into_iter().filter_map(|(name, value)| Some((name, value?)))
    }
}

const CATALOG: [Column; 6] = [
    ("KEY", "/key"),
    ("TYPE", "/type"),
    ("DEFAULT", "/default"),
    ("BOUNDS", "/bounds"),
    ("SCOPES", "/scopes"),
    ("MEANING", "/meaning"),
];
const VALUES: [Column; 7] = [
    ("ID", "/id"),
    ("KEY", "/key"),
    ("VALUE", "/value"),
    ("SCOPE", "/scope"),
    ("EFFECTIVE", "/effective_at"),
    ("BY", "/written_by"),
    ("WHY", "/reason"),
];
const RESOLVED: [Column; 5] =
    [("key", "/key"), ("value", "/value"), ("from", "/source"), ("scope", "/scope"), ("since", "/effective_at")];

const PATH: &str = "/api/v1/admin/policy-values";
const CATALOG_PATH: &str = "/api/v1/admin/policies";

const VALUE: ResourceKind = ResourceKind {
    noun: "policy value",
    listed_by: "gpuctl policy list",
    path: PATH,
    names: &["/key"],
    shown: &["/key", "/scope", "/value"],
};

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::Catalog => {
            let catalog = api.get(CATALOG_PATH, &[]).await?;
            api.out.list(&catalog, &CATALOG)
        }
        Command::List { key, scope, limit } => {
            let mut query: Query<'_> = scope.fields().collect();
            query.extend(key.clone().map(|key| ("key", key)));
            let page = api.list(PATH, &query, limit.into()).await?;
            api.out.list(&page, &VALUES)?;
            if let Some(key) = key.filter(|_| items(&page).is_empty()) {
                api.out.notice(&not_set(&key));
            }
            Ok(())
        }
        Command::Show { policy_value } => {
            let id = match policy_value.id(&VALUE, api).await {
                Err(failure) if failure.exit_status == ExitStatus::NotFound => {
                    let key = policy_value.to_string();
                    let is_key = api.get(CATALOG_PATH, &[]).await.is_ok_and(|all| is_in(&all, &key));
                    return Err(if is_key {
                        Failure { message: not_set(&key), next: None, ..failure }
                    } else {
                        failure
                    });
                }
                id => id?,
            };
            api.out.show(&api.get(&format!("{PATH}/{id}"), &[]).await?, &VALUES)
        }
        Command::Set { key, value, scope, reason, effective_at, old_value } => {
            let scope: Value = scope.fields().map(|(name, value)| (name.to_owned(), Value::from(value))).collect();
            let mut body = json!({ "key": key, "value": parse_value(&value), "scope": scope, "reason": reason });
            if let Some(at) = effective_at {
                body["effective_at"] = json!(at);
            }
            if let Some(old) = old_value {
                body["old_value"] = parse_value(&old);
            }
            let written = api.post(PATH, &body).await?;
            api.out.list(&json!({ "items": [written], "next_page": null }), &VALUES)
        }
        Command::Unset { key, scope, reason, effective_at, old_value } => {
            let mut query: Query<'_> = scope.fields().collect();
            query.extend([("key", key.clone()), ("reason", reason)]);
            query.extend(effective_at.map(|at| ("effective_at", at.to_rfc3339())));
            query.extend(old_value.map(|old| ("old_value", old)));
            let taken = api.delete(PATH, &query).await?;
            api.out.done(&taken, &format!("{key} is taken back; `gpuctl policy resolve {key}` shows what holds."))
        }
        Command::Resolve { key, scope } => {
            let mut query: Query<'_> = scope.fields().collect();
            query.push(("key", key));
            api.out.show(&api.get(&format!("{PATH}/resolve"), &query).await?, &RESOLVED)
        }
    }
}

fn is_in(catalog: &Value, key: &str) -> bool {
    items(catalog).iter().any(|row| row["key"] == key)
}

/// What holds where no value is set.
fn not_set(key: &str) -> String {
    format!(
        "{key} has no value of its own here; `gpuctl policy resolve {key}` shows what holds, and `gpuctl policy catalog` its default and \
         its bounds"
    )
}

/// The value with the type that its text has: the server refuses a wrong type.
fn parse_value(text: &str) -> Value {
    match text {
        "true" => Value::Bool(true),
        "false" => Value::Bool(false),
        "null" => Value::Null,
        number => number.parse::<i64>().map_or_else(|_| number.into(), Value::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_value_has_the_type_of_its_text() {
        assert_eq!(parse_value("5"), json!(5));
        assert_eq!(parse_value("true"), json!(true));
        assert_eq!(parse_value("best-effort"), json!("best-effort"));
        assert_eq!(parse_value("1e3"), json!("1e3"));
    }
}
