//! The loopback listener that receives the authorization code from the user's browser, for one log-in (RFC 8252, section 7.3).

use crate::failure::{ExitStatus, Failure};
use reqwest::Url;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// The longest request.
const MAX_REQUEST_BYTES: usize = 16 * 1024;
/// A browser sends its request at once; slower connections are closed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const PATH: &str = "/callback";

/// An address of this machine that is registered at the provider as a redirect URI, exactly as it was given.
#[derive(Clone, Debug)]
pub(crate) struct RedirectAddress {
    text: String,
    ip: IpAddr,
    port: u16,
    path: String,
}

impl FromStr for RedirectAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = "it has to be an address of this machine with a port, such as http://localhost:8400/callback";
        let url = Url::parse(text).map_err(|_| form)?;
        let ip = match url.host_str() {
            Some("localhost" | "127.0.0.1") => IpAddr::from(Ipv4Addr::LOCALHOST),
            Some("[::1]") => IpAddr::from(Ipv6Addr::LOCALHOST),
            _ => return Err(form),
        };
        let is_plain = url.scheme() == "http" && url.query().is_none() && url.fragment().is_none();
        let port = url.port().filter(|_| is_plain && url.username().is_empty()).ok_or(form)?;
        Ok(Self { text: text.to_owned(), ip, port, path: url.path().to_owned() })
    }
}

pub(crate) struct Loopback {
    listener: TcpListener,
    address: String,
    path: String,
}

impl Loopback {
    /// At the registered address, or else at a free port.
    pub(crate) async fn bind(registered: Option<&RedirectAddress>) -> Result<Self, Failure> {
        if let Some(RedirectAddress { text, ip, port, path }) = registered {
            let listener = TcpListener::bind((*ip, *port)).await.map_err(|error| {
                Failure::new(ExitStatus::Failed, format!("your browser cannot come back to {text}: {error}"))
                    .next("End the program that has the port, or name another registered address: --redirect-uri")
            })?;
            return Ok(Self { listener, address: text.clone(), path: path.clone() });
        }
        let no_port = |error: std::io::Error| {
            Failure::new(
                ExitStatus::Failed,
                format!("no port of 127.0.0.1 is free for your browser to come back to: {error}"),
            )
            .next("Log in with a code: gpuctl login --device")
        };
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.map_err(no_port)?;
        let port = listener.local_addr().map_err(no_port)?.port();
        Ok(Self { listener, address: format!("http://127.0.0.1:{port}{PATH}"), path: PATH.to_owned() })
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Waits for the redirect with this state, and returns its code.
    pub(crate) async fn code(&self, state: &str, issuer: &str) -> Result<String, Failure> {
        loop {
            let Ok((mut stream, _)) = self.listener.accept().await else { continue };
            let target = tokio::time::timeout(REQUEST_TIMEOUT, target(&mut stream)).await.ok().flatten();
            let result = target.and_then(|target| callback_result(&target, &self.path, state, issuer));
            let (status, text) = match &result {
                None => ("404 Not Found", "There is nothing here."),
                Some(Ok(_)) => ("200 OK", "You are logged in. Close this page and go back to your terminal."),
                Some(Err(_)) => ("200 OK", "You are not logged in; your terminal says why."),
            };
            let _ = stream.write_all(page(status, text).as_bytes()).await;
            let _ = stream.shutdown().await;
            if let Some(result) = result {
                return result;
            }
        }
    }
}

fn page(status: &str, text: &str) -> String {
    let html = format!("<!doctype html><meta charset=utf-8><title>gpuctl</title><p>{text}</p>");
    let length = html.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {length}\r\nCache-Control: no-store\r\n\
         Content-Security-Policy: default-src 'none'\r\nConnection: close\r\n\r\n{html}"
    )
}

/// The target of a request's first line, once its head is complete.
async fn target(stream: &mut TcpStream) -> Option<String> {
    let mut read = Vec::new();
    let mut chunk = [0; 2048];
    while !read.windows(4).any(|end| end == b"\r\n\r\n") {
        let count = stream.read(&mut chunk).await.ok().filter(|count| *count > 0)?;
        read.extend_from_slice(&chunk[..count]);
        if read.len() > MAX_REQUEST_BYTES {
            return None;
        }
    }
    let head = String::from_utf8(read).ok()?;
    let mut words = head.lines().next()?.split(' ');
    (words.next()? == "GET").then(|| words.next().map(str::to_owned))?
}

