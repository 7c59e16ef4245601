//! The fields of requests. Each is parsed once, into a type that has its bounds for both the validation and the API's description.

use chrono::{DateTime, Datelike as _, Utc};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::ops::Deref;
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::api::request_fields::secret_detection::holds_a_secret;
use crate::http::visible_text::{is_blank, shows_nothing_pattern};
use crate::outbound::http_client::is_secure;

/// Text types of 1 to `max` characters. `pattern` and `fits` are the same condition, for the description and for the check.
macro_rules! texts {
    ($($(#[doc = $doc:literal])+ $name:ident: $max:literal, $expected:literal, $pattern:expr, $fits:expr;)+) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
        #[serde(transparent)]
        pub(crate) struct $name(String);

        impl Deref for $name {
            type Target = str;
            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                let fits: fn(&str) -> bool = $fits;
                if (1..=$max).contains(&text.chars().count()) && fits(&text) {
                    Ok(Self(text))
                } else {
                    Err(D::Error::custom(concat!("expected ", $expected, ", 1 to ", $max, " characters")))
                }
            }
        }

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                ObjectBuilder::new()
                    .schema_type(SchemaType::new(Type::String))
                    .description(Some(concat!($($doc),+).trim()))
                    .min_length(Some(1))
                    .max_length(Some($max))
                    .pattern(Some($pattern))
                    .into()
            }
        }

        impl ToSchema for $name {}
    )+};
}

/// Whole numbers within bounds.
macro_rules! numbers {
    ($($(#[doc = $doc:literal])+ $name:ident: $type:ty, $min:literal to $max:literal;)+) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
        #[serde(transparent)]
        pub(crate) struct $name(pub(crate) $type);

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                const EXPECTED: &str = concat!("a whole number from ", $min, " to ", $max);
                let whole = IntegerVisitor { expected: EXPECTED, min: $min, max: $max };
                let number = deserializer.deserialize_i64(whole)?;
                <$type>::try_from(number).map(Self).map_err(|_| D::Error::custom(EXPECTED))
            }
        }

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                ObjectBuilder::new()
                    .schema_type(SchemaType::new(Type::Integer))
                    .description(Some(concat!($($doc),+).trim()))
                    .minimum(Some($min as i64))
                    .maximum(Some($max as i64))
                    .into()
            }
        }

        impl ToSchema for $name {}
    )+};
}

// Below the macros, since they use them.
mod metadata;
mod money;
pub(crate) mod secret_detection;
pub(crate) mod ssh_public_key;

pub(crate) use metadata::{
    LabelChanges, LabelSelector, LabelSelectors, Labels, ResourceName, metadata, metadata_patch, terms,
};
pub(crate) use money::{AdjustmentMinor, AmountMinor, PriceMinor};

struct IntegerVisitor {
    expected: &'static str,
    min: i64,
    max: i64,
}

impl Visitor<'_> for IntegerVisitor {
    type Value = i64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<i64, E> {
        if (self.min..=self.max).contains(&number) {
            Ok(number)
        } else {
            Err(E::invalid_value(serde::de::Unexpected::Signed(number), &self))
        }
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<i64, E> {
        let signed =
            i64::try_from(number).map_err(|_| E::invalid_value(serde::de::Unexpected::Unsigned(number), &self))?;
        self.visit_i64(signed)
    }
}

/// [`without_control`] as a pattern, for the description.
pub(crate) const WITHOUT_CONTROL: &str = r"^[^\u0000-\u001f\u007f-\u009f]+$";
/// [`is_legible`] as a pattern, for the description.
const LEGIBLE: &str = concat!(
    r"^[^\u0000-\u001f\u007f-\u009f]*[^\u0000-\u001f\u007f-\u009f",
    shows_nothing_pattern!(),
    r"][^\u0000-\u001f\u007f-\u009f]*$"
);

