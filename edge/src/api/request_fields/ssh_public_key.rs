//! SSH public keys as users and administrators upload them: one line of OpenSSH text (RFC 4253, section 6.6), or the block that PuTTY's key
//! generator and other programs save (RFC 4716).
//!
//! Only the key is stored: an option prefix would grant or restrict on the node, a comment is arbitrary text.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::secret_detection::holds_a_private_key;
use ssh_key::{HashAlg, PublicKey, public::KeyData};
use std::borrow::Cow;
use thiserror::Error;

/// The longest text read, in bytes; an RSA key of 16,384 bits has 2.8 kB.
const MAX_LEN: usize = 8 * 1024;
const RSA_MIN_BITS: u32 = 2048;
const RSA_MAX_BITS: u32 = 16_384;
/// The longest key that is stored, in bytes: with an exponent, or with the name of an application, of any length a key could be longer than
/// the longest modulus.
const MAX_KEY_LEN: usize = 3 * 1024;

/// A public key that may be written to an `authorized_keys` file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SshPublicKey {
    /// The algorithm's name, such as `ssh-ed25519`.
    pub(crate) key_type: String,
    /// Type and base64, without comment.
    pub(crate) public_key: String,
    /// OpenSSH's `SHA256:` form.
    pub(crate) fingerprint: String,
}

/// Why a text is not accepted as a public key. The messages are for its author.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum SshPublicKeyError {
    #[error("the key is empty")]
    Empty,
    #[error("the key is longer than {MAX_LEN} bytes")]
    TooLong,
    #[error(
        "this is a private key, which has left its machine with this request: replace it by a new pair wherever it is used, and send \
         the public key (the .pub file, or what PuTTYgen shows for authorized_keys)"
    )]
    PrivateKey,
    #[error("a public key is one line without control characters")]
    NotOneLine,
    #[error("there are several keys; send each in a request of its own")]
    SeveralKeys,
    #[error("options before the key's type are not accepted; send the key from its type on")]
    Options,
    #[error("this is {form}; convert it to OpenSSH's form with `{command}`")]
    OtherForm { form: &'static str, command: &'static str },
    #[error("the block of RFC 4716 is not complete; send it from its BEGIN line to its END line")]
    CutBlock,
    #[error("the key must begin with its type (such as ssh-ed25519), without options")]
    NoType,
    #[error("keys of type {0} are not accepted; use ssh-ed25519")]
    UnsupportedType(String),
    #[error("an RSA key needs {RSA_MIN_BITS} to {RSA_MAX_BITS} bits, this one has {0}")]
    RsaSize(u32),
    #[error("the key without its comment is longer than {MAX_KEY_LEN} bytes; use ssh-ed25519")]
    KeyTooLong,
    #[error("the text after the type is not a public key of that type")]
    Malformed,
}

/// The accepted types, as `ssh-keygen -t` makes them today. DSA is broken, certificates are not keys.
const TYPES: [&str; 7] = [
    "ssh-ed25519",
    "ssh-rsa",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
];

/// The lines around a key in the form of RFC 4716, section 3.2.
const BLOCK_BEGIN: &str = "---- BEGIN SSH2 PUBLIC KEY ----";
const BLOCK_END: &str = "---- END SSH2 PUBLIC KEY ----";

/// Other forms of public keys: how they begin, their name, and what converts them.
const OTHER_FORMS: [(&str, &str, &str); 4] = [
    ("-----BEGIN PUBLIC KEY-----", "a public key in PEM", "ssh-keygen -i -m PKCS8 -f FILE"),
    ("-----BEGIN RSA PUBLIC KEY-----", "an RSA public key in PEM", "ssh-keygen -i -m PEM -f FILE"),
    ("-----BEGIN PGP PUBLIC KEY BLOCK-----", "an OpenPGP public key", "gpg --export-ssh-key ID"),
    (
        "-----BEGIN CERTIFICATE-----",
        "a certificate",
        "openssl x509 -in FILE -pubkey -noout > KEY && ssh-keygen -i -m PKCS8 -f KEY",
    ),
];

