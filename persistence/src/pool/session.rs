//! A session with the settings that it was asked for. They are parameters of its start, as the connect options have them, and are set by
//! statement once more: a pooler that ignores such parameters, as PgBouncer can be set to, would silently drop the time-outs.

use super::ConnectionError;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Executor as _, Row as _};

/// How often a session is compared with another one before it counts as one of its own. A pooler of transactions has most often a single
/// server connection for both.
const COMPARISONS: u32 = 3;

/// The settings of a session, each with its value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SessionSettings(Vec<(String, String)>);

impl SessionSettings {
    /// Of the parameter `options` (libpq, *options*): `-c name=value`, where a backslash escapes a blank.
    pub(super) fn of(options: &PgConnectOptions) -> Self {
        Self(options.get_options().map(parse).unwrap_or_default())
    }

    fn statement(&self) -> String {
        // Not `SET`, for which a quoted list is one element.
        let set =
            |(name, value): &(String, String)| format!("set_config('{name}', '{}', false)", value.replace('\'', "''"));
        format!("SELECT {}", self.0.iter().map(set).collect::<Vec<_>>().join(", "))
    }

    /// # Errors
    /// Where the server refuses one of them, or cannot be reached.
    pub(super) async fn apply(&self, session: &mut PgConnection) -> Result<(), sqlx::Error> {
        if self.0.is_empty() {
            return Ok(());
        }
        session.execute(sqlx::raw_sql(AssertSqlSafe(self.statement()))).await.map(drop)
    }

    /// The first of these settings that the session does not have, with the value that it has.
    async fn lost(&self, session: &mut PgConnection) -> Result<Option<(String, String)>, sqlx::Error> {
        for (name, value) in &self.0 {
            let shown = session.fetch_one(sqlx::raw_sql(AssertSqlSafe(format!("SHOW {name}")))).await?;
            let found: String = shown.try_get(0)?;
            // In the server's own spelling: `10s` for 10000 milliseconds.
            let wanted = sqlx::query_scalar("SELECT set_config($1, $2, false)").bind(name).bind(value);
            let wanted: String = wanted.fetch_one(&mut *session).await?;
            if wanted != found {
                return Ok(Some((name.clone(), found)));
            }
        }
        Ok(None)
    }
}

fn parse(options: &str) -> Vec<(String, String)> {
    let mut words = vec![String::new()];
    let mut letters = options.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => words.last_mut().map(|word| word.extend(letters.next())),
            ' ' | '\t' | '\n' => {
                words.push(String::new());
                None
            }
            letter => words.last_mut().map(|word| word.push(letter)),
        };
    }
    let is_name = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.'))
    };
    let setting = |word: &String| {
        let (name, value) = word.trim_start_matches("--").trim_start_matches("-c").split_once('=')?;
        is_name(name).then(|| (name.to_owned(), value.to_owned()))
    };
    words.iter().filter_map(setting).collect()
}

/// Opens a session, with its settings.
pub(crate) async fn connect(options: &PgConnectOptions) -> Result<PgConnection, sqlx::Error> {
    let mut session = options.connect().await?;
    SessionSettings::of(options).apply(&mut session).await?;
    Ok(session)
}

/// Whether what this process needs of a session holds: it is its own, and its settings stay.
///
/// # Errors
/// [`ConnectionError`] where a pooler gives a session to other clients, or drops settings.
pub(super) async fn check(
    session: &mut PgConnection,
    options: &PgConnectOptions,
    at: &str,
) -> Result<(), ConnectionError> {
    let down = |source| ConnectionError::Down { at: at.to_owned(), source };
    let mut other = connect(options).await.map_err(down)?;
    let is_shared = is_shared(session, &mut other).await;
    // How it closes does not matter.
    let _ = other.close().await;
    if is_shared.map_err(down)? {
        return Err(ConnectionError::SharedSessions { at: at.to_owned() });
    }
    match SessionSettings::of(options).lost(session).await.map_err(down)? {
        Some((name, found)) => Err(ConnectionError::LostSetting { at: at.to_owned(), name, found }),
        None => Ok(()),
    }
}

/// Whether the two sessions are, or become, one of the server's. Advisory locks, prepared statements and settings would be another client's.
async fn is_shared(session: &mut PgConnection, other: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let first = backend(session).await?;
    for _ in 0..COMPARISONS {
        if backend(other).await? == first || backend(session).await? != first {
            return Ok(true);
        }
    }
    Ok(false)
}

async fn backend(session: &mut PgConnection) -> Result<i32, sqlx::Error> {
    session.fetch_one(sqlx::raw_sql("SELECT pg_backend_pid()")).await?.try_get(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(options: PgConnectOptions) -> Vec<(String, String)> {
        SessionSettings::of(&options).0
    }

    #[test]
    fn settings_of_the_connect_options_are_set_by_statement() {
        let options = PgConnectOptions::new_without_pgpass();
        assert!(of(options.clone()).is_empty());
        let options = options.options([("statement_timeout", "10000"), ("search_path", "it's, b\\c")]);
        let settings = SessionSettings::of(&options);
        let statement =
            r"SELECT set_config('statement_timeout', '10000', false), set_config('search_path', 'it''s, b\c', false)";
        assert_eq!(settings.statement(), statement);
    }

    #[test]
    fn options_as_libpq_takes_them_are_read_and_no_name_carries_a_statement() {
        let settings = parse(r"-c geqo=off -cjit=off  --work_mem=1\ MB -c a;b=c -c novalue");
        let pairs: Vec<_> = settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(pairs, [("geqo", "off"), ("jit", "off"), ("work_mem", "1 MB")]);
    }
}
