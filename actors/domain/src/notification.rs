//! What people are told at once, and whom (specification, *Notification channel*; decisions 7). A notification is a word about an event,
//! for those who may know of it: identifiers, states and reason codes. Nothing is kept of it, and nobody waits for it.
//!
//! Each is told to whoever would find the same thing in the API: what is rented to its renter, an account to its holder, the inventory to those
//! who run it.

use crate::announcement::Severity;
use crate::billing_account::Holder;
use crate::event::{Event, Stream};
use crate::id::{AllocationId, AnnouncementId, BillingAccountId, NodeId, PaymentId, RefundId, TerminalSessionId};
use crate::machine::Timestamp;
use crate::policy::Key;
use serde::Serialize;

/// Where those who listen hear of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Channel {
    User(String),
    Org(String),
    Broadcast,
}

impl Channel {
    /// `user`, `org` or `broadcast`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::User(_) => "user",
            Self::Org(_) => "org",
            Self::Broadcast => "broadcast",
        }
    }

    /// The subject on the bus. An id comes from outside: written in base32 (RFC 4648, without padding) it is one word and no wildcard.
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

/// Whom it concerns. Who that is at this moment is looked up by whoever tells them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Whose account it is: a user, or everybody whose token names the org.
    Holder(Holder),
    /// Into whose account it was paid.
    PaidInto(PaymentId),
    /// Who rents the allocation.
    Renter(AllocationId),
    /// Who rents on the node.
    RentersOn(NodeId),
    /// Whose terminal it is.
    UserOf(TerminalSessionId),
    /// Who holds the platform role `platform_operations`.
    Operators,
    /// Everybody who listens; the words are the announcement's.
    Everybody(AnnouncementId),
}

/// What is said of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Data {
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
    /// A code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Of a clean-up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// When what runs is released, unless money comes in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub severity: Option<Severity>,
    /// An operator's words to everybody.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Something to be told to somebody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub audience: Audience,
    /// The policy that switches it off, resolved for whoever is told.
    pub switch: Option<Key>,
    pub data: Data,
}

