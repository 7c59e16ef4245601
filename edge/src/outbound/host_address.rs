//! The address of a node as an operator writes it: a DNS name or an IP address, in its one canonical spelling.
//!
//! The C library's resolver reads `0x7f.1`, `2130706433` and `0177.0.0.1` as 127.0.0.1. None of them is a host here: a name whose last
//! label is a number must be a dotted decimal address (the rule of the WHATWG URL standard, "ends in a number"), without leading zeros.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use thiserror::Error;

use crate::http::error::{ApiError, Code};

/// A DNS name (lower case, without its trailing dot) or an IP address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HostAddress {
    Name(String),
    Address(IpAddr),
}

/// Why a text is not a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HostError {
    #[error("the host is empty")]
    Empty,
    #[error("the host is longer than 253 characters")]
    TooLong,
    #[error(
        "the host has characters other than letters, digits, dots and dashes; write international names in punycode"
    )]
    Character,
    #[error("each part of the host between dots has 1 to 63 characters and neither begins nor ends with a dash")]
    Label,
    #[error("an IP address is written in its usual form, as 192.0.2.7 or 2001:db8::7")]
    OddAddress,
    #[error("this name always means the machine it is used on")]
    Localhost,
}

impl HostAddress {
    /// The longest name (RFC 1035, section 2.3.4, without the root's dot).
    pub const MAX_LEN: usize = 253;

    /// Reads a host.
    ///
    /// # Errors
    /// Not a host, or one in an odd spelling.
    pub fn parse(text: &str) -> Result<Self, HostError> {
        if text.is_empty() {
            return Err(HostError::Empty);
        }
        if text.chars().any(|character| !character.is_ascii() && character.is_numeric()) {
            return Err(HostError::OddAddress);
        }
        let bracketed = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        if bracketed.is_some() || text.contains(':') {
            let address: Ipv6Addr = bracketed.unwrap_or(text).parse().map_err(|_| HostError::OddAddress)?;
            return Ok(Self::Address(address.into()));
        }
        let name = text.strip_suffix('.').unwrap_or(text);
        if name.len() > Self::MAX_LEN {
            return Err(HostError::TooLong);
        }
        if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-')) {
            return Err(HostError::Character);
        }
        for label in name.split('.') {
            if !(1..=63).contains(&label.len()) || label.starts_with('-') || label.ends_with('-') {
                return Err(HostError::Label);
            }
        }
        let name = name.to_ascii_lowercase();
        if ends_in_a_number(&name) {
            // Only the C library accepts a dot at the end of an address.
            let address: Ipv4Addr = text.parse().map_err(|_| HostError::OddAddress)?;
            return Ok(Self::Address(address.into()));
        }
        if is_localhost_name(&name) {
            return Err(HostError::Localhost);
        }
        Ok(Self::Name(name))
    }
}

/// Whether this is a name of this machine by RFC 6761, section 6.3; in lower case, without the dot at the end.
pub(crate) fn is_localhost_name(name: &str) -> bool {
    name == "localhost" || name.ends_with(".localhost")
}

fn ends_in_a_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    let hexadecimal = last.strip_prefix("0x").is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    hexadecimal || last.bytes().all(|byte| byte.is_ascii_digit())
}

impl fmt::Display for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(address) => address.fmt(f),
        }
    }
}

impl From<HostError> for ApiError {
    fn from(error: HostError) -> Self {
        let code = match error {
            HostError::OddAddress | HostError::Localhost => Code::ProbeTargetDenied,
            HostError::Empty | HostError::TooLong | HostError::Character | HostError::Label => Code::InvalidRequest,
        };
        Self::new(code, format!("`host` is refused: {error}.")).detail("field", "host")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_and_addresses_are_read() {
        assert_eq!(HostAddress::parse("gpu-17.Example.COM."), Ok(HostAddress::Name("gpu-17.example.com".into())));
        assert_eq!(HostAddress::parse("node"), Ok(HostAddress::Name("node".into())));
        assert_eq!(HostAddress::parse("10.0.0.7"), Ok(HostAddress::Address([10, 0, 0, 7].into())));
        assert_eq!(HostAddress::parse("[2001:db8::7]").unwrap().to_string(), "2001:db8::7");
        assert_eq!(HostAddress::parse("2001:db8::7").unwrap().to_string(), "2001:db8::7");
        assert_eq!(HostAddress::parse("1.example"), Ok(HostAddress::Name("1.example".into())));
    }

    #[test]
    fn odd_spellings_of_addresses_are_refused() {
        for odd in [
            "0x7f.1",
            "0x7f000001",
            "0X7F.0.0.1",
            "2130706433",
            "0177.0.0.1",
            "127.1",
            "127.0.1",
            "127.0.0.01",
            "127.0.0.1.",
            "1.2.3.4.5",
            "256.0.0.1",
            "example.0x",
            "example.1",
            "[::ffff:127.0.0.1",
            "::1%lo",
            "[::1%25lo]",
            "fe80::1%eth0",
            "[127.0.0.1]",
            "127.0.0.1:22",
            "１２７.0.0.1",
            "①②⑦.0.0.1",
            "١٢٧.0.0.1",
            "[::1]:22",
        ] {
            assert_eq!(HostAddress::parse(odd), Err(HostError::OddAddress), "{odd}");
        }
    }

    #[test]
    fn localhost_is_refused_in_every_spelling() {
        for name in ["localhost", "LOCALHOST", "localhost.", "a.localhost", "a.b.LocalHost."] {
            assert_eq!(HostAddress::parse(name), Err(HostError::Localhost), "{name}");
        }
        assert!(HostAddress::parse("localhost.example").is_ok());
    }

    #[test]
    fn invalid_host_name_is_refused() {
        for (text, error) in [
            ("", HostError::Empty),
            (".", HostError::Label),
            ("a..b", HostError::Label),
            ("a.b..", HostError::Label),
            ("-oProxyCommand=x", HostError::Character),
            ("-a", HostError::Label),
            ("a-", HostError::Label),
            ("a b", HostError::Character),
            ("a\n", HostError::Character),
            ("a\0b", HostError::Character),
            ("a/b", HostError::Character),
            ("user@host", HostError::Character),
            ("a%2e", HostError::Character),
            ("例え", HostError::Character),
            ("a。b", HostError::Character),
            ("a_b", HostError::Character),
        ] {
            assert_eq!(HostAddress::parse(text), Err(error), "{text:?}");
        }
        assert_eq!(HostAddress::parse(&"a".repeat(64)), Err(HostError::Label));
        assert_eq!(HostAddress::parse(&vec!["a"; 128].join(".")), Err(HostError::TooLong));
        assert!(HostAddress::parse(&vec!["a"; 127].join(".")).is_ok());
    }

    proptest! {
        #[test]
        fn parsed_host_round_trips_and_has_only_safe_characters(text in "\\PC{0,40}|[0-9a-fx.:\\[\\]-]{1,24}|[a-z.-]{1,300}") {
            if let Ok(host) = HostAddress::parse(&text) {
                let shown = host.to_string();
                prop_assert!(shown.len() <= HostAddress::MAX_LEN);
                prop_assert!(!shown.starts_with('-'));
                prop_assert!(shown.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-:".contains(&byte)));
                prop_assert_eq!(HostAddress::parse(&shown), Ok(host));
            }
        }
    }
}
