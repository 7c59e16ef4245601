//! Notifications by e-mail, to a third-party mail server (aiosmtpd).

use edge::notifications::delivery::SendFailure;
use edge::notifications::delivery::email::{Mail, MailConfig, Mailer};
use futures::future::join_all;
use reqwest::Method;
use secrecy::ExposeSecret as _;
use serde_json::json;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tests::cluster::client::Client;
use tests::cluster::mail_server::{MailServer, ReceivedMail, Security};
use tests::cluster::{CURRENCY, TestCluster, WAIT_TIMEOUT};
use tokio::net::{TcpListener, TcpStream};

const FROM: &str = "Größe GPU <no-reply@example.com>";
const ENDPOINT: &str = "00000000-0000-0000-0000-0000000000ee";
const EVENT: &str = "00000000-0000-0000-0000-000000000009";

/// A notification with characters beyond ASCII.
const ANNOUNCED: &str = r#"{"id":"00000000-0000-0000-0000-000000000009","type":"notification.announced","time":"2026-11-23T08:00:00Z",
    "data":{"severity":"warning","message":"Die Region größte-1 wird gewartet.\r\n.\r\nQUIT"}}"#;

const MAIL: Mail<'_> = Mail { message_id: EVENT, endpoint_id: ENDPOINT, body: ANNOUNCED };

/// Less than four mails take that time out one after the other: 15 s each (edge/src/notifications/delivery/email.rs).
const GIVEN_UP_WITHIN: Duration = Duration::from_secs(55);

fn mailer_at(url: &str, authorities_pem: Option<&str>) -> Mailer {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let config = MailConfig {
        url: url.to_owned().into(),
        from: FROM.to_owned(),
        authorities_pem: authorities_pem.map(str::to_owned),
        public_url: "https://gpu.example".to_owned(),
    };
    Mailer::new(&config).unwrap()
}

fn mailer_of(server: &MailServer) -> Mailer {
    mailer_at(&server.url(), Some(server.authorities_pem()))
}

/// The reason why a mail was not sent. No error that operators can fix is permanent.
async fn not_sent(mailer: &Mailer) -> String {
    let SendFailure { is_final, why } = mailer.send("ann@example.org", &MAIL).await.unwrap_err();
    assert!(!is_final, "{why}");
    why
}

/// An address that forwards to the server and is not in its certificate.
async fn forwarded_from_another_address(port: u16) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        }
    });
    address
}

#[tokio::test]
async fn mail_arrives_unchanged_over_implicit_tls_and_after_starttls() {
    for security in [Security::Tls, Security::StartTls] {
        let server = MailServer::start(security).await;
        mailer_of(&server).send("ann@example.org", &MAIL).await.unwrap();
        let [mail] = &server.received()[..] else { panic!("not one mail: {:?}", server.received()) };
        assert!(mail.is_encrypted && mail.is_authenticated, "{security:?}: {mail:?}");
        assert_eq!((mail.to.as_str(), mail.sender.as_str()), ("ann@example.org", "no-reply@example.com"));
        assert_eq!((mail.client.as_str(), mail.defects.len()), ("gpu.example", 0), "{:?}", mail.defects);
        let headers = mail.headers();
        let id = format!("<{EVENT}.{ENDPOINT}@example.com>");
        for (name, value) in [
            ("From", FROM),
            ("To", "ann@example.org"),
            ("Subject", "Warning: an announcement of the operators"),
            ("Date", "Mon, 23 Nov 2026 08:00:00 +0000"),
            ("Message-ID", &id),
            ("Auto-Submitted", "auto-generated"),
            ("Content-Type", "text/plain; charset=\"utf-8\""),
        ] {
            assert_eq!(headers.get(name).copied(), Some(value), "{name} of {headers:?}");
        }
        let (first, rest) = mail.text.split_once("\r\n\r\n").unwrap();
        assert_eq!(first, "The operators of the service announce:");
        assert!(rest.starts_with("Die Region größte-1 wird gewartet. . QUIT\r\n"), "{rest}");
        let last = format!("gpuctl notification-endpoints set {ENDPOINT} --disable");
        assert!(rest.trim_end().ends_with(&last), "{rest}");
    }
}

