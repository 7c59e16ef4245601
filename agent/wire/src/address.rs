//! Addresses as settings name them. Each kind is a type that exists only where the text has the form which that kind needs, so that a text
//! that is nearly right is refused at the start, with the right form in the message.

use std::fmt;
use std::net::IpAddr;
use url::{Host, Url};

/// The longest address, in characters.
const MAX_LEN: usize = 2048;

/// Why a text is no address of its kind. It shows no user and no password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressError {
    /// `None` where it may have a password.
    shown: Option<String>,
    why: String,
    form: &'static str,
}

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.shown {
            Some(text) => write!(f, "{text:?} ")?,
            None => f.write_str("the address ")?,
        }
        write!(f, "{}; it must be {}", self.why, self.form)
    }
}

impl std::error::Error for AddressError {}

/// What one kind of address needs.
struct Rules {
    form: &'static str,
    scheme: &'static str,
    /// The same scheme without TLS, for this machine; none where TLS is needed there too.
    local_scheme: Option<&'static str>,
    /// Whether the scheme without TLS is for other machines too.
    is_plain_anywhere: bool,
    path: PathRule,
}

enum PathRule {
    Any,
    /// Not even a slash that is more than the end of the address.
    Empty,
    EndsWith(&'static str),
}

/// Below this a client adds the path of an API: `https`, or `http` on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceUrl(String);

/// Where users reach the public API and the console, both at the root of their host: `https`, or `http` on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicUrl(String);

/// Below this are paths that agents call, always with TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentApiUrl(String);

/// Where terminals connect: a WebSocket at the path of the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TerminalUrl(String);

/// The origin of a web page (RFC 6454), as browsers send it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageOrigin(String);

/// A collector of traces, which a network of the operator's own may reach without TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectorUrl(String);

/// The path of the gateway for terminals.
pub const TERMINAL_PATH: &str = "/ws/v1/terminal";

const SERVICE: Rules = Rules {
    form: "like https://service.example:8443/path, without user, query and fragment (http:// only on this machine)",
    scheme: "https",
    local_scheme: Some("http"),
    is_plain_anywhere: false,
    path: PathRule::Any,
};
const PUBLIC: Rules = Rules {
    form: "like https://gpu.example:8443, without user, path, query and fragment (http:// only on this machine)",
    path: PathRule::Empty,
    ..SERVICE
};
const AGENT_API: Rules = Rules {
    form: "an https URL like https://nodes.example:9443, without user, query and fragment",
    local_scheme: None,
    ..SERVICE
};
const COLLECTOR: Rules = Rules {
    form: "like https://collector.example:4318 or http://collector.example:4318, without user, query and fragment",
    is_plain_anywhere: true,
    ..SERVICE
};
const TERMINAL: Rules = Rules {
    form: "like wss://terminals.example/ws/v1/terminal, with this path at its end (ws:// only on this machine)",
    scheme: "wss",
    local_scheme: Some("ws"),
    is_plain_anywhere: false,
    path: PathRule::EndsWith(TERMINAL_PATH),
};
const ORIGIN: Rules = Rules {
    form: "an origin like https://portal.example, without a path and without a slash at its end (http:// only on this machine)",
    ..PUBLIC
};

impl ServiceUrl {
    /// # Errors
    /// What of the text is wrong.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        SERVICE.check(text).map(|_| Self(text.trim_end_matches('/').to_owned()))
    }

    /// Without a slash at its end.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// An error in the form of this kind, for what a client knows of its API's paths.
    #[must_use]
    pub fn refuse(&self, why: impl Into<String>) -> AddressError {
        SERVICE.refuse(&self.0, why)
    }
}

