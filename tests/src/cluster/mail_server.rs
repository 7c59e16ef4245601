//! A mail server for a test: aiosmtpd, a third-party server (deploy/lib.sh takes it from PyPI). It parses what it
//! receives with Python's mail parser.

use anyhow::{Context as _, bail};
use local_servers::pki::Authority;
use local_servers::private_files;
use local_servers::process::{ChildProcess, Launch};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const STARTS_WITHIN: Duration = Duration::from_secs(60);

/// The user that it accepts.
const USER: &str = "gpuaas@example.com";

/// It accepts every mail, except to addresses that request otherwise: `rcpt-550.ann@example.org` has its recipient refused, `data-451.…`
/// its message; `-hang` instead of a code never responds, and with `-once` after it the second attempt succeeds.
const SERVER: &str = r#"
import asyncio, json, os, re, ssl, sys
from email import message_from_bytes, policy
from aiosmtpd.smtp import SMTP, AuthResult

folder, security, certificate, key = sys.argv[1:]
user, password = os.environ['MAIL_USER'].encode(), os.environ['MAIL_PASSWORD'].encode()
spared, connections = set(), set()

def write(**note):
    with open(folder + '/notes', 'a') as file:
        file.write(json.dumps(note) + '\n')

async def refusal(stage, address):
    asked = re.match(r'(rcpt|data)-(\d{3}|hang)(-once)?\.', address)
    if asked is None or asked[1] != stage or address in spared:
        return None
    if asked[3]:
        spared.add(address)
    write(to=address, refused=asked[2])
    if asked[2] == 'hang':
        await asyncio.sleep(3600)
    return asked[2] + ' the address asks for it'

class Handler:
    async def handle_RCPT(self, server, session, envelope, address, options):
        answer = await refusal('rcpt', address)
        if answer is None:
            envelope.rcpt_tos.append(address)
        return answer or '250 OK'

    async def handle_DATA(self, server, session, envelope):
        [address] = envelope.rcpt_tos
        answer = await refusal('data', address)
        if answer is None:
            mail = message_from_bytes(envelope.original_content, policy=policy.default)
            write(to=address, sender=envelope.mail_from, client=session.host_name, connections=len(connections),
                  is_encrypted=server.transport.get_extra_info('ssl_object') is not None,
                  is_authenticated=bool(session.authenticated), defects=[str(it) for it in mail.defects],
                  headers=[[name, str(value)] for name, value in mail.items()], text=mail.get_content())
        return answer or '250 OK'

class Counted(SMTP):
    def connection_made(self, transport):
        connections.add(self)
        super().connection_made(transport)

    def connection_lost(self, error):
        connections.discard(self)
        super().connection_lost(error)

def admit(server, session, envelope, mechanism, data):
    is_known = (data.login, data.password) == (user, password)
    if not is_known:
        write(to='', refused='535')
    return AuthResult(success=is_known, handled=False)

async def main():
    context = None
    if security != 'clear':
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
    upgrades = security == 'starttls'
    admits = {} if security == 'clear' else dict(
        auth_required=True, authenticator=admit, auth_require_tls=upgrades,
        tls_context=context if upgrades else None, require_starttls=upgrades)
    serve = lambda: Counted(Handler(), enable_SMTPUTF8=True, loop=asyncio.get_running_loop(), **admits)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(serve, '127.0.0.1', 0, ssl=context if security == 'tls' else None)
    with open(folder + '/port.new', 'w') as file:
        file.write(str(server.sockets[0].getsockname()[1]))
    os.replace(folder + '/port.new', folder + '/port')
    await server.serve_forever()

asyncio.run(main())
"#;

/// How clients connect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    /// TLS from the first byte.
    Tls,
    /// STARTTLS, without which it accepts nothing.
    StartTls,
    /// Neither TLS nor a password.
    Clear,
}

/// A mail that it has accepted.
#[derive(Clone, Debug, Deserialize)]
pub struct ReceivedMail {
    /// The recipient and the sender of the envelope.
    pub to: String,
    pub sender: String,
    /// The name of its client in HELO or EHLO.
    pub client: String,
    pub is_encrypted: bool,
    pub is_authenticated: bool,
    /// The number of open connections when it was accepted.
    pub connections: usize,
    /// Its defects, as Python's parser reports them.
    pub defects: Vec<String>,
    headers: Vec<(String, String)>,
    /// The decoded text.
    pub text: String,
}

