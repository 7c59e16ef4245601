//! The client that an HTTP proxy names: one reader for all forms in which proxies write an address.

use super::ingress::ClientAddressHeader;
use axum::http::HeaderMap;
use prometheus::{IntCounter, Registry};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{LazyLock, Mutex, PoisonError};

/// Proxies that are named in the log; the others are counted alone.
const MAX_LOGGED: usize = 64;
/// The most of an entry that is logged, in characters.
const MAX_SHOWN: usize = 64;

/// Requests whose proxy named its client in a form that is no address.
static UNREADABLE: LazyLock<IntCounter> = LazyLock::new(|| {
    IntCounter::new(
        "forwarded_clients_unreadable_total",
        "Requests whose proxy named its client by something that is no address; they count against the address of the proxy",
    )
    .unwrap_or_else(|error| unreachable!("{error}"))
});

/// The proxies that were logged.
static LOGGED: Mutex<BTreeSet<IpAddr>> = Mutex::new(BTreeSet::new());

/// Shows the metric on `/metrics`.
///
/// # Errors
/// Where the registry has a metric of this name.
pub fn register(registry: &Registry) -> prometheus::Result<()> {
    registry.register(Box::new(UNREADABLE.clone()))
}

/// What the proxies in front say of the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ForwardedClient {
    Address(IpAddr),
    /// There is no entry, or each is a proxy's.
    Unnamed,
    /// The entry that counts names no address, as `unknown` and `_hidden` do not. Its text, for the log.
    Unreadable(String),
}

impl ForwardedClient {
    /// Reads the last entry that is not a proxy's: the entries before it are written by the client. Empty entries are passed over (RFC 9110,
    /// section 5.6.1).
    pub(crate) fn of(headers: &HeaderMap, header: ClientAddressHeader, is_proxy: impl Fn(IpAddr) -> bool) -> Self {
        let lines: Vec<_> = headers.get_all(header.name()).iter().collect();
        let entries = lines.into_iter().rev().flat_map(|line| FromTheEnd::of(line.as_bytes(), b','));
        for entry in entries.map(<[u8]>::trim_ascii).filter(|entry| !entry.is_empty()) {
            let node = match header {
                ClientAddressHeader::XForwardedFor => Some(entry),
                ClientAddressHeader::Forwarded => for_of(entry),
            };
            match node.and_then(address_of) {
                Some(address) if is_proxy(address) => {}
                Some(address) => return Self::Address(address),
                None => return Self::Unreadable(shown(entry)),
            }
        }
        Self::Unnamed
    }

    /// Counts an entry that names no address, and logs it once for each proxy.
    pub(super) fn note_unreadable(entry: &str, proxy: IpAddr, header: ClientAddressHeader) {
        UNREADABLE.inc();
        let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.len() < MAX_LOGGED && logged.insert(proxy) {
            tracing::warn!(
                %proxy,
                header = header.name(),
                entry,
                "a proxy names its client by something that is no address; such requests count against the address of the proxy"
            );
        }
    }
}

fn shown(entry: &[u8]) -> String {
    entry.escape_ascii().map(char::from).take(MAX_SHOWN).collect()
}

/// The parts of a list from its end, with separators in quoted strings passed over. From the end: what a client wrote before does not change
/// how the proxy's own part is read, even where it opens a quoted string.
struct FromTheEnd<'a> {
    rest: Option<&'a [u8]>,
    separator: u8,
}

impl<'a> FromTheEnd<'a> {
    const fn of(text: &'a [u8], separator: u8) -> Self {
        Self { rest: Some(text), separator }
    }
}

impl<'a> Iterator for FromTheEnd<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let text = self.rest.take()?;
        let mut in_quotes = false;
        for (at, byte) in text.iter().enumerate().rev() {
            match *byte {
                b'"' if !is_escaped(&text[..at]) => in_quotes = !in_quotes,
                byte if byte == self.separator && !in_quotes => {
                    self.rest = Some(&text[..at]);
                    return Some(&text[at + 1..]);
                }
                _ => {}
            }
        }
        Some(text)
    }
}

/// Whether the byte after this text is a quoted pair (RFC 9110, section 5.6.4).
fn is_escaped(before: &[u8]) -> bool {
    before.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
}

