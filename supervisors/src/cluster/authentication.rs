//! Authenticates the messages between members over NATS: a client that may publish there and is no member is refused
//! (`deploy/decisions/0036`).
//!
//! A message carries, in one header, its sender, its receiver where it has one, a number, the shared time at which it was sent, and an
//! HMAC-SHA256 (RFC 2104) over these, its purpose, its subject, its reply subject and its bytes. The keys are rotated like the others
//! (`edge::trust::current_keys::MemberKeys`). Senders and receivers are processes, with ids that are drawn at each start; a receiver accepts each
//! number of a sender once, so that a message that is replayed, or sent to another process, is refused.

mod replay_window;

use super::ClusterView;
use chrono::TimeDelta;
use domain::{MemberId, Timestamp};
use edge::trust::current_keys::{CurrentKeys, MacKey};
use hmac::{Hmac, KeyInit as _, Mac as _};
use prometheus::{IntCounter, IntCounterVec, Opts, Registry};
use replay_window::ReplayWindow;
use sha2::Sha256;
use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The header that carries a [`MessageStamp`].
pub const HEADER: &str = "gpuaas-mac";

const VERSION: &str = "v1";

/// The age up to which a broadcast is accepted, by the shared time. Messages to one process need no such bound: a process that starts
/// has a new id.
const MAX_MESSAGE_AGE: TimeDelta = TimeDelta::seconds(30);

/// The age up to which an event is accepted. The ids of its commands are stored for longer (policy `retention.command_ids_hours`), so that an
/// event that is published again has no effect.
const MAX_EVENT_AGE: TimeDelta = TimeDelta::hours(23);

/// A process that sent nothing for so long is gone: its messages have arrived or are lost.
const SENDER_IDLE: Duration = Duration::from_secs(60);

/// How often refused messages are logged, per reason.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

type Tag = [u8; 32];

/// What a message is for. A message of one purpose is not accepted for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum MessagePurpose {
    /// A command or a query that is answered.
    Request,
    /// The answer to the request with this tag.
    Answer { to: Tag },
    /// A broadcast to all members, or a message to one that does not answer.
    Notice,
    /// A committed event, which JetStream stores and may deliver several times.
    Event,
}

impl MessagePurpose {
    const fn name(&self) -> &'static str {
        self.into_str()
    }
}

/// The authenticated content of a message: the input of its MAC.
#[derive(Clone, Copy, Debug)]
pub struct MacInput<'a> {
    pub purpose: MessagePurpose,
    pub subject: &'a str,
    /// Where the answer to a request goes.
    pub reply: Option<&'a str>,
    pub payload: &'a [u8],
}

/// The sender, the recipient and the time of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageStamp {
    pub sender: MemberId,
    /// `None` for a message to all.
    pub recipient: Option<MemberId>,
    /// By the shared time; `None` where the sender did not know it yet.
    pub sent_at: Option<Timestamp>,
    /// The MAC. An answer is bound to its request by it.
    pub tag: Tag,
    key_id: String,
    number: u64,
}

/// The origin of an accepted message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageOrigin {
    Stamped(MessageStamp),
    /// Without a stamp, while a member lives whose release makes none.
    OfEarlierRelease,
}

/// Why a message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error, strum::VariantArray)]
pub enum MessageRefusal {
    #[error("unstamped")]
    Unstamped,
    #[error("unreadable")]
    Unreadable,
    #[error("unknown_key")]
    UnknownKey,
    #[error("forged")]
    Forged,
    #[error("for_another_member")]
    ForAnother,
    #[error("repeated")]
    Repeated,
    #[error("stale")]
    Stale,
    /// A member's, sent or received before the first heartbeat, which brings the shared time. An event takes effect from the outbox.
    #[error("undated")]
    Undated,
}

/// Stamps this member's messages, and verifies those of others.
pub struct MemberAuthenticator {
    view: Arc<ClusterView>,
    keys: CurrentKeys,
    next: AtomicU64,
    received: Mutex<BTreeMap<MemberId, ReplayWindow>>,
    refused: IntCounterVec,
    undated: IntCounter,
    logged: Mutex<BTreeMap<MessageRefusal, Instant>>,
}

impl MemberAuthenticator {
    /// # Errors
    /// Where the registry has a metric of this name.
    pub fn register(registry: &Registry, view: Arc<ClusterView>, keys: CurrentKeys) -> prometheus::Result<Self> {
        let refused = IntCounterVec::new(
            Opts::new(
                "member_messages_refused_total",
                "Messages over NATS that could not be authenticated as a member's.",
            ),
            &["reason"],
        )?;
        let undated = IntCounter::new(
            "member_messages_undated_total",
            "Messages of members over NATS that came before the shared time was known, as after a start; their events take effect from the outbox.",
        )?;
        registry.register(Box::new(undated.clone()))?;
        let counted = <MessageRefusal as strum::VariantArray>::VARIANTS.iter();
        for refusal in counted.filter(|refusal| **refusal != MessageRefusal::Undated) {
            // Exported from the start, so that a first burst is an increase.
            let _ = refused.with_label_values(&[&refusal.to_string()]);
        }
        registry.register(Box::new(refused.clone()))?;
        let (received, logged) = (Mutex::default(), Mutex::default());
        Ok(Self { view, keys, next: AtomicU64::new(1), received, refused, undated, logged })
    }

