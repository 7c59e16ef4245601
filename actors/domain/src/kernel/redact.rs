//! Redaction of JSON values that are stored: the text of every field whose name marks it as a secret is replaced. Replies are stored for
//! repeated requests (specification, *Idempotency record*); what is redacted there is redacted in the repeated answer.

use serde_json::Value;

/// The replacement of a secret.
pub const REDACTED: &str = "[redacted]";

/// Last words of names of secret fields: `password`, `client_secret`, `enrollment_token`. An id or a hash of one has another last
/// word (`token_id`, `token_sha256`).
pub const SECRET_WORDS: [&str; 10] = [
    "password",
    "passphrase",
    "secret",
    "token",
    "credential",
    "credentials",
    "authorization",
    "cookie",
    "enc",
    "bearer",
];

/// Endings of names of secret fields that are more than one word: `public_key` and `recovery_public_key` are no secrets.
pub const SECRET_ENDS: [&str; 4] = ["private_key", "private_key_pem", "api_key", "restart_command"];

/// Whether a field of this name holds a secret.
#[must_use]
pub fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('-', "_");
    let last = name.rsplit('_').next().unwrap_or_default();
    SECRET_WORDS.contains(&last) || SECRET_ENDS.iter().any(|end| name.ends_with(end))
}

/// Redacts in place, at any depth. Only strings are replaced, so that the value keeps its structure.
pub fn redact(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                // A list under a secret's name is a list of secrets.
                match (is_secret(name), field) {
                    (true, Value::String(text)) => REDACTED.clone_into(text),
                    (true, Value::Array(items)) => items.iter_mut().for_each(redact_text),
                    (_, field) => redact(field),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(redact),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn redact_text(item: &mut Value) {
    if let Value::String(text) = item {
        REDACTED.clone_into(text);
    } else {
        redact(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn strings_under_secret_names_are_redacted_and_others_stay() {
        let mut body = json!({
            "id": "1", "token_id": "2", "token_sha256": [1, 2], "public_key": "ssh-ed25519 A", "key_id": "k",
            "enrollment_token": "S", "client_secret": "S", "Password": "S", "ssh_private_key_enc": "S", "api-key": "S",
            "token": {"id": "3", "secret": "S", "expires_at": "t"}, "tokens_left": 3,
            "list": [{"password": "S"}, "free text"], "cookie": ["S", {"secret": "S", "name": "n"}],
            "token_count": 1, "secret": null, "authorization": true,
        });
        redact(&mut body);
        let r = REDACTED;
        assert_eq!(
            body,
            json!({
                "id": "1", "token_id": "2", "token_sha256": [1, 2], "public_key": "ssh-ed25519 A", "key_id": "k",
                "enrollment_token": r, "client_secret": r, "Password": r, "ssh_private_key_enc": r, "api-key": r,
                "token": {"id": "3", "secret": r, "expires_at": "t"}, "tokens_left": 3,
                "list": [{"password": r}, "free text"], "cookie": [r, {"secret": r, "name": "n"}],
                "token_count": 1, "secret": null, "authorization": true,
            })
        );
    }

    #[test]
    fn the_names_are_as_reviewed() {
        insta::assert_snapshot!(format!("last words: {}\nends: {}", SECRET_WORDS.join(", "), SECRET_ENDS.join(", ")));
    }

    proptest! {
        /// At any depth, and in any list.
        #[test]
        fn no_depth_hides_a_secret(depth in 0_usize..40, lists in prop::collection::vec(any::<bool>(), 40)) {
            let mut body = json!({"a_secret": "sown-by-this-test"});
            for list in &lists[..depth] {
                body = if *list { json!([body, 1]) } else { json!({"inner": body}) };
            }
            redact(&mut body);
            prop_assert!(!body.to_string().contains("sown-by-this-test"));
        }
    }
}