impl PublicUrl {
    /// # Errors
    /// What of the text is wrong.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        PUBLIC.check(text).map(|_| Self(text.trim_end_matches('/').to_owned()))
    }

    /// Without a slash at its end.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl AgentApiUrl {
    /// # Errors
    /// What of the text is wrong.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        AGENT_API.check(text).map(|_| Self(text.trim_end_matches('/').to_owned()))
    }

    /// Without a slash at its end.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl CollectorUrl {
    /// # Errors
    /// What of the text is wrong.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        COLLECTOR.check(text).map(|_| Self(text.to_owned()))
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TerminalUrl {
    /// # Errors
    /// What of the text is wrong.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        TERMINAL.check(text).map(|_| Self(text.to_owned()))
    }

    /// The gateway at the host of the public API.
    #[must_use]
    pub fn at(public: &PublicUrl) -> Self {
        Self(format!("{}{TERMINAL_PATH}", public.0.replacen("http", "ws", 1)))
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl PageOrigin {
    /// # Errors
    /// What of the text is wrong.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        let url = ORIGIN.check(text)?;
        // A browser compares and sends the one spelling: lower case, no default port, no slash.
        let origin = url.origin().ascii_serialization();
        if origin == text {
            return Ok(Self(origin));
        }
        Err(ORIGIN.refuse(text, format!("is not as browsers send it, which is {origin}")))
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Rules {
    fn refuse(&self, text: &str, why: impl Into<String>) -> AddressError {
        let shown = (!text.contains('@')).then(|| text.chars().take(200).collect());
        AddressError { shown, why: why.into(), form: self.form }
    }

    fn check(&self, text: &str) -> Result<Url, AddressError> {
        let refuse = |why: &str| Err(self.refuse(text, why));
        if text.len() > MAX_LEN {
            return refuse("has more than 2048 characters");
        }
        if text.starts_with(is_quote) || text.ends_with(is_quote) {
            return refuse(
                "is in quotes, which not every reader of an environment file takes off; write it without them",
            );
        }
        if text.chars().any(|character| character.is_whitespace() || character.is_control() || character == '\\') {
            return refuse("has a blank, a backslash or a control character");
        }
        let Some((scheme, after)) = text.split_once("://") else { return refuse("names no scheme") };
        let authority = after.split(['/', '?', '#']).next().unwrap_or_default();
        if authority.is_empty() {
            return refuse("names no host");
        }
        let url = Url::parse(text).map_err(|error| self.refuse(text, format!("cannot be read ({error})")))?;
        let host = url.host().ok_or_else(|| self.refuse(text, "names no host"))?;
        let is_local = is_this_machine(&host);
        let is_plain_allowed = is_local || self.is_plain_anywhere;
        let is_allowed = url.scheme() == self.scheme || (is_plain_allowed && Some(url.scheme()) == self.local_scheme);
        if !is_allowed {
            return refuse(&format!("begins with {}://", scheme.to_ascii_lowercase()));
        }
        if !url.username().is_empty() || url.password().is_some() || authority.contains('@') {
            return refuse("has a user or a password, which belong into settings of their own");
        }
        if is_unspecified(&host) {
            return refuse("is the unspecified address, to which no client can connect");
        }
        if url.port() == Some(0) {
            return refuse("has port 0");
        }
        if url.query().is_some() || url.fragment().is_some() {
            return refuse("has a query or a fragment");
        }
        match self.path {
            PathRule::Empty if url.path() != "/" => refuse(&format!("has the path {}", url.path())),
            PathRule::EndsWith(path) if !url.path().ends_with(path) => {
                refuse(&format!("does not end in the path {path}"))
            }
            PathRule::Any | PathRule::Empty | PathRule::EndsWith(_) => Ok(url),
        }
    }
}

/// Also those that a word processor makes of them.
const fn is_quote(character: char) -> bool {
    matches!(character, '"' | '\'' | '`' | '“' | '”' | '„' | '‘' | '’')
}

/// Whether a connection to it stays on this machine: `localhost` or an address of the loopback interface.
#[must_use]
pub fn is_this_machine(host: &Host<&str>) -> bool {
    match host {
        Host::Domain(name) => name.eq_ignore_ascii_case("localhost"),
        Host::Ipv4(address) => address.is_loopback(),
        Host::Ipv6(address) => address.is_loopback(),
    }
}

fn is_unspecified(host: &Host<&str>) -> bool {
    match host {
        Host::Domain(name) => name.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified()),
        Host::Ipv4(address) => address.is_unspecified(),
        Host::Ipv6(address) => address.is_unspecified(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts that are wrong for every kind, with what the message has.
    const WRONG: [(&str, &str); 16] = [
        ("", "names no scheme"),
        ("gpu.example", "names no scheme"),
        ("gpu.example:8443", "names no scheme"),
        ("https:gpu.example", "names no scheme"),
        ("https:///gpu.example", "names no host"),
        ("ftp://gpu.example", "begins with ftp://"),
        ("http://gpu.example", "begins with http://"),
        ("http://127.0.0.1.example", "begins with http://"),
        ("https://gpu.example ", "blank"),
        (" https://gpu.example", "blank"),
        ("https://gpu.example\n", "blank"),
        ("\"https://gpu.example\"", "quotes"),
        ("'https://gpu.example'", "quotes"),
        ("https://gpu.example:99999", "cannot be read"),
        ("https://gpu.example:0", "port 0"),
        ("https://0.0.0.0:8443", "unspecified address"),
    ];
    /// Of those kinds that begin with https.
    const MORE_WRONG: [(&str, &str); 5] = [
        ("https://[::]:8443", "unspecified address"),
        ("https://ops:hunter2@gpu.example", "password"),
        ("https://@gpu.example", "password"),
        ("https://gpu.example?a=b", "query"),
        ("https://gpu.example#a", "fragment"),
    ];

    fn expect<T: fmt::Debug>(parse: fn(&str) -> Result<T, AddressError>, form: &str, wrong: &[(&str, &str)]) {
        for (text, named) in wrong {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(named) && error.contains(form), "{text:?}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn address_that_is_nearly_right_is_refused_with_the_form_that_it_needs() {
        let https = [WRONG.as_slice(), &MORE_WRONG].concat();
        expect(ServiceUrl::parse, "https://service.example", &https);
        expect(PublicUrl::parse, "https://gpu.example:8443, without", &https);
        expect(AgentApiUrl::parse, "https://nodes.example", &https);
        expect(PageOrigin::parse, "https://portal.example", &https);
        expect(PublicUrl::parse, "path", &[("https://gpu.example/gpuaas", "has the path /gpuaas")]);
        expect(AgentApiUrl::parse, "https", &[("http://127.0.0.1:9443", "begins with http://")]);
        expect(
            TerminalUrl::parse,
            TERMINAL_PATH,
            &[
                ("wss://gpu.example", "does not end in the path"),
                ("wss://gpu.example/", "does not end in the path"),
                ("wss://gpu.example/ws/v1/terminal/", "does not end in the path"),
                ("https://gpu.example/ws/v1/terminal", "begins with https://"),
                ("ws://gpu.example/ws/v1/terminal", "begins with ws://"),
                ("wss://gpu.example/ws/v1/terminal?token=1", "query"),
                ("gpu.example/ws/v1/terminal", "names no scheme"),
            ],
        );
        expect(
            PageOrigin::parse,
            "origin",
            &[
                ("https://portal.example/", "as browsers send it, which is https://portal.example"),
                ("https://portal.example:443", "as browsers send it, which is https://portal.example"),
                ("https://Portal.example", "as browsers send it, which is https://portal.example"),
                ("https://portal.example/start", "has the path"),
                ("*", "names no scheme"),
            ],
        );
    }

    #[test]
    fn address_of_its_kind_is_accepted_and_has_no_slash_at_its_end() {
        for (text, read) in [
            ("https://service.example/tenant/", "https://service.example/tenant"),
            ("http://localhost:3100", "http://localhost:3100"),
            ("http://127.0.0.1:3100/", "http://127.0.0.1:3100"),
            ("http://[::1]:3100", "http://[::1]:3100"),
        ] {
            assert_eq!(ServiceUrl::parse(text).unwrap().as_str(), read);
        }
        let public = PublicUrl::parse("https://gpu.example/").unwrap();
        assert_eq!(public.as_str(), "https://gpu.example");
        assert_eq!(TerminalUrl::at(&public).as_str(), "wss://gpu.example/ws/v1/terminal");
        let local = PublicUrl::parse("http://localhost:8443").unwrap();
        assert_eq!(TerminalUrl::at(&local).as_str(), "ws://localhost:8443/ws/v1/terminal");
        for terminal in ["wss://t.example/ws/v1/terminal", "wss://t.example:444/gpu/ws/v1/terminal"] {
            assert_eq!(TerminalUrl::parse(terminal).unwrap().as_str(), terminal);
        }
        assert_eq!(CollectorUrl::parse("http://otel:4318").unwrap().as_str(), "http://otel:4318");
        assert!(CollectorUrl::parse("otel:4318").unwrap_err().to_string().contains("http://collector.example"));
        assert_eq!(AgentApiUrl::parse("https://10.0.0.1:9443/").unwrap().as_str(), "https://10.0.0.1:9443");
        assert_eq!(PageOrigin::parse("https://portal.example:8443").unwrap().as_str(), "https://portal.example:8443");
    }
}
