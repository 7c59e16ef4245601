//! Fuzz targets for what strangers send: host names and SSH keys here, and each other one beside its parser, in a file `fuzz.rs`
//! (`http/correlation`, `log_gateway`, `payment_processor`, `terminal/recording`, `terminal_gateway/browser`, `tls`).
//!
//! They run as ordinary tests with random inputs, and under `cargo bolero` with a coverage-guided engine
//! (`deploy/docs/src/contribute/testing.md`).

use crate::api::request_fields::ssh_public_key::SshPublicKey;
use crate::outbound::host_address::HostAddress;
use std::time::Duration;

/// The time of a target in an ordinary run; `BOLERO_RANDOM_TEST_TIME_MS` sets another.
pub(crate) const BUDGET: Duration = Duration::from_millis(300);

/// A text of these tokens, control characters and letters that are not ASCII. The first byte is its length.
pub(crate) fn text_of(input: &[u8], tokens: &[&str]) -> String {
    let Some((length, rest)) = input.split_first() else { return String::new() };
    let mut text = String::new();
    for byte in rest.iter().take(usize::from(*length) % 32) {
        match *byte {
            0..=247 => text.push_str(tokens[usize::from(*byte) % tokens.len()]),
            248..=251 => text.push(char::from(*byte - 248 + 7)),
            252..=255 => text.push(char::from(*byte)),
        }
    }
    text
}

#[test]
fn fuzz_host_has_one_spelling_that_no_resolver_reads_as_another() {
    const TOKENS: [&str; 24] = [
        "a",
        "z",
        "-",
        ".",
        "0",
        "1",
        "127",
        "255",
        "0x7f",
        "localhost",
        "LOCAL",
        "xn--",
        ":",
        "::",
        "[",
        "]",
        "fe80",
        "%",
        "_",
        "256",
        "::ffff:",
        "1e3",
        "07",
        "example",
    ];
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        for text in [text_of(input, &TOKENS), String::from_utf8_lossy(input).into_owned()] {
            let Ok(host) = HostAddress::parse(&text) else { continue };
            let shown = host.to_string();
            assert_eq!(HostAddress::parse(&shown), Ok(host.clone()), "{text:?}");
            assert!(shown.len() <= HostAddress::MAX_LEN);
            // It is an argument of programs, and part of URLs.
            assert!(!shown.starts_with('-') && !shown.bytes().any(|byte| b" /@?#\\%\"'`$;&|<>\0\n".contains(&byte)));
            if let HostAddress::Name(name) = &host {
                let last = name.rsplit('.').next().unwrap();
                // What the C library would read as a number (inet_aton) is an address or refused.
                let digits = last.strip_prefix("0x").unwrap_or(last);
                let radix = if digits.len() < last.len() { 16 } else { 10 };
                assert!(!digits.is_empty() && digits.chars().any(|digit| !digit.is_digit(radix)), "{name}");
                assert!(last != "localhost" && name.bytes().all(|byte| !byte.is_ascii_uppercase()), "{name}");
            }
        }
    });
}

#[test]
fn fuzz_ssh_public_key_is_one_clean_line() {
    const ED25519: &str = "AAAAC3NzaC1lZDI1NTE5AAAAINEoqqkY4e7bJe1Jl4MhWXVh60tJIaoDRJGRhDuzPvaA";
    const TOKENS: [&str; 14] = [
        "ssh-ed25519",
        "ssh-ed25519 ",
        "ssh-rsa ",
        "AAAA",
        " ",
        " ",
        "\n",
        "\t",
        "\"",
        "command=\"x\" ",
        "no-pty,",
        "ann@laptop",
        "=",
        "é",
    ];
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        // A valid key with a byte changed, among other text.
        let (mut key, noise) = (ED25519.as_bytes().to_vec(), text_of(input, &TOKENS));
        if let [at, change, ..] = input {
            let at = usize::from(*at) % (4 * key.len());
            if let Some(byte) = key.get_mut(at) {
                *byte = b"ABCDwxyz0123+/= "[usize::from(*change) % 16];
            }
        }
        let key = String::from_utf8(key).unwrap();
        for text in
            [format!("ssh-ed25519 {key}"), format!("ssh-ed25519 {key} {noise}"), format!("{noise} {key}"), noise]
        {
            let Ok(read) = SshPublicKey::parse(&text) else { continue };
            let (key_type, encoded) = read.public_key.split_once(' ').unwrap();
            assert_eq!(key_type, read.key_type);
            assert!(encoded.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte)), "{text:?}");
            assert!(text.contains(encoded), "the key of the text itself: {text:?}");
            let begin = text.trim_start_matches([' ', '\r', '\n', '\u{feff}']);
            assert!(begin.starts_with(key_type), "without options: {text:?}");
            assert_eq!(SshPublicKey::parse(&read.public_key), Ok(read), "{text:?}");
        }
    });
}