    /// The header's value for a message of this member, and the tag that its answer is bound to. `None` only where there is no key.
    #[must_use]
    pub fn stamp(&self, message: &MacInput<'_>, recipient: Option<MemberId>) -> Option<(String, Tag)> {
        let keys = self.keys.load();
        let (key_id, key) = keys.member.active()?;
        let mut stamp = MessageStamp {
            sender: self.view.me.id,
            recipient,
            sent_at: self.view.clock.shared(),
            tag: Tag::default(),
            key_id: key_id.to_owned(),
            number: self.next.fetch_add(1, Ordering::Relaxed),
        };
        stamp.tag = stamp.mac(key, message)?.finalize().into_bytes().into();
        Some((stamp.to_string(), stamp.tag))
    }

    /// Verifies a message with this header. Refused messages are counted.
    ///
    /// # Errors
    /// [`MessageRefusal`]; the message must have no effect.
    pub fn check(&self, message: &MacInput<'_>, header: Option<&str>) -> Result<MessageOrigin, MessageRefusal> {
        let checked = self.verify(message, header).and_then(|origin| match &origin {
            MessageOrigin::Stamped(stamp) if !self.is_for_this_member(stamp) => Err(MessageRefusal::ForAnother),
            MessageOrigin::Stamped(stamp) => self.admit(message, stamp).map(|()| origin),
            MessageOrigin::OfEarlierRelease => Ok(origin),
        });
        checked.inspect_err(|refusal| self.record_refusal(*refusal, message.subject))
    }

    /// The same for a request to the owner of a shard, where the sender may address another process as the owner. `false`: it is accepted,
    /// and addressed to another process.
    ///
    /// # Errors
    /// [`MessageRefusal`]
    pub fn check_request(
        &self,
        message: &MacInput<'_>,
        header: Option<&str>,
    ) -> Result<(MessageOrigin, bool), MessageRefusal> {
        let checked = self.verify(message, header).and_then(|origin| match &origin {
            MessageOrigin::Stamped(stamp) if !self.is_for_this_member(stamp) => Ok((origin, false)),
            MessageOrigin::Stamped(stamp) => self.admit(message, stamp).map(|()| (origin, true)),
            MessageOrigin::OfEarlierRelease => Ok((origin, true)),
        });
        checked.inspect_err(|refusal| self.record_refusal(*refusal, message.subject))
    }

    fn is_for_this_member(&self, stamp: &MessageStamp) -> bool {
        stamp.recipient.is_none_or(|recipient| recipient == self.view.me.id)
    }

    fn verify(&self, message: &MacInput<'_>, header: Option<&str>) -> Result<MessageOrigin, MessageRefusal> {
        let Some(header) = header else {
            let earlier = self.view.has_unauthenticated_members();
            return if earlier { Ok(MessageOrigin::OfEarlierRelease) } else { Err(MessageRefusal::Unstamped) };
        };
        let stamp: MessageStamp = header.parse()?;
        let keys = self.keys.load();
        let key = keys.member.trusted(&stamp.key_id).ok_or(MessageRefusal::UnknownKey)?;
        // Compares in constant time.
        let mac = stamp.mac(key, message).ok_or(MessageRefusal::UnknownKey)?;
        mac.verify_slice(&stamp.tag).map_err(|_| MessageRefusal::Forged)?;
        Ok(MessageOrigin::Stamped(stamp))
    }

    /// Checks that a member's message is neither stale nor repeated.
    fn admit(&self, message: &MacInput<'_>, stamp: &MessageStamp) -> Result<(), MessageRefusal> {
        let now = self.view.clock.shared();
        let age = now.zip(stamp.sent_at).map(|(now, sent_at)| now - sent_at);
        match message.purpose {
            // JetStream may redeliver it. One that is not accepted is found in the outbox.
            MessagePurpose::Event => {
                return match age {
                    Some(age) if age <= MAX_EVENT_AGE => Ok(()),
                    Some(_) => Err(MessageRefusal::Stale),
                    None => Err(MessageRefusal::Undated),
                };
            }
            MessagePurpose::Request | MessagePurpose::Answer { .. } | MessagePurpose::Notice => {}
        }
        let is_broadcast = stamp.recipient.is_none();
        if is_broadcast && age.is_some_and(|age| age > MAX_MESSAGE_AGE) {
            return Err(MessageRefusal::Stale);
        }
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        if !received.entry(stamp.sender).or_default().admit(stamp.number) {
            return Err(MessageRefusal::Repeated);
        }
        // Before its first heartbeat a process does not know the shared time, and has no state that a broadcast could change.
        if is_broadcast && now.is_some() && age.is_none() { Err(MessageRefusal::Undated) } else { Ok(()) }
    }

