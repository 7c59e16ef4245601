//! What a listener could not read as a request. It goes through the router as one that stands for it, so that its answer is made, logged
//! and counted where every other is.

use axum::response::{IntoResponse, Response};

use crate::error::{ApiError, Code};

/// Why there is no request, in the extensions of the one that stands for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// Not HTTP as its specification writes it.
    Malformed,
    /// More headers, or longer ones, than a listener takes.
    Headers { bytes: usize, count: usize },
}

impl IntoResponse for Unreadable {
    fn into_response(self) -> Response {
        let error = match self {
            Self::Malformed => ApiError::invalid_request(
                "The request is not HTTP/1.1: its first line or one of its headers cannot be read, or it has no `Host`, or two (RFC 9112). \
                 Correct it and open a new connection.",
            ),
            Self::Headers { bytes, count } => {
                let message = format!(
                    "The request has more than {count} headers, or its target and headers are over {bytes} bytes together; send less."
                );
                ApiError::new(Code::HeadersTooLarge, message).detail("limit_bytes", bytes).detail("limit_count", count)
            }
        };
        error.into_response()
    }
}
