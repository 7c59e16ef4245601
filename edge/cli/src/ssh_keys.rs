//! SSH public keys that open allocations. A private key never leaves its owner's machine.

use crate::api::Api;
use crate::completion;
use crate::confirmation::Confirm;
use crate::failure::Failure;
use crate::output::Column;
use crate::printable::{cell, plain};
use crate::resource_ref::{Ref, SSH_KEY, items};
use crate::text_encoding;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// More than a user may have.
const MAX_KEYS: usize = 1000;
/// The longest file of a public key.
const MAX_KEY_FILE_BYTES: u64 = 16 * 1024;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists your keys.
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        of: UserSelector,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Adds a public key, such as ~/.ssh/id_ed25519.pub.
    Add {
        /// The file with the public key; `-` reads standard input.
        file: PathBuf,
        /// Its name; the key's own comment, or the file's name, by default.
        #[arg(long)]
        name: Option<String>,
        /// Use it for your allocations by default.
        #[arg(long)]
        default: bool,
    },
    /// Shows one key.
    Show {
        #[arg(add = completion::of(&SSH_KEY))]
        key: Ref,
        #[command(flatten)]
        of: UserSelector,
    },
    /// Removes a key: it opens no allocation any more. The oldest other one takes the place of the default key.
    #[command(visible_alias = "rm")]
    Delete {
        #[arg(add = completion::of(&SSH_KEY))]
        key: Ref,
        #[command(flatten)]
        of: UserSelector,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Uses this key for your allocations by default.
    Default {
        #[arg(add = completion::of(&SSH_KEY))]
        key: Ref,
        #[command(flatten)]
        of: UserSelector,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct UserSelector {
    /// Administrators: the keys of this user.
    #[arg(long, value_name = "ID", value_parser = user_id)]
    user: Option<String>,
}

impl UserSelector {
    fn path(&self) -> String {
        match &self.user {
            Some(user) => format!("/api/v1/admin/users/{user}/ssh-keys"),
            None => SSH_KEY.path.to_owned(),
        }
    }
}

/// A user's id, as one part of a path.
fn user_id(text: &str) -> Result<String, String> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '@' | ':' | '|');
    let fits = (1..=255).contains(&text.len()) && text.chars().all(good) && !matches!(text, "." | "..");
    fits.then(|| text.to_owned()).ok_or_else(|| "a user's id has up to 255 letters, digits and -_.@:|".to_owned())
}

const KEYS: [Column; 6] = [
    ("ID", "/id"),
    ("NAME", "/name"),
    ("TYPE", "/key_type"),
    ("FINGERPRINT", "/fingerprint"),
    ("DEFAULT", "/is_default"),
    ("CREATED", "/created_at"),
];

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { of, limit } => api.out.list(&api.list(&of.path(), &[], limit.into()).await?, &KEYS),
        Command::Add { file, name, default } => {
            let key = public_key(&file)?;
            let name = name.or_else(|| comment(&key)).unwrap_or_else(|| name_of(&file));
            let mut added = api.post("/api/v1/ssh-keys", &json!({ "name": name, "public_key": key })).await?;
            if default && let Some(id) = added["id"].as_str() {
                let is_default = api.post_empty(&format!("/api/v1/ssh-keys/{id}/default")).await;
                added = is_default.map_err(|failure| {
                    failure.next(format!(
                        "The key is added. Make it the default one: gpuctl ssh-keys default {}",
                        plain(id)
                    ))
                })?;
            }
            api.out.list(&json!({ "items": [added], "next_page": null }), &KEYS)
        }
        Command::Show { key, of } => {
            let id = key.id_in(&SSH_KEY, &of.path(), api).await?;
            api.out.show(&api.get(&format!("{}/{id}", of.path()), &[]).await?, &KEYS)
        }
        Command::Delete { key, of, confirm } => delete(&key, &of, &confirm, api).await,
        Command::Default { key, of } => {
            let id = key.id_in(&SSH_KEY, &of.path(), api).await?;
            let now = api.post_empty(&format!("{}/{id}/default", of.path())).await?;
            api.out.done(&now, &format!("Key {key} opens what you rent from now on."))
        }
    }
}

