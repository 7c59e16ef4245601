//! Live notifications and their audiences (specification, *Notification channel*; decisions 7). A notification is a message about an
//! event, for those who may know of it: identifiers, states and reason codes. It is not stored, and no sender waits for it.
//!
//! Each is sent to those who would find the same data in the API: an allocation's to its renter, an account's to its holder, the
//! inventory's to operators.

use crate::announcement::Severity;
use crate::event::{Event, Stream};
use crate::holder::Holder;
use crate::id::{AllocationId, AnnouncementId, BillingAccountId, NodeId, PaymentId, RefundId, TerminalSessionId};
use crate::machine::Timestamp;
use crate::policy::PolicyKey;
use serde::Serialize;

/// The channel on which subscribers receive it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum Channel {
    User(String),
    Org(String),
    Broadcast,
}

impl Channel {
    /// `user`, `org` or `broadcast`.
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
    pub account_id: Option<BillingAccountId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payment_id: Option<PaymentId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refund_id: Option<RefundId>,
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
    /// The policy that switches it off, resolved for each recipient.
    pub switch: Option<PolicyKey>,
    pub data: NotificationDetails,
}

/// The events with a notification, by their stream: the workers subscribe to no others for it.
pub const NOTIFIED_EVENTS: &[(Stream, &[&str])] = &[
    (
        Stream::Provisioning,
        &[
            "provisioning.active",
            "provisioning.failed",
            "provisioning.release_failed",
            "provisioning.release_exhausted",
            "provisioning.released",
        ],
    ),
    (Stream::Nodes, &["node.state_changed", "node.tenant_faulted"]),
    (Stream::Terminals, &["terminal.opened", "terminal.closed"]),
    (
        Stream::Billing,
        &[
            "billing.balance_low",
            "billing.balance_depleted",
            "billing.payment_deposited",
            "billing.deposit_refused",
            "billing.refund_succeeded",
            "billing.refund_refused",
            "billing.refund_given_back",
            "billing.reversal_posted",
        ],
    ),
    (Stream::Notifications, &["notification.announced"]),
];

/// Whether events of this type can be delivered to a webhook or an e-mail address. Announcements are for connected clients only.
#[must_use]
pub fn is_deliverable(event: &str) -> bool {
    let streams = NOTIFIED_EVENTS.iter().filter(|(stream, _)| *stream != Stream::Notifications);
    streams.flat_map(|(_, events)| events.iter()).any(|notified| *notified == event)
}

impl Notification {
    const fn new(audience: Audience, data: NotificationDetails) -> Self {
        Self { audience, switch: None, data }
    }

    fn with_switch(self, switch: PolicyKey) -> Self {
        Self { switch: Some(switch), ..self }
    }

