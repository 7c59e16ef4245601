//! Live notifications and their audiences (specification, *Notification channel*; decisions 7). A notification is a message about an
//! event, for those who may know of it: identifiers, states and reason codes. It is not stored, and no sender waits for it.
//!
//! Each is sent to those who would find the same data in the API: an allocation's to its renter, an account's to its holder, the
//! inventory's to operators.

use crate::account_holder::Holder;
use crate::announcement::Severity;
use crate::event::{Event, NotificationScope, Stream};
use crate::id::{
    AllocationId, AnnouncementId, BillingAccountId, BrowserSessionId, NodeId, OrgId, PaymentId, RefundId, RolloutId,
    TerminalSessionId, UserId,
};
use crate::policy::PolicyKey;
use crate::state_machine::Timestamp;
use serde::Serialize;
use std::collections::BTreeMap;

/// The subject of [`Channel::Operations`].
pub const OPERATIONS_SUBJECT: &str = "notify.operations";

/// The channel on which subscribers receive it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum Channel {
    User(UserId),
    Org(OrgId),
    Broadcast,
    /// Which entities change, for operators.
    Operations,
}

impl Channel {
    /// `user`, `org`, `broadcast` or `operations`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.into_str()
    }

    /// The subject on the bus. Ids come from outside: in base32 (RFC 4648, without padding) an id is one token and no wildcard.
    #[must_use]
    pub fn subject(&self) -> String {
        match self {
            Self::User(id) => format!("notify.user.{}", base32(id.as_bytes())),
            Self::Org(id) => format!("notify.org.{}", base32(id.as_bytes())),
            Self::Broadcast => "notify.broadcast".to_owned(),
            Self::Operations => OPERATIONS_SUBJECT.to_owned(),
        }
    }
}

fn base32(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let mut text = String::with_capacity(bytes.len().div_ceil(5) * 8);
    for group in bytes.chunks(5) {
        let bits = group.iter().fold(0_u64, |bits, byte| bits << 8 | u64::from(*byte)) << (8 * (5 - group.len()));
        for n in 0..(group.len() * 8).div_ceil(5) {
            let letter = usize::try_from(bits >> (35 - 5 * n) & 31).unwrap_or_default();
            text.push(char::from(ALPHABET[letter]));
        }
    }
    text
}

/// The audience of a notification. The sender resolves it to users at the time of sending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Audience {
    /// The holder of an account: a user, or every user whose token names the organization.
    Holder(Holder),
    /// The holder of the account that a payment was paid into.
    PaymentHolder(PaymentId),
    /// The user who rents the allocation.
    Renter(AllocationId),
    /// The users who rent on the node.
    NodeRenters(NodeId),
    User(UserId),
    /// The user of the terminal session.
    SessionUser(TerminalSessionId),
    /// The users in platform role `platform_operations`.
    Operators,
    /// All connected clients; the text is the announcement's.
    AllClients(AnnouncementId),
}

/// The details of a notification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NotificationDetails {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocation_id: Option<AllocationId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_id: Option<NodeId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<TerminalSessionId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub browser_session_id: Option<BrowserSessionId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub account_id: Option<BillingAccountId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payment_id: Option<PaymentId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refund_id: Option<RefundId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout_id: Option<RolloutId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub announcement_id: Option<AnnouncementId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_state: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// A reason code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The number of the clean-up attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// When running allocations are released, unless money comes in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub severity: Option<Severity>,
    /// The text of an announcement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A message about an event, and its audience.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    pub audience: Audience,
    pub data: NotificationDetails,
}

/// The subjects of the events that connected clients are notified of, by their stream: the workers subscribe to no others for it.
#[must_use]
pub fn live_subjects() -> BTreeMap<Stream, Vec<&'static str>> {
    subjects(|scope| scope != NotificationScope::None)
}

/// The subjects of the events that are delivered to webhooks and e-mail addresses too, by their stream.
#[must_use]
pub fn delivered_subjects() -> BTreeMap<Stream, Vec<&'static str>> {
    subjects(|scope| scope == NotificationScope::Delivered)
}

