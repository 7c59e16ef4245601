//! Authenticates what the members send each other over NATS: whoever may publish there, and is no member, is not believed
//! (`deploy/decisions/0039`).
//!
//! A message carries, in one header, its sender, its receiver where it has one, a number, the shared time at which it was sent, and an
//! HMAC-SHA256 (RFC 2104) over these, its purpose, its subject, its reply subject and its bytes. The keys are rotated like the others
//! (`edge::keys::MemberKeys`). Senders and receivers are processes, by ids that are drawn anew at each start; a receiver takes each number
//! of a sender once, so that a message which is repeated, or sent to another process, is refused.

mod window;

use super::View;
use chrono::TimeDelta;
use domain::{MemberId, Timestamp};
use edge::keys::{KeysInForce, MacKey};
use hmac::{Hmac, KeyInit as _, Mac as _};
use prometheus::{IntCounterVec, Opts, Registry};
use sha2::Sha256;
use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use uuid::Uuid;
use window::Window;

/// The header that carries a [`Stamp`].
pub const HEADER: &str = "gpuaas-mac";

const VERSION: &str = "v1";

/// A message to all is believed for so long after it was sent, by the shared time. Messages to one process need no such bound: a process
/// that starts has a new id.
const FRESH_FOR: TimeDelta = TimeDelta::seconds(30);

/// An event is believed for so long. What it led to is remembered for longer (`persistence::sweep::COMMANDS_KEPT`), so that an event
/// which is published again leads to nothing.
const EVENT_FOR: TimeDelta = TimeDelta::hours(23);

/// A process that sent nothing for so long is gone: what it sent has come or is lost.
const SILENT_FOR: Duration = Duration::from_secs(60);

/// How often refused messages are logged, for each reason.
const LOGS_EVERY: Duration = Duration::from_secs(10);

type Tag = [u8; 32];

/// What a message is for. One of one purpose is none of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A command or a question that is answered.
    Request,
    /// The answer to the request with this tag.
    Answer { to: Tag },
    /// To all members, or to one that does not answer.
    Notice,
    /// A committed event, which JetStream stores and may deliver several times.
    Event,
}

impl Purpose {
    const fn name(&self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Answer { .. } => "answer",
            Self::Notice => "notice",
            Self::Event => "event",
        }
    }
}

/// What is authenticated.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    pub purpose: Purpose,
    pub subject: &'a str,
    /// Where the answer to a request goes.
    pub reply: Option<&'a str>,
    pub payload: &'a [u8],
}

/// Who sent a message, to whom, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub sender: MemberId,
    /// `None` for a message to all.
    pub recipient: Option<MemberId>,
    /// The shared time; `None` where the sender did not know it yet.
    pub sent_at: Option<Timestamp>,
    /// An answer is bound to its request by this.
    pub tag: Tag,
    key_id: String,
    number: u64,
}

/// A message that is believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Believed {
    Stamped(Stamp),
    /// Without a stamp, while a member of a release lives that makes none.
    OfEarlierRelease,
}

/// Why a message is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Refusal {
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
}

/// Stamps this member's messages, and checks those of others.
pub struct MemberAuthenticator {
    view: Arc<View>,
    keys: KeysInForce,
    next: AtomicU64,
    received: Mutex<BTreeMap<MemberId, Window>>,
    refused: IntCounterVec,
    logged: Mutex<BTreeMap<Refusal, Instant>>,
}

impl MemberAuthenticator {
    /// # Errors
    /// Where the registry has a metric of this name.
    pub fn register(registry: &Registry, view: Arc<View>, keys: KeysInForce) -> prometheus::Result<Self> {
        let refused = IntCounterVec::new(
            Opts::new("member_messages_refused_total", "Messages over NATS that were not believed to be a member's."),
            &["reason"],
        )?;
        registry.register(Box::new(refused.clone()))?;
        let (received, logged) = (Mutex::default(), Mutex::default());
        Ok(Self { view, keys, next: AtomicU64::new(1), received, refused, logged })
    }