#[tokio::test]
async fn retry_after_a_rejection_sends_the_same_mail_and_it_arrives_once() {
    let server = MailServer::start(Security::Tls).await;
    let (mailer, to) = (mailer_of(&server), "data-451-once.ann@example.org");
    let later = mailer.send(to, &MAIL).await.unwrap_err();
    assert!(!later.is_final && later.why.contains("451"), "{later}");
    mailer.send(to, &MAIL).await.unwrap();
    mailer.send("ann@example.org", &MAIL).await.unwrap();
    let received = server.received();
    assert_eq!(received.iter().map(|mail| mail.to.as_str()).collect::<Vec<_>>(), [to, "ann@example.org"]);
    assert_eq!(received[0].headers()["Message-ID"], received[1].headers()["Message-ID"]);
}

#[tokio::test]
async fn rejection_of_the_recipient_or_message_is_permanent_and_any_other_temporary() {
    let server = MailServer::start(Security::StartTls).await;
    let mailer = mailer_of(&server);
    for (to, is_final) in [
        ("rcpt-550.ann@example.org", true),
        ("rcpt-501.ann@example.org", true),
        ("rcpt-552.ann@example.org", true),
        ("data-554.ann@example.org", true),
        ("rcpt-451.ann@example.org", false),
        ("rcpt-421.ann@example.org", false),
        ("data-452.ann@example.org", false),
        ("rcpt-503.ann@example.org", false),
        ("rcpt-530.ann@example.org", false),
        ("data-535.ann@example.org", false),
    ] {
        let undelivered = mailer.send(to, &MAIL).await.unwrap_err();
        assert_eq!(undelivered.is_final, is_final, "{to}: {undelivered}");
        let code = &to["rcpt-".len().."rcpt-550".len()];
        assert!(undelivered.why.contains(&format!("{code} the address asks for it")), "{undelivered}");
    }
    assert_eq!((server.received().len(), server.refused().len()), (0, 10));
}

#[tokio::test]
async fn non_ascii_address_is_sent_as_rfc_6531_defines() {
    let server = MailServer::start(Security::Tls).await;
    mailer_of(&server).send("größe@example.org", &MAIL).await.unwrap();
    let received = server.received();
    assert_eq!((received[0].to.as_str(), received[0].headers()["To"]), ("größe@example.org", "größe@example.org"));
}

#[tokio::test]
async fn hanging_mail_server_times_out_and_the_next_mail_is_sent() {
    // A server that sends no greeting, one that never responds to a recipient, and one that never responds to a message.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let server = MailServer::start(Security::Tls).await;
    let mailer = mailer_of(&server);
    let (greeted, in_tls) = (
        mailer_at(&format!("smtp://127.0.0.1:{port}"), None),
        mailer_at(&format!("smtps://127.0.0.1:{port}"), Some(server.authorities_pem())),
    );
    let began = Instant::now();
    let hanging = [
        greeted.send("ann@example.org", &MAIL),
        in_tls.send("ann@example.org", &MAIL),
        mailer.send("rcpt-hang.ann@example.org", &MAIL),
        mailer.send("data-hang.ann@example.org", &MAIL),
    ];
    for outcome in join_all(hanging).await {
        let undelivered = outcome.unwrap_err();
        assert!(!undelivered.is_final && undelivered.why.contains("within 15 seconds"), "{undelivered}");
    }
    assert!(began.elapsed() < GIVEN_UP_WITHIN, "{:?}", began.elapsed());
    mailer.send("ann@example.org", &MAIL).await.unwrap();
    assert_eq!(server.received().len(), 1);
}

#[tokio::test]
async fn mail_server_without_a_trusted_certificate_is_sent_nothing() {
    let (server, other) = tokio::join!(MailServer::start(Security::Tls), MailServer::start(Security::StartTls));
    // With the other server's authority, with the system's authorities alone, and with a name that is not in the certificate.
    for (server, authorities) in [(&server, Some(&other)), (&other, Some(&server)), (&server, None), (&other, None)] {
        let why = not_sent(&mailer_at(&server.url(), authorities.map(MailServer::authorities_pem))).await;
        assert!(why.contains("certificate") && !why.contains(server.password()), "{why}");
    }
    let elsewhere = forwarded_from_another_address(server.port()).await;
    let url = server.url().replace(&format!("localhost:{}", server.port()), &elsewhere.to_string());
    let why = not_sent(&mailer_at(&url, Some(server.authorities_pem()))).await;
    assert!(why.contains("certificate not valid for name"), "{why}");
    assert!(server.received().is_empty() && other.received().is_empty());
    assert!(server.refused().is_empty() && other.refused().is_empty(), "no password was sent");
}

