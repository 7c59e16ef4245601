//! Whether a request by cookie comes from a page of ours: a browser sends the cookie whatever page has caused the request.
//!
//! `SameSite=Strict` keeps the cookie from other sites, not from other origins of this site. `Origin` (RFC 6454) and Fetch Metadata (W3C,
//! `Sec-Fetch-Site`) are set by the browser, and no page's script can change them.

use axum::http::{HeaderMap, Method, header, request};

use crate::http::error::ApiError;
use crate::http::websocket::origin_of;

const SITE: &str = "sec-fetch-site";
const MODE: &str = "sec-fetch-mode";
const DESTINATION: &str = "sec-fetch-dest";

/// # Errors
/// `forbidden` where another origin may have caused the request.
pub(crate) fn check(public_url: &str, parts: &request::Parts) -> Result<(), ApiError> {
    let headers = &parts.headers;
    let is_safe = parts.method == Method::GET || parts.method == Method::HEAD;
    let is_upgrade = headers.contains_key(header::UPGRADE);
    match text(headers, header::ORIGIN.as_str()) {
        Some(origin) if origin == origin_of(public_url) => {}
        None if is_safe && !is_upgrade => {}
        Some(_) => return Err(foreign("the origin is another")),
        None => return Err(foreign("there is no origin")),
    }
    match text(headers, SITE) {
        Some("same-origin") => Ok(()),
        // The user has typed the address, or opened a bookmark.
        Some("none") if is_safe && text(headers, MODE) == Some("navigate") => Ok(()),
        // Not every browser sends it with WebSockets; their origin was checked.
        None if is_upgrade => Ok(()),
        Some(_) => Err(foreign("the site is another")),
        None => Err(foreign("there is no Sec-Fetch-Site")),
    }
}

/// Admits a request by which the browser's tab goes to another page, and no other: a script reads neither its answer nor where it is redirected to.
///
/// # Errors
/// `forbidden`.
pub(crate) fn check_navigation(parts: &request::Parts) -> Result<(), ApiError> {
    match (text(&parts.headers, MODE), text(&parts.headers, DESTINATION)) {
        (Some("navigate"), Some("document")) => Ok(()),
        _ => {
            Err(ApiError::forbidden("This address is for the navigation of a browser's tab.").because("no navigation"))
        }
    }
}

/// The value of the request's one header of this name; text that no browser sends, where it is none or there are several.
fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    let is_single = values.next().is_none();
    Some(value.to_str().ok().filter(|_| is_single).unwrap_or("?"))
}

fn foreign(why: &'static str) -> ApiError {
    let message = "A request with the console's cookie must come from a page of this service, in a browser that sends Origin and \
                   Sec-Fetch-Site; other clients send an access token.";
    ApiError::forbidden(message).because(why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    fn verdict(method: &str, headers: &[(&str, &str)]) -> bool {
        let mut request = Request::builder().method(method).uri("/api/v1/me");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        check("https://gpu.example/", &request.body(()).unwrap().into_parts().0).is_ok()
    }

    const OWN: (&str, &str) = ("origin", "https://gpu.example");
    const SAME: (&str, &str) = (SITE, "same-origin");

    #[test]
    fn request_of_an_own_page_is_admitted() {
        assert!(verdict("GET", &[SAME]) && verdict("GET", &[SAME, OWN]) && verdict("POST", &[SAME, OWN]));
        assert!(verdict("GET", &[(SITE, "none"), (MODE, "navigate")]));
        assert!(verdict("GET", &[("upgrade", "websocket"), OWN]));
    }

    #[test]
    fn requests_of_scripts_and_frames_are_no_navigations() {
        let verdict = |headers: &[(&str, &str)]| {
            let request = headers.iter().fold(Request::builder().uri("/console/logout"), |request, (name, value)| {
                request.header(*name, *value)
            });
            check_navigation(&request.body(()).unwrap().into_parts().0).is_ok()
        };
        assert!(verdict(&[(MODE, "navigate"), (DESTINATION, "document")]));
        for (mode, destination) in [
            ("cors", "empty"),
            ("no-cors", "empty"),
            ("same-origin", "empty"),
            ("navigate", "iframe"),
            ("navigate", "frame"),
            ("navigate", "embed"),
            ("no-cors", "document"),
        ] {
            assert!(!verdict(&[(MODE, mode), (DESTINATION, destination)]), "{mode}, {destination}");
        }
        assert!(!verdict(&[]) && !verdict(&[(MODE, "navigate")]));
    }

    #[test]
    fn request_that_another_origin_may_have_caused_is_refused() {
        for origin in [
            "https://evil.example",
            "http://gpu.example",
            "https://gpu.example:8443",
            "https://a.gpu.example",
            "null",
            "",
        ] {
            assert!(!verdict("POST", &[SAME, ("origin", origin)]), "{origin}");
            assert!(!verdict("GET", &[("upgrade", "websocket"), ("origin", origin)]), "{origin}");
            assert!(!verdict("GET", &[SAME, ("origin", origin)]), "{origin}");
        }
        assert!(!verdict("POST", &[SAME]) && !verdict("DELETE", &[SAME]), "no origin");
        assert!(!verdict("GET", &[("upgrade", "websocket"), SAME]), "no origin");
        assert!(!verdict("POST", &[SAME, OWN, OWN]), "two origins");
        for site in ["same-site", "cross-site", "none", "x"] {
            assert!(!verdict("GET", &[(SITE, site)]) && !verdict("POST", &[OWN, (SITE, site)]), "{site}");
            assert!(!verdict("GET", &[("upgrade", "websocket"), OWN, (SITE, site)]), "{site}");
        }
        assert!(!verdict("GET", &[]) && !verdict("POST", &[OWN]), "a browser without Fetch Metadata");
        assert!(!verdict("POST", &[OWN, (SITE, "none"), (MODE, "navigate")]), "a form of another program");
    }
}
