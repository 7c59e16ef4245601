//! The terminal sessions of an allocation, as its user lists them.

use super::harness::{ANNS_KEY, ApiHarness, PlacementOutcome};
use crate::app_state::read_model::find;
use crate::terminal::mint;
use crate::terminal_gateway;
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use domain::allocation::{Allocation, Fact, Phase};
use domain::authz::{CallerIdentity, TokenRole};
use domain::browser_session::{self, BrowserSession, Opening, Place, SecretDigest};
use domain::commit::Precondition;
use domain::terminal_session::{self, Instruction, TerminalSession, TokenDigest};
use domain::{BrowserSessionId, Machine as _, Principal, TerminalSessionId};
use futures::StreamExt as _;
use futures::future::BoxFuture;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use test_host::CapturedLog;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::{WebSocketStream, client_async};
use uuid::Uuid;

/// An active allocation of ann's.
async fn rented(api: &ApiHarness) -> String {
    api.sku("h100x4", 4).await;
    let node = api.active_node("h100x4", 4).await;
    api.set_placement(PlacementOutcome::On(node));
    let key = json!({"name": "laptop", "public_key": ANNS_KEY});
    api.post("/api/v1/ssh-keys").user("ann").json(&key).send().await.is(201);
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let made = api.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let id: Uuid = made.is(201)["id"].as_str().unwrap().parse().unwrap();
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    format!("/api/v1/allocations/{id}")
}

/// A terminal session on the allocation.
async fn opened(api: &ApiHarness, allocation: &str) -> String {
    let issued = api.post(&format!("{allocation}/terminal-tokens")).user("ann").send().await;
    issued.is(201)["session_id"].as_str().unwrap().to_owned()
}

