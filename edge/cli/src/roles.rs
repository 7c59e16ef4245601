//! Bindings of platform roles, for administrators.

use crate::api::{Api, Query};
use crate::failure::Failure;
use crate::output::Column;
use crate::resource_ref::{Ref, ResourceKind};
use clap::ValueEnum;
use serde_json::json;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists who has which role.
    #[command(visible_alias = "ls")]
    List {
        /// List roles of this user alone.
        #[arg(long, value_name = "ID")]
        user: Option<String>,
        /// List this role alone.
        #[arg(long, value_enum)]
        role: Option<Role>,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Shows one binding.
    Show {
        /// Its id, the beginning of it, or the user where they have one role.
        binding: Ref,
    },
    /// Gives a user a role.
    Bind {
        /// The user's id at the identity provider, not their name; `gpuctl whoami` shows one's own.
        user: String,
        role: Role,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Takes a role from a user.
    Revoke {
        /// The user's id at the identity provider.
        user: String,
        role: Role,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub(crate) enum Role {
    /// Rotates keys and approves changes of SKUs.
    #[value(alias = "platform_operations")]
    PlatformOperations,
    /// Approves changes of SKUs.
    #[value(alias = "inventory_owner")]
    InventoryOwner,
    /// Adjusts accounts and settles the processor's events.
    #[value(alias = "billing_operations")]
    BillingOperations,
    /// Reads the audit log.
    Auditor,
}

impl Role {
    const fn name(self) -> &'static str {
        self.into_str()
    }
}

const BINDINGS: [Column; 6] = [
    ("ID", "/id"),
    ("USER", "/subject"),
    ("ROLE", "/role"),
    ("BOUND", "/bound_at"),
    ("BY", "/bound_by"),
    ("WHY", "/reason"),
];

const PATH: &str = "/api/v1/admin/platform-roles/bindings";

const BINDING: ResourceKind = ResourceKind {
    noun: "binding",
    listed_by: "gpuctl roles list",
    path: PATH,
    names: &["/subject"],
    shown: &["/subject", "/role"],
};

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { user, role, limit } => {
            let given = [("subject", user), ("role", role.map(|role| role.name().to_owned()))];
            let query: Query<'_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
            api.out.list(&api.list(PATH, &query, limit.into()).await?, &BINDINGS)
        }
        Command::Show { binding } => {
            let id = binding.id(&BINDING, api).await?;
            api.out.show(&api.get(&format!("{PATH}/{id}"), &[]).await?, &BINDINGS)
        }
        Command::Bind { user, role, reason } => {
            let body = json!({ "subject": user, "role": role.name(), "reason": reason });
            let bound = api.post(PATH, &body).await?;
            api.out.done(&bound, &format!("{user} has the role {}.", role.name()))?;
            // The identity provider has the users, and the service sees them by their tokens alone.
            api.out.notice(
                "Whether there is a user with this id is not checked: `gpuctl whoami` shows users their own as `user id`; `gpuctl roles \
                 revoke` takes the role back.",
            );
            Ok(())
        }
        Command::Revoke { user, role, reason } => {
            let mut query: Query<'_> = vec![("subject", user.clone()), ("role", role.name().to_owned())];
            query.extend(reason.map(|reason| ("reason", reason)));
            let revoked = api.delete(PATH, &query).await?;
            api.out.done(&revoked, &format!("{user} has the role {} no longer.", role.name()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn role_may_be_written_as_the_api_writes_it() {
        for role in Role::value_variants() {
            let name = role.to_possible_value().unwrap().get_name().replace('-', "_");
            assert!(Role::from_str(&name, false).is_ok(), "{name}");
        }
    }
}
