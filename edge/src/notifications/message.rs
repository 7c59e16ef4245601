//! A notification as it is sent: a CloudEvent (1.0, JSON format), version 1 of its data. What is added to it later is added beside what
//! there is.

use actors::ChangedEntities;
use chrono::{DateTime, Utc};
use domain::EntityRef;
use domain::announcement::Severity;
use domain::notification::{Channel, NotificationDetails};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

const VERSION: u32 = 1;
const SOURCE: &str = "/gpuaas/notifications";

/// A message of a notification connection: a CloudEvent.
///
/// `provisioning.*`, `node.*`, `terminal.*`, `billing.*`, `notification.announced`: something happened.
/// `runtime.changed`: entities changed, on the channel `operations`. `notifications.ready`: you are subscribed. `notifications.pong`: the answer to your `{"type":"ping"}`.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Notification)]
pub struct NotificationMessage<'a> {
    /// Of CloudEvents.
    #[schema(example = "1.0")]
    specversion: &'static str,
    /// The event's id. A message that is sent twice has the same id.
    id: Uuid,
    #[schema(example = "/gpuaas/notifications")]
    source: &'static str,
    /// What happened.
    #[serde(rename = "type")]
    #[schema(example = "provisioning.active")]
    kind: &'a str,
    /// The resource of the event: kind and id.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "allocation/0199e3f4-5c1b-7a00-8000-0c0ffee0c0de")]
    subject: Option<&'a str>,
    time: DateTime<Utc>,
    #[schema(example = "application/json")]
    datacontenttype: &'static str,
    /// The version of the data: fields of a version are never removed.
    #[schema(example = 1)]
    dataversion: u32,
    /// The request that caused it.
    #[serde(skip_serializing_if = "Option::is_none")]
    correlationid: Option<&'a str>,
    /// `user`, `org`, `broadcast` or `operations`; none for messages about the connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "user")]
    channel: Option<&'static str>,
    #[schema(value_type = NotificationData)]
    data: MessageData<'a>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum MessageData<'a> {
    Event(&'a NotificationDetails),
    Ready {
        channels: Vec<&'static str>,
        expires_at: DateTime<Utc>,
    },
    Changed {
        kinds: Vec<&'static str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        entities: Option<Vec<ChangedEntity>>,
    },
    Nothing {},
}

/// An entity that changed.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChangedEntity {
    #[schema(example = "node")]
    kind: &'static str,
    id: Uuid,
}

/// Identifiers, states and codes; the fields depend on `type`.
#[derive(Debug, Serialize, ToSchema)]
pub struct NotificationData {
    allocation_id: Option<Uuid>,
    node_id: Option<Uuid>,
    /// A terminal session's.
    session_id: Option<Uuid>,
    /// A login's to the web console.
    browser_session_id: Option<Uuid>,
    /// A billing account's.
    account_id: Option<Uuid>,
    /// The payment, or the one that is refunded.
    payment_id: Option<Uuid>,
    refund_id: Option<Uuid>,
    rollout_id: Option<Uuid>,
    announcement_id: Option<Uuid>,
    from_state: Option<String>,
    state: Option<String>,
    /// A code.
    reason: Option<String>,
    /// Of a clean-up.
    attempt: Option<u32>,
    /// Of `billing.balance_depleted`: when running allocations are released, unless the account is topped up.
    release_at: Option<DateTime<Utc>>,
    /// Of `notification.announced`: `info`, `warning` or `critical`.
    #[schema(value_type = Option<String>)]
    severity: Option<Severity>,
    /// Of `notification.announced`: the operator's text.
    message: Option<String>,
    /// Of `notifications.ready`: the subscribed channels.
    channels: Option<Vec<String>>,
    /// Of `runtime.changed`: the kinds of the entities that changed.
    kinds: Option<Vec<String>>,
    /// Of `runtime.changed`: the entities that changed; absent where they are more than 64.
    entities: Option<Vec<ChangedEntity>>,
    /// Of `notifications.ready`: when the access token ends, and the connection with it.
    expires_at: Option<DateTime<Utc>>,
}

/// The event of a notification.
#[derive(Clone, Debug)]
pub struct EventHeader<'a> {
    pub id: Uuid,
    /// The event's own type.
    pub kind: &'a str,
    pub subject: &'a str,
    pub time: DateTime<Utc>,
    pub correlation_id: &'a str,
}

impl<'a> NotificationMessage<'a> {
    const fn new(id: Uuid, kind: &'a str, time: DateTime<Utc>, data: MessageData<'a>) -> Self {
        Self {
            specversion: "1.0",
            id,
            source: SOURCE,
            kind,
            subject: None,
            time,
            datacontenttype: "application/json",
            dataversion: VERSION,
            correlationid: None,
            channel: None,
            data,
        }
    }

