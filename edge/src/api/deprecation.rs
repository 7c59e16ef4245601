//! What of the API is deprecated, as one table (decisions 2). Its rows are announced by the headers `Deprecation` (RFC 9745) and `Sunset`
//! (RFC 8594) of every answer, refusals included, by the OpenAPI description and by the reference page.

use axum::Router;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::map_response;
use axum::response::Response;
use chrono::{DateTime, NaiveDate, NaiveTime, Utc};
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::Operation;
use utoipa::openapi::{Deprecated, RefOr};

use crate::app_state::AppState;

const DEPRECATION: HeaderName = HeaderName::from_static("deprecation");
const SUNSET: HeaderName = HeaderName::from_static("sunset");

/// A route that is deprecated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deprecation {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    /// The first day on which it is deprecated, in UTC: `2026-12-01`.
    pub(super) since: &'static str,
    /// The first day on which it may answer no more, in UTC.
    pub(super) sunset: &'static str,
    /// The path to use in its place; its methods are in the description.
    pub(super) successor: &'static str,
}

/// The deprecated routes. `deploy/docs/src/contribute/releases.md`, *Deprecating a route*, says what a row needs.
pub(super) const DEPRECATIONS: &[Deprecation] = &[];

impl Deprecation {
    pub(super) fn is_of(&self, method: &str, path: &str) -> bool {
        self.method == method && self.path == path
    }

    /// When it is deprecated, and when it may end; `None` where the table's text is no date.
    pub(super) fn times(&self) -> Option<(DateTime<Utc>, DateTime<Utc>)> {
        let day = |text: &str| Some(text.parse::<NaiveDate>().ok()?.and_time(NaiveTime::MIN).and_utc());
        Some((day(self.since)?, day(self.sunset)?))
    }

    /// The headers of its answers: a structured date, an HTTP date, and where to read about it.
    pub(super) fn headers(&self) -> Option<HeaderMap> {
        let (since, sunset) = self.times()?;
        let about = "</api/v1/docs>; rel=\"deprecation\"; type=\"text/html\", </api/v1/docs>; rel=\"sunset\"; type=\"text/html\"";
        // A path with placeholders is no reference (RFC 8288).
        let successor = match self.successor {
            pattern if pattern.contains('{') => String::new(),
            path => format!(", <{path}>; rel=\"successor-version\""),
        };
        let values = [
            (DEPRECATION, format!("@{}", since.timestamp())),
            (SUNSET, sunset.format("%a, %d %b %Y %H:%M:%S GMT").to_string()),
            (header::LINK, format!("{about}{successor}")),
        ];
        values.into_iter().map(|(name, value)| Some((name, HeaderValue::from_str(&value).ok()?))).collect()
    }

    /// The route with the headers on each of its answers, where it is deprecated.
    pub(super) fn announced(deprecation: Option<&Self>, router: Router<AppState>) -> Router<AppState> {
        let Some(deprecation) = deprecation else { return router };
        let headers = deprecation.headers();
        assert!(headers.is_some(), "{deprecation:?}: its days are no dates");
        let announce = move |mut response: Response| {
            response.headers_mut().extend(headers.clone().unwrap_or_default());
            std::future::ready(response)
        };
        router.route_layer(map_response(announce))
    }

    /// Marks the operation, and says what to use.
    pub(super) fn describe(&self, operation: &mut Operation) {
        let Self { since, sunset, successor, .. } = self;
        operation.deprecated = Some(Deprecated::True);
        let text = operation.description.get_or_insert_default();
        let gap = if text.is_empty() { "" } else { "\n\n" };
        *text =
            format!("{text}{gap}Deprecated since {since}: use `{successor}`. From {sunset} on this route may be gone.");
        for response in operation.responses.responses.values_mut() {
            let RefOr::T(response) = response else { continue };
            for (name, what) in [
                ("Deprecation", "Since when the route is deprecated, in seconds since 1970 (RFC 9745): `@1796083200`."),
                ("Sunset", "From when on the route may be gone (RFC 8594)."),
                ("Link", "Where the deprecation is described, and the route to use in its place."),
            ] {
                let header = HeaderBuilder::new().description(Some(what));
                response.headers.insert(name.to_owned(), RefOr::T(header.build()));
            }
        }
    }
}