    /// The header's value for a message of this member, and what its answer is bound by. `None` only where there is no key.
    #[must_use]
    pub fn stamp(&self, message: &Message<'_>, recipient: Option<MemberId>) -> Option<(String, Tag)> {
        let keys = self.keys.load();
        let (key_id, key) = keys.member.active()?;
        let mut stamp = Stamp {
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

    /// Checks a message with this header. What is refused is counted.
    ///
    /// # Errors
    /// [`Refusal`]; the message must have no effect.
    pub fn check(&self, message: &Message<'_>, header: Option<&str>) -> Result<Believed, Refusal> {
        let checked = self.believed(message, header).and_then(|believed| match &believed {
            Believed::Stamped(stamp) if !self.is_for_this(stamp) => Err(Refusal::ForAnother),
            Believed::Stamped(stamp) => self.admit(message, stamp).map(|()| believed),
            Believed::OfEarlierRelease => Ok(believed),
        });
        checked.inspect_err(|refusal| self.count(*refusal, message.subject))
    }

    /// The same for a request to the owner of a shard, where a member may take another process for the owner. `false`: it is believed,
    /// and not for this process.
    ///
    /// # Errors
    /// [`Refusal`]
    pub fn check_request(&self, message: &Message<'_>, header: Option<&str>) -> Result<(Believed, bool), Refusal> {
        let checked = self.believed(message, header).and_then(|believed| match &believed {
            Believed::Stamped(stamp) if !self.is_for_this(stamp) => Ok((believed, false)),
            Believed::Stamped(stamp) => self.admit(message, stamp).map(|()| (believed, true)),
            Believed::OfEarlierRelease => Ok((believed, true)),
        });
        checked.inspect_err(|refusal| self.count(*refusal, message.subject))
    }

    fn is_for_this(&self, stamp: &Stamp) -> bool {
        stamp.recipient.is_none_or(|recipient| recipient == self.view.me.id)
    }

    fn believed(&self, message: &Message<'_>, header: Option<&str>) -> Result<Believed, Refusal> {
        let Some(header) = header else {
            let earlier = self.view.has_unauthenticated_members();
            return if earlier { Ok(Believed::OfEarlierRelease) } else { Err(Refusal::Unstamped) };
        };
        let stamp: Stamp = header.parse()?;
        let keys = self.keys.load();
        let key = keys.member.trusted(&stamp.key_id).ok_or(Refusal::UnknownKey)?;
        // In constant time.
        let mac = stamp.mac(key, message).ok_or(Refusal::UnknownKey)?;
        mac.verify_slice(&stamp.tag).map_err(|_| Refusal::Forged)?;
        Ok(Believed::Stamped(stamp))
    }

    /// Whether a message by a member is neither too old nor repeated.
    fn admit(&self, message: &Message<'_>, stamp: &Stamp) -> Result<(), Refusal> {
        let now = self.view.clock.shared();
        let age = now.zip(stamp.sent_at).map(|(now, sent_at)| now - sent_at);
        match message.purpose {
            // JetStream delivers it as often as it has to. One whose age is not known is found in the outbox.
            Purpose::Event if age.is_some_and(|age| age <= EVENT_FOR) => return Ok(()),
            Purpose::Event => return Err(Refusal::Stale),
            Purpose::Request | Purpose::Answer { .. } | Purpose::Notice => {}
        }
        // Before its first heartbeat a process knows no time, and has nothing that a notice could change.
        if stamp.recipient.is_none() && now.is_some() && age.is_none_or(|age| age > FRESH_FOR) {
            return Err(Refusal::Stale);
        }
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let new = received.entry(stamp.sender).or_default().admit(stamp.number);
        if new { Ok(()) } else { Err(Refusal::Repeated) }
    }

    /// How long a request was on its way, by the shared time.
    #[must_use]
    pub fn in_transit(&self, believed: &Believed) -> Duration {
        let sent_at = match believed {
            Believed::Stamped(stamp) => stamp.sent_at,
            Believed::OfEarlierRelease => None,
        };
        let passed = self.view.clock.shared().zip(sent_at).map(|(now, sent_at)| now - sent_at);
        passed.and_then(|passed| passed.to_std().ok()).unwrap_or_default()
    }

    /// Keeps of processes that have been silent for a while only how far they came. To be called now and then.
    pub fn shrink(&self) {
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        received.values_mut().filter(|window| window.rested_for(SILENT_FOR)).for_each(Window::shrink);
    }

    fn count(&self, refusal: Refusal, subject: &str) {
        self.refused.with_label_values(&[&refusal.to_string()]).inc();
        // A message to a process that has just ended is no attack.
        if refusal == Refusal::ForAnother {
            return;
        }
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.get(&refusal).is_none_or(|at| at.elapsed() >= LOGS_EVERY) {
            logged.insert(refusal, Instant::now());
            tracing::warn!(reason = %refusal, subject, "a message over NATS was refused: it is not believed to be a member's");
        }
    }
}

impl Stamp {
    /// `None` never in practice: HMAC takes keys of every length.
    fn mac(&self, key: &MacKey, message: &Message<'_>) -> Option<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(key.as_slice()).ok()?;
        let mut part = |bytes: &[u8]| {
            mac.update(&(bytes.len() as u64).to_be_bytes());
            mac.update(bytes);
        };
        part(VERSION.as_bytes());
        part(message.purpose.name().as_bytes());
        part(match &message.purpose {
            Purpose::Answer { to } => to,
            Purpose::Request | Purpose::Notice | Purpose::Event => &[],
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
impl std::fmt::Display for Stamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let recipient = self.recipient.map_or_else(|| "*".to_owned(), |it| it.0.simple().to_string());
        let (sender, sent_at) = (self.sender.0.simple(), millis(self.sent_at));
        let (key_id, number, tag) = (&self.key_id, self.number, hex::encode(self.tag));
        write!(f, "{VERSION};{key_id};{sender};{recipient};{number};{sent_at};{tag}")
    }
}

impl FromStr for Stamp {
    type Err = Refusal;

    fn from_str(header: &str) -> Result<Self, Refusal> {
        let member = |text: &str| Uuid::try_parse(text).map(MemberId).map_err(|_| Refusal::Unreadable);
        let mut parts = header.splitn(8, ';');
        let mut next = || parts.next().ok_or(Refusal::Unreadable);
        if next()? != VERSION {
            return Err(Refusal::Unreadable);
        }
        let key_id = next()?.to_owned();
        let sender = member(next()?)?;
        let recipient = match next()? {
            "*" => None,
            one => Some(member(one)?),
        };
        let number = next()?.parse().map_err(|_| Refusal::Unreadable)?;
        let sent_at: i64 = next()?.parse().map_err(|_| Refusal::Unreadable)?;
        let mut tag = Tag::default();
        hex::decode_to_slice(next()?, &mut tag).map_err(|_| Refusal::Unreadable)?;
        if parts.next().is_some() {
            return Err(Refusal::Unreadable);
        }
        let sent_at = Timestamp::from_timestamp_millis(sent_at).filter(|_| sent_at != 0);
        Ok(Self { sender, recipient, sent_at, tag, key_id, number })
    }
}

#[cfg(test)]
mod tests;
