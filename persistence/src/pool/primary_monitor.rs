//! Which of several servers takes writes, and the pool's way to it (`target_session_attrs=read-write` of libpq).
//!
//! Each server is asked several times a second on a connection of its own. The one that takes writes is the primary; of two, as after a
//! failover whose old primary is back, the one on the later timeline. A server on an earlier timeline than one that was used is never
//! used again, whatever it says. Where the primary changes, every connection to the one before is closed, also those on which a statement
//! waits: a frozen server, or one that a partition has left behind, would answer none.

use super::nodelay_proxy::Route;
use super::{change_connect_options, of_user};
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool};
use sqlx::{ConnectOptions as _, Executor as _, Row as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Between two questions to one server.
const INTERVAL: Duration = Duration::from_millis(200);
/// How long a server may take to answer, and to accept a connection.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

const QUESTION: &str = "SELECT system_identifier,
    CASE WHEN pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' THEN NULL
         ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int END AS timeline
    FROM pg_control_system()";

/// What a server last answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ServerState {
    /// Which cluster of Postgres it belongs to: that of `initdb`, which its standbys have too.
    system: i64,
    /// The timeline of its writes; `None` where it takes none.
    timeline: Option<i32>,
}

/// What is known of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// It was not asked to the end yet.
    Never,
    /// It did not answer in time.
    Silent,
    As(ServerState),
}

impl Seen {
    const fn state(self) -> Option<ServerState> {
        match self {
            Self::As(state) => Some(state),
            Self::Never | Self::Silent => None,
        }
    }
}

/// What is known of all servers, in the order of the URL.
type States = Arc<Mutex<Vec<Seen>>>;

/// Chooses among the states.
#[derive(Debug, Default)]
struct Choice {
    primary: Option<usize>,
    system: Option<i64>,
    /// The latest timeline that was used.
    timeline: i32,
}

/// What follows from the states.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Stay,
    Use(usize),
    /// None of the servers may be used.
    Close(&'static str),
}

impl Choice {
    fn decide(&mut self, states: &[Seen]) -> Decision {
        // A process that has just started knows no timeline: it may meet an old primary first.
        if self.system.is_none() && states.contains(&Seen::Never) {
            return Decision::Stay;
        }
        let writable = |seen: &Seen| {
            let state = seen.state()?;
            let is_known = self.system.is_none_or(|system| system == state.system);
            state.timeline.filter(|timeline| is_known && *timeline >= self.timeline)
        };
        let latest = states.iter().filter_map(writable).max();
        let Some(latest) = latest else {
            // One that does not answer may still be the primary: its connections end by themselves.
            let answers =
                self.primary.is_some_and(|primary| states.get(primary).is_some_and(|seen| seen.state().is_some()));
            if !answers {
                return Decision::Stay;
            }
            self.primary = None;
            return Decision::Close("it takes no writes any more");
        };
        let on_it: Vec<usize> =
            (0..states.len()).filter(|n| states.get(*n).and_then(writable) == Some(latest)).collect();
        match on_it.as_slice() {
            [one] if self.primary == Some(*one) => {
                self.timeline = latest;
                Decision::Stay
            }
            [one] => {
                (self.primary, self.timeline) = (Some(*one), latest);
                self.system = states.get(*one).and_then(|seen| seen.state()).map(|state| state.system);
                Decision::Use(*one)
            }
            _ if self.primary.is_none() => Decision::Stay,
            _ => {
                self.primary = None;
                Decision::Close("two servers take writes on one timeline: stop the wrong one")
            }
        }
    }
}

/// The monitor of one pool.
pub(super) struct PrimaryMonitor {
    pool: PgPool,
    routes: Vec<Route>,
    choice: Choice,
}

impl PrimaryMonitor {
    /// Runs until the pool is closed, or the runtime ends. To be called within the runtime.
    pub(super) fn start(pool: PgPool, routes: Vec<Route>) {
        tokio::spawn(Self { pool, routes, choice: Choice::default() }.run());
    }

    async fn run(mut self) {
        let states: States = Arc::new(Mutex::new(vec![Seen::Never; self.routes.len()]));
        let changed = Arc::new(Notify::new());
        let mut questions = JoinSet::new();
        for (number, route) in self.routes.iter_mut().enumerate() {
            match route.watch() {
                Ok(server) => {
                    questions.spawn(ask(self.pool.clone(), server, number, Arc::clone(&states), Arc::clone(&changed)));
                }
                Err(error) => tracing::error!(%error, "a server of the database cannot be watched; it is not used"),
            }
        }
        while !self.pool.is_closed() {
            let now = states.lock().unwrap_or_else(PoisonError::into_inner).clone();
            match self.choice.decide(&now) {
                Decision::Stay => {}
                Decision::Use(number) => self.switch_to(number),
                Decision::Close(reason) => {
                    tracing::warn!(reason, "no server of the database is used");
                    self.routes.iter_mut().for_each(Route::close);
                }
            }
            tokio::select! {
                () = changed.notified() => {}
                () = self.pool.close_event() => {}
            }
        }
    }