async fn delete(key: &Ref, of: &UserSelector, confirm: &Confirm, api: &Api) -> Result<(), Failure> {
    let id = key.id_in(&SSH_KEY, &of.path(), api).await?;
    let keys = api.list(&of.path(), &[], MAX_KEYS).await;
    // A confirmed command needs no list.
    let keys = if confirm.is_given() { keys.unwrap_or_default() } else { keys? };
    let heir = heir_of(items(&keys), &id.to_string());
    if let Some(heir) = heir {
        confirm.ask(&question(key, heir))?;
    }
    let deleted = api.delete(&format!("{}/{id}", of.path()), &[]).await?;
    let now = heir.flatten().map(|heir| format!(" The default key is {}.", name_in_list(heir))).unwrap_or_default();
    api.out.done(&deleted, &format!("Key {key} is deleted.{now}"))
}

/// The key that takes the place of the default key `id`, `Some(None)` where there is no other one; `None` where `id` is not the default.
/// The list has the oldest first.
fn heir_of<'a>(keys: &'a [Value], id: &str) -> Option<Option<&'a Value>> {
    let is_default = keys.iter().any(|key| key["id"] == id && key["is_default"] == true);
    is_default.then(|| keys.iter().find(|key| key["id"] != id))
}

fn question(key: &Ref, heir: Option<&Value>) -> String {
    let after = match heir {
        Some(heir) => format!("The default is then {}, the oldest other one: it opens", name_in_list(heir)),
        None => "There is no other key: only terminals reach".to_owned(),
    };
    format!(
        "{key} is the default key. {after} allocations for which no key was chosen, those that run included. Delete {key}?"
    )
}

/// `laptop (SHA256:…)`.
fn name_in_list(key: &Value) -> String {
    format!("{} ({})", cell(&key["name"]), cell(&key["fingerprint"]))
}

