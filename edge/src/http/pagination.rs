//! Lists in pages: `?limit=` 1 to 200 (default 50) and an opaque `?page_token=`, answered as
//! `{"items":[...],"next_page":"..."|null}`.
//!
//! A page begins after the position (created_at, id) that its token carries. The token is bound to the list, to its
//! filter and to its order: with another filter it is refused, so that no page is silently skipped or repeated.

use axum::{
    extract::{FromRequestParts, Query},
    http::request,
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use chrono::{DateTime, Datelike as _, Utc};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use subtle::ConstantTimeEq;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use crate::http::error::ApiError;
use crate::http::request_body;
use crate::http::request_body::integers::in_digits;

/// The most items of one page.
pub const MAX_LIMIT: u32 = 200;
/// The default size of a page.
pub const DEFAULT_LIMIT: u32 = 50;

/// The parameter that may be repeated: its values count as one comma-separated list.
const LABEL: &str = "label";

const VERSION: u8 = 1;
const TAG_LEN: usize = 16;
const TOKEN_LEN: usize = 1 + 8 + 16 + TAG_LEN;

/// The query parameters of every list, for the API's description.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    /// The number of items per page.
    #[param(minimum = 1, maximum = 200, default = 50)]
    #[allow(dead_code)]
    limit: Option<u32>,
    /// Where the page begins: the `next_page` of the page before, with the same filter.
    #[param(pattern = "^[A-Za-z0-9_-]{55}$")]
    #[allow(dead_code)]
    page_token: Option<String>,
}

/// The order of a list: by the creation of its entries, then by their ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = ListOrder)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    NewestFirst,
    #[default]
    OldestFirst,
}

/// The order of a list that has no filter beside it.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct OrderQuery {
    /// The order of the list; the oldest first where it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(inline)]
    pub order: Option<Order>,
}

impl Order {
    /// As page tokens are bound to it.
    const fn name(self) -> &'static str {
        match self {
            Self::NewestFirst => "newest-first",
            Self::OldestFirst => "oldest-first",
        }
    }
}

/// The position of an item in its list. Times are compared in microseconds, as Postgres stores them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    pub created_at: DateTime<Utc>,
    pub id: Uuid,
}

/// The query of a list: its page and, strictly read, its filter.
#[derive(Debug)]
pub struct Listing<F> {
    pub filter: F,
    limit: u32,
    page_token: Option<String>,
}

/// One page of a list that is about to be read.
#[derive(Debug)]
pub struct Page {
    /// The page begins after this position; `None` at the beginning of the list.
    pub after: Option<Position>,
    /// The order in which its rows are read.
    pub order: Order,
    limit: u32,
    binding: [u8; 32],
}

/// One page of items.
#[derive(Debug, Serialize, ToSchema)]
pub struct Items<T> {
    pub items: Vec<T>,
    /// The `page_token` of the next page; null on the last.
    pub next_page: Option<String>,
}

impl<S: Send + Sync, F: DeserializeOwned> FromRequestParts<S> for Listing<F> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, _: &S) -> Result<Self, ApiError> {
        Self::parse(parts.uri.query().unwrap_or_default())
    }
}

impl<F: DeserializeOwned> Listing<F> {
    fn parse(query: &str) -> Result<Self, ApiError> {
        let (mut limit, mut page_token) = (None, None);
        let (mut filter, mut labels) = (Vec::new(), Vec::new());
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = plain(key);
            let slot = match &*name {
                "limit" => &mut limit,
                "page_token" => &mut page_token,
                LABEL => {
                    labels.push(value);
                    continue;
                }
                _ => {
                    filter.push(pair);
                    continue;
                }
            };
            if slot.replace(value).is_some() {
                return Err(refuse(&name, "is given twice"));
            }
        }
        let labels = (!labels.is_empty()).then(|| format!("{LABEL}={}", labels.join(",")));
        filter.extend(labels.as_deref());
        Ok(Self {
            filter: request_body::parse_query(&filter.join("&"))?,
            limit: limit.map_or(Ok(DEFAULT_LIMIT), parse_limit)?,
            page_token: page_token.map(ToOwned::to_owned),
        })
    }
}