    fn switch_to(&mut self, number: usize) {
        let timeline = self.choice.timeline;
        for (at, route) in self.routes.iter_mut().enumerate() {
            if at != number {
                route.close();
                continue;
            }
            let (server, port) = (route.options().get_host().to_owned(), route.options().get_port());
            change_connect_options(&self.pool, |options| of_user(options, route.options()));
            match route.open() {
                Ok(()) => tracing::info!(server, port, timeline, "the database's primary is used"),
                Err(error) => {
                    // Decided again with the next answer.
                    self.choice.primary = None;
                    tracing::warn!(%error, server, port, "the local proxy to the database's primary cannot be opened");
                }
            }
        }
    }
}

/// Asks one server again and again, and records its state.
async fn ask(pool: PgPool, server: PgConnectOptions, number: usize, states: States, changed: Arc<Notify>) {
    let mut connection = None;
    while !pool.is_closed() {
        // With the user that was renewed last.
        let state = answer(&mut connection, &of_user(&pool.connect_options(), &server)).await;
        {
            let mut states = states.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(slot) = states.get_mut(number) {
                *slot = state.map_or(Seen::Silent, Seen::As);
            }
        }
        changed.notify_one();
        sleep(INTERVAL).await;
    }
}

/// One answer; `None` where there is none in time. The connection is opened again then.
async fn answer(connection: &mut Option<PgConnection>, options: &PgConnectOptions) -> Option<ServerState> {
    let mut open = match connection.take() {
        Some(open) => open,
        None => timeout(CONNECT_TIMEOUT, options.connect()).await.ok()?.ok()?,
    };
    let row = timeout(ANSWER_TIMEOUT, open.fetch_one(sqlx::raw_sql(QUESTION))).await.ok()?.ok()?;
    let state = ServerState { system: row.try_get("system_identifier").ok()?, timeline: row.try_get("timeline").ok()? };
    *connection = Some(open);
    Some(state)
}

#[cfg(test)]
mod tests {
    use super::Seen::{Never, Silent};
    use super::*;

    const STANDBY: Seen = Seen::As(ServerState { system: 7, timeline: None });

    const fn primary(timeline: i32) -> Seen {
        Seen::As(ServerState { system: 7, timeline: Some(timeline) })
    }

    #[test]
    fn server_that_takes_writes_is_used_and_a_silent_one_stays_until_another_does() {
        let mut choice = Choice::default();
        assert_eq!(choice.decide(&[Silent, STANDBY, STANDBY]), Decision::Stay);
        assert_eq!(choice.decide(&[STANDBY, primary(1), STANDBY]), Decision::Use(1));
        assert_eq!(choice.decide(&[STANDBY, Silent, STANDBY]), Decision::Stay);
        assert_eq!(choice.decide(&[STANDBY, Silent, primary(2)]), Decision::Use(2));
        assert_eq!(choice.decide(&[STANDBY, STANDBY, primary(2)]), Decision::Stay);
    }

    #[test]
    fn old_primary_that_is_back_is_not_used_even_where_no_other_answers() {
        let mut choice = Choice::default();
        assert_eq!(choice.decide(&[primary(1), STANDBY]), Decision::Use(0));
        assert_eq!(choice.decide(&[primary(1), primary(2)]), Decision::Use(1));
        assert_eq!(choice.decide(&[primary(1), Silent]), Decision::Stay);
        assert!(matches!(choice.decide(&[primary(1), STANDBY]), Decision::Close(_)));
        assert_eq!(choice.decide(&[primary(1), Silent]), Decision::Stay);
        assert_eq!(choice.decide(&[primary(3), Silent]), Decision::Use(0));
    }

    #[test]
    fn process_that_starts_uses_no_primary_before_every_server_was_asked() {
        let mut choice = Choice::default();
        assert_eq!(choice.decide(&[primary(3), Never, STANDBY]), Decision::Stay);
        assert_eq!(choice.decide(&[primary(3), primary(4), STANDBY]), Decision::Use(1));
        let mut choice = Choice::default();
        assert_eq!(choice.decide(&[primary(3), Silent, STANDBY]), Decision::Use(0));
    }

    #[test]
    fn demoted_primary_is_left_at_once() {
        let mut choice = Choice::default();
        assert_eq!(choice.decide(&[primary(1), STANDBY]), Decision::Use(0));
        assert!(matches!(choice.decide(&[STANDBY, STANDBY]), Decision::Close(_)));
        assert_eq!(choice.decide(&[STANDBY, STANDBY]), Decision::Stay);
    }

    #[test]
    fn two_primaries_on_one_timeline_or_one_of_another_cluster_are_not_used() {
        let mut choice = Choice::default();
        assert_eq!(choice.decide(&[primary(4), primary(4)]), Decision::Stay);
        assert_eq!(choice.decide(&[primary(4), Silent]), Decision::Use(0));
        assert!(matches!(choice.decide(&[primary(4), primary(4)]), Decision::Close(_)));
        let foreign = Seen::As(ServerState { system: 8, timeline: Some(9) });
        assert_eq!(choice.decide(&[Silent, foreign]), Decision::Stay);
    }
}
