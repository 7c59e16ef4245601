//! The NATS subjects that a member needs, by role: one table, from which `gpuaas dev` makes its server's users and
//! `gpuaas nats-permissions` a user for a server of one's own (`deploy/docs/src/reference/nats-permissions.md`).

use super::nats::inbox_of;
use crate::process_roles::ProcessRole;
use domain::event::Stream;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The subjects that a NATS user may publish and subscribe to. It may also answer messages that it received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permissions {
    pub publish: BTreeSet<String>,
    pub subscribe: BTreeSet<String>,
}

/// The subjects that every member needs beside its inbox.
const EVERY: RoleSubjects = RoleSubjects {
    publish: &[
        "gpuaas.shard.*",
        "gpuaas.cluster.beat",
        "gpuaas.cluster.changed",
        "gpuaas.runtime.ask",
        // `gpuaas doctor`: the limits of the account.
        "$JS.API.INFO",
        "recovery.mark.*",
        "$JS.API.STREAM.INFO.RECOVERY",
        "$JS.API.STREAM.CREATE.RECOVERY",
        "$JS.API.STREAM.MSG.GET.RECOVERY",
        "$JS.API.DIRECT.GET.RECOVERY.>",
    ],
    subscribe: &[
        "gpuaas.cluster.*",
        "gpuaas.cells.*",
        "gpuaas.runtime.ask",
        "gpuaas.terminal.streams",
        "policy.invalidate.>",
        "node.trust_changed",
        "recovery.mark.*",
    ],
};

struct RoleSubjects {
    publish: &'static [&'static str],
    subscribe: &'static [&'static str],
}

const fn subjects_of(role: ProcessRole) -> RoleSubjects {
    match role {
        ProcessRole::Api => RoleSubjects {
            publish: &["gpuaas.identity.keys", "gpuaas.terminal.streams", "gpuaas.terminal.link.*"],
            subscribe: &["gpuaas.identity.keys", "notify.>"],
        },
        ProcessRole::NodeApi => RoleSubjects {
            // The far end of a terminal subscribes to an inbox that the sealed hello names.
            publish: &["gpuaas.terminal.streams", "_INBOX.*.terminal.*"],
            subscribe: &["gpuaas.node.*", "gpuaas.terminal.wake", "gpuaas.terminal.link.*"],
        },
        ProcessRole::TerminalGateway => RoleSubjects {
            publish: &["gpuaas.terminal.streams", "gpuaas.terminal.link.*"],
            subscribe: &["gpuaas.node.*", "gpuaas.terminal.wake", "notify.>"],
        },
        ProcessRole::Entities => RoleSubjects {
            publish: &[
                "gpuaas.node.wake",
                "gpuaas.node.close",
                "gpuaas.terminal.wake",
                "notify.operations",
                "gpuaas.placement.nodes",
                "gpuaas.cells.*",
                "audit.head.*",
                "$JS.API.STREAM.INFO.AUDIT",
                "$JS.API.STREAM.CREATE.AUDIT",
                "$JS.API.STREAM.MSG.GET.AUDIT",
                "$JS.API.DIRECT.GET.AUDIT.>",
            ],
            subscribe: &["gpuaas.shard.*", "gpuaas.placement.nodes"],
        },
        ProcessRole::Provisioning => RoleSubjects { publish: &[], subscribe: &["gpuaas.placement.nodes"] },
        ProcessRole::NotificationRelay => RoleSubjects { publish: &["notify.>"], subscribe: &[] },
        ProcessRole::Billing | ProcessRole::OutboxRelay | ProcessRole::Webhook | ProcessRole::NodeLogGateway => {
            RoleSubjects { publish: &[], subscribe: &[] }
        }
    }
}

/// The permissions of the member `name` with these roles.
#[must_use]
pub fn for_member(name: &str, roles: &BTreeSet<ProcessRole>) -> Permissions {
    let (mut publish, mut subscribe) = (BTreeSet::new(), BTreeSet::from([format!("{}.>", inbox_of(name))]));
    let all = roles.iter().map(|role| subjects_of(*role)).chain([EVERY]);
    for needed in all {
        publish.extend(needed.publish.iter().map(|subject| (*subject).to_owned()));
        subscribe.extend(needed.subscribe.iter().map(|subject| (*subject).to_owned()));
    }
    let has = |role: ProcessRole| roles.contains(&role);
    let (consumes, notifies) = (has(ProcessRole::Provisioning), has(ProcessRole::NotificationRelay));
    for stream in Stream::ALL {
        let name = stream.name();
        // Every process shows the consumers' lag.
        publish.insert(format!("$JS.API.STREAM.INFO.{name}"));
        publish.insert(format!("$JS.API.CONSUMER.INFO.{name}.*"));
        if has(ProcessRole::OutboxRelay) {
            publish.extend(stream.subjects().iter().map(|subject| (*subject).to_owned()));
        }
        if has(ProcessRole::OutboxRelay) || consumes || notifies {
            publish.insert(format!("$JS.API.STREAM.CREATE.{name}"));
        }
        let lower = name.to_lowercase();
        for (wanted, consumer) in [
            (consumes, format!("{lower}-reactions")),
            (notifies, format!("{lower}-notifications")),
            (notifies, format!("{lower}-deliveries")),
        ] {
            if wanted {
                publish.insert(format!("$JS.API.CONSUMER.CREATE.{name}.{consumer}"));
                publish.insert(format!("$JS.API.CONSUMER.CREATE.{name}.{consumer}.>"));
                publish.insert(format!("$JS.API.CONSUMER.DURABLE.CREATE.{name}.{consumer}"));
                publish.insert(format!("$JS.API.CONSUMER.MSG.NEXT.{name}.{consumer}"));
                publish.insert(format!("$JS.ACK.{name}.{consumer}.>"));
            }
        }
    }
    Permissions { publish, subscribe }
}