impl<F: Serialize> Listing<F> {
    /// The requested page of the list `name`. `owner` is the scope that the list depends on, such as the caller whose allocations it shows.
    ///
    /// # Errors
    /// `invalid_request` where the token is not one of this list, filter and order.
    pub fn page(&self, name: &str, owner: &str, order: Order) -> Result<Page, ApiError> {
        self.page_in_orders(name, owner, &[order])
    }

    /// The requested page of a list whose order differs between releases: in the first order given, unless the token is of another. While
    /// replicas are upgraded, a list goes on in the order in which it began.
    ///
    /// # Errors
    /// `invalid_request` where the token is not one of this list and filter, in any of the orders.
    pub fn page_in_orders(&self, name: &str, owner: &str, orders: &[Order]) -> Result<Page, ApiError> {
        let filter = serde_json::to_vec(&self.filter).map_err(ApiError::internal)?;
        let binding = |order: Order| digest([name.as_bytes(), owner.as_bytes(), order.name().as_bytes(), &filter]);
        let mut pages = orders.iter().filter_map(|&order| {
            let binding = binding(order);
            let after = self.page_token.as_deref().map(|token| open(token, &binding));
            let is_of_order = after.is_none_or(|after| after.is_some());
            is_of_order.then(|| Page { after: after.flatten(), order, limit: self.limit, binding })
        });
        pages.next().ok_or_else(|| {
            refuse("page_token", "is not the next_page of this list with this filter; begin again without it")
        })
    }
}

impl Page {
    /// How many rows to read: one more than is returned, which shows whether there is a next page.
    #[must_use]
    pub fn rows_to_read(&self) -> i64 {
        i64::from(self.limit) + 1
    }

    /// Answers with the rows read, at most [`Page::rows_to_read`], in the order of the list.
    #[must_use]
    pub fn answer<R, T>(
        &self,
        mut rows: Vec<R>,
        position: impl Fn(&R) -> Position,
        show: impl FnMut(R) -> T,
    ) -> Items<T> {
        let limit = self.limit as usize;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next_page = rows.last().filter(|_| more).map(|last| seal(&position(last), &self.binding));
        Items { items: rows.into_iter().map(show).collect(), next_page }
    }
}

/// The name of a parameter without its percent-encoding.
fn plain(name: &str) -> Cow<'_, str> {
    if !name.contains('%') {
        return Cow::Borrowed(name);
    }
    let read = format!("/?{name}").parse().ok().and_then(|uri| Query::<Vec<(String, String)>>::try_from_uri(&uri).ok());
    read.and_then(|Query(mut pairs)| pairs.pop()).map_or(Cow::Borrowed(name), |(name, _)| Cow::Owned(name))
}

fn parse_limit(text: &str) -> Result<u32, ApiError> {
    let in_digits = in_digits(text);
    let text = in_digits.as_deref().unwrap_or(text);
    text.parse::<u32>()
        .ok()
        .filter(|limit| (1..=MAX_LIMIT).contains(limit) && text.bytes().all(|byte| byte.is_ascii_digit()))
        .ok_or_else(|| refuse("limit", "must be a whole number from 1 to 200"))
}

fn refuse(parameter: &str, why: &str) -> ApiError {
    ApiError::invalid_request(format!("Query parameter `{parameter}` {why}.")).detail("field", parameter)
}

/// Each part is hashed with its length, so that no two lists share a digest.
fn digest<const N: usize>(parts: [&[u8]; N]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"gpuaas page token v1");
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

fn seal(position: &Position, binding: &[u8; 32]) -> String {
    let mut token = Vec::with_capacity(TOKEN_LEN);
    token.push(VERSION);
    token.extend_from_slice(&position.created_at.timestamp_micros().to_be_bytes());
    token.extend_from_slice(position.id.as_bytes());
    let tag = digest([binding.as_slice(), &token]);
    token.extend_from_slice(&tag[..TAG_LEN]);
    URL_SAFE_NO_PAD.encode(token)
}

