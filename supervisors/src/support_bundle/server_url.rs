//! The parts of a setting that is a URL of one server or several: `postgres://user:password@db-1:5432,db-2:5432/gpuaas?…`, and for NATS also
//! `tls://user:password@nats-1,tls://nats-2`. It is more tolerant than the parsers that the service starts with: a bundle is made where the
//! service does not start, too, and what is no URL may have a password in it all the same.

use percent_encoding::percent_decode_str;
use std::collections::BTreeSet;

/// What identifies someone in a URL, and what is secret.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ServerUrl {
    /// As they are written, and decoded.
    pub(super) passwords: BTreeSet<String>,
    pub(super) users: BTreeSet<String>,
    /// Without their ports.
    pub(super) hosts: BTreeSet<String>,
    /// Without credentials, and with the names of its parameters alone. `None` where it is not certain which part is a password.
    pub(super) shown: Option<String>,
}

impl ServerUrl {
    pub(super) fn read(text: &str) -> Self {
        let mut url = Self::default();
        let Some((scheme, rest)) = text.split_once("://") else {
            url.passwords.insert(text.to_owned());
            return url;
        };
        let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
        let end = address.find('/').unwrap_or(address.len());
        // A slash in a password, which should have been encoded, looks like the end of the hosts.
        let is_plain = !address[end..].replace("://", "").contains('@');
        let end = if is_plain { end } else { address.rfind('@').unwrap_or(end) };
        let end = address[end..].find('/').map_or(address.len(), |at| end + at);
        // Of `a://u:p@b,a://c` the part after the first host is read as another URL.
        let (authority, path) = address.split_at(end);
        let (credentials, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
        url.add_user(user);
        url.add_password(password);
        hosts.split(',').for_each(|host| url.add_host(host));
        let mut parameters = Vec::new();
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            parameters.push(name);
            match name {
                "user" => url.add_user(value),
                "host" | "hostaddr" => value.split(',').for_each(|host| url.add_host(host)),
                name if name.to_lowercase().contains("pass") => url.add_password(value),
                _ => {}
            }
        }
        let is_shown = is_plain && hosts.chars().chain(path.chars()).all(is_of_an_address);
        url.shown = is_shown.then(|| format!("{scheme}://{hosts}{path} {parameters:?}"));
        url
    }

    /// Of a list with commas whose later elements may be URLs of their own.
    pub(super) fn read_list(text: &str) -> Self {
        let starts = text.match_indices(',').map(|(at, _)| at + 1).filter(|at| is_url(&text[*at..]));
        let mut bounds: Vec<usize> = std::iter::once(0).chain(starts).collect();
        bounds.push(text.len() + 1);
        let urls = bounds.windows(2).map(|pair| Self::read(text[pair[0]..pair[1] - 1].trim()));
        urls.reduce(|mut all, url| {
            all.passwords.extend(url.passwords);
            all.users.extend(url.users);
            all.hosts.extend(url.hosts);
            all.shown = all.shown.zip(url.shown).map(|(all, one)| format!("{all}, {one}"));
            all
        })
        .unwrap_or_default()
    }

    fn add_password(&mut self, text: &str) {
        add(&mut self.passwords, text);
    }

    fn add_user(&mut self, text: &str) {
        add(&mut self.users, text);
    }

    fn add_host(&mut self, text: &str) {
        let host = match text.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or_default(),
            None => text.split(':').next().unwrap_or_default(),
        };
        // A path is that of a socket.
        if !host.starts_with('/') && !host.starts_with("%2F") {
            add(&mut self.hosts, host);
        }
    }
}

/// Whether it begins with a scheme.
fn is_url(text: &str) -> bool {
    let scheme = text.trim_start().split_once("://").map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| !scheme.is_empty() && scheme.chars().all(|letter| letter.is_ascii_alphanumeric()))
}

fn is_of_an_address(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "._-:,[]%/".contains(letter)
}

fn add(texts: &mut BTreeSet<String>, text: &str) {
    if !text.is_empty() {
        texts.insert(text.to_owned());
        texts.insert(percent_decode_str(text).decode_utf8_lossy().into_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(texts: &[&str]) -> BTreeSet<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn password_and_hosts_of_several_servers_are_found() {
        for (text, passwords, users, hosts, shown) in [
            (
                "postgres://gpuaas:p%40ss@db-1:5432,db-2:5432,db-3/gpuaas?target_session_attrs=read-write",
                &["p%40ss", "p@ss"][..],
                &["gpuaas"][..],
                &["db-1", "db-2", "db-3"][..],
                Some("postgres://db-1:5432,db-2:5432,db-3/gpuaas [\"target_session_attrs\"]"),
            ),
            ("tls://r-1:pw,d@n-1:4222,n-2", &["pw,d"], &["r-1"], &["n-1", "n-2"], Some("tls://n-1:4222,n-2 []")),
            (
                "tls://r-1:a@n-1, tls://r-1:b@n-2",
                &["a", "b"],
                &["r-1"],
                &["n-1", "n-2"],
                Some("tls://n-1 [], tls://n-2 []"),
            ),
            (
                "postgres:///gpuaas?host=/run/postgresql&user=ann&password=1",
                &["1"],
                &["ann"],
                &[],
                Some("postgres:///gpuaas [\"host\", \"user\", \"password\"]"),
            ),
            (
                "postgres://[2001:db8::1]:5432,10.0.0.1/x",
                &[],
                &[],
                &["10.0.0.1", "2001:db8::1"],
                Some("postgres://[2001:db8::1]:5432,10.0.0.1/x []"),
            ),
            (
                "https://login.example/realms/gpu",
                &[],
                &[],
                &["login.example"],
                Some("https://login.example/realms/gpu []"),
            ),
            // Not encoded, so that the service does not start with it.
            ("postgres://ann:pa/ss@db-1,db-2/x", &["pa/ss"], &["ann"], &["db-1", "db-2"], None),
            ("postgres://ann:p@ss@db-1/x", &["p@ss"], &["ann"], &["db-1"], Some("postgres://db-1/x []")),
            ("host=db-1 password=1", &["host=db-1 password=1"], &[], &[], None),
        ] {
            let expected = ServerUrl {
                passwords: set(passwords),
                users: set(users),
                hosts: set(hosts),
                shown: shown.map(str::to_owned),
            };
            assert_eq!(ServerUrl::read_list(text), expected, "{text}");
        }
        assert_eq!(ServerUrl::read_list(""), ServerUrl { passwords: set(&[""]), ..ServerUrl::default() });
    }
}