    fn encode(&self) -> String {
        // Plain fields only: it can be written.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The message for an event on a channel.
#[must_use]
pub fn encoded(about: &EventHeader<'_>, channel: &Channel, data: &NotificationDetails) -> String {
    let message = NotificationMessage {
        subject: Some(about.subject),
        correlationid: Some(about.correlation_id),
        channel: Some(channel.name()),
        ..NotificationMessage::new(about.id, about.kind, about.time, MessageData::Event(data))
    };
    message.encode()
}

/// The message for an endpoint that its owner tests.
#[must_use]
pub fn test_message(endpoint: Uuid, now: DateTime<Utc>) -> String {
    let subject = format!("notification_endpoint/{endpoint}");
    let message = NotificationMessage {
        subject: Some(&subject),
        ..NotificationMessage::new(Uuid::new_v4(), domain::notification_endpoint::TEST, now, MessageData::Nothing {})
    };
    message.encode()
}

/// The message for operators about entities that changed.
#[must_use]
pub fn changes_message(changed: &ChangedEntities, now: DateTime<Utc>) -> String {
    let named = |entity: &EntityRef| ChangedEntity { kind: entity.kind.as_str(), id: entity.id };
    let data = MessageData::Changed {
        kinds: changed.kinds.iter().map(|kind| kind.as_str()).collect(),
        entities: changed.entities.as_ref().map(|entities| entities.iter().map(named).collect()),
    };
    let message = NotificationMessage {
        channel: Some(Channel::Operations.name()),
        ..NotificationMessage::new(Uuid::new_v4(), "runtime.changed", now, data)
    };
    message.encode()
}

/// The first message: from here on, events of these channels are received.
pub(super) fn ready(channels: &[Channel], expires_at: DateTime<Utc>, now: DateTime<Utc>) -> String {
    let channels = channels.iter().map(Channel::name).collect();
    NotificationMessage::new(Uuid::new_v4(), "notifications.ready", now, MessageData::Ready { channels, expires_at })
        .encode()
}

pub(super) fn pong(now: DateTime<Utc>) -> String {
    NotificationMessage::new(Uuid::new_v4(), "notifications.pong", now, MessageData::Nothing {}).encode()
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::{
        AllocationId, AnnouncementId, BillingAccountId, BrowserSessionId, NodeId, PaymentId, RefundId, RolloutId,
        TerminalSessionId,
    };
    use serde_json::{Value, json};
    use std::collections::BTreeSet;
    use utoipa::PartialSchema as _;

    fn everything() -> NotificationDetails {
        let (id, text) = (Uuid::from_u128(1), || Some("x".to_owned()));
        NotificationDetails {
            allocation_id: Some(AllocationId(id)),
            node_id: Some(NodeId(id)),
            session_id: Some(TerminalSessionId(id)),
            browser_session_id: Some(BrowserSessionId(id)),
            account_id: Some(BillingAccountId(id)),
            payment_id: Some(PaymentId(id)),
            refund_id: Some(RefundId(id)),
            rollout_id: Some(RolloutId(id)),
            announcement_id: Some(AnnouncementId(id)),
            from_state: text(),
            state: text(),
            reason: text(),
            attempt: Some(1),
            release_at: Some(DateTime::UNIX_EPOCH),
            severity: Some(Severity::Warning),
            message: text(),
        }
    }

    fn keys(value: &Value) -> BTreeSet<String> {
        value.as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn notification_is_a_cloud_event_with_only_its_readers_data() {
        let about = EventHeader {
            id: Uuid::from_u128(7),
            kind: "billing.balance_low",
            subject: "billing_account/x",
            time: DateTime::UNIX_EPOCH,
            correlation_id: "c",
        };
        let data = NotificationDetails {
            account_id: Some(BillingAccountId(Uuid::from_u128(2))),
            ..NotificationDetails::default()
        };
        let sent: Value = serde_json::from_str(&encoded(&about, &Channel::Org("acme".into()), &data)).unwrap();
        let expected = json!({
            "specversion": "1.0", "id": Uuid::from_u128(7), "source": "/gpuaas/notifications", "type": "billing.balance_low",
            "subject": "billing_account/x", "time": "1970-01-01T00:00:00Z", "datacontenttype": "application/json",
            "dataversion": 1, "correlationid": "c", "channel": "org", "data": { "account_id": Uuid::from_u128(2) },
        });
        assert_eq!(sent, expected, "the id of whose channel it is stands nowhere");
    }

    #[test]
    fn every_notification_field_is_in_the_description() {
        let (now, channels) = (DateTime::UNIX_EPOCH, [Channel::Broadcast]);
        let schema = serde_json::to_value(NotificationData::schema()).unwrap();
        let described = keys(&schema["properties"]);
        let ready: Value = serde_json::from_str(&ready(&channels, now, now)).unwrap();
        let pong: Value = serde_json::from_str(&pong(now)).unwrap();
        let node = EntityRef { kind: domain::EntityKind::Node, id: Uuid::nil() };
        let changed = ChangedEntities { kinds: [node.kind].into(), entities: Some([node].into()) };
        let changed: Value = serde_json::from_str(&changes_message(&changed, now)).unwrap();
        assert_eq!(changed["data"]["entities"], json!([{ "kind": "node", "id": Uuid::nil() }]));
        let everything = serde_json::to_value(everything()).unwrap();
        let output: BTreeSet<_> =
            [&everything, &ready["data"], &pong["data"], &changed["data"]].into_iter().flat_map(keys).collect();
        assert_eq!(output, described);
        let schema = serde_json::to_value(NotificationMessage::schema()).unwrap();
        let about = EventHeader { id: Uuid::nil(), kind: "k", subject: "s", time: now, correlation_id: "c" };
        let sent: Value =
            serde_json::from_str(&encoded(&about, &Channel::Broadcast, &NotificationDetails::default())).unwrap();
        assert_eq!(keys(&sent), keys(&schema["properties"]));
    }

    #[test]
    fn no_field_could_hold_a_secret() {
        let data = serde_json::to_value(everything()).unwrap();
        for key in keys(&data) {
            let suspect = ["secret", "token", "key", "password"].into_iter().find(|word| key.contains(word));
            assert_eq!(suspect, None, "{key}");
        }
    }
}