fn open(token: &str, binding: &[u8; 32]) -> Option<Position> {
    if token.len() > 2 * TOKEN_LEN {
        return None;
    }
    let bytes: [u8; TOKEN_LEN] = URL_SAFE_NO_PAD.decode(token).ok()?.try_into().ok()?;
    let (position, tag) = bytes.split_at(TOKEN_LEN - TAG_LEN);
    let expected = digest([binding.as_slice(), position]);
    if position[0] != VERSION || !bool::from(expected[..TAG_LEN].ct_eq(tag)) {
        return None;
    }
    let micros = i64::from_be_bytes(position[1..9].try_into().ok()?);
    // The tag is no secret: a token that a client has made must not reach beyond the database's range of times.
    let created_at = DateTime::from_timestamp_micros(micros).filter(|at| (0..=9999).contains(&at.year()))?;
    Some(Position { created_at, id: Uuid::from_slice(&position[9..]).ok()? })
}

#[cfg(test)]
mod tests {
    use chrono::TimeZone as _;
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;
    use crate::http::error::Code;

    #[derive(Debug, Deserialize, Serialize)]
    #[serde(deny_unknown_fields)]
    struct Filter {
        state: Option<String>,
        port: Option<u16>,
    }

    fn listing(query: &str) -> Result<Listing<Filter>, ApiError> {
        Listing::parse(query)
    }

    fn rows(count: i64) -> Vec<Position> {
        (0..count)
            .map(|n| Position {
                created_at: DateTime::from_timestamp_micros(1_000_000 + n).unwrap(),
                id: Uuid::from_u128(n as u128),
            })
            .collect()
    }

    #[test]
    fn the_limit_is_50_and_between_1_and_200() {
        assert_eq!(listing("").unwrap().limit, 50);
        assert_eq!(listing("limit=1&state=active").unwrap().limit, 1);
        assert_eq!(listing("limit=200").unwrap().limit, 200);
        for bad in [
            "limit=0",
            "limit=201",
            "limit=-1",
            "limit=x",
            "limit=",
            "limit",
            "limit=+5",
            "limit=1&limit=2",
            "limit=1&%6cimit=2",
            "%6Cimit=0",
            "limit=99999999999",
        ] {
            let error = listing(bad).unwrap_err();
            assert_eq!(error.code(), Code::InvalidRequest, "{bad}");
            assert_eq!(error.details()["field"], "limit");
        }
    }

    #[test]
    fn the_filter_is_read_strictly_beside_the_page() {
        let read = listing("port=22&limit=5&state=a%20b").unwrap();
        assert_eq!((read.filter.port, read.filter.state.as_deref()), (Some(22), Some("a b")));
        for bad in ["unknown=1", "port=x", "limit=5&port=22&port=23"] {
            assert_eq!(listing(bad).unwrap_err().code(), Code::InvalidRequest, "{bad}");
        }
    }

    #[test]
    fn following_the_tokens_shows_every_row_once() {
        let all = rows(7);
        let (mut seen, mut token) = (Vec::new(), None::<String>);
        loop {
            let query = token.as_ref().map_or("limit=3".to_owned(), |token| format!("limit=3&page_token={token}"));
            let page = listing(&query).unwrap().page("nodes", "", Order::OldestFirst).unwrap();
            let from = page.after.map_or(0, |after| all.iter().position(|row| *row == after).unwrap() + 1);
            let read: Vec<Position> = all[from..].iter().copied().take(page.rows_to_read() as usize).collect();
            let answer = page.answer(read, |row| *row, |row| row);
            seen.extend(answer.items);
            token = answer.next_page;
            if token.is_none() {
                break;
            }
        }
        assert_eq!(seen, all);
    }