/// The value of `for` in an element of `Forwarded` (RFC 7239, section 4); `None` where it has none, or several.
fn for_of(element: &[u8]) -> Option<&[u8]> {
    let mut found = FromTheEnd::of(element, b';').filter_map(|pair| {
        let at = pair.iter().position(|byte| *byte == b'=')?;
        pair[..at].trim_ascii().eq_ignore_ascii_case(b"for").then(|| &pair[at + 1..])
    });
    let value = found.next()?;
    found.next().is_none().then_some(value)
}

/// The address in `192.0.2.43`, `192.0.2.43:47011`, `2001:db8::1`, `[2001:db8::1]`, `[2001:db8::1]:47011` and `fe80::1%eth0`, quoted or not. A
/// port and a zone are dropped, and an IPv4 address in IPv6 (`::ffff:192.0.2.43`) is the IPv4 address.
fn address_of(node: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(node).ok()?.trim_matches([' ', '\t']);
    let text = match text.strip_prefix('"') {
        Some(quoted) => quoted.strip_suffix('"')?,
        None => text,
    };
    if let Some(bracketed) = text.strip_prefix('[') {
        let (address, port) = bracketed.split_once(']')?;
        let has_port = port.strip_prefix(':').is_some_and(is_port);
        return if port.is_empty() || has_port { ipv6(address) } else { None };
    }
    match text.split_once(':') {
        Some((address, port)) if is_port(port) && address.contains('.') => {
            address.parse::<Ipv4Addr>().ok().map(IpAddr::V4)
        }
        Some(_) => ipv6(text),
        None => text.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
    }
}

fn ipv6(text: &str) -> Option<IpAddr> {
    let address = match text.split_once('%') {
        Some((address, zone)) if is_name(zone) => address,
        Some(_) => return None,
        None => text,
    };
    Some(IpAddr::V6(address.parse::<Ipv6Addr>().ok()?).to_canonical())
}