pub(crate) fn without_control(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

/// The events that webhooks and e-mails deliver.
const EVENTS: &str = r"^(provisioning\.(active|failed|release_failed|release_exhausted|released)|node\.(state_changed|tenant_faulted|evacuation_begun|evacuation_ended)|terminal\.(opened|closed)|billing\.(balance_low|balance_depleted|payment_deposited|deposit_refused|refund_succeeded|refund_refused|refund_given_back|reversal_posted))$";

/// A text that shows nothing has no content.
fn is_legible(text: &str) -> bool {
    without_control(text) && !is_blank(text)
}

fn is_code(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}

/// An address without a user name and a password, of printable ASCII characters alone.
fn is_return_url(text: &str) -> bool {
    let has_no_credentials = |url: reqwest::Url| url.username().is_empty() && url.password().is_none();
    text.bytes().all(|byte| byte.is_ascii_graphic())
        && is_secure(text)
        && reqwest::Url::parse(text).is_ok_and(has_no_credentials)
}

texts! {
    /// Why it is done; recorded in the audit log. What looks like a key, a token or a password is refused.
    Reason: 500, "text other than blanks, without control characters and without secrets", LEGIBLE,
        |text| is_legible(text) && !holds_a_secret(text);
    /// A name for people. What looks like a key, a token or a password is refused.
    Label: 100, "text other than blanks, without control characters and without secrets", LEGIBLE,
        |text| is_legible(text) && !holds_a_secret(text);
    /// A longer text for people.
    Statement: 4000, "text other than blanks, without control characters other than line ends and without secrets",
        concat!(
            r"^[^\u0000-\u0009\u000b-\u001f\u007f-\u009f]*[^\u0000-\u001f\u007f-\u009f",
            shows_nothing_pattern!(),
            r"][^\u0000-\u0009\u000b-\u001f\u007f-\u009f]*$"
        ),
        |text| !text.chars().any(|c| c.is_control() && c != '\n') && !is_blank(text) && !holds_a_secret(text);
    /// The digest of a package: `sha256:` and 64 lower-case hexadecimal digits.
    DigestText: 71, "sha256: and 64 lower-case hexadecimal digits", r"^sha256:[0-9a-f]{64}$",
        |text| text.parse::<domain::PackageDigest>().is_ok();
    /// The version of a GPU driver: one to four numbers with dots between them.
    DriverVersionText: 19, "a version such as 570.86.15", r"^[0-9]{1,4}(\.[0-9]{1,4}){0,3}$",
        |text| text.parse::<domain::hardware::DriverVersion>().is_ok();
    /// The name of a SKU, unique in the catalog.
    SkuName: 64, "letters, digits, dots, dashes and underscores, beginning with a letter or digit, and no UUID",
        r"^[A-Za-z0-9][A-Za-z0-9._-]*$", |text| is_code(text) && uuid::Uuid::parse_str(text).is_err();
    /// A SKU's name or id.
    SkuRef: 64, "a SKU's name or id", r"^[A-Za-z0-9][A-Za-z0-9._-]*$", is_code;
    /// A region's code.
    RegionCode: 64, "letters, digits, dots, dashes and underscores, beginning with a letter or digit",
        r"^[A-Za-z0-9][A-Za-z0-9._-]*$", is_code;
    /// A DNS name or an IP address in its usual form.
    HostName: 253, "a DNS name or an IP address", r"^[A-Za-z0-9.:\[\]-]+$",
        |text| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".:[]-".contains(&byte));
    /// A user name on the machine.
    LoginName: 32, "a user name of letters, digits, dots, dashes and underscores, beginning with a letter or underscore",
        r"^[A-Za-z_][A-Za-z0-9._-]*$",
        |text| text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    /// One public key in OpenSSH's text form, as in a `.pub` file: type, base64, perhaps a comment; no options. Or the block that PuTTY's key
    /// generator saves (RFC 4716).
    PublicKeyText: 8192, "one public key in OpenSSH's text form or as a block of RFC 4716",
        r"^\s*((ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)|sk-[a-z0-9@.-]+) [A-Za-z0-9+/]+={0,2}( [^\u0000\r\n]*)?|---- BEGIN SSH2 PUBLIC KEY ----\r?\n[ -~\r\n]*---- END SSH2 PUBLIC KEY ----)\s*$", |_| true;
    /// An id of the identity provider, as the access token names it.
    ClaimId: 255, "text without control characters", WITHOUT_CONTROL, without_control;
    /// An actor as the audit log names it: its kind, a colon, its id.
    ActorName: 300, "text without control characters", WITHOUT_CONTROL, without_control;
    /// A name in the audit log: an action, a kind, a correlation id.
    AuditName: 128, "letters, digits, dots, dashes and underscores", r"^[A-Za-z0-9._-]+$",
        |text| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    /// The name of a row of the supervision tree.
    WorkerName: 64, "lower-case letters, digits and dashes, beginning with a letter", r"^[a-z][a-z0-9-]*$",
        |text| text.starts_with(|first: char| first.is_ascii_lowercase())
            && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    /// The UUID of a GPU, as the driver and the node's agent name it.
    GpuUuid: 96, "letters, digits, dots, dashes and underscores, as in GPU-6d0b0b0e-5a1f-0000-0000-000000000001", r"^[A-Za-z0-9._-]+$",
        |text| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    /// The name of a policy key; GET /api/v1/admin/policies lists those there are.
    PolicyKey: 100, "a policy key such as billing.window_seconds", r"^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+$",
        |text| text.split('.').count() > 1 && text.split('.').all(|part| part.starts_with(|c: char| c.is_ascii_lowercase())
            && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_'));
    /// The health findings that a rule is for: a probe, a slash, and a code, which may end in `*`.
    FindingPattern: 64, "a pattern such as xid/79 or xid/14*", r"^[a-z][a-z0-9_]*/([A-Za-z0-9._-]+\*?|\*)$",
        |text| domain::finding::CodePattern::parse(text).is_some();
    /// What a tenant reads of a fault. What looks like a key, a token or a password is refused.
    TenantMessage: 300, "text other than blanks, without control characters and without secrets", LEGIBLE,
        |text| is_legible(text) && !holds_a_secret(text);
    /// An id of the payment processor's.
    ProcessorId: 255, "letters, digits and underscores", r"^[A-Za-z0-9_]+$", |text| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    /// What of a payment waits for an operator's decision, as its `review` says: the processor's id of what was paid, its amount in minor units, and
    /// its currency.
    ReviewName: 300, "the payment's `review`, such as pi_1:4200:GBP (GET /api/v1/billing/payments/{id} shows it)", r"^[!-~]+:[0-9]{1,19}:[A-Z]{3}$",
        is_review_name;
    /// The id of one of the service's own keys, as GET /api/v1/admin/keys shows it.
    KeyId: 64, "letters, digits, dots, dashes and underscores", r"^[A-Za-z0-9._-]+$",
        |text| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    /// A policy value as a text: 120, true, user-revoke.
    PolicyText: 255, "text without control characters", WITHOUT_CONTROL, without_control;
    /// Where a browser is sent: an https address, or an http one on this machine.
    ReturnUrl: 2048, "an https address (http only on a loopback host) without a user name", r"^(https://|http://(localhost|127\.|\[::1\]))[!-~]+$",
        is_return_url;
    /// Where a webhook's messages are posted.
    ReceiverUrl: 2048, "an https address without a user name, a password or a fragment", r"^https://[!-~]+$",
        |text| text.starts_with("https://") && text.bytes().all(|byte| byte.is_ascii_graphic());
    /// The type of an event that notifications tell of; `notification.announced` is for those who listen.
    EventName: 64, "the type of an event such as billing.balance_low", EVENTS, domain::notification::is_deliverable;
    /// An ISO 4217 code.
    CurrencyCode: 3, "an ISO 4217 code such as EUR", r"^[A-Z]{3}$",
        |text| text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_uppercase());
}