impl SshPublicKey {
    /// Reads one public key.
    ///
    /// # Errors
    /// Whatever is not exactly one acceptable public key.
    pub(crate) fn parse(text: &str) -> Result<Self, SshPublicKeyError> {
        use SshPublicKeyError as E;
        if text.contains("PRIVATE KEY") || holds_a_private_key(text) {
            return Err(E::PrivateKey);
        }
        if text.len() > MAX_LEN {
            return Err(E::TooLong);
        }
        // Line ends, and the mark of an encoding, belong to the file and not to the key.
        let text = text.trim_start_matches('\u{feff}').trim_matches([' ', '\r', '\n']);
        let text = if text.starts_with(BLOCK_BEGIN) { Cow::Owned(line_of_block(text)?) } else { Cow::Borrowed(text) };
        if let Some((_, form, command)) = OTHER_FORMS.into_iter().find(|(begin, ..)| text.starts_with(begin)) {
            return Err(E::OtherForm { form, command });
        }
        if text.chars().any(char::is_control) {
            let has_key = |line: &&str| line.split([' ', ',']).any(|word| TYPES.contains(&word));
            return Err(if text.lines().filter(has_key).nth(1).is_some() { E::SeveralKeys } else { E::NotOneLine });
        }
        let mut words = text.split(' ').filter(|word| !word.is_empty());
        let key_type = words.next().ok_or(E::Empty)?;
        if !TYPES.contains(&key_type) {
            return Err(match ssh_key::Algorithm::new(key_type) {
                _ if key_type.contains("-cert-v0") => E::UnsupportedType("certificate".into()),
                _ if words.any(|word| TYPES.contains(&word)) => E::Options,
                Ok(ssh_key::Algorithm::Other(_)) | Err(_) => E::NoType,
                Ok(known) => E::UnsupportedType(known.as_str().into()),
            });
        }
        let encoded = words.next().ok_or(E::Malformed)?;
        let key = PublicKey::from_openssh(&format!("{key_type} {encoded}")).map_err(|_| E::Malformed)?;
        if key.algorithm().as_str() != key_type {
            return Err(E::Malformed);
        }
        if let KeyData::Rsa(rsa) = key.key_data() {
            let bits = rsa_bits(rsa.n().as_positive_bytes().ok_or(E::Malformed)?);
            if !(RSA_MIN_BITS..=RSA_MAX_BITS).contains(&bits) {
                return Err(E::RsaSize(bits));
            }
        }
        let public_key = key.to_openssh().map_err(|_| E::Malformed)?;
        if public_key.len() > MAX_KEY_LEN {
            return Err(E::KeyTooLong);
        }
        Ok(Self {
            key_type: key_type.to_owned(),
            public_key,
            fingerprint: key.fingerprint(HashAlg::Sha256).to_string(),
        })
    }
}

/// The key of a block of RFC 4716 as one line of OpenSSH's form. Its headers, comments for people, are left out.
fn line_of_block(text: &str) -> Result<String, SshPublicKeyError> {
    use SshPublicKeyError as E;
    let mut encoded = String::new();
    let mut in_header = false;
    let mut lines = text.lines().map(str::trim_end).skip(1);
    loop {
        match lines.next().ok_or(E::CutBlock)? {
            BLOCK_END => break,
            // A header may go on in further lines.
            line if in_header || line.contains(':') => in_header = line.ends_with('\\'),
            line => encoded.push_str(line),
        }
    }
    if lines.any(|line| !line.is_empty()) {
        return Err(E::SeveralKeys);
    }
    let key = STANDARD.decode(&encoded).map_err(|_| E::Malformed)?;
    let (length, rest) = key.split_first_chunk::<4>().ok_or(E::Malformed)?;
    let length = usize::try_from(u32::from_be_bytes(*length)).map_err(|_| E::Malformed)?;
    let key_type = rest.get(..length).and_then(|name| std::str::from_utf8(name).ok()).ok_or(E::Malformed)?;
    if key_type.is_empty() || !key_type.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(E::Malformed);
    }
    Ok(format!("{key_type} {encoded}"))
}

