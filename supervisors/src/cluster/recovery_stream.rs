//! Recovery marks on the bus: the stream `RECOVERY` stores the last mark of each incarnation, where a restore of the database does not reach.
//!
//! A mark is sealed with the key ring, since no member's stamp outlives the database: who may publish on NATS can neither stop members by an
//! invented incarnation nor keep them from starting.

use super::stream_copies::open_stream;
use anyhow::Context as _;
use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::GetStreamErrorKind;
use async_nats::jetstream::stream::{Config, DiscardPolicy, LastRawMessageErrorKind, StorageType, Stream};
use async_nats::{Client, Subscriber, jetstream};
use chrono::{DateTime, Utc};
use futures::TryStreamExt as _;
use persistence::envelope_encryption::{KeyRing, SealContext};
use persistence::recovery_mark::{MarkPosition, RecoveryMark};
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use uuid::Uuid;

/// The name of the stream.
pub const STREAM: &str = "RECOVERY";
const SUBJECTS: &str = "recovery.mark.*";
/// Incarnations are begun by hand.
const MAX_INCARNATIONS: i64 = 10_000;
const TIMEOUT: Duration = Duration::from_secs(3);

const CONTEXT: SealContext<'static> = SealContext { table: "recovery_mark", column: "mark", row: "bus" };

/// A mark as a member has published it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedMark {
    pub cluster_id: Uuid,
    pub incarnation: i64,
    pub mark: i64,
    /// The member that published it.
    pub member: String,
    pub at: DateTime<Utc>,
}

impl PublishedMark {
    #[must_use]
    pub fn new(mark: &RecoveryMark, member: &str, at: DateTime<Utc>) -> Self {
        let MarkPosition { incarnation, mark: number } = mark.position;
        Self { cluster_id: mark.cluster_id, incarnation, mark: number, member: member.to_owned(), at }
    }

    #[must_use]
    pub const fn position(&self) -> MarkPosition {
        MarkPosition { incarnation: self.incarnation, mark: self.mark }
    }

    /// # Errors
    /// Where the key ring cannot seal.
    pub fn seal(&self, ring: &KeyRing) -> anyhow::Result<Vec<u8>> {
        Ok(ring.seal(&CONTEXT, &serde_json::to_vec(self)?)?)
    }

    /// `None` where it was sealed with another key ring, or is no mark.
    #[must_use]
    pub fn open(ring: &KeyRing, sealed: &[u8]) -> Option<Self> {
        let plain = ring.open(&CONTEXT, sealed).ok()?;
        strict_json::from_slice(plain.expose_secret()).ok()
    }
}

/// What the bus has of an incarnation's marks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BusMark {
    /// NATS did not answer, or what it has does not open with this key ring.
    Unknown(String),
    /// The bus has no mark: a new cluster, or NATS has lost its data.
    Missing,
    /// The newest mark of the highest incarnation.
    Of(PublishedMark),
}

/// Publishes the mark, and waits until the stream has stored it.
///
/// # Errors
/// Where the stream cannot be reached.
pub async fn publish(client: &Client, ring: &KeyRing, mark: &PublishedMark) -> anyhow::Result<()> {
    let publishing = async {
        let context = context(client);
        let subject = format!("recovery.mark.{}", mark.incarnation);
        context.publish(subject, mark.seal(ring)?.into()).await?.await?;
        anyhow::Ok(())
    };
    tokio::time::timeout(TIMEOUT, publishing).await.context("NATS did not answer in time")?
}

/// Makes the stream, with so many copies, where it is missing.
///
/// # Errors
/// Where JetStream cannot be reached, or the cluster has fewer servers than that.
pub async fn make(client: &Client, copies: usize) -> anyhow::Result<Stream> {
    let config = Config {
        name: STREAM.to_owned(),
        subjects: vec![SUBJECTS.to_owned()],
        storage: StorageType::File,
        discard: DiscardPolicy::Old,
        max_messages_per_subject: 1,
        max_messages: MAX_INCARNATIONS,
        ..Config::default()
    };
    open_stream(&context(client), config, copies).await
}

/// Reads the newest mark. It returns within some seconds, whatever NATS does.
pub async fn read(client: &Client, ring: &KeyRing) -> BusMark {
    match tokio::time::timeout(TIMEOUT, newest(client, ring)).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => BusMark::Unknown(format!("{error:#}")),
        Err(_) => BusMark::Unknown("NATS did not answer in time".to_owned()),
    }
}