impl ReceivedMail {
    /// Each header by its name, decoded; a second one of a name is an error.
    #[must_use]
    pub fn headers(&self) -> BTreeMap<&str, &str> {
        let all: BTreeMap<_, _> = self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(all.len(), self.headers.len(), "a header is there twice: {:?}", self.headers);
        all
    }
}

/// An event of the server: a mail or a client that it accepted or refused.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum MailServerEvent {
    Received(Box<ReceivedMail>),
    Refused { to: String, refused: String },
}

/// A running server. Dropping it stops it.
pub struct MailServer {
    security: Security,
    port: u16,
    password: String,
    authority: Authority,
    notes: PathBuf,
    _process: ChildProcess,
    _folder: tempfile::TempDir,
}

impl MailServer {
    pub async fn start(security: Security) -> Self {
        Self::try_start(security).await.unwrap_or_else(|error| panic!("the mail server does not start: {error:#}"))
    }

    async fn try_start(security: Security) -> anyhow::Result<Self> {
        let python = private_files::find_programs("aiosmtpd/bin/python").into_iter().next();
        let python =
            python.context("no aiosmtpd in $GPUAAS_TOOLS_DIR or in .dev/tools; `deploy/test --tools` installs it")?;
        let holder = tempfile::Builder::new().prefix("gpuaas-mail-").tempdir()?;
        let folder = holder.path().canonicalize()?;
        let authority = Authority::create(&folder.join("pki"))?;
        let certificate = authority.server_certificate("mail")?;
        let password = format!("p:{}@/%", private_files::random_hex(16));
        let name = match security {
            Security::Tls => "tls",
            Security::StartTls => "starttls",
            Security::Clear => "clear",
        };
        let mut process = Launch::new("aiosmtpd", python, folder.join("log"))
            .arguments(["-c", SERVER])
            .argument(&folder)
            .argument(name)
            .argument(&certificate.certificate_path)
            .argument(&certificate.key_path)
            .variable("MAIL_USER", USER)
            .variable("MAIL_PASSWORD", &password)
            .spawn()?;
        let until = Instant::now() + STARTS_WITHIN;
        let port = loop {
            if let Ok(port) = std::fs::read_to_string(folder.join("port")) {
                break port.parse()?;
            }
            if let Some(status) = process.exit_status() {
                bail!("it ended ({status}); its log ends with:\n{}", process.log_tail());
            }
            anyhow::ensure!(Instant::now() < until, "it has no port; its log ends with:\n{}", process.log_tail());
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let notes = folder.join("notes");
        Ok(Self { security, port, password, authority, notes, _process: process, _folder: holder })
    }

    /// As `SVC_SMTP_URL` names it, with the password.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_with(&self.password)
    }

    /// As [`MailServer::url`], with another password.
    #[must_use]
    pub fn url_with(&self, password: &str) -> String {
        let encoded = |text: &str| text.bytes().map(|byte| format!("%{byte:02X}")).collect::<String>();
        let user = format!("{}:{}@", encoded(USER), encoded(password));
        match self.security {
            Security::Tls => format!("smtps://{user}localhost:{}", self.port),
            Security::StartTls => format!("smtp://{user}localhost:{}?tls=required", self.port),
            Security::Clear => format!("smtp://localhost:{}", self.port),
        }
    }

    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    #[must_use]
    pub fn password(&self) -> &str {
        &self.password
    }

    #[must_use]
    pub fn authorities_pem(&self) -> &str {
        self.authority.certificate_pem()
    }

    #[must_use]
    pub fn authorities_path(&self) -> &Path {
        self.authority.certificate_path()
    }

    /// The mails that it has accepted, in their order.
    #[must_use]
    pub fn received(&self) -> Vec<ReceivedMail> {
        let received = |note| match note {
            MailServerEvent::Received(mail) => Some(*mail),
            MailServerEvent::Refused { .. } => None,
        };
        self.notes().into_iter().filter_map(received).collect()
    }

    /// The addresses that it has refused, with the code; a client that failed to log in has no address.
    #[must_use]
    pub fn refused(&self) -> Vec<(String, String)> {
        let refused = |note| match note {
            MailServerEvent::Received(_) => None,
            MailServerEvent::Refused { to, refused } => Some((to, refused)),
        };
        self.notes().into_iter().filter_map(refused).collect()
    }

    fn notes(&self) -> Vec<MailServerEvent> {
        let text = std::fs::read_to_string(&self.notes).unwrap_or_default();
        // The last line may be half written.
        let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        lines.map(|line| serde_json::from_str(line).expect("a note can be read")).collect()
    }
}