    #[test]
    fn token_of_a_time_that_the_database_does_not_have_is_refused() {
        let page = listing("").unwrap().page("nodes", "", Order::OldestFirst).unwrap();
        let token = |year| {
            let created_at = Utc.with_ymd_and_hms(year, 1, 1, 0, 0, 0).unwrap();
            seal(&Position { created_at, id: Uuid::nil() }, &page.binding)
        };
        assert!(open(&token(2026), &page.binding).is_some());
        for year in [-5000, -1, 10_000] {
            assert!(open(&token(year), &page.binding).is_none(), "{year}");
        }
    }

    #[test]
    fn a_full_last_page_has_no_next() {
        let page = listing("limit=3").unwrap().page("nodes", "", Order::NewestFirst).unwrap();
        assert!(page.answer(rows(3), |row| *row, |row| row).next_page.is_none());
    }

    #[test]
    fn a_token_is_refused_for_another_filter_list_owner_or_order() {
        let page = listing("limit=1&state=active").unwrap().page("nodes", "ann", Order::NewestFirst).unwrap();
        let token = page.answer(rows(2), |row| *row, |row| row).next_page.unwrap();
        let with = |query: &str, name: &str, owner: &str, order: Order| {
            listing(&format!("{query}&page_token={token}"))
                .unwrap()
                .page(name, owner, order)
                .map(|_| ())
                .map_err(|error| error.code())
        };
        assert_eq!(with("state=active", "nodes", "ann", Order::NewestFirst), Ok(()));
        assert_eq!(with("state=active&limit=7", "nodes", "ann", Order::NewestFirst), Ok(()));
        for refused in [
            with("state=retired", "nodes", "ann", Order::NewestFirst),
            with("", "nodes", "ann", Order::NewestFirst),
            with("state=active&port=1", "nodes", "ann", Order::NewestFirst),
            with("state=active", "allocations", "ann", Order::NewestFirst),
            with("state=active", "nodes", "bob", Order::NewestFirst),
            with("state=active", "nodes", "ann", Order::OldestFirst),
        ] {
            assert_eq!(refused, Err(Code::InvalidRequest));
        }
    }

    #[test]
    fn list_whose_order_differs_between_releases_goes_on_in_the_order_of_its_token() {
        let orders = [Order::NewestFirst, Order::OldestFirst];
        for order in orders {
            let page = listing("limit=1&state=active").unwrap().page("nodes", "ann", order).unwrap();
            let token = page.answer(rows(2), |row| *row, |row| row).next_page.unwrap();
            let next = listing(&format!("limit=1&state=active&page_token={token}")).unwrap();
            let next = next.page_in_orders("nodes", "ann", &orders).unwrap();
            assert_eq!((next.after, next.order), (Some(rows(1)[0]), order));
            let other = listing(&format!("limit=1&page_token={token}")).unwrap();
            assert!(other.page_in_orders("nodes", "ann", &orders).is_err(), "of another filter");
        }
        let first = listing("").unwrap().page_in_orders("nodes", "ann", &orders).unwrap();
        assert_eq!((first.after, first.order), (None, Order::NewestFirst));
    }

    proptest! {
        #[test]
        fn page_token_round_trips_its_position(micros in -1_000_000_000_000_000_i64..4_000_000_000_000_000, id: u128, binding: [u8; 32]) {
            let position = Position { created_at: DateTime::from_timestamp_micros(micros).unwrap(), id: Uuid::from_u128(id) };
            prop_assert_eq!(open(&seal(&position, &binding), &binding), Some(position));
        }

        #[test]
        fn one_changed_bit_is_refused(bit in 0..TOKEN_LEN * 8, id: u128, binding: [u8; 32]) {
            let position = Position { created_at: DateTime::from_timestamp_micros(1_750_000_000_000_000).unwrap(), id: Uuid::from_u128(id) };
            let mut bytes = URL_SAFE_NO_PAD.decode(seal(&position, &binding)).unwrap();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(open(&URL_SAFE_NO_PAD.encode(bytes), &binding), None);
        }

        #[test]
        fn arbitrary_text_is_not_a_page_token(text in "\\PC{0,90}", binding: [u8; 32]) {
            prop_assert_eq!(open(&text, &binding), None);
        }
    }
}
