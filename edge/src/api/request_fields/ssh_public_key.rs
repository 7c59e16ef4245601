//! SSH public keys as users and administrators upload them: one line of OpenSSH text (RFC 4253, section 6.6).
//!
//! Only the key is stored: an option prefix would grant or restrict on the node, a comment is arbitrary text.

use ssh_key::{HashAlg, PublicKey, public::KeyData};
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
    #[error("this is a private key; never send it anywhere; make a new pair and send the .pub file")]
    PrivateKey,
    #[error("a public key is one line without control characters")]
    NotOneLine,
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

impl SshPublicKey {
    /// Reads one public key.
    ///
    /// # Errors
    /// Whatever is not exactly one acceptable public key.
    pub(crate) fn parse(text: &str) -> Result<Self, SshPublicKeyError> {
        use SshPublicKeyError as E;
        if text.len() > MAX_LEN {
            return Err(E::TooLong);
        }
        if text.contains("PRIVATE KEY") {
            return Err(E::PrivateKey);
        }
        // The line end of a .pub file belongs to the file, not to the key.
        let text = text.strip_suffix('\n').map_or(text, |line| line.strip_suffix('\r').unwrap_or(line));
        let text = text.trim_matches(' ');
        if text.chars().any(char::is_control) {
            return Err(E::NotOneLine);
        }
        let mut words = text.split(' ').filter(|word| !word.is_empty());
        let key_type = words.next().ok_or(E::Empty)?;
        if !TYPES.contains(&key_type) {
            return Err(match ssh_key::Algorithm::new(key_type) {
                _ if key_type.contains("-cert-v0") => E::UnsupportedType("certificate".into()),
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

fn rsa_bits(modulus: &[u8]) -> u32 {
    let significant = modulus.iter().position(|byte| *byte != 0).map_or(&[][..], |first| &modulus[first..]);
    let Some(first) = significant.first() else { return 0 };
    u32::try_from(significant.len()).unwrap_or(u32::MAX).saturating_mul(8) - first.leading_zeros()
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
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
        for file in [format!("{text}\n"), format!("{text}\r\n"), format!("  {text} ")] {
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