#[tokio::test]
async fn mail_server_without_starttls_is_sent_nothing() {
    let server = MailServer::start(Security::Clear).await;
    let url = format!("smtp://user:hunter2@localhost:{}?tls=required", server.port());
    let why = not_sent(&mailer_at(&url, Some(server.authorities_pem()))).await;
    assert!(why.contains("STARTTLS") && !why.contains("hunter2"), "{why}");
    assert!(server.received().is_empty());
    // In clear text, on this machine and if the operators configure it, mail is sent.
    mailer_of(&server).send("ann@example.org", &MAIL).await.unwrap();
    assert!(server.received().iter().all(|mail| !mail.is_encrypted && !mail.is_authenticated));
}

#[tokio::test]
async fn wrong_mail_password_is_an_operator_error_and_is_not_shown() {
    for security in [Security::Tls, Security::StartTls] {
        let server = MailServer::start(security).await;
        let why = not_sent(&mailer_at(&server.url_with("hunter2"), Some(server.authorities_pem()))).await;
        assert_eq!(why, "the mail server refuses the login (535)");
        assert!(server.received().is_empty());
    }
}

#[tokio::test]
async fn concurrent_mails_share_four_connections() {
    let server = MailServer::start(Security::Tls).await;
    let mailer = mailer_of(&server);
    let addresses: Vec<String> = (0..24).map(|n| format!("ann{n}@example.org")).collect();
    for sent in join_all(addresses.iter().map(|to| mailer.send(to, &MAIL))).await {
        sent.unwrap();
    }
    let mut received = server.received();
    assert!(received.iter().all(|mail| mail.connections <= 4), "{received:?}");
    received.sort_unstable_by(|one, other| one.to.cmp(&other.to));
    received.dedup_by(|one, other| one.to == other.to);
    assert_eq!(received.len(), addresses.len());
}

/// Waits until a mail with this subject is received.
async fn until_received(server: &MailServer, subject: &str) -> ReceivedMail {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let received = server.received();
        if let Some(mail) = received.iter().find(|mail| mail.headers()["Subject"] == subject) {
            return mail.clone();
        }
        let refused = server.refused();
        assert!(Instant::now() < until, "no mail {subject:?} has come: {received:?}, {refused:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn low_balance_is_mailed_once_although_the_server_rejected_the_first_attempt() {
    const ADDRESS: &str = "rcpt-451-once.user@example.org";
    let server = MailServer::start(Security::Tls).await;
    let mut cluster = TestCluster::builder()
        .without_credit()
        .replicas(2)
        .policy("billing.window_seconds", 1)
        .policy("billing.low_balance_threshold_minor", 50_000)
        .variable("SVC_SMTP_URL", &server.url())
        .variable("SVC_SMTP_FROM", FROM)
        .variable("SVC_NOTIFICATION_CA_PATH", &server.authorities_path().display().to_string())
        .start()
        .await;
    cluster.register_secret("the mail server's password", server.password());
    let mut claims = cluster.identity.claims_of("user").unwrap();
    (claims["email"], claims["email_verified"]) = (json!(ADDRESS), json!(true));
    let token = cluster.identity.mint(&claims).unwrap();
    cluster.register_secret("the bearer token of user", token.expose_secret());
    let token = Some(token.expose_secret().to_owned());
    cluster.user = Client::new(cluster.authority.certificate_path(), &cluster.settings.public_url, token);

    // 10 minor units a second: the balance is above the threshold for a few seconds, and is not depleted on a slow machine.
    let sku = cluster.offer_sku("dear", 8).await;
    let price = json!({ "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": 36_000 } });
    cluster.admin.request_until_final(Method::PATCH, &format!("/api/v1/admin/skus/{sku}"), Some(&price)).await.ok();
    cluster.node("dear").await;
    let account = cluster.credit("user", 50_040).await;
    let rented = cluster.rent_active("dear", 1).await;

    let low = until_received(&server, "Your balance is low").await;
    assert_eq!((low.to.as_str(), low.headers()["To"]), (ADDRESS, ADDRESS));
    assert!(low.text.contains(&format!("Billing account: {account}")), "{}", low.text);
    assert_eq!(server.refused(), [(ADDRESS.to_owned(), "451".to_owned())]);
    rented.release().await;
    until_received(&server, &format!("Allocation {} is released", rented.id)).await;
    let of_balance = server.received().into_iter().filter(|mail| mail.headers()["Subject"] == "Your balance is low");
    assert_eq!(of_balance.count(), 1);
    cluster.shutdown().await;
}
