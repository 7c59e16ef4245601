//! Fuzz targets for the headers in which proxies name a client and its certificate. See [`crate::fuzz`].

use super::forwarded_client::ForwardedClient;
use super::forwarded_client_certificate::{Forwarding, strip};
use super::ingress::ClientAddressHeader;
use crate::fuzz::{BUDGET, text_of};
use axum::http::{HeaderMap, HeaderValue};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use std::net::IpAddr;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----\n";
const END: &str = "-----END CERTIFICATE-----\n";

fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
    text.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// The header as a proxy writes it.
fn written(way: Forwarding, der: &[u8]) -> String {
    let pem = escaped(&format!("{BEGIN}{}\n{END}", STANDARD.encode(der)));
    match way {
        Forwarding::Rfc9440 => format!(":{}:", STANDARD.encode(der)),
        Forwarding::Xfcc => format!(r#"Hash=00ff;Cert="{pem}";Subject="CN=a, \"b\"; c=d""#),
        Forwarding::Nginx => pem,
    }
}

/// The certificate of a request with these headers; `None` where there is none, or none that is accepted.
fn read(way: Forwarding, headers: &HeaderMap) -> Option<Vec<u8>> {
    way.read(headers).ok().flatten().map(|der| der.to_vec())
}

fn with(way: Forwarding, value: &[u8]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_bytes(value) {
        headers.insert(way.header(), value);
    }
    headers
}

#[test]
fn fuzz_forwarded_certificate_is_read_as_it_was_written() {
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        for way in Forwarding::ALL {
            let headers = with(way, written(way, input).as_bytes());
            let expected = (!input.is_empty()).then(|| input.to_vec());
            let read = read(way, &headers);
            assert!(read == expected || (read.is_none() && input.len() > 4 * 1024), "{way}");
            // The other formats see nothing, and no handler sees the header.
            for other in Forwarding::ALL.into_iter().filter(|other| *other != way) {
                assert_eq!(other.read(&headers), Ok(None));
            }
            let mut stripped = headers;
            strip(&mut stripped);
            assert!(stripped.is_empty());
        }
    });
}

#[test]
fn fuzz_forwarded_certificate_of_any_header_is_exactly_one() {
    let pem = escaped(&format!("{BEGIN}AQID/+8=\n{END}"));
    let tokens = [
        "Cert=",
        "cert=\"",
        pem.as_str(),
        "\"",
        "\\",
        ";",
        ",",
        "Hash=00ff",
        "URI=x",
        ":",
        "AQID/+8=",
        "%0A",
        "%",
        "%2B",
        "-----BEGIN ",
        " ",
        "=",
    ];
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        for value in [text_of(input, &tokens).into_bytes(), input.to_vec()] {
            for way in Forwarding::ALL {
                let headers = with(way, &value);
                let Some(der) = read(way, &headers) else { continue };
                assert!(!der.is_empty() && der.len() <= value.len());
                assert_eq!(read(way, &with(way, written(way, &der).as_bytes())), Some(der), "{way}: {value:?}");
                // A client's copy beside it makes both worthless.
                let mut twice = headers;
                twice.append(way.header(), HeaderValue::from_static("x"));
                assert!(way.read(&twice).is_err(), "{way}");
            }
        }
    });
}

#[test]
fn fuzz_forwarded_client_is_the_last_that_no_proxy_wrote() {
    const TOKENS: [&str; 16] = [
        "192.0.2.1",
        "192.0.2.1:4711",
        "[2001:db8::1]:4711",
        "\"",
        "_hidden",
        "10.0.0.1",
        "10.0.0.2",
        "::ffff:10.0.0.1",
        "2001:db8::1",
        ",",
        ", ",
        ",",
        " ",
        "unknown",
        "[::1]",
        "0x7f.1",
    ];
    let is_proxy = |address: IpAddr| matches!(address, IpAddr::V4(address) if address.octets()[..3] == [10, 0, 0]);
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let line = text_of(input, &TOKENS);
        let client = |lines: &[&str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append("x-forwarded-for", HeaderValue::from_str(line).ok()?);
            }
            match ForwardedClient::of(&headers, ClientAddressHeader::XForwardedFor, is_proxy) {
                ForwardedClient::Address(address) => Some(address),
                ForwardedClient::Unnamed | ForwardedClient::Unreadable(_) => None,
            }
        };
        if let Some(address) = client(&[&line]) {
            assert!(!is_proxy(address), "{line:?}");
            // What a client writes in front of it changes nothing.
            for forged in ["203.0.113.9", "10.0.0.7", "x"] {
                assert_eq!(client(&[&format!("{forged}, {line}")]), Some(address), "{line:?}");
                assert_eq!(client(&[forged, &line]), Some(address), "{line:?}");
            }
            // Further proxies of ours behind it neither.
            assert_eq!(client(&[&format!("{line}, 10.0.0.9")]), Some(address), "{line:?}");
        }
    });
}