/// The result of a redirect. `None` where it is of another log-in: a request with another state is no redirect of this one, or an attack
/// on it.
fn callback_result(target: &str, path: &str, state: &str, issuer: &str) -> Option<Result<String, Failure>> {
    let url = Url::parse("http://127.0.0.1").ok()?.join(target).ok()?;
    let params: BTreeMap<String, String> = url.query_pairs().into_owned().collect();
    if url.path() != path || params.get("state").map(String::as_str) != Some(state) {
        return None;
    }
    let refused = |why: String| Some(Err(Failure::new(ExitStatus::LoggedOut, why).next("Log in again: gpuctl login")));
    // A provider that names itself must be the one that this log-in uses (RFC 9207).
    if params.get("iss").is_some_and(|iss| iss.trim_end_matches('/') != issuer.trim_end_matches('/')) {
        return refused("another identity provider answered than was asked".to_owned());
    }
    match (params.get("code"), params.get("error")) {
        (Some(code), None) => Some(Ok(code.clone())),
        (_, Some(error)) => {
            let more = params.get("error_description").map(|more| format!(": {more}")).unwrap_or_default();
            refused(format!("the identity provider refuses ({error}){more}"))
        }
        (None, None) => refused("the identity provider sent the browser back without a code".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ISSUER: &str = "https://id.example";

    #[test]
    fn callback_with_another_state_is_ignored() {
        let result = |target: &str| callback_result(target, PATH, "s", ISSUER);
        assert_eq!(result("/callback?code=c&state=s").unwrap().unwrap(), "c");
        assert_eq!(result("/callback?code=c&state=s&iss=https%3A%2F%2Fid.example").unwrap().unwrap(), "c");
        for other in ["/callback?code=c&state=t", "/callback?code=c", "/favicon.ico", "/callback/?code=c&state=s", "*"]
        {
            assert!(result(other).is_none(), "{other}");
        }
        for refused in ["error=access_denied&state=s", "state=s", "code=c&state=s&iss=https%3A%2F%2Fevil.example"] {
            assert_eq!(
                result(&format!("/callback?{refused}")).unwrap().unwrap_err().exit_status,
                ExitStatus::LoggedOut,
                "{refused}"
            );
        }
    }

    #[tokio::test]
    async fn browser_comes_back_to_the_registered_address_as_it_was_given() {
        let free = TcpListener::bind(("127.0.0.1", 0)).await.unwrap().local_addr().unwrap().port();
        for (path, callback) in [("/gpuctl/done", "/gpuctl/done"), ("", "/")] {
            let registered = format!("http://localhost:{free}{path}");
            let loopback = Loopback::bind(Some(&registered.parse().unwrap())).await.unwrap();
            assert_eq!(loopback.address(), registered);
            let browser = async {
                let mut stream = TcpStream::connect(("127.0.0.1", free)).await.unwrap();
                let request = format!("GET {callback}?code=c&state=s HTTP/1.1\r\n\r\n");
                stream.write_all(request.as_bytes()).await.unwrap();
                stream.read_to_end(&mut Vec::new()).await.unwrap();
            };
            let (code, ()) = tokio::join!(loopback.code("s", ISSUER), browser);
            assert_eq!(code.unwrap(), "c");
            let taken = Loopback::bind(Some(&registered.parse().unwrap())).await.err().unwrap();
            assert!(taken.message.contains(&registered), "{}", taken.message);
        }
    }

    #[test]
    fn redirect_address_is_a_port_of_this_machine() {
        for good in ["http://localhost:8400/callback", "http://127.0.0.1:1", "http://[::1]:8400/a/b"] {
            assert!(good.parse::<RedirectAddress>().is_ok(), "{good}");
        }
        for bad in [
            "https://localhost:8400/callback",
            "http://localhost/callback",
            "http://gpu.example:8400/callback",
            "http://0.0.0.0:8400/callback",
            "http://localhost.evil.example:8400/",
            "http://ann@localhost:8400/",
            "http://localhost:8400/?a=b",
            "http://localhost:8400/#a",
            "localhost:8400",
            "",
        ] {
            assert!(bad.parse::<RedirectAddress>().is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn invalid_requests_do_not_end_the_wait_for_the_callback() {
        let loopback = Loopback::bind(None).await.unwrap();
        let at = loopback.address().trim_start_matches("http://").trim_end_matches(PATH).to_owned();
        let speak = |text: String| {
            let at = at.clone();
            async move {
                let mut stream = TcpStream::connect(&at).await.unwrap();
                stream.write_all(text.as_bytes()).await.unwrap();
                let mut answer = String::new();
                let _ = stream.read_to_string(&mut answer).await;
                answer
            }
        };
        let browser = async {
            assert!(speak("GET /favicon.ico HTTP/1.1\r\n\r\n".to_owned()).await.contains("404"));
            assert!(speak("POST /callback?code=c&state=s HTTP/1.1\r\n\r\n".to_owned()).await.contains("404"));
            speak("x".repeat(MAX_REQUEST_BYTES + 5000)).await;
            assert!(speak("GET /callback?code=c&state=s HTTP/1.1\r\n\r\n".to_owned()).await.contains("logged in"));
        };
        let (code, ()) = tokio::join!(loopback.code("s", ISSUER), browser);
        assert_eq!(code.unwrap(), "c");
    }
}
