//! The gate before the start: a database that was restored from a backup is recognized, and nothing starts on it before `gpuaas
//! begin-incarnation` (decision 0069). Nodes and NATS know epochs that such a database does not.

use crate::cluster::nats;
use crate::cluster::recovery_stream::{self, BusMark, PublishedMark};
use crate::config::Config;
use async_nats::Client;
use async_nats::connection::State;
use persistence::RecoveryMarks;
use persistence::recovery_mark::{MarkPosition, MarkReading, RecoveryMark};
use sqlx::PgPool;
use std::time::Duration;
use thiserror::Error;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

/// How long the connection to NATS may take before the gate judges without it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Why nothing starts on this database.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RestoreFinding {
    #[error(
        "the database was restored from a backup: it ends at {database}, and members have published {bus} ({member}, {at}). NATS and the \
         nodes know epochs that it lacks. Stop every member, list what was lost by `gpuaas recover-report`, and run `gpuaas \
         begin-incarnation` once"
    )]
    Behind { database: String, bus: String, member: String, at: String },
    #[error(
        "the database is of cluster {database}, and NATS has the marks of cluster {bus}: SVC_DATABASE_URL or SVC_NATS_URL leads to another \
         cluster, or another cluster's backup was restored. Correct the variable or restore this cluster's backup; where the database is \
         the right one, run `gpuaas begin-incarnation --force`"
    )]
    AnotherCluster { database: Uuid, bus: Uuid },
    #[error(
        "the database has been moved or recovered: another server, or another timeline, committed its last mark, and NATS cannot say \
         whether commits are missing ({why}). If it was restored from a backup, run `gpuaas begin-incarnation` once; if not, make NATS \
         answer"
    )]
    Moved { why: String, is_temporary: bool },
    #[error(
        "{member} has begun incarnation {incarnation} of this cluster on another database; this member is of incarnation {own} and ends. \
         Give it that database's SVC_DATABASE_URL, or leave it stopped"
    )]
    Superseded { member: String, incarnation: i64, own: i64 },
}

/// Judges a database by its own mark and by what the bus has. The bus was read first, so that marks which members commit meanwhile do not look
/// lost.
///
/// # Errors
/// [`RestoreFinding`]
pub fn judge(database: &MarkReading, bus: &BusMark) -> Result<(), RestoreFinding> {
    match (bus, &database.mark) {
        (BusMark::Of(bus), Some(mark)) if bus.cluster_id != mark.cluster_id => {
            Err(RestoreFinding::AnotherCluster { database: mark.cluster_id, bus: bus.cluster_id })
        }
        (BusMark::Of(bus), Some(mark)) if mark.position < bus.position() => Err(behind(&text(mark.position), bus)),
        (BusMark::Of(_), Some(_)) => Ok(()),
        // A schema from before marks, and yet members have published some.
        (BusMark::Of(bus), None) => Err(behind("a schema without marks", bus)),
        (BusMark::Missing | BusMark::Unknown(_), mark) => {
            let is_moved = mark.and_then(|mark| mark.committed_by).is_some_and(|server| server != database.server);
            match bus {
                BusMark::Unknown(why) if is_moved => {
                    Err(RestoreFinding::Moved { why: why.clone(), is_temporary: true })
                }
                BusMark::Missing if is_moved => {
                    let why = "it has no mark: its data was lost, too".to_owned();
                    Err(RestoreFinding::Moved { why, is_temporary: false })
                }
                BusMark::Unknown(_) | BusMark::Missing | BusMark::Of(_) => Ok(()),
            }
        }
    }
}

fn behind(database: &str, bus: &PublishedMark) -> RestoreFinding {
    RestoreFinding::Behind {
        database: database.to_owned(),
        bus: text(bus.position()),
        member: bus.member.clone(),
        at: bus.at.format("%Y-%m-%dT%H:%M:%SZ").to_string(),
    }
}

fn text(position: MarkPosition) -> String {
    format!("mark {} of incarnation {}", position.mark, position.incarnation)
}

/// Fails where the database was restored and no incarnation was begun since.
///
/// # Errors
/// [`RestoreFinding`], or where the database cannot be read.
pub async fn pass(config: &Config, pool: &PgPool) -> anyhow::Result<()> {
    let (database, bus) = read(config, pool).await?;
    if let BusMark::Unknown(why) = &bus {
        tracing::warn!(why, "whether the database was restored is judged without NATS");
    }
    Ok(judge(&database, &bus)?)
}