    /// The notifications of an event: the row to review when one is added.
    #[must_use]
    pub fn of(event: &Event) -> Vec<Self> {
        let renter = |allocation_id: AllocationId, data: NotificationDetails| {
            vec![Self::new(
                Audience::Renter(allocation_id),
                NotificationDetails { allocation_id: Some(allocation_id), ..data },
            )]
        };
        let of_payment = |payment_id: PaymentId, data: NotificationDetails| {
            vec![Self::new(
                Audience::PaymentHolder(payment_id),
                NotificationDetails { payment_id: Some(payment_id), ..data },
            )]
        };
        let in_state =
            |state: &str| NotificationDetails { state: Some(state.to_owned()), ..NotificationDetails::default() };
        match event.clone() {
            // A resent event for the payment: other recipients were notified the first time.
            Event::PaymentDeposited { is_again: true, .. }
            | Event::DepositRefused { is_again: true, .. }
            | Event::RefundRefused { is_again: true, .. }
            | Event::RefundGivenBack { is_again: true, .. }
            | Event::ReversalPosted { is_again: true, .. } => Vec::new(),
            Event::AllocationActive { allocation_id, node_id } => {
                renter(allocation_id, NotificationDetails { node_id: Some(node_id), ..in_state("active") })
            }
            Event::ProvisioningFailed { allocation_id, reason, .. } => {
                renter(allocation_id, NotificationDetails { reason: Some(reason), ..NotificationDetails::default() })
            }
            Event::AllocationReleased { allocation_id, reason, .. } => {
                renter(allocation_id, NotificationDetails { reason: Some(reason), ..in_state("released") })
            }
            Event::ReleaseFailed { allocation_id, attempt, reason, .. } => {
                let data =
                    NotificationDetails { attempt: Some(attempt), reason: Some(reason), ..in_state("release_failed") };
                renter(allocation_id, data)
            }
            Event::ReleaseExhausted { allocation_id, node_id, attempt } => {
                let data = NotificationDetails {
                    allocation_id: Some(allocation_id),
                    node_id: Some(node_id),
                    attempt: Some(attempt),
                    ..NotificationDetails::default()
                };
                vec![Self::new(Audience::Operators, data)]
            }
            Event::TenantFaulted { node_id, allocation_id, reason, .. } => renter(
                allocation_id,
                NotificationDetails { node_id: Some(node_id), reason: Some(reason), ..NotificationDetails::default() },
            ),
            Event::NodeStateChanged { node_id, from, to, reason } => {
                let data = NotificationDetails { node_id: Some(node_id), ..in_state(&to) };
                // The reason is for operators: a tenant learns the consequence from the allocation.
                let all = NotificationDetails { from_state: from, reason: Some(reason), ..data.clone() };
                vec![Self::new(Audience::Operators, all), Self::new(Audience::NodeRenters(node_id), data)]
            }
            Event::TerminalOpened { session_id, allocation_id, .. } => {
                let data = NotificationDetails {
                    session_id: Some(session_id),
                    allocation_id: Some(allocation_id),
                    ..in_state("opened")
                };
                vec![Self::new(Audience::SessionUser(session_id), data)]
            }
            Event::TerminalClosed { session_id, allocation_id, reason, .. } => {
                let data = NotificationDetails {
                    session_id: Some(session_id),
                    allocation_id: Some(allocation_id),
                    reason: Some(reason),
                    ..in_state("closed")
                };
                vec![Self::new(Audience::SessionUser(session_id), data)]
            }
            Event::BalanceLow { account_id, holder } => {
                let data = NotificationDetails { account_id: Some(account_id), ..NotificationDetails::default() };
                let notification = Self::new(Audience::Holder(holder), data);
                vec![notification.with_switch(PolicyKey::NotificationLowBalance)]
            }
            Event::BalanceDepleted { account_id, holder, release_at } => {
                let data = NotificationDetails {
                    account_id: Some(account_id),
                    release_at: Some(release_at),
                    ..NotificationDetails::default()
                };
                let notification = Self::new(Audience::Holder(holder), data);
                vec![notification.with_switch(PolicyKey::NotificationBalanceDepleted)]
            }
            Event::PaymentDeposited { payment_id, account_id, .. } => {
                of_payment(payment_id, NotificationDetails { account_id: Some(account_id), ..in_state("deposited") })
            }
            Event::DepositRefused { payment_id, account_id, reason, .. } => {
                let data =
                    NotificationDetails { account_id: Some(account_id), reason: Some(reason), ..in_state("refused") };
                of_payment(payment_id, data)
            }
            Event::RefundSucceeded { payment_id, refund_id } => {
                of_payment(payment_id, NotificationDetails { refund_id: Some(refund_id), ..in_state("succeeded") })
            }
            Event::RefundRefused { payment_id, refund_id, account_id, .. } => {
                let data = NotificationDetails {
                    account_id: Some(account_id),
                    refund_id: Some(refund_id),
                    ..in_state("refused")
                };
                of_payment(payment_id, data)
            }
            Event::RefundGivenBack { payment_id, refund_id, account_id, .. } => {
                let data = NotificationDetails {
                    account_id: Some(account_id),
                    refund_id: Some(refund_id),
                    ..in_state("returned")
                };
                of_payment(payment_id, data)
            }
            Event::ReversalPosted { payment_id, account_id, is_undone, .. } => {
                let state = in_state(if is_undone { "reversal_undone" } else { "reversed" });
                of_payment(payment_id, NotificationDetails { account_id: Some(account_id), ..state })
            }
            Event::Announced { announcement_id } => {
                let data =
                    NotificationDetails { announcement_id: Some(announcement_id), ..NotificationDetails::default() };
                vec![Self::new(Audience::AllClients(announcement_id), data)]
            }
            // Intermediate steps that no user has to know, and messages between the parts of the system.
            Event::AllocationRequested { .. }
            | Event::ProvisioningStarted { .. }
            | Event::ReservationUnwanted { .. }
            | Event::ReleaseRequested { .. }
            | Event::ReleaseForced { .. }
            | Event::LoginsChanged { .. }
            | Event::LoginsStale { .. }
            | Event::LoginsWritten { .. }
            | Event::TerminalsUnwanted { .. }
            | Event::TerminalsCutOff { .. }
            | Event::TerminalFailed { .. }
            | Event::UsageChanged { .. }
            | Event::AllocationUncovered { .. }
            | Event::AllocationMetered { .. }
            | Event::AllocationCounted { .. }
            | Event::RefundTaken { .. }
            | Event::PaymentOpeningDue { .. }
            | Event::PaymentCheckDue { .. }
            | Event::PaymentPaid { .. }
            | Event::RefundRequested { .. }
            | Event::RefundDue { .. }
            | Event::RefundFailed { .. }
            | Event::PaymentReversed { .. }
            | Event::ReversalUndone { .. }
            | Event::ProcessorEventDue { .. }
            | Event::DevicesReserved { .. }
            | Event::TenantReady { .. }
            | Event::TenantFailed { .. }
            | Event::TenantGone { .. }
            | Event::TenantRemains { .. }
            | Event::SkuStateChanged { .. }
            | Event::PolicyWritten { .. }
            | Event::TrustChanged { .. } => Vec::new(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::event::tests::every_event;
    use proptest::prelude::*;
    use std::fmt::Write as _;

    #[test]
    fn recipients_of_every_event_are_as_reviewed() {
        let mut table = String::new();
        for event in every_event() {
            for notification in Notification::of(&event) {
                let whom = match &notification.audience {
                    Audience::Holder(_) => "the account's holder",
                    Audience::PaymentHolder(_) => "the holder of the account it was paid into",
                    Audience::Renter(_) => "who rents the allocation",
                    Audience::NodeRenters(_) => "who rents on the node",
                    Audience::SessionUser(_) => "whose terminal it is",
                    Audience::Operators => "platform_operations",
                    Audience::AllClients(_) => "everybody",
                };
                let data = serde_json::to_value(&notification.data).unwrap();
                let fields: Vec<_> = data.as_object().unwrap().keys().map(String::as_str).collect();
                let switch = notification.switch.map(|key| format!(", by {}", key.name())).unwrap_or_default();
                writeln!(table, "{} -> {whom}{switch}: {}", event.subject(), fields.join(" ")).unwrap();
            }
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn relay_subscribes_to_exactly_the_events_with_notifications() {
        for event in every_event() {
            let (subject, stream) = event.row();
            let listens = NOTIFIED_EVENTS.iter().any(|(of, subjects)| *of == stream && subjects.contains(&subject));
            assert_eq!(listens, !Notification::of(&event).is_empty(), "{subject}");
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
            let subject = Channel::User(one.clone()).subject();
            let word = subject.strip_prefix("notify.user.").unwrap();
            prop_assert!(word.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit()));
            prop_assert_eq!(one == other, subject == Channel::User(other.clone()).subject());
            prop_assert_ne!(Channel::User(one.clone()).subject(), Channel::Org(one).subject());
        }
    }
}