/// A port, or an obfuscated one (RFC 7239, section 6).
fn is_port(text: &str) -> bool {
    let is_number = (1..=5).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number || text.strip_prefix('_').is_some_and(is_name)
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-%".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::ClientAddressHeader::{Forwarded, XForwardedFor};
    use super::*;

    fn client(header: ClientAddressHeader, lines: &[&[u8]]) -> ForwardedClient {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(header.name(), axum::http::HeaderValue::from_bytes(line).unwrap());
        }
        ForwardedClient::of(&headers, header, |address| address.to_string().starts_with("10.0.0."))
    }

    fn is(address: &str) -> ForwardedClient {
        ForwardedClient::Address(address.parse().unwrap())
    }

    #[test]
    fn address_in_every_documented_form_is_the_client() {
        for (written, address) in [
            ("203.0.113.7", "203.0.113.7"),
            ("203.0.113.7:51008", "203.0.113.7"),
            ("2001:db8::7", "2001:db8::7"),
            ("[2001:db8::7]", "2001:db8::7"),
            ("[2001:db8::7]:51008", "2001:db8::7"),
            ("\"[2001:db8::7]:51008\"", "2001:db8::7"),
            ("\"203.0.113.7\"", "203.0.113.7"),
            ("fe80::7%eth0", "fe80::7"),
            ("[fe80::7%25eth0]:443", "fe80::7"),
            ("::ffff:203.0.113.7", "203.0.113.7"),
            ("[::ffff:203.0.113.7]:51008", "203.0.113.7"),
            ("::ffff:cb00:7107", "203.0.113.7"),
            ("\t203.0.113.7 ", "203.0.113.7"),
            ("203.0.113.7,", "203.0.113.7"),
            ("203.0.113.7, ,", "203.0.113.7"),
            ("198.51.100.9, 203.0.113.7:51008, 10.0.0.2:8080", "203.0.113.7"),
            ("unknown, 203.0.113.7", "203.0.113.7"),
        ] {
            assert_eq!(client(XForwardedFor, &[written.as_bytes()]), is(address), "{written}");
        }
        assert_eq!(client(XForwardedFor, &[b"198.51.100.9", b"203.0.113.7:1", b"10.0.0.2"]), is("203.0.113.7"));
        // What a client wrote before is not read, whatever its bytes are.
        assert_eq!(client(XForwardedFor, &[b"\xff\xfe, 203.0.113.7"]), is("203.0.113.7"));
        assert_eq!(client(XForwardedFor, &[b"\"198.51.100.9, 203.0.113.7"]), is("203.0.113.7"));
    }

    #[test]
    fn forwarded_of_rfc_7239_names_the_client() {
        for (written, address) in [
            ("for=192.0.2.43", "192.0.2.43"),
            ("For=\"[2001:db8:cafe::17]:4711\"", "2001:db8:cafe::17"),
            ("for=192.0.2.60;proto=http;by=203.0.113.43", "192.0.2.60"),
            ("for=192.0.2.43, for=198.51.100.17", "198.51.100.17"),
            ("proto=https;for=\"192.0.2.43:_port\";host=\"a,b;c\"", "192.0.2.43"),
            ("for=unknown, FOR = 192.0.2.43", "192.0.2.43"),
            ("for=192.0.2.43, for=10.0.0.2;by=10.0.0.3", "192.0.2.43"),
            // A client's value with quotes and separators, which its proxy has escaped.
            (r#"for=192.0.2.43;host="a\",for=198.51.100.9;x=\"b""#, "192.0.2.43"),
            // A client that leaves a quoted string open.
            ("for=\"evil, for=192.0.2.43", "192.0.2.43"),
        ] {
            assert_eq!(client(Forwarded, &[written.as_bytes()]), is(address), "{written}");
        }
    }

    #[test]
    fn entry_without_an_address_is_unreadable_and_no_earlier_one_counts() {
        let unreadable = |header, written: &str| match client(header, &[b"198.51.100.9", written.as_bytes()]) {
            ForwardedClient::Unreadable(entry) => entry,
            other => panic!("{written}: {other:?}"),
        };
        for written in [
            "unknown",
            "_hidden",
            "_SEVKISEK",
            "client.example.com",
            "203.0.113",
            "203.0.113.7:",
            "203.0.113.7:http",
            "203.0.113.7:510080",
            "203.0.113.7/32",
            "[203.0.113.7]",
            "[2001:db8::7",
            "[2001:db8::7]51008",
            "2001:db8::7%",
            "unix:",
            "0x7f.1",
            "-",
            "198.51.100.9, unknown",
        ] {
            unreadable(XForwardedFor, written);
        }
        for written in ["by=203.0.113.7", "for=unknown", "for=_hidden", "for=192.0.2.1;for=192.0.2.2", "192.0.2.1"] {
            unreadable(Forwarded, written);
        }
        assert_eq!(client(XForwardedFor, &[b"\xff"]), ForwardedClient::Unreadable("\\xff".to_owned()));
        assert!(unreadable(XForwardedFor, &"x".repeat(9_000)).len() <= MAX_SHOWN);
    }

    #[test]
    fn proxy_that_names_no_client_differs_from_one_whose_entry_is_unreadable() {
        for lines in [&[][..], &[&b""[..]], &[&b" , "[..]], &[&b"10.0.0.2"[..]], &[&b"10.0.0.2:80, 10.0.0.3"[..]]] {
            assert_eq!(client(XForwardedFor, lines), ForwardedClient::Unnamed, "{lines:?}");
        }
        // The header that is not configured is written by clients.
        let mut headers = HeaderMap::new();
        headers.insert("forwarded", axum::http::HeaderValue::from_static("for=192.0.2.43"));
        assert_eq!(ForwardedClient::of(&headers, XForwardedFor, |_| false), ForwardedClient::Unnamed);
    }

    #[test]
    fn unreadable_entries_are_counted_and_logged_for_a_bounded_number_of_proxies() {
        let before = UNREADABLE.get();
        for last in 0..=255 {
            ForwardedClient::note_unreadable("unknown", IpAddr::from([192, 0, 2, last]), XForwardedFor);
        }
        assert!(UNREADABLE.get() >= before + 256);
        assert_eq!(LOGGED.lock().unwrap().len(), MAX_LOGGED);
    }
}
