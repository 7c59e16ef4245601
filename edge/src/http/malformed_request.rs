//! Bytes that a listener could not parse as a request. A substitute request goes through the router in their place, so that the response is
//! rendered, logged and counted like every other.

use axum::response::{IntoResponse, Response};

use crate::http::error::{ApiError, Code};

/// Why the request could not be parsed; an extension of the substitute request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MalformedRequest {
    /// Not HTTP as its specification writes it.
    Malformed,
    /// More headers, or longer ones, than a listener accepts.
    Headers { bytes: usize, count: usize },
}

impl IntoResponse for MalformedRequest {
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