fn ids(page: &Value) -> Vec<&str> {
    page["items"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn open_terminal_sessions_are_listed_for_the_allocations_user_alone() {
    let api = ApiHarness::new().await;
    let allocation = rented(&api).await;
    let path = format!("{allocation}/terminal-sessions");
    assert_eq!(ids(api.get(&path).user("ann").send().await.is(200)), [""; 0]);
    let (first, second) = (opened(&api, &allocation).await, opened(&api, &allocation).await);
    let open = api.get(&path).user("ann").send().await;
    assert_eq!(ids(open.is(200)), [&first, &second]);
    assert_eq!((&open.body["items"][0]["state"], &open.body["items"][0]["user_id"]), (&json!("opened"), &json!("ann")));
    assert_eq!(ids(api.get(&path).admin().send().await.is(200)), [&first, &second]);
    api.get(&path).user("bob").send().await.refused(404, "not_found");

    // Page by page.
    let page = api.get(&format!("{path}?limit=1")).user("ann").send().await;
    assert_eq!(ids(page.is(200)), [&first]);
    let next = page.body["next_page"].as_str().unwrap();
    let page = api.get(&format!("{path}?limit=1&page_token={next}")).user("ann").send().await;
    assert_eq!((ids(page.is(200)), &page.body["next_page"]), (vec![&*second], &Value::Null));

    // Closed sessions are not listed.
    let kill = format!("/api/v1/admin/terminal-sessions/{first}/kill");
    api.post(&kill).admin().json(&json!({"reason": "a test"})).send().await.is(200);
    assert_eq!(ids(api.get(&path).user("ann").send().await.is(200)), [&second]);
}

/// The gateway of terminals, on a socket.
async fn gateway(api: &ApiHarness) -> SocketAddr {
    served(terminal_gateway::router(api.app.clone())).await
}

async fn served(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// An upgrade that shows the token.
fn upgrade(gateway: SocketAddr, token: &str) -> Request<()> {
    let mut request = format!("ws://{gateway}{}", terminal_gateway::PATH).into_client_request().unwrap();
    let offered = format!("{}, token.{token}", crate::terminal::PROTOCOL);
    request.headers_mut().insert("sec-websocket-protocol", offered.parse().unwrap());
    request
}

/// A connection that shows the token.
async fn socket(gateway: SocketAddr, token: &str) -> WebSocketStream<TcpStream> {
    let stream = TcpStream::connect(gateway).await.unwrap();
    client_async(upgrade(gateway, token), stream).await.unwrap().0
}

/// Connects with the token. The code with which the gateway closes the connection; `None` where it admits the connection.
async fn connect(api: &ApiHarness, gateway: SocketAddr, session: Uuid, token: &str) -> Option<u16> {
    let attachments = find::<TerminalSession>(&api.app, session).await.unwrap().unwrap().it.attachments;
    let mut socket = socket(gateway, token).await;
    let closed = async {
        while let Some(Ok(message)) = socket.next().await {
            if let Message::Close(frame) = message {
                return Some(u16::from(frame.unwrap().code));
            }
        }
        panic!("the connection broke off");
    };
    // There is no agent: an admitted connection waits for it.
    let admitted = api.wait_until::<TerminalSession>(session, |session| session.attachments > attachments);
    tokio::select! {
        code = closed => code,
        () = admitted => None,
    }
}

/// Ann, by the browser session.
fn ann_by(login: Uuid) -> Principal {
    Principal::Caller(CallerIdentity {
        org_id: Some("acme".into()),
        browser_session: Some(BrowserSessionId(login)),
        ..CallerIdentity::new("ann", [TokenRole::User])
    })
}

/// Ann logs in to the console.
async fn log_in(api: &ApiHarness) -> Uuid {
    let login = Uuid::now_v7();
    let opening = Opening {
        secret_sha256: SecretDigest([0; 32]),
        subject: "ann".to_owned(),
        provider_session: None,
        authenticated_at: chrono::Utc::now(),
        place: Place { address: "192.0.2.1".to_owned(), user_agent: "a browser".to_owned() },
        tokens_enc: "c2VhbGVk".to_owned(),
        token_ends_at: chrono::Utc::now() + chrono::TimeDelta::hours(1),
    };
    api.ask::<BrowserSession>(&ann_by(login), login, browser_session::Request::Open(Box::new(opening))).await.unwrap();
    login
}

#[tokio::test]
async fn token_of_a_login_that_has_ended_admits_no_connection() {
    let api = ApiHarness::new().await;
    let allocation: Uuid = rented(&api).await.rsplit_once('/').unwrap().1.parse().unwrap();
    let gateway = gateway(&api).await;
    let (first, second) = (log_in(&api).await, log_in(&api).await);
    let rented = find::<Allocation>(&api.app, allocation).await.unwrap().unwrap();
    let Phase::Active { node_id, .. } = rented.it.phase else { panic!("{:?}", rented.it.phase) };
    let active = Precondition { entity: allocation, version: rented.version };
    let session = Uuid::now_v7();
    let (token, hash) = mint(session);
    let allocation_id = rented.it.id;
    let open =
        terminal_session::Request::Open { allocation_id, node_id, token_sha256: TokenDigest(hash.to_bytes()), active };
    api.ask::<TerminalSession>(&ann_by(first), session, open).await.unwrap();
    assert_eq!(connect(&api, gateway, session, token.expose_secret()).await, None, "the login is active");

    // What the event of the end does is not part of this: here it arrives too late.
    let issued = async |login: Uuid| {
        let (token, hash) = mint(session);
        let issue = terminal_session::Request::IssueToken { token_sha256: TokenDigest(hash.to_bytes()), active };
        api.ask::<TerminalSession>(&ann_by(login), session, issue).await.unwrap();
        token
    };
    let token = issued(second).await;
    api.ask::<BrowserSession>(&ann_by(second), second, browser_session::Request::EndByUser).await.unwrap();
    assert_eq!(connect(&api, gateway, session, token.expose_secret()).await, Some(4403));
    assert_eq!(connect(&api, gateway, session, issued(first).await.expose_secret()).await, None, "that one is active");
}

/// A session of ann's with a connection, and an agent that says nothing.
struct AttachedTerminal {
    id: Uuid,
    socket: WebSocketStream<TcpStream>,
    _agent: (crate::terminal::AgentStream, mpsc::Receiver<wire::terminal::TerminalCommand>),
}

impl AttachedTerminal {
    async fn open(api: &ApiHarness) -> Self {
        let allocation = rented(api).await;
        let issued = api.post(&format!("{allocation}/terminal-tokens")).user("ann").send().await;
        let issued = issued.is(201);
        let id: Uuid = issued["session_id"].as_str().unwrap().parse().unwrap();
        let (down, downs) = mpsc::channel(16);
        let stream = api.app.terminals.register_stream(TerminalSessionId(id), down);
        let socket = socket(gateway(api).await, issued["token"].as_str().unwrap()).await;
        api.wait_until::<TerminalSession>(id, |session| session.state() == "attached").await;
        Self { id, socket, _agent: (stream, downs) }
    }
}

#[tokio::test]
async fn session_whose_client_leaves_during_an_outage_of_the_database_is_detached_after_it() {
    let log = CapturedLog::of_process();
    let api = ApiHarness::with_own_postgres(None).await;
    let AttachedTerminal { id, socket, _agent } = AttachedTerminal::open(&api).await;
    api.kill_postgres().await;
    drop(socket);
    while !log.text().contains("a terminal's connection could not be detached") {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    api.start_postgres_again().await;
    api.wait_until::<TerminalSession>(id, |session| session.state() == "detached").await;
}

/// What a layer around the gateway does.
type Layer = fn(Request<Body>, Next) -> BoxFuture<'static, Response>;

/// The client of an admitted connection leaves before it has the answer: its session is detached.
async fn expect_detached_behind(layer: Layer) {
    let api = ApiHarness::new().await;
    let allocation = rented(&api).await;
    let issued = api.post(&format!("{allocation}/terminal-tokens")).user("ann").send().await;
    let issued = issued.is(201);
    let id: Uuid = issued["session_id"].as_str().unwrap().parse().unwrap();
    let gateway = served(terminal_gateway::router(api.app.clone()).layer(from_fn(layer))).await;
    let stream = TcpStream::connect(gateway).await.unwrap();
    let connecting = tokio::spawn(client_async(upgrade(gateway, issued["token"].as_str().unwrap()), stream));
    api.wait_until::<TerminalSession>(id, |session| session.attachments == 1).await;
    connecting.abort();
    api.wait_until::<TerminalSession>(id, |session| session.state() == "detached").await;
}

#[tokio::test]
async fn session_whose_upgrade_fails_after_the_admission_is_detached() {
    expect_detached_behind(|request, next| {
        Box::pin(async move {
            let _answer = next.run(request).await;
            std::future::pending().await
        })
    })
    .await;
}

/// The time of the request ends, or its client leaves, while the admission is being committed.
#[tokio::test]
async fn session_whose_request_is_dropped_during_the_admission_is_detached() {
    expect_detached_behind(|request, next| {
        Box::pin(async move {
            drop(tokio::time::timeout(Duration::from_micros(1), next.run(request)).await);
            std::future::pending().await
        })
    })
    .await;
}

#[tokio::test]
async fn client_whose_connection_counts_as_gone_is_asked_to_connect_again() {
    let api = ApiHarness::new().await;
    let AttachedTerminal { id, mut socket, _agent } = AttachedTerminal::open(&api).await;
    // As the worker does, where it takes this member for an ended one.
    api.ask_as_system::<TerminalSession>(id, Instruction::Detach { attachment: 1 }).await;
    api.app.terminals.wake(TerminalSessionId(id));
    let code = loop {
        if let Message::Close(frame) = socket.next().await.unwrap().unwrap() {
            break u16::from(frame.unwrap().code);
        }
    };
    assert_eq!(code, 1012);
}