/// The events that are told of, by their stream: nobody listens to the others for it.
pub const TOLD: &[(Stream, &[&str])] = &[
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

/// Whether a webhook or an e-mail address can be told of events of this type. What an operator says to everybody is for those who listen.
#[must_use]
pub fn is_delivered(event: &str) -> bool {
    let streams = TOLD.iter().filter(|(stream, _)| *stream != Stream::Notifications);
    streams.flat_map(|(_, events)| events.iter()).any(|told| *told == event)
}

impl Notice {
    const fn new(audience: Audience, data: Data) -> Self {
        Self { audience, switch: None, data }
    }

    fn unless_switched_off(self, switch: Key) -> Self {
        Self { switch: Some(switch), ..self }
    }

    /// Who is told what of an event: the row to review when one is added.
    #[must_use]
    pub fn of(event: &Event) -> Vec<Self> {
        let renter = |allocation_id: AllocationId, data: Data| {
            vec![Self::new(Audience::Renter(allocation_id), Data { allocation_id: Some(allocation_id), ..data })]
        };
        let of_payment = |payment_id: PaymentId, data: Data| {
            vec![Self::new(Audience::PaidInto(payment_id), Data { payment_id: Some(payment_id), ..data })]
        };
        let in_state = |state: &str| Data { state: Some(state.to_owned()), ..Data::default() };
        match event.clone() {
            // The payment had not heard it; whom else it concerns was told the first time.
            Event::PaymentDeposited { is_again: true, .. }
            | Event::DepositRefused { is_again: true, .. }
            | Event::RefundRefused { is_again: true, .. }
            | Event::RefundGivenBack { is_again: true, .. }
            | Event::ReversalPosted { is_again: true, .. } => Vec::new(),
            Event::AllocationActive { allocation_id, node_id } => {
                renter(allocation_id, Data { node_id: Some(node_id), ..in_state("active") })
            }
            Event::ProvisioningFailed { allocation_id, reason, .. } => {
                renter(allocation_id, Data { reason: Some(reason), ..Data::default() })
            }
            Event::AllocationReleased { allocation_id, reason, .. } => {
                renter(allocation_id, Data { reason: Some(reason), ..in_state("released") })
            }
            Event::ReleaseFailed { allocation_id, attempt, reason, .. } => {
                let data = Data { attempt: Some(attempt), reason: Some(reason), ..in_state("release_failed") };
                renter(allocation_id, data)
            }
            Event::ReleaseExhausted { allocation_id, node_id, attempt } => {
                let data = Data {
                    allocation_id: Some(allocation_id),
                    node_id: Some(node_id),
                    attempt: Some(attempt),
                    ..Data::default()
                };
                vec![Self::new(Audience::Operators, data)]
            }
            Event::TenantFaulted { node_id, allocation_id, reason, .. } => {
                renter(allocation_id, Data { node_id: Some(node_id), reason: Some(reason), ..Data::default() })
            }
            Event::NodeStateChanged { node_id, from, to, reason } => {
                let data = Data { node_id: Some(node_id), ..in_state(&to) };
                // Why, is for those who run it: to a tenant the allocation says what it means for them.
                let all = Data { from_state: from, reason: Some(reason), ..data.clone() };
                vec![Self::new(Audience::Operators, all), Self::new(Audience::RentersOn(node_id), data)]
            }
            Event::TerminalOpened { session_id, allocation_id, .. } => {
                let data =
                    Data { session_id: Some(session_id), allocation_id: Some(allocation_id), ..in_state("opened") };
                vec![Self::new(Audience::UserOf(session_id), data)]
            }
            Event::TerminalClosed { session_id, allocation_id, reason, .. } => {
                let data = Data {
                    session_id: Some(session_id),
                    allocation_id: Some(allocation_id),
                    reason: Some(reason),
                    ..in_state("closed")
                };
                vec![Self::new(Audience::UserOf(session_id), data)]
            }
            Event::BalanceLow { account_id, holder } => {
                let data = Data { account_id: Some(account_id), ..Data::default() };
                let notice = Self::new(Audience::Holder(holder), data);
                vec![notice.unless_switched_off(Key::NotificationLowBalance)]
            }
            Event::BalanceDepleted { account_id, holder, release_at } => {
                let data = Data { account_id: Some(account_id), release_at: Some(release_at), ..Data::default() };
                let notice = Self::new(Audience::Holder(holder), data);
                vec![notice.unless_switched_off(Key::NotificationBalanceDepleted)]
            }
            Event::PaymentDeposited { payment_id, account_id, .. } => {
                of_payment(payment_id, Data { account_id: Some(account_id), ..in_state("deposited") })
            }
            Event::DepositRefused { payment_id, account_id, reason, .. } => {
                let data = Data { account_id: Some(account_id), reason: Some(reason), ..in_state("refused") };
                of_payment(payment_id, data)
            }
            Event::RefundSucceeded { payment_id, refund_id } => {
                of_payment(payment_id, Data { refund_id: Some(refund_id), ..in_state("succeeded") })
            }
            Event::RefundRefused { payment_id, refund_id, account_id, .. } => {
                let data = Data { account_id: Some(account_id), refund_id: Some(refund_id), ..in_state("refused") };
                of_payment(payment_id, data)
            }
            Event::RefundGivenBack { payment_id, refund_id, account_id, .. } => {
                let data = Data { account_id: Some(account_id), refund_id: Some(refund_id), ..in_state("returned") };
                of_payment(payment_id, data)
            }
            Event::ReversalPosted { payment_id, account_id, is_undone, .. } => {
                let state = in_state(if is_undone { "reversal_undone" } else { "reversed" });
                of_payment(payment_id, Data { account_id: Some(account_id), ..state })
            }
            Event::Announced { announcement_id } => {
                let data = Data { announcement_id: Some(announcement_id), ..Data::default() };
                vec![Self::new(Audience::Everybody(announcement_id), data)]
            }
            // Steps on the way, of which nobody outside has to know, and what the parts of the system say to each other.
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
    fn who_is_told_what_is_as_reviewed() {
        let mut table = String::new();
        for event in every_event() {
            for notice in Notice::of(&event) {
                let whom = match &notice.audience {
                    Audience::Holder(_) => "the account's holder",
                    Audience::PaidInto(_) => "the holder of the account it was paid into",
                    Audience::Renter(_) => "who rents the allocation",
                    Audience::RentersOn(_) => "who rents on the node",
                    Audience::UserOf(_) => "whose terminal it is",
                    Audience::Operators => "platform_operations",
                    Audience::Everybody(_) => "everybody",
                };
                let data = serde_json::to_value(&notice.data).unwrap();
                let fields: Vec<_> = data.as_object().unwrap().keys().map(String::as_str).collect();
                let switch = notice.switch.map(|key| format!(", by {}", key.name())).unwrap_or_default();
                writeln!(table, "{} -> {whom}{switch}: {}", event.subject(), fields.join(" ")).unwrap();
            }
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn the_relay_listens_to_the_events_that_are_told_of_and_to_no_others() {
        for event in every_event() {
            let (subject, stream) = event.row();
            let listens = TOLD.iter().any(|(of, subjects)| *of == stream && subjects.contains(&subject));
            assert_eq!(listens, !Notice::of(&event).is_empty(), "{subject}");
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