impl Permissions {
    /// The permissions in the format of a NATS server's configuration, in JSON, which it also reads.
    #[must_use]
    pub fn as_config(&self) -> Value {
        json!({
            "publish": { "allow": self.publish },
            "subscribe": { "allow": self.subscribe },
            // One answer to each received message with a reply subject.
            "allow_responses": { "max": 1, "expires": "1m" },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(role: ProcessRole) -> Permissions {
        for_member("member", &[role].into())
    }

    fn allows(subjects: &BTreeSet<String>, subject: &str) -> bool {
        let matches = |pattern: &str| {
            let (mut wanted, mut has) = (pattern.split('.'), subject.split('.'));
            loop {
                match (wanted.next(), has.next()) {
                    (Some(">"), Some(_)) | (None, None) => return true,
                    (Some("*"), Some(_)) => {}
                    (Some(wanted), Some(has)) if wanted == has => {}
                    _ => return false,
                }
            }
        };
        subjects.iter().any(|pattern| matches(pattern))
    }

    #[test]
    fn members_cannot_read_answers_to_others_or_rewrite_streams() {
        let all = for_member("member", &ProcessRole::ALL.into());
        assert!(allows(&all.subscribe, "_INBOX.member.answers.1") && !allows(&all.subscribe, "_INBOX.other.answers.1"));
        assert!(!allows(&all.publish, "_INBOX.other.answers.1"), "but for what it was asked");
        for call in ["STREAM.DELETE.AUDIT", "STREAM.PURGE.BILLING", "STREAM.UPDATE.BILLING", "CONSUMER.DELETE.NODES.x"]
        {
            assert!(!allows(&all.publish, &format!("$JS.API.{call}")), "{call}");
        }
    }

    #[test]
    fn only_the_responsible_role_publishes_events_or_receives_commands() {
        for role in ProcessRole::ALL {
            let permissions = one(role);
            for stream in Stream::ALL {
                let subject = stream.subjects()[0].replace('>', "something");
                assert_eq!(
                    allows(&permissions.publish, &subject),
                    role == ProcessRole::OutboxRelay,
                    "{role:?} {subject}"
                );
            }
            assert_eq!(allows(&permissions.subscribe, "gpuaas.shard.7"), role == ProcessRole::Entities, "{role:?}");
            assert_eq!(allows(&permissions.publish, "gpuaas.node.close"), role == ProcessRole::Entities, "{role:?}");
            assert_eq!(
                allows(&permissions.publish, "notify.user.ann"),
                role == ProcessRole::NotificationRelay,
                "{role:?}"
            );
        }
    }

    const HEAD: &str = "# What a member's user of NATS may do\n\n\
        <!-- Made by the code: `UPDATE_DOCS=1 cargo test -p supervisors nats_permissions` regenerates it. -->\n\n\
        Each member has a user of NATS of its own, or members with the same roles share one, as the pods of a Deployment do. Give it what its \
        roles need and nothing else; \
        `gpuaas nats-permissions --name NAME --roles ROLES` prints `permissions` for the server's configuration, with all that the roles need \
        together. Keep the members' users in an account of their own: users and leaf nodes of other accounts then see none of these \
        subjects. Who can do what with which credentials: [0036](../decisions/0036-members-authenticate-their-messages.md).\n\n\
        A member may answer a message that it received once, within a minute (`allow_responses`). `NAME` is the user's name: the \
        inbox of a member is that of its user.\n";

    /// The page for operators: the subjects that every member needs, and those that each role needs in addition.
    fn page() -> String {
        use std::fmt::Write as _;
        let list = |subjects: &BTreeSet<String>| {
            let quoted: Vec<_> = subjects.iter().map(|subject| format!("`{subject}`")).collect();
            if quoted.is_empty() { "–".to_owned() } else { quoted.join(", ") }
        };
        let every = for_member("NAME", &BTreeSet::new());
        let mut page = format!("{HEAD}\n| role | publishes | subscribes to |\n| --- | --- | --- |\n");
        writeln!(page, "| every member | {} | {} |", list(&every.publish), list(&every.subscribe)).unwrap();
        for role in ProcessRole::ALL {
            let Permissions { publish, subscribe } = for_member("NAME", &[role].into());
            let (publish, subscribe) = (&publish - &every.publish, &subscribe - &every.subscribe);
            writeln!(page, "| `{}` | {} | {} |", role.name(), list(&publish), list(&subscribe)).unwrap();
        }
        page
    }

    #[test]
    fn nats_permissions_page_matches_the_code() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/docs/src/reference/nats-permissions.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(path, page()).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == page(),
            "deploy/docs/src/reference/nats-permissions.md is not what the code says; regenerate it with UPDATE_DOCS=1"
        );
    }
}