fn rsa_bits(modulus: &[u8]) -> u32 {
    let significant = modulus.iter().position(|byte| *byte != 0).map_or(&[][..], |first| &modulus[first..]);
    let Some(first) = significant.first() else { return 0 };
    u32::try_from(significant.len()).unwrap_or(u32::MAX).saturating_mul(8) - first.leading_zeros()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{SshPublicKeyError as E, *};

    const GOOD: [(&str, &str); 5] = [
        (
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAINEoqqkY4e7bJe1Jl4MhWXVh60tJIaoDRJGRhDuzPvaA ann@laptop",
            "SHA256:awLufrjqBI9Fx8fOe4VPSG8EbAofMyKsZudqfQggrNU",
        ),
        (
            "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBBME4DMtcCQzfrvuQU5iY9qIMAkq4TTFoGh0T21WpxVhwbP1FyKF70/N2AKNDD5TSMddiGmDlrhfM0U5a41GC1g= ann@laptop",
            "SHA256:R03y/ooXGVnINNL6uUa9XIerKb1fzo22V/i+6Td9yu0",
        ),
        (
            "ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBMjOpQas2qDaxE6+g5yubvRXrqYfWsdwkSPiyCyddW5H3RoRHbh1wCJsSTTIFXrsjGnaQwgGhPyg1L6a6hxA8X2In9L+UHSa82lKruw0hZmy2psYLxcv3+IlcwO1+IQksA== ann@laptop",
            "SHA256:pw2ti9wErz9pwqgR+N8RrdLe26jeXAPjlSn0/lt4bzo",
        ),
        (
            "ecdsa-sha2-nistp521 AAAAE2VjZHNhLXNoYTItbmlzdHA1MjEAAAAIbmlzdHA1MjEAAACFBADNqQnXK7FsWktl+qfdY66JaCbhVeiCAsRI4coE370/zoRnxTP3ww14E6gPBSZ6aeNY4SbpbRl4aAGcnmZ7J7qbvQCRJDE2Wl3Eeaj/iap79ox4lK0kEidP4Q2y1+gxQCHnbEmiiHZGNyVP4M0t97tyQxQ/kee0cMSCOiNgA00cXuCaDA== ann@laptop",
            "SHA256:oOCdW8Uc5gN5xoqMbwPq0e3TN802lpZf1UAM1rii+5I",
        ),
        (
            "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABAQDWPnOP8WxhH3pV8maugGq2k8ShS2FA58fS+0pnSyaYxxaTzyQoErtIn4QGey/ICBkMhTx577VPN8WU2h3Mb31kl2p9nRqxh8LbJRkdLL4C9tz6FbqmRGeixbToQwGrYDmlRkPaV85zyLNX95Xo0E/d/GKlmBrZaUBMlv8eQBNWqpm/fG8unsMvzpwntvQhQKuhefERnXkET6HbppxC0OsBem4nuFMl7il/eHvIAm8CDeL+QDoPHFuA8KN3dsGKO+sdARVaFRy4DRkND1n5G1KPWafJWnYxWIeBmrPETkkZYNEXWmlVWRzh5quu+kbgLawQGwytgGTgR58BH3gHBJm/ ann@laptop",
            "SHA256:2KXlwv/+HcCXrO1zlqMRjPnlZc4mxF2ZbjsX7U+BKfA",
        ),
    ];
    const RSA_1024: &str = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAgQDGik7paXYBI457wINyg6CMqJ7wyp/W482B4zZwtIVO/gHLpnE3uSvzyNz3bOmghsS2sXVTchf0t1arotE4raRt9OANxW1/l3lPz8K5sUucK/RjFXS7yuAkYoD61eM0og5xQoqP1lwRHCk8ULlBZsy+WQ8SPF3BeXcNfDvwoZr0jQ== ann@laptop";
    const DSA: &str = "ssh-dss AAAAB3NzaC1kc3MAAACBAMjDs+8Vsj5PI1ZjX/m7CVI1WGVPwhVwMQzTY7pEcFMo4QlTtUsVGDGuoUVeH/86UG07Q/sjubXW1BqT/4gDa/IWWhkC8Y+FGedEzic9fZjmXcpOObaZ/oJFtPiNvHLPId/gaKuSyPsVEXpZHY78ScUA6kpYgygtcmZqSRmyFRq5AAAAFQCPTAbsIWyRYcQt1qUjQ6BUv+frbwAAAIBD1j6eNSNK9ag6aRTJ1bpo47S5DkRN2ywc8HD6dHR3sW/LXZx9CyQVS5AOGdoRftpGntI2jXHODLV8xIlBF3QgcjcfGxzQYBz+iGjffW3OsR5UP1LkLy2A4NOv37r+nveqeI6Q06sfS/l3z8HEQxtnHXa6gYelmkrHNptoR0g04QAAAIBN348Danq8wfGXi0RicuIZr5Upbrl6qn6ACXVMUhkNo84z81f7x3O6cbw7JYZcv8AXSKvVbRZCCu9+wqyZ97DpmN/3Ujh5bFomv8llxmPrI/DP5VT2k8+jCy9C3FZIaUdw4gmFVttSFDGQLQHlYI7nMYpuim/I+ydG+34zrOl1tA== ann@laptop";

    #[test]
    fn the_keys_that_ssh_keygen_makes_are_read_with_its_fingerprints() {
        for (text, fingerprint) in GOOD {
            let key = SshPublicKey::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(key.fingerprint, fingerprint);
            assert!(text.starts_with(&key.public_key));
            assert_eq!(key.public_key.split(' ').count(), 2);
            assert_eq!(SshPublicKey::parse(&key.public_key), Ok(key));
        }
    }

    #[test]
    fn public_key_file_is_accepted_unchanged() {
        let (text, fingerprint) = GOOD[0];
        for file in [
            format!("{text}\n"),
            format!("{text}\r\n"),
            format!("  {text} "),
            format!("\u{feff}{text}\r\n\r\n"),
            format!("\n{text}"),
        ] {
            assert_eq!(SshPublicKey::parse(&file).unwrap().fingerprint, fingerprint);
        }
    }

    #[test]
    fn weak_and_unknown_keys_are_refused() {
        assert_eq!(SshPublicKey::parse(RSA_1024), Err(E::RsaSize(1024)));
        assert_eq!(SshPublicKey::parse(DSA), Err(E::UnsupportedType("ssh-dss".into())));
        assert_eq!(SshPublicKey::parse("ssh-frob AAAA"), Err(E::NoType));
        assert_eq!(
            SshPublicKey::parse("ssh-ed25519-cert-v01@openssh.com AAAA"),
            Err(E::UnsupportedType("certificate".into()))
        );
    }

    #[test]
    fn private_keys_are_refused_with_a_warning() {
        for label in ["OPENSSH PRIVATE KEY", "RSA PRIVATE KEY", "PRIVATE KEY", "ENCRYPTED PRIVATE KEY"] {
            let text = format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
            assert_eq!(SshPublicKey::parse(&text), Err(E::PrivateKey));
        }
    }

    /// The block of a key in the form of RFC 4716, with these headers and line end.
    fn block(line: &str, headers: &str, end: &str) -> String {
        let encoded = line.split(' ').nth(1).unwrap();
        let lines: Vec<_> = encoded.as_bytes().chunks(70).map(|line| std::str::from_utf8(line).unwrap()).collect();
        format!("{BLOCK_BEGIN}{end}{headers}{}{end}{BLOCK_END}{end}", lines.join(end))
    }

    #[test]
    fn key_that_putty_saved_is_read_as_the_same_key_in_one_line() {
        for (text, fingerprint) in GOOD {
            for end in ["\n", "\r\n"] {
                for headers in [
                    String::new(),
                    format!("Comment: \"ed25519-key-20261129\"{end}"),
                    format!(
                        "Subject: ann{end}Comment: a long one that \\{end}goes on \\{end}and ends{end}x-note: y{end}"
                    ),
                ] {
                    let key = SshPublicKey::parse(&block(text, &headers, end)).unwrap();
                    assert_eq!(key, SshPublicKey::parse(text).unwrap());
                    assert_eq!(key.fingerprint, fingerprint);
                }
            }
        }
    }

    #[test]
    fn block_that_is_cut_doubled_weak_or_no_key_is_refused_by_its_cause() {
        let good = block(GOOD[0].0, "Comment: x\n", "\n");
        let read = |text: &str| SshPublicKey::parse(text).unwrap_err();
        assert_eq!(read(&good.replace(BLOCK_END, "")), E::CutBlock);
        assert_eq!(read(&format!("{good}{good}")), E::SeveralKeys);
        assert_eq!(read(&block(RSA_1024, "", "\n")), E::RsaSize(1024));
        assert_eq!(read(&block(DSA, "", "\n")), E::UnsupportedType("ssh-dss".into()));
        assert_eq!(read(&block("x AAAA", "", "\n")), E::Malformed);
        assert_eq!(read(&block("x !!!!", "", "\n")), E::Malformed);
        assert_eq!(read(&block("x AAAAAA==", "", "\n")), E::Malformed);
    }

    #[test]
    fn private_key_in_any_form_is_refused_as_one() {
        for text in [
            "PuTTY-User-Key-File-3: ssh-ed25519\r\nEncryption: none\r\nComment: x\r\nPublic-Lines: 2\r\nAAAA\r\nPrivate-Lines: 1\r\nAAAA\r\n",
            "PuTTY-User-Key-File-2: ssh-rsa\nEncryption: aes256-cbc\n",
            "Private-Lines: 1\nAAAA\nPrivate-MAC: 00",
            "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\nAAAA\n---- END SSH2 ENCRYPTED PRIVATE KEY ----",
            "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW",
            "MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC",
            "ssh-ed25519 MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC",
        ] {
            assert_eq!(SshPublicKey::parse(text), Err(E::PrivateKey), "{text}");
        }
        let long = format!("-----BEGIN RSA PRIVATE KEY-----\n{}", "A".repeat(MAX_LEN));
        assert_eq!(SshPublicKey::parse(&long), Err(E::PrivateKey));
    }

    #[test]
    fn other_forms_several_keys_and_options_are_named_with_what_to_do() {
        let good = GOOD[0].0;
        for (text, expected) in [
            ("-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----".to_owned(), "-m PKCS8"),
            ("-----BEGIN RSA PUBLIC KEY-----\nMIIB\n-----END RSA PUBLIC KEY-----".into(), "-m PEM"),
            ("-----BEGIN PGP PUBLIC KEY BLOCK-----\n".into(), "gpg --export-ssh-key"),
            (format!("{good}\n{good}"), "several keys"),
            (format!("{good}\r\ncommand=\"x\" {good}\r\n"), "several keys"),
            (format!("command=\"/bin/sh\" {good}"), "options"),
            (format!("no-pty,from=\"10.0.0.0/8\" {good}"), "options"),
        ] {
            let error = SshPublicKey::parse(&text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    /// An RSA key with a modulus and an exponent of so many bytes (RFC 4253, section 6.6).
    fn rsa(modulus: usize, exponent: usize) -> String {
        let mut blob = Vec::new();
        let mut write = |bytes: &[u8]| {
            blob.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
            blob.extend(bytes);
        };
        write(b"ssh-rsa");
        write(&vec![1; exponent]);
        write(&[&[0][..], &vec![0xff; modulus]].concat());
        format!("ssh-rsa {}", STANDARD.encode(blob))
    }

    /// A key of a device, for an application with a name of so many bytes.
    fn of_device(application: usize) -> String {
        let kind = "sk-ssh-ed25519@openssh.com";
        let mut blob = Vec::new();
        for part in [kind.as_bytes(), &[1; 32], &vec![b'a'; application]] {
            blob.extend(u32::try_from(part.len()).unwrap().to_be_bytes());
            blob.extend(part);
        }
        format!("{kind} {}", STANDARD.encode(blob))
    }

    #[test]
    fn longest_rsa_key_is_read_and_a_longer_key_of_any_kind_is_refused() {
        let longest = SshPublicKey::parse(&rsa(2048, 3)).unwrap();
        assert_eq!(longest.public_key.len(), 2772);
        assert_eq!(SshPublicKey::parse(&rsa(2049, 3)), Err(E::RsaSize(16_392)));
        assert_eq!(SshPublicKey::parse(&rsa(2048, 600)), Err(E::KeyTooLong));
        SshPublicKey::parse(&of_device(4)).unwrap();
        assert_eq!(SshPublicKey::parse(&of_device(4000)), Err(E::KeyTooLong));
    }

    #[test]
    fn options_extra_lines_and_other_text_are_refused() {
        let good = GOOD[0].0;
        for bad in [
            format!("command=\"/bin/sh\" {good}"),
            format!("no-pty {good}"),
            format!("cert-authority,{good}"),
            format!("{good}\n{good}"),
            format!("{good}\nssh-rsa"),
            format!("{good}\0"),
            good.replacen(' ', "\t", 1),
            good.replace("ssh-ed25519 ", "ssh-rsa "),
            "ssh-ed25519".into(),
            "ssh-ed25519 ".into(),
            "ssh-ed25519 !!!!".into(),
            "ssh-ed25519 AAAA".into(),
            String::new(),
            " ".into(),
        ] {
            assert!(SshPublicKey::parse(&bad).is_err(), "{bad:?}");
        }
        assert_eq!(SshPublicKey::parse(&format!("{good}{}", "x".repeat(MAX_LEN))), Err(E::TooLong));
    }

    proptest! {
        #[test]
        fn parser_does_not_panic_on_any_public_key_text(kind in prop::sample::select(TYPES.to_vec()), rest in "[ -~]{0,120}") {
            let _ = SshPublicKey::parse(&format!("{kind} {rest}"));
        }
    }
}
