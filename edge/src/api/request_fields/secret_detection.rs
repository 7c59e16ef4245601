//! Detection of texts that look like secrets. Reasons and names are stored and shown as written; a secret that was pasted there would stay
//! forever, so it is refused at the edge.

use crate::auth::opaque_token::TokenPurpose;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// The minimum length, in characters, of a suspected secret.
const MIN_SECRET_LEN: usize = 16;

/// Whether the text holds something of the form of a private key, a token of ours, a JWT, a bearer header, or a URL's password.
#[must_use]
pub(crate) fn holds_a_secret(text: &str) -> bool {
    holds_a_private_key(text)
        || text.split(|c: char| !is_token_char(c)).any(|word| is_our_token(word) || is_jwt(word))
        || has_bearer(text)
        || has_url_password(text)
}

/// The marks of private keys: PEM (RFC 7468) and OpenSSH's form, that of ssh.com, PuTTY's `.ppk`, and the beginning of OpenSSH's form in
/// base64 (`openssh-key-v1`).
const PRIVATE_KEY_MARKS: [&str; 6] = [
    "PRIVATE KEY-----",
    "PRIVATE KEY ----",
    "PuTTY-User-Key-File-",
    "Private-Lines:",
    "Private-MAC:",
    "b3BlbnNzaC1rZXktdjEA",
];

/// Whether the text has a private key, or a recognizable part of one.
#[must_use]
pub(crate) fn holds_a_private_key(text: &str) -> bool {
    PRIVATE_KEY_MARKS.into_iter().any(|mark| text.contains(mark))
        || text.split(|c: char| !is_base64_char(c)).any(is_private_der)
        || (text.contains("\"kty\"") && text.contains("\"d\""))
}

const fn is_base64_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=')
}

/// The base64 of a private key in DER: a sequence that begins with its version, and then has the modulus (PKCS #1, RFC 8017, section A.1.2),
/// the algorithm (PKCS #8, RFC 5958, section 2) or the key itself (RFC 5915, section 3). Public keys and certificates begin with another
/// sequence or with a longer number.
fn is_private_der(word: &str) -> bool {
    const MIN_PRIVATE_DER: usize = 40;
    const HEAD: usize = 16;
    if word.len() < MIN_PRIVATE_DER || !word.starts_with('M') {
        return false;
    }
    let Ok(head) = STANDARD.decode(&word[..HEAD]) else { return false };
    let ([0x30, 0x82, _, _, content @ ..] | [0x30, 0x81, _, content @ ..] | [0x30, 0..=0x7f, content @ ..]) =
        head.as_slice()
    else {
        return false;
    };
    matches!(content, [2, 1, 0, 2 | 0x30, ..] | [2, 1, 1, 4 | 0x30, ..])
}

const fn is_token_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

fn is_our_token(word: &str) -> bool {
    let follows = |prefix: &str| word.find(prefix).is_some_and(|at| word.len() - at - prefix.len() >= MIN_SECRET_LEN);
    TokenPurpose::ALL.into_iter().any(|purpose| follows(purpose.prefix()))
}

/// Three base64url parts, the first of which is a JSON object (RFC 7515, section 7.1).
fn is_jwt(word: &str) -> bool {
    let mut parts = word.split('.');
    let head = parts.next().is_some_and(|head| head.contains("eyJ") && head.len() >= MIN_SECRET_LEN);
    head && parts.next().is_some_and(|payload| payload.len() >= 4) && parts.next().is_some()
}

fn has_bearer(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    ["bearer ", "basic "].into_iter().any(|scheme| {
        lower.match_indices(scheme).any(|(at, found)| {
            let rest = lower[at + found.len()..].chars();
            rest.take_while(|c| is_token_char(*c) || matches!(c, '+' | '/' | '=')).count() >= MIN_SECRET_LEN
        })
    })
}

/// `scheme://user:password@host`.
fn has_url_password(text: &str) -> bool {
    text.match_indices("://").any(|(at, found)| {
        let authority = text[at + found.len()..].split(['/', ' ', '?', '#']).next().unwrap_or_default();
        let user = authority.rsplit_once('@').map(|(user, _)| user);
        user.and_then(|user| user.split_once(':')).is_some_and(|(_, password)| !password.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_distinguished_from_ordinary_text() {
        for secret in [
            "-----BEGIN OPENSSH PRIVATE KEY----- AAAA",
            "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----",
            "PuTTY-User-Key-File-3: ssh-ed25519",
            "Private-Lines: 1 AAAA",
            "key b3BlbnNzaC1rZXktdjEAAAAABG5vbmU=",
            r#"{"kty":"OKP","crv":"Ed25519","d":"nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A"}"#,
            // The begin of a key of RSA in PKCS #1, one of RFC 8410 in PKCS #8, and one of a curve in SEC 1.
            "MIIEpAIBAAKCAQEA0000000000000000000000000000",
            "MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC",
            "MHcCAQEEIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
            "use gpuenr_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA, quick",
            "token=gpuenr_AAAAAAAAAAAAAAAAAAAA",
            "gpusak_AAAAAAAAAAAAAAAAAAAA",
            "(eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln)",
            "Authorization: Bearer abcdefghijklmnop",
            "basic dXNlcjpwYXNzd29yZA==",
            "see https://ann:hunter2@example.com/x",
        ] {
            assert!(holds_a_secret(secret), "{secret}");
        }
        for text in [
            "the bearer of this node is tired",
            "the private key was replaced",
            // A public key and a certificate, both in DER.
            "MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=",
            "MIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEAu0000000",
            "fan failed, see https://tickets.example.com/1?a=b",
            "ssh://host:22 and mailto://ann@example.com",
            "prefix gpuenr_ alone",
            "eyJ is how they begin",
            "a.b.c version 1.2.3",
            "basic maintenance",
            "ü://ü:@ü",
        ] {
            assert!(!holds_a_secret(text), "{text}");
        }
    }
}