/// The marks of all members as they are published.
///
/// # Errors
/// Where the connection is closed for good.
pub async fn subscribe(client: &Client) -> anyhow::Result<Subscriber> {
    Ok(client.subscribe(SUBJECTS).await?)
}

async fn newest(client: &Client, ring: &KeyRing) -> anyhow::Result<BusMark> {
    let stream = match context(client).get_stream(STREAM).await {
        Ok(stream) => stream,
        Err(error) if is_missing(&error.kind()) => return Ok(BusMark::Missing),
        Err(error) => return Err(error).context("the stream RECOVERY cannot be read"),
    };
    let subjects: Vec<(String, usize)> = stream.info_with_subjects(SUBJECTS).await?.try_collect().await?;
    let incarnation_of = |(subject, _): &(String, usize)| subject.rsplit('.').next()?.parse::<i64>().ok();
    let mut incarnations: Vec<i64> = subjects.iter().filter_map(incarnation_of).collect();
    if incarnations.is_empty() {
        return Ok(BusMark::Missing);
    }
    incarnations.sort_unstable();
    for incarnation in incarnations.into_iter().rev() {
        let message = match stream.get_last_raw_message_by_subject(&format!("recovery.mark.{incarnation}")).await {
            Ok(message) => message,
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => continue,
            Err(error) => return Err(error.into()),
        };
        // What members have not published in this incarnation hides no mark below it.
        let mark = PublishedMark::open(ring, &message.payload).filter(|mark| mark.incarnation == incarnation);
        if let Some(mark) = mark {
            return Ok(BusMark::Of(mark));
        }
    }
    Ok(BusMark::Unknown("no mark in the stream RECOVERY opens with this key ring".to_owned()))
}

fn is_missing(error: &GetStreamErrorKind) -> bool {
    matches!(error, GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND)
}

fn context(client: &Client) -> jetstream::Context {
    let mut context = jetstream::new(client.clone());
    context.set_timeout(TIMEOUT);
    context
}

#[cfg(test)]
mod tests {
    use super::*;
    use local_servers::nats::{NatsServer, NatsUser};
    use local_servers::pki::Authority;

    fn ring(fill: &str) -> KeyRing {
        KeyRing::parse(&format!("active a\nkey a {}=\n", fill.repeat(43))).unwrap()
    }

    #[test]
    fn mark_opens_with_the_key_ring_that_sealed_it_and_no_other() {
        let at = DateTime::UNIX_EPOCH;
        let mark = PublishedMark { cluster_id: Uuid::nil(), incarnation: 3, mark: 9, member: "a".to_owned(), at };
        let (right, wrong) = (ring("A"), ring("Q"));
        let sealed = mark.seal(&right).unwrap();
        assert_eq!(PublishedMark::open(&right, &sealed), Some(mark));
        assert_eq!(PublishedMark::open(&wrong, &sealed), None);
        assert_eq!(PublishedMark::open(&right, b"forged"), None);
    }

    #[tokio::test]
    async fn message_that_is_no_mark_of_its_incarnation_hides_no_mark() {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(&folder.path().join("pki")).unwrap();
        let server = NatsServer::start(folder.path(), &authority, vec![NatsUser::operator("operator")]).await.unwrap();
        let client = server.connect("operator").await.unwrap();
        let ring = ring("A");
        assert_eq!(read(&client, &ring).await, BusMark::Missing);
        make(&client, 1).await.unwrap();
        let at = DateTime::UNIX_EPOCH;
        let old = PublishedMark { cluster_id: Uuid::nil(), incarnation: 2, mark: 9, member: "a".to_owned(), at };
        let newest = PublishedMark { incarnation: 3, mark: 4, ..old.clone() };
        for mark in [&old, &newest] {
            publish(&client, &ring, mark).await.unwrap();
        }
        // A publisher who is no member, with an invented message, and with an old one.
        let context = context(&client);
        for (incarnation, payload) in [("9001", b"forged".to_vec()), ("9002", old.seal(&ring).unwrap())] {
            let subject = format!("recovery.mark.{incarnation}");
            context.publish(subject, payload.into()).await.unwrap().await.unwrap();
        }
        assert_eq!(read(&client, &ring).await, BusMark::Of(newest));
        assert!(matches!(read(&client, &self::ring("Q")).await, BusMark::Unknown(_)));
    }
}