fn subjects(among: impl Fn(NotificationScope) -> bool) -> BTreeMap<Stream, Vec<&'static str>> {
    let mut subjects = BTreeMap::<_, Vec<_>>::new();
    for row in Event::ROWS.iter().filter(|row| among(row.notification)) {
        subjects.entry(row.stream).or_default().push(row.subject);
    }
    subjects
}

/// Whether events of this type can be delivered to a webhook or an e-mail address. Announcements are for connected clients only.
#[must_use]
pub fn is_deliverable(event: &str) -> bool {
    Event::ROWS.iter().any(|row| row.notification == NotificationScope::Delivered && row.subject == event)
}

/// The policy that switches notifications of this event type off, resolved for each recipient; `None`: they are always sent.
#[must_use]
pub fn switch_of(event: &str) -> Option<PolicyKey> {
    match event {
        "billing.balance_low" => Some(PolicyKey::NotificationLowBalance),
        "billing.balance_depleted" => Some(PolicyKey::NotificationBalanceDepleted),
        _ => None,
    }
}

impl NotificationDetails {
    pub(super) fn in_state(state: &str) -> Self {
        Self { state: Some(state.to_owned()), ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fmt::Write as _;

    #[test]
    fn recipients_of_every_event_are_as_reviewed() {
        let mut table = String::new();
        for event in Event::samples() {
            for notification in event.notifications() {
                let audience = match &notification.audience {
                    Audience::Holder(_) => "the account's holder",
                    Audience::PaymentHolder(_) => "the holder of the account it was paid into",
                    Audience::Renter(_) => "who rents the allocation",
                    Audience::NodeRenters(_) => "who rents on the node",
                    Audience::User(_) => "the user",
                    Audience::SessionUser(_) => "whose terminal it is",
                    Audience::Operators => "platform_operations",
                    Audience::AllClients(_) => "everybody",
                };
                let data = serde_json::to_value(&notification.data).unwrap();
                let fields: Vec<_> = data.as_object().unwrap().keys().map(String::as_str).collect();
                let switch = switch_of(event.subject()).map(|key| format!(", by {}", key.name())).unwrap_or_default();
                writeln!(table, "{} -> {audience}{switch}: {}", event.subject(), fields.join(" ")).unwrap();
            }
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn relay_subscribes_to_exactly_the_events_with_notifications() {
        for event in Event::samples() {
            let (subject, stream) = (event.subject(), event.row().stream);
            let live = live_subjects().get(&stream).is_some_and(|subjects| subjects.contains(&subject));
            assert_eq!(live, !event.notifications().is_empty(), "{subject}");
            const STEPS: [&str; 4] = [
                "terminal.browser_session_ended",
                "provisioning.requested",
                "provisioning.started",
                "provisioning.release_requested",
            ];
            let is_for_clients_only = stream == Stream::Notifications || STEPS.contains(&subject);
            assert_eq!(is_deliverable(subject), live && !is_for_clients_only, "{subject}");
            let delivered = delivered_subjects().get(&stream).is_some_and(|subjects| subjects.contains(&subject));
            assert_eq!(is_deliverable(subject), delivered, "{subject}");
        }
    }

    #[test]
    fn ids_are_written_as_rfc_4648_has_it() {
        for (text, expected) in [
            ("", ""),
            ("f", "MY"),
            ("fo", "MZXQ"),
            ("foo", "MZXW6"),
            ("foob", "MZXW6YQ"),
            ("fooba", "MZXW6YTB"),
            ("foobar", "MZXW6YTBOI"),
        ] {
            assert_eq!(base32(text.as_bytes()), expected, "{text}");
        }
        assert_eq!(Channel::User("foobar".into()).subject(), "notify.user.MZXW6YTBOI");
        assert_eq!(Channel::Org("*".into()).subject(), "notify.org.FI");
    }

    proptest! {
        #[test]
        fn no_id_is_a_wildcard_and_no_two_share_a_subject(one in "\\PC{0,40}", other in "\\PC{0,40}") {
            let subject = Channel::User(one.as_str().into()).subject();
            let word = subject.strip_prefix("notify.user.").unwrap();
            prop_assert!(word.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit()));
            prop_assert_eq!(one == other, subject == Channel::User(other.as_str().into()).subject());
            prop_assert_ne!(Channel::User(one.as_str().into()).subject(), Channel::Org(one.into()).subject());
        }
    }
}