/// What the database and the bus have.
///
/// # Errors
/// Where the database cannot be read.
pub async fn read(config: &Config, pool: &PgPool) -> anyhow::Result<(MarkReading, BusMark)> {
    let client = nats::connect(&config.nats_url, config.nats_ca.as_deref(), &config.member_name).await?;
    let bus = if is_connected(&client).await {
        recovery_stream::read(&client, &config.key_ring).await
    } else {
        BusMark::Unknown("it cannot be reached".to_owned())
    };
    Ok((RecoveryMarks::new(pool.clone()).read().await?, bus))
}

/// Waits some seconds for the connection.
pub async fn is_connected(client: &Client) -> bool {
    let connecting = async {
        while client.connection_state() != State::Connected {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(CONNECT_TIMEOUT, connecting).await.is_ok()
}

/// Whether a published mark is of a later incarnation of this member's cluster.
#[must_use]
pub fn superseded(own: &RecoveryMark, published: &PublishedMark) -> Option<RestoreFinding> {
    let is_later = published.cluster_id == own.cluster_id && published.incarnation > own.position.incarnation;
    is_later.then(|| RestoreFinding::Superseded {
        member: published.member.clone(),
        incarnation: published.incarnation,
        own: own.position.incarnation,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::DateTime;
    use persistence::recovery_mark::ServerIdentity;

    const HERE: ServerIdentity = ServerIdentity { system_identifier: 7, timeline: 1 };
    const RECOVERED: ServerIdentity = ServerIdentity { system_identifier: 7, timeline: 2 };

    fn database(incarnation: i64, mark: i64, server: ServerIdentity) -> MarkReading {
        let position = MarkPosition { incarnation, mark };
        let mark = RecoveryMark { cluster_id: Uuid::nil(), position, committed_by: Some(HERE), raised_at: None };
        MarkReading { mark: Some(mark), server }
    }

    fn bus(incarnation: i64, mark: i64) -> BusMark {
        let at = DateTime::UNIX_EPOCH;
        BusMark::Of(PublishedMark { cluster_id: Uuid::nil(), incarnation, mark, member: "replica-1".to_owned(), at })
    }

    #[test]
    fn database_is_refused_where_the_bus_has_a_later_mark() {
        for (position, published, is_behind) in [
            ((0, 9), (0, 10), true),
            ((0, 10), (0, 10), false),
            ((0, 11), (0, 10), false),
            // Restored once more after an incarnation was begun.
            ((0, 50), (3, 10), true),
            ((3, 1), (0, 99), false),
        ] {
            // A failover that lost nothing begins a timeline, too.
            for server in [HERE, RECOVERED] {
                let judged = judge(&database(position.0, position.1, server), &bus(published.0, published.1));
                assert_eq!(
                    matches!(judged, Err(RestoreFinding::Behind { .. })),
                    is_behind,
                    "{position:?} {published:?}"
                );
                assert!(is_behind || judged.is_ok());
            }
        }
    }

    #[test]
    fn moved_database_is_refused_only_where_the_bus_cannot_say() {
        let unknown = BusMark::Unknown("it cannot be reached".to_owned());
        assert_eq!(judge(&database(0, 9, HERE), &unknown), Ok(()));
        assert_eq!(judge(&database(0, 9, HERE), &BusMark::Missing), Ok(()));
        let moved = judge(&database(0, 9, RECOVERED), &unknown);
        assert!(matches!(moved, Err(RestoreFinding::Moved { is_temporary: true, .. })), "{moved:?}");
        let moved = judge(&database(0, 9, RECOVERED), &BusMark::Missing);
        assert!(matches!(moved, Err(RestoreFinding::Moved { is_temporary: false, .. })), "{moved:?}");
        // The first start on this schema.
        let first = MarkReading { mark: None, server: HERE };
        assert_eq!(judge(&first, &BusMark::Missing), Ok(()));
        assert!(judge(&first, &bus(0, 1)).is_err());
    }

    #[test]
    fn another_clusters_database_and_a_later_incarnation_are_named() {
        let mut foreign = database(0, 99, HERE);
        foreign.mark.as_mut().unwrap().cluster_id = Uuid::from_u128(1);
        let judged = judge(&foreign, &bus(0, 10));
        assert!(matches!(judged, Err(RestoreFinding::AnotherCluster { .. })), "{judged:?}");
        let own = database(0, 9, HERE).mark.unwrap();
        let BusMark::Of(later) = bus(3, 1) else { panic!("a mark") };
        assert!(superseded(&own, &later).is_some_and(|finding| finding.to_string().contains("incarnation 3")));
        let BusMark::Of(same) = bus(0, 99) else { panic!("a mark") };
        assert_eq!(superseded(&own, &same), None);
    }
}
