//! Detection of texts that look like secrets. Reasons and names are stored and shown as written; a secret that was pasted there would stay
//! forever, so it is refused at the edge.

use crate::auth::opaque_token::TokenPurpose;

/// The minimum length, in characters, of a suspected secret.
const LEAST: usize = 16;

/// Whether the text holds something of the form of a private key, a token of ours, a JWT, a bearer header, or a URL's password.
#[must_use]
pub(crate) fn holds_a_secret(text: &str) -> bool {
    text.contains("PRIVATE KEY-----")
        || text.split(|c: char| !is_token_char(c)).any(|word| is_our_token(word) || is_jwt(word))
        || has_bearer(text)
        || has_url_password(text)
}

const fn is_token_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

fn is_our_token(word: &str) -> bool {
    let follows = |prefix: &str| word.find(prefix).is_some_and(|at| word.len() - at - prefix.len() >= LEAST);
    TokenPurpose::ALL.into_iter().any(|purpose| follows(purpose.prefix()))
}

/// Three base64url parts, the first of which is a JSON object (RFC 7515, section 7.1).
fn is_jwt(word: &str) -> bool {
    let mut parts = word.split('.');
    let head = parts.next().is_some_and(|head| head.contains("eyJ") && head.len() >= LEAST);
    head && parts.next().is_some_and(|payload| payload.len() >= 4) && parts.next().is_some()
}

fn has_bearer(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    ["bearer ", "basic "].into_iter().any(|scheme| {
        lower.match_indices(scheme).any(|(at, found)| {
            let rest = lower[at + found.len()..].chars();
            rest.take_while(|c| is_token_char(*c) || matches!(c, '+' | '/' | '=')).count() >= LEAST
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