fn is_review_name(text: &str) -> bool {
    let mut parts = text.rsplitn(3, ':');
    let (currency, amount, id) = (parts.next(), parts.next(), parts.next());
    currency.is_some_and(|code| code.len() == 3 && code.bytes().all(|byte| byte.is_ascii_uppercase()))
        && amount
            .is_some_and(|minor| (1..=19).contains(&minor.len()) && minor.bytes().all(|byte| byte.is_ascii_digit()))
        && id.is_some_and(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_graphic()))
}

impl ClaimId {
    /// An id that comes from the store and was validated when it was read first.
    pub(crate) const fn from_stored(id: String) -> Self {
        Self(id)
    }
}

numbers! {
    /// A TCP port.
    Port: u16, 1 to 65535;
    /// How many GPUs.
    GpuCount: u32, 1 to 64;
    /// Memory, in MiB.
    MemoryMib: u64, 1 to 1073741824;
    /// Storage, in GiB.
    StorageGib: u64, 0 to 1073741824;
    /// How many cores.
    CpuCores: u32, 1 to 65536;
    /// The least that a machine has to reach, in the unit of the measurement.
    MeasurementMinimum: u64, 1 to 1000000000;
    /// How long an enrollment token holds, in seconds.
    TokenTtl: u32, 5 to 86400;
    /// How long to wait for capacity, in seconds; policy `allocation.queue_max_seconds` may allow less.
    QueueSeconds: u32, 0 to 604800;
    /// How long something is rented, in seconds.
    EstimatedSeconds: u32, 1 to 31622400;
    /// How many nodes have to succeed before the others of a rollout begin; 0: none.
    CanaryCount: u32, 0 to 200;
    /// How many nodes of a rollout may be under update at once.
    MaxUnavailable: u32, 1 to 200;
    /// How long the nodes of a wave of a rollout are watched before the next wave begins, in seconds; 0: not at all.
    SoakSeconds: u32, 0 to 604800;
}

