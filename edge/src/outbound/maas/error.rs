//! Why a request to the bare-metal provider failed.

use reqwest::StatusCode;
use thiserror::Error;

/// The operator's half: what is wrong, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MaasError {
    #[error("it cannot be reached: {0}")]
    Unreachable(String),
    #[error("it does not answer in time; raise MAAS_API_TIMEOUT_MS where it is only slow")]
    Slow,
    #[error("its answer ended too early, or is too long: {0}")]
    Cut(String),
    #[error("it refuses the API key ({0}); set MAAS_API_TOKEN to a key of a user who may deploy")]
    Unauthorized(StatusCode),
    #[error("it has no such machine")]
    NotFound,
    #[error("the machine's status does not allow it: {0}")]
    Conflict(String),
    #[error("it is busy or being maintained ({status}): {text}")]
    Busy { status: StatusCode, text: String },
    #[error("it sends its clients elsewhere ({0}); set MAAS_API_BASE_URL to the address that it names")]
    Redirects(StatusCode),
    #[error(
        "it answers with a web page; set MAAS_API_BASE_URL to the address of the server, such as https://maas.example/MAAS"
    )]
    Page,
    #[error("its answer is not understood: {0}")]
    Unreadable(String),
    #[error("it answers {status}: {text}")]
    Status { status: StatusCode, text: String },
}

impl MaasError {
    /// The error of an answer that is no success.
    pub(super) fn refused(status: StatusCode, text: String) -> Self {
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Self::Unauthorized(status),
            StatusCode::NOT_FOUND => Self::NotFound,
            StatusCode::CONFLICT => Self::Conflict(text),
            StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::GATEWAY_TIMEOUT => Self::Busy { status, text },
            status if status.is_redirection() => Self::Redirects(status),
            status => Self::Status { status, text },
        }
    }
}
