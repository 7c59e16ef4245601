//! The policies by which a recipient's notifications are switched off.

use actors::shell_dependencies::Environment;
use domain::notification::switch_of;
use domain::policy::Scopes;
use serde::Deserialize;
use std::borrow::Cow;
use std::sync::Arc;

/// The switches of one subscriber, who may be a member of the organization that a notification is for.
pub(crate) struct Switches {
    pub(crate) environment: Arc<dyn Environment>,
    /// As the subscriber's token names them.
    pub(crate) recipient: Scopes,
}

#[derive(Deserialize)]
struct EventType<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
}

impl Switches {
    /// True where the message is not switched off for the subscriber at this moment.
    pub(crate) fn admit(&self, message: &str) -> bool {
        let switch = strict_json::from_str::<EventType<'_>>(message).ok().and_then(|event| switch_of(&event.kind));
        switch.is_none_or(|key| self.environment.policy().is_on(key, &self.recipient, self.environment.now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::Timestamp;
    use domain::policy::{PolicyBook, PolicyKey, PolicyScope, PolicyValue};

    struct Fixed(PolicyBook);

    impl Environment for Fixed {
        fn now(&self) -> Timestamp {
            Timestamp::UNIX_EPOCH
        }

        fn seed(&self) -> u128 {
            7
        }

        fn policy(&self) -> Arc<PolicyBook> {
            Arc::new(self.0.clone())
        }
    }

    fn scope(kind: &str) -> PolicyScope {
        match kind {
            "user_id" => PolicyScope::UserId("ann".into()),
            "org_id" => PolicyScope::OrgId("acme".into()),
            "plan" => PolicyScope::Plan("pro".into()),
            _ => PolicyScope::Global,
        }
    }

    #[test]
    fn notification_is_switched_off_by_the_most_specific_scope_of_its_recipient() {
        let recipient = || Scopes {
            user_id: Some("ann".into()),
            project_id: Some("p".into()),
            org_id: Some("acme".into()),
            plan: Some("pro".into()),
        };
        let (low, depleted) = (r#"{"id":1,"type":"billing.balance_low"}"#, r#"{"type":"billing.balance_depleted"}"#);
        let keys = [(PolicyKey::NotificationLowBalance, low), (PolicyKey::NotificationBalanceDepleted, depleted)];
        for (key, message) in keys {
            let mut book = PolicyBook::default();
            let mut expected = true;
            for kind in ["global", "plan", "org_id", "user_id"] {
                expected = !expected;
                book.set(key, scope(kind), Timestamp::UNIX_EPOCH, PolicyValue::Bool(expected)).unwrap();
                let switches = Switches { environment: Arc::new(Fixed(book.clone())), recipient: recipient() };
                assert_eq!(switches.admit(message), expected, "{kind}");
                for other in [low, depleted, r#"{"type":"provisioning.active"}"#, "no JSON"] {
                    assert!(other == message || switches.admit(other), "{other}");
                }
            }
        }
    }
}