    /// How long a request was in transit, by the shared time.
    #[must_use]
    pub fn in_transit(&self, origin: &MessageOrigin) -> Duration {
        let sent_at = match origin {
            MessageOrigin::Stamped(stamp) => stamp.sent_at,
            MessageOrigin::OfEarlierRelease => None,
        };
        let passed = self.view.clock.shared().zip(sent_at).map(|(now, sent_at)| now - sent_at);
        passed.and_then(|passed| passed.to_std().ok()).unwrap_or_default()
    }

    /// Reduces the replay windows of idle processes to their highest number. To be called periodically.
    pub fn compact(&self) {
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        received.values_mut().filter(|window| window.is_idle_for(SENDER_IDLE)).for_each(ReplayWindow::compact);
    }

    fn record_refusal(&self, refusal: MessageRefusal, subject: &str) {
        if refusal == MessageRefusal::Undated {
            self.undated.inc();
        } else {
            self.refused.with_label_values(&[&refusal.to_string()]).inc();
        }
        // A message for a process that has just ended is no attack.
        if refusal == MessageRefusal::ForAnother {
            return;
        }
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.get(&refusal).is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
            logged.insert(refusal, Instant::now());
            match refusal {
                MessageRefusal::Undated => tracing::info!(
                    subject,
                    "a member's message came before the shared time was known, as after a start; an event takes effect from the outbox"
                ),
                MessageRefusal::Stale => tracing::warn!(
                    reason = %refusal,
                    subject,
                    "a message over NATS was refused: a member sent it too long ago, or it was replayed; an event without effect is in the outbox"
                ),
                MessageRefusal::Unstamped
                | MessageRefusal::Unreadable
                | MessageRefusal::UnknownKey
                | MessageRefusal::Forged
                | MessageRefusal::ForAnother
                | MessageRefusal::Repeated => tracing::warn!(
                    reason = %refusal,
                    subject,
                    "a message over NATS was refused: it is not believed to be a member's"
                ),
            }
        }
    }
}

impl MessageStamp {
    /// `None` never in practice: HMAC takes keys of every length.
    fn mac(&self, key: &MacKey, message: &MacInput<'_>) -> Option<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(key.as_slice()).ok()?;
        let mut part = |bytes: &[u8]| {
            mac.update(&(bytes.len() as u64).to_be_bytes());
            mac.update(bytes);
        };
        part(VERSION.as_bytes());
        part(message.purpose.name().as_bytes());
        part(match &message.purpose {
            MessagePurpose::Answer { to } => to,
            MessagePurpose::Request | MessagePurpose::Notice | MessagePurpose::Event => &[],
        });
        part(message.subject.as_bytes());
        part(message.reply.unwrap_or_default().as_bytes());
        part(self.sender.0.as_bytes());
        part(self.recipient.as_ref().map_or(&[], |recipient| recipient.0.as_bytes()));
        part(&self.number.to_be_bytes());
        part(&millis(self.sent_at).to_be_bytes());
        part(message.payload);
        Some(mac)
    }
}

/// 0 stands for an unknown time.
fn millis(at: Option<Timestamp>) -> i64 {
    at.map_or(0, |at| at.timestamp_millis())
}

/// `v1;KEY;SENDER;RECIPIENT;NUMBER;SENT_AT;TAG`: ids as 32 hexadecimal digits, `*` for all, the time in milliseconds since 1970 or 0.
impl std::fmt::Display for MessageStamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let recipient = self.recipient.map_or_else(|| "*".to_owned(), |it| it.0.simple().to_string());
        let (sender, sent_at) = (self.sender.0.simple(), millis(self.sent_at));
        let (key_id, number, tag) = (&self.key_id, self.number, hex::encode(self.tag));
        write!(f, "{VERSION};{key_id};{sender};{recipient};{number};{sent_at};{tag}")
    }
}

impl FromStr for MessageStamp {
    type Err = MessageRefusal;

    fn from_str(header: &str) -> Result<Self, MessageRefusal> {
        let member = |text: &str| Uuid::try_parse(text).map(MemberId).map_err(|_| MessageRefusal::Unreadable);
        let mut parts = header.splitn(8, ';');
        let mut next = || parts.next().ok_or(MessageRefusal::Unreadable);
        if next()? != VERSION {
            return Err(MessageRefusal::Unreadable);
        }
        let key_id = next()?.to_owned();
        let sender = member(next()?)?;
        let recipient = match next()? {
            "*" => None,
            one => Some(member(one)?),
        };
        let number = next()?.parse().map_err(|_| MessageRefusal::Unreadable)?;
        let sent_at: i64 = next()?.parse().map_err(|_| MessageRefusal::Unreadable)?;
        let mut tag = Tag::default();
        hex::decode_to_slice(next()?, &mut tag).map_err(|_| MessageRefusal::Unreadable)?;
        if parts.next().is_some() {
            return Err(MessageRefusal::Unreadable);
        }
        let sent_at = Timestamp::from_timestamp_millis(sent_at).filter(|_| sent_at != 0);
        Ok(Self { sender, recipient, sent_at, tag, key_id, number })
    }
}

#[cfg(test)]
mod tests;
