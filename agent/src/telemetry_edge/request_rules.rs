//! Which requests are passed on: decided by the method, the path as it was sent, and the headers.

use hyper::header::{self, HeaderName};
use hyper::{HeaderMap, Method, StatusCode};

const HEALTH: &str = "/svc/telemetry/health";
const PREFIX: &str = "/svc/telemetry/";
/// The longest path with its query, in bytes.
const TARGET_MAX: usize = 8 * 1024;
const NAME_MAX: usize = 64;

/// Headers of a request that the telemetry agent gets. Cookies, credentials and addresses are not among them.
const PASSED: [HeaderName; 5] = [
    header::ACCEPT,
    header::ACCEPT_ENCODING,
    header::ACCEPT_LANGUAGE,
    header::IF_MODIFIED_SINCE,
    header::IF_NONE_MATCH,
];

/// What a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Requested {
    Health,
    /// The user interface of the telemetry agent, in the version that it has.
    Interface,
    /// This, from the telemetry agent.
    Upstream,
}

/// A refusal: the status, and a line that says why.
pub(super) type Refusal = (StatusCode, &'static str);

/// Judges a request.
///
/// # Errors
/// [`Refusal`]
pub(super) fn judge(method: &Method, target: &str, path: &str, headers: &HeaderMap) -> Result<Requested, Refusal> {
    if method != Method::GET {
        return Err((StatusCode::METHOD_NOT_ALLOWED, "Only GET is served here."));
    }
    let has_body = headers.contains_key(header::TRANSFER_ENCODING)
        || headers.get_all(header::CONTENT_LENGTH).iter().any(|length| length != "0");
    if has_body {
        return Err((StatusCode::BAD_REQUEST, "A GET has no body here."));
    }
    if headers.contains_key(header::UPGRADE) {
        return Err((StatusCode::BAD_REQUEST, "Connections are not upgraded here."));
    }
    if target.len() > TARGET_MAX {
        return Err((StatusCode::URI_TOO_LONG, "The path is too long."));
    }
    if !is_plain(path) {
        return Err((StatusCode::BAD_REQUEST, "The path is written in a way that is not passed on."));
    }
    if path == HEALTH {
        return Ok(Requested::Health);
    }
    if let Some(name) = path.strip_prefix(PREFIX) {
        return if is_name(name.strip_suffix('/').unwrap_or(name)) {
            Ok(Requested::Interface)
        } else {
            Err((StatusCode::NOT_FOUND, "There is nothing here."))
        };
    }
    if is_management(path) {
        return Err((StatusCode::FORBIDDEN, "The telemetry agent is not managed from here."));
    }
    Ok(Requested::Upstream)
}

/// The headers that are passed on.
pub(super) fn passed(headers: &HeaderMap) -> HeaderMap {
    let mut passed = HeaderMap::new();
    for name in PASSED {
        for value in headers.get_all(&name) {
            passed.append(&name, value.clone());
        }
    }
    passed
}

/// Whether a path has one spelling only: with an encoded letter or a `..` it would be judged as another one than the agent reads.
fn is_plain(path: &str) -> bool {
    let bytes = path.as_bytes();
    let is_segment = |segment: &str| segment != "." && segment != "..";
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'%' => {
                let Some(decoded) = path.get(at + 1..at + 3).and_then(|hex| u8::from_str_radix(hex, 16).ok()) else {
                    return false;
                };
                if decoded.is_ascii_alphanumeric() || decoded.is_ascii_control() || b"-._~/\\%".contains(&decoded) {
                    return false;
                }
                at += 3;
            }
            b'\\' | 0..=0x20 | 0x7f.. => return false,
            _ => at += 1,
        }
    }
    path.starts_with('/') && !path.contains("//") && path.split('/').all(is_segment)
}

fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    !name.is_empty() && name.len() <= NAME_MAX && name.bytes().all(plain)
}

/// Paths that netdata serves to the machine itself alone: as it sees it, every request of ours comes from there.
fn is_management(path: &str) -> bool {
    let lower = path.to_ascii_lowercase();
    lower.ends_with("/netdata.conf") || lower.split('/').any(|segment| segment == "manage")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(target: &str) -> Result<Requested, u16> {
        let path = target.split('?').next().unwrap();
        judge(&Method::GET, target, path, &HeaderMap::new()).map_err(|(status, _)| status.as_u16())
    }

    #[test]
    fn health_interface_and_other_paths_are_distinguished() {
        assert_eq!(get("/svc/telemetry/health"), Ok(Requested::Health));
        assert_eq!(get("/svc/telemetry/netdata/"), Ok(Requested::Interface));
        assert_eq!(get("/svc/telemetry/netdata"), Ok(Requested::Interface));
        assert_eq!(get("/api/v1/charts?x=%41"), Ok(Requested::Upstream));
        for path in ["/svc/telemetry/", "/svc/telemetry/a/b", "/svc/telemetry/a%20b/"] {
            assert_eq!(get(path), Err(404), "{path}");
        }
    }

    #[test]
    fn only_get_without_a_body_and_without_an_upgrade_is_served() {
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::HEAD, Method::CONNECT, Method::OPTIONS] {
            assert_eq!(judge(&method, "/", "/", &HeaderMap::new()).unwrap_err().0, 405, "{method}");
        }
        for (name, value) in [("content-length", "5"), ("transfer-encoding", "chunked"), ("upgrade", "websocket")] {
            let headers = HeaderMap::from_iter([(HeaderName::from_static(name), value.parse().unwrap())]);
            assert_eq!(judge(&Method::GET, "/", "/", &headers).unwrap_err().0, 400, "{name}");
        }
        assert_eq!(get(&format!("/{}", "a".repeat(TARGET_MAX))), Err(414));
    }

    #[test]
    fn management_of_the_agent_is_refused_in_every_spelling() {
        for path in ["/netdata.conf", "/NETDATA.conf", "/api/v1/manage/health", "/host/a/api/v1/Manage/health"] {
            assert_eq!(get(path), Err(403), "{path}");
        }
        for path in [
            "/netdata%2econf",
            "/api/v1/man%61ge/health",
            "/api//v1/manage/health",
            "/api/../netdata.conf",
            "/./netdata.conf",
            "/api%2Fv1/manage",
            "/a\\..\\netdata.conf",
            "/%",
            "/%4",
            "/%zz",
            "/%00",
            "*",
            "/ä",
        ] {
            assert_eq!(get(path), Err(400), "{path}");
        }
    }

    #[test]
    fn credentials_and_addresses_are_not_passed_on() {
        let sent = ["cookie", "authorization", "x-auth-token", "x-forwarded-for", "host", "accept", "if-none-match"];
        let headers = sent.map(|name| (HeaderName::from_static(name), "x".parse().unwrap()));
        let passed = passed(&HeaderMap::from_iter(headers));
        let names: Vec<_> = passed.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["accept", "if-none-match"]);
    }
}
