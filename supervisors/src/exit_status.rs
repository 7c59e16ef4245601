//! Exit statuses of `gpuaas`, which service managers act on. The numbers are those of `sysexits.h`.

use crate::config::ConfigError;
use crate::restore_gate::RestoreFinding;
use persistence::key_rewrap::KeyRingMismatch;
use persistence::migrate::SchemaError;
use persistence::pool::{ConnectionError, PoolError};
use std::io::Write as _;
use std::process::ExitCode;

/// `EX_CONFIG`: an operator has to correct a setting first, so that a restart does not help.
pub const CONFIGURATION: u8 = 78;
/// `EX_TEMPFAIL`: a contract has to wait for members of an earlier release. The same command succeeds once they are gone.
pub const WAITS: u8 = 75;
/// `EX_UNAVAILABLE`: the database cannot be reached. A restart succeeds once it is back.
pub const UNAVAILABLE: u8 = 69;
const FAILURE: u8 = 1;

/// The status of a command that checks: 0 where all agrees, 1 where it does not, 2 where that is not known.
pub(crate) fn of_check(agrees: anyhow::Result<bool>) -> ExitCode {
    agrees.map_or_else(
        |error| {
            let _ = writeln!(std::io::stderr(), "gpuaas: {error:#}");
            ExitCode::from(2)
        },
        |agrees| ExitCode::from(u8::from(!agrees)),
    )
}

/// The status for an error that ends the program.
#[must_use]
pub fn code_of(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(status_of(error))
}

fn status_of(error: &anyhow::Error) -> u8 {
    if error.is::<ConfigError>() || error.is::<PoolError>() {
        return CONFIGURATION;
    }
    if let Some(KeyRingMismatch::Missing { .. } | KeyRingMismatch::Wrong { .. }) = error.downcast_ref() {
        return CONFIGURATION;
    }
    if let Some(SchemaError::Newer { .. } | SchemaError::Behind { .. } | SchemaError::Changed { .. }) =
        error.downcast_ref()
    {
        return CONFIGURATION;
    }
    match error.downcast_ref() {
        Some(RestoreFinding::Moved { is_temporary: true, .. }) => return UNAVAILABLE,
        Some(
            RestoreFinding::Behind { .. }
            | RestoreFinding::AnotherCluster { .. }
            | RestoreFinding::Moved { .. }
            | RestoreFinding::Superseded { .. },
        ) => return CONFIGURATION,
        None => {}
    }
    match error.downcast_ref() {
        Some(
            ConnectionError::Refused { .. }
            | ConnectionError::StartupParameter { .. }
            | ConnectionError::SharedSessions { .. }
            | ConnectionError::LostSetting { .. }
            | ConnectionError::AnotherDatabase { .. }
            | ConnectionError::Pool(_),
        ) => CONFIGURATION,
        Some(ConnectionError::Down { .. } | ConnectionError::ReadOnly { .. }) => UNAVAILABLE,
        None => FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;
    use persistence::pool::{PoolConfig, check_connection};

    #[tokio::test]
    async fn unreachable_database_has_its_own_exit_status_and_is_named() {
        let url = "postgres://gpuaas:hunter2@127.0.0.1:1/gpuaas";
        let error = check_connection(&PoolConfig::new(url.into(), None)).await.err().map(anyhow::Error::from);
        let error = error.expect("nothing listens there");
        let text = format!("{error:#}");
        assert!(text.starts_with("the database at 127.0.0.1:1/gpuaas cannot be reached: "), "{text}");
        assert!(text.contains("refused") && !text.contains("hunter2"), "{text}");
        assert_eq!(status_of(&error.context("SVC_DATABASE_URL")), UNAVAILABLE);
    }

    #[test]
    fn configuration_errors_have_another_exit_status_than_other_failures() {
        let wrong = Err::<(), _>(ConfigError::of("SVC_NATS_URL is not set")).context("serve");
        assert_eq!(wrong.map_err(|error| status_of(&error)), Err(CONFIGURATION));
        let mismatch = KeyRingMismatch::Missing { id: "first".to_owned(), count: 1 };
        assert_eq!(status_of(&anyhow::Error::from(mismatch).context("SVC_KEK_FILE")), CONFIGURATION);
        let behind = SchemaError::Behind { missing: vec![41, 42] };
        assert!(behind.to_string().contains("migrations 0041, 0042"), "{behind}");
        assert_eq!(status_of(&anyhow::Error::from(behind).context("the database")), CONFIGURATION);
        assert_eq!(status_of(&anyhow::anyhow!("a port is taken")), FAILURE);
    }
}