/// The single public key in a file; `-` is standard input.
pub(crate) fn public_key(file: &Path) -> Result<String, Failure> {
    let wrong = |why: String| Failure::usage(format!("{}: {why}", file.display()));
    let unread = |error: io::Error| wrong(error.to_string());
    let mut bytes = Vec::new();
    let source: Box<dyn Read> = match file.to_str() {
        Some("-") => Box::new(io::stdin().lock()),
        _ => Box::new(File::open(file).map_err(unread)?),
    };
    source.take(MAX_KEY_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(unread)?;
    let is_too_long = bytes.len() as u64 > MAX_KEY_FILE_BYTES;
    if is_private_key(&bytes) {
        return Err(wrong(
            "this is a private key, which is never sent anywhere; give the file that ends in .pub".into(),
        ));
    }
    let no_key = || wrong("this is not one public key in OpenSSH's form; give the file that ends in .pub".to_owned());
    let text = text_encoding::decoded(bytes).ok_or_else(no_key)?;
    let key = text.trim();
    // A block of RFC 4716, as PuTTYgen saves it, is read by the service.
    let is_block =
        key.starts_with("---- BEGIN SSH2 PUBLIC KEY ----") && key.matches("---- END SSH2 PUBLIC KEY ----").count() == 1;
    // A zero is that of an encoding without its mark.
    if is_too_long || key.contains('\0') || (key.lines().count() != 1 && !is_block) {
        return Err(no_key());
    }
    Ok(key.to_owned())
}

/// Whether the file holds a private key, in whatever encoding: as text, or in PuTTY's own form.
fn is_private_key(bytes: &[u8]) -> bool {
    let ascii: Vec<u8> = bytes.iter().copied().filter(|byte| *byte != 0).collect();
    let text = String::from_utf8_lossy(&ascii);
    text.contains("PRIVATE KEY") || text.contains("PuTTY-User-Key-File-")
}

/// The comment after the key's type and its body; none of a block, whose first line is no key.
fn comment(key: &str) -> Option<String> {
    if key.starts_with("----") {
        return None;
    }
    let comment = plain(key.splitn(3, ' ').nth(2)?.trim());
    (!comment.is_empty()).then_some(comment)
}

fn name_of(file: &Path) -> String {
    file.file_stem().map_or_else(|| "key".to_owned(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn question_before_the_default_key_is_deleted_names_the_oldest_other_one() {
        let key = |id: &str, is_default: bool| json!({ "id": id, "name": id, "fingerprint": "SHA256:x", "is_default": is_default });
        let keys = [key("oldest", false), key("newer", false), key("laptop", true)];
        assert_eq!(heir_of(&keys, "newer"), None, "no default key: nothing is asked");
        let heir = heir_of(&keys, "laptop").unwrap();
        let asked = question(&"laptop".parse().unwrap(), heir);
        assert!(asked.contains("The default is then oldest (SHA256:x), the oldest other one"), "{asked}");
        assert_eq!(heir_of(&keys[2..], "laptop"), Some(None));
        assert!(question(&"laptop".parse().unwrap(), None).contains("only terminals reach"));
    }

    #[test]
    fn one_public_key_is_read_and_a_private_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let of_bytes = |content: &[u8]| {
            let path = folder.path().join("key");
            std::fs::write(&path, content).unwrap();
            public_key(&path)
        };
        let file = |content: &str| of_bytes(content.as_bytes());
        // As PowerShell and Notepad write it.
        let utf_16 = |content: &str| content.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
        let big_endian = |content: &str| content.encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<u8>>();
        let key = file("ssh-ed25519 AAAA ann at work\n").unwrap();
        assert_eq!(comment(&key).as_deref(), Some("ann at work"));
        assert_eq!(comment("ssh-ed25519 AAAA"), None);
        assert_eq!(file("\u{feff}ssh-ed25519 AAAA\r\n").unwrap(), "ssh-ed25519 AAAA");
        let windows = "\u{feff}ssh-ed25519 AAAA ann\r\n";
        assert_eq!(of_bytes(&utf_16(windows)).unwrap(), "ssh-ed25519 AAAA ann");
        assert_eq!(of_bytes(&big_endian(windows)).unwrap(), "ssh-ed25519 AAAA ann");
        let private = "-----BEGIN OPENSSH PRIVATE KEY-----\nhidden\n";
        let marked = format!("\u{feff}{private}");
        for private in [
            private.as_bytes().to_vec(),
            utf_16(&marked),
            big_endian(&marked),
            utf_16(private),
            [b"\xE4", private.as_bytes()].concat(),
        ] {
            let failure = of_bytes(&private).unwrap_err();
            assert!(failure.message.contains("private key") && !failure.message.contains("hidden"), "{failure}");
        }
        // Without its mark, as DER, as Latin-1.
        for other in [utf_16("ssh-ed25519 AAAA"), vec![0x30, 0x82, 0x04, 0xBE, 0x02], b"ssh-ed25519 AAAA \xE4".to_vec()]
        {
            let failure = of_bytes(&other).unwrap_err();
            assert!(failure.exit_status.code() == 2 && failure.message.contains(".pub"), "{failure}");
        }
        let block = "---- BEGIN SSH2 PUBLIC KEY ----\r\nComment: \"x y\"\r\nAAAA\r\n---- END SSH2 PUBLIC KEY ----\r\n";
        let read = file(block).unwrap();
        assert_eq!((read.as_str(), comment(&read)), (block.trim(), None));
        for bad in [
            "-----BEGIN OPENSSH PRIVATE KEY-----\nhidden\n".to_owned(),
            "PuTTY-User-Key-File-3: ssh-ed25519\r\nPrivate-Lines: 1\r\nhidden\r\n".to_owned(),
            "ssh-ed25519 AAAA\nssh-ed25519 BBBB\n".to_owned(),
            "x".repeat(20_000),
            String::new(),
        ] {
            let failure = file(&bad).unwrap_err();
            assert!(failure.exit_status.code() == 2 && !failure.message.contains("hidden"), "{failure}");
        }
    }
}