/// Why an administrator does something.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Because)]
pub(crate) struct ReasonBody {
    pub(crate) reason: Reason,
}

/// Reads an instant of the years 1 to 9999, where one is given: RFC 3339 has no others, and the database compares none beyond its own range.
pub(crate) fn instant_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<DateTime<Utc>>, D::Error> {
    let given = Option::<DateTime<Utc>>::deserialize(deserializer)?;
    if given.is_some_and(|at| !(1..=9999).contains(&at.year())) {
        return Err(D::Error::custom("expected an instant of the years 1 to 9999, such as 2026-11-26T13:00:00Z"));
    }
    Ok(given)
}

/// Reads a field that may be left out and may not be null.
pub(crate) fn not_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Reads a list of at most `MAX` items without duplicates.
pub(crate) fn set<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + PartialEq,
{
    let items = Vec::<T>::deserialize(deserializer)?;
    if items.len() > MAX {
        return Err(D::Error::custom(format!("expected at most {MAX} items")));
    }
    Ok(items.into_iter().fold(Vec::new(), |mut different, item| {
        if !different.contains(&item) {
            different.push(item);
        }
        different
    }))
}

/// As [`set`], where the list may be left out.
pub(crate) fn set_or_none<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + PartialEq,
{
    struct BoundedList<T, const MAX: usize>(Vec<T>);
    impl<'de, T: Deserialize<'de> + PartialEq, const MAX: usize> Deserialize<'de> for BoundedList<T, MAX> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            set::<D, T, MAX>(deserializer).map(Self)
        }
    }
    Ok(Option::<BoundedList<T, MAX>>::deserialize(deserializer)?.map(|given| given.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::request_body::parse_json;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Request {
        #[allow(dead_code)]
        text: Option<Label>,
        #[allow(dead_code)]
        name: Option<SkuName>,
        #[allow(dead_code)]
        port: Option<Port>,
        #[serde(default, deserialize_with = "set_or_none::<_, _, 2>")]
        list: Option<Vec<Label>>,
    }

    #[test]
    fn field_within_its_bounds_is_accepted() {
        let longest = "ü".repeat(100);
        for body in [
            r#"{"text":"a b"}"#.to_owned(),
            format!(r#"{{"text":"{longest}"}}"#),
            r#"{"port":1}"#.into(),
            r#"{"port":65535}"#.into(),
            r#"{"port":22.0}"#.into(),
            r#"{"name":"h100x4.b-2"}"#.into(),
            r#"{"list":null}"#.into(),
            r#"{"list":["a","a"]}"#.into(),
        ] {
            parse_json::<Request>(body.as_bytes()).unwrap_or_else(|error| panic!("{body}: {error}"));
        }
        let request: Request = parse_json(br#"{"list":["b","a"]}"#).unwrap();
        assert_eq!(request.list.unwrap().iter().map(|label| &**label).collect::<Vec<_>>(), ["b", "a"]);
    }

    #[test]
    fn invalid_field_is_refused_by_its_name_without_its_value() {
        let long = format!(r#"{{"text":"{}"}}"#, "a".repeat(101));
        let refusals: Vec<String> = [
            r#"{"text":""}"#,
            r#"{"text":"a\u0007b"}"#,
            r#"{"text":" \u00a0"}"#,
            r#"{"text":"\u200b\ufeff"}"#,
            r#"{"text":7}"#,
            &long,
            r#"{"name":"018f4e2a-7c1b-7000-8000-000000000001"}"#,
            r#"{"name":"-x"}"#,
            r#"{"port":0}"#,
            r#"{"port":65536}"#,
            r#"{"port":-1}"#,
            r#"{"port":1.5}"#,
            r#"{"port":"22"}"#,
            r#"{"port":99999999999999999999999}"#,
            r#"{"port":1e400}"#,
            r#"{"list":["a","b","c"]}"#,
            r#"{"list":"a"}"#,
            r#"{"other":1}"#,
        ]
        .into_iter()
        .map(|body| parse_json::<Request>(body.as_bytes()).unwrap_err().message().to_owned())
        .collect();
        insta::assert_snapshot!(refusals.join("\n"));
    }
}
