use super::*;

const BODY: &str = r#"{"id":"00000000-0000-0000-0000-000000000009","type":"billing.balance_low","time":"2026-11-23T08:00:00Z",
    "data":{"account_id":"00000000-0000-0000-0000-000000000004"}}"#;

fn config(url: &str) -> MailConfig {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    MailConfig {
        url: url.to_owned().into(),
        from: "GPUaaS <no-reply@example.com>".to_owned(),
        authorities_pem: None,
        public_url: "https://gpu.example:8443".to_owned(),
    }
}

fn server(url: &str) -> Server {
    Server::parse(&config(url)).unwrap()
}

fn mailer() -> Mailer {
    Mailer::new(&config("smtp://localhost")).unwrap()
}

fn formatted(mailer: &Mailer, to: &str, mail: &Mail<'_>) -> String {
    String::from_utf8(mailer.0.message(&recipient(to).unwrap(), mail).unwrap().formatted()).unwrap()
}

const MAIL: Mail<'_> = Mail { message_id: "the-event", endpoint_id: "the-endpoint", body: BODY };

#[test]
fn smtp_url_sets_server_security_and_credentials() {
    let tls = server("smtps://user%40example.com:p%3Ass@mail.example");
    assert!(matches!(tls.security, Security::Tls(_)));
    assert_eq!((tls.host.as_str(), tls.port), ("mail.example", 465));
    assert_eq!(tls.credentials, Some(Credentials::new("user@example.com".to_owned(), "p:ss".to_owned())));
    assert_eq!(tls.client, ClientId::Domain("gpu.example".to_owned()));
    let upgraded = server("smtp://mail.example?tls=required");
    assert!(matches!(upgraded.security, Security::StartTls(_)) && upgraded.credentials.is_none());
    assert_eq!(upgraded.port, 587);
    assert_eq!(server("smtps://[2001:db8::1]:2465").port, 2465);
    for (url, host) in
        [("smtp://localhost", "localhost"), ("smtp://127.0.0.1:25", "127.0.0.1"), ("smtp://[::1]", "::1")]
    {
        let here = server(url);
        assert!(matches!(here.security, Security::Clear) && here.port == 25, "{url}");
        assert_eq!(here.host, host);
    }
}

#[test]
fn insecure_or_ambiguous_smtp_url_is_refused_without_being_quoted() {
    for url in [
        "smtp://user:hunter2@mail.example",
        "smtp://user:hunter2@10.0.0.1",
        "smtp://user:hunter2@127.0.0.1.example",
        "smtp://user:hunter2@mail.example?tls=opportunistic",
        "smtps://user:hunter2@mail.example?tls=required&x=y",
        "smtps://user:hunter2@mail.example/inbox",
        "smtps://user:hunter2@mail.example#x",
        "https://user:hunter2@mail.example",
        "smtps://user@mail.example",
        "smtps://user:%ff%feR@mail.example",
        "smtps://:hunter2@mail.example",
        "smtps:mail.example",
        "mail.example:hunter2",
        "",
    ] {
        let error = Mailer::new(&config(url)).unwrap_err();
        assert!(matches!(error, MailConfigError::Url(_)), "{url}: {error}");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
    }
    let clear = Mailer::new(&config("smtp://mail.example")).unwrap_err().to_string();
    assert!(clear.contains("?tls=required") && clear.contains("smtps://"), "{clear}");
}

#[test]
fn neither_a_mailer_nor_its_configuration_shows_the_password() {
    let config = config("smtps://user:hunter2@mail.example");
    let shown = format!("{config:?} {:?}", Mailer::new(&config).unwrap());
    assert!(!shown.contains("hunter2"), "{shown}");
}

#[test]
fn a_sender_must_be_one_mailbox_with_an_address_in_ascii() {
    for from in [
        "no-reply@example.com",
        "GPUaaS <no-reply@example.com>",
        "Größe, \"GPU\" <a@b.example>",
        "\"A, B\" <a@b.example>",
    ] {
        let config = MailConfig { from: from.to_owned(), ..config("smtp://localhost") };
        assert_eq!(Mailer::new(&config).is_ok(), !from.starts_with('G') || !from.contains('ö'), "{from}");
    }
    for from in [
        "",
        "GPUaaS",
        "a@b.example, c@d.example",
        "a@b.example\r\nBcc: c@d.example",
        "größe@b.example",
        "a@größe.example",
    ] {
        let config = MailConfig { from: from.to_owned(), ..config("smtp://localhost") };
        assert!(matches!(Mailer::new(&config), Err(MailConfigError::From(_))), "{from}");
    }
}

#[test]
fn authorities_that_cannot_be_read_are_refused() {
    let pem = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let config = MailConfig { authorities_pem: Some(pem.to_owned()), ..config("smtps://mail.example") };
    assert!(matches!(Mailer::new(&config), Err(MailConfigError::Authorities(_))));
}

#[test]
fn mail_has_sender_recipient_and_message_id() {
    let mail = formatted(&mailer(), "ann@example.org", &MAIL);
    let (headers, text) = mail.split_once("\r\n\r\n").unwrap();
    let mut headers: Vec<&str> = headers.split("\r\n").collect();
    headers.sort_unstable();
    let expected = [
        "Auto-Submitted: auto-generated",
        "Content-Transfer-Encoding: quoted-printable",
        "Content-Type: text/plain; charset=utf-8",
        "Date: Mon, 23 Nov 2026 08:00:00 +0000",
        "From: GPUaaS <no-reply@example.com>",
        "MIME-Version: 1.0",
        "Message-ID: <the-event.the-endpoint@example.com>",
        "Subject: Your balance is low",
        "To: ann@example.org",
    ];
    assert_eq!(headers, expected);
    assert!(text.contains("gpuctl billing top-up"), "{text}");
    assert_eq!(mail, formatted(&mailer(), "ann@example.org", &MAIL), "an attempt sends what the one before sent");
}

#[test]
fn recipient_that_is_not_one_plain_address_is_refused() {
    for address in [
        "",
        "ann",
        "ann@",
        "@example.org",
        "ann@example.org, bob@example.org",
        "ann@example.org;bob@example.org",
        "ann@example.org bob@example.org",
        "Ann <ann@example.org>",
        "<ann@example.org>",
        "ann@example.org>\r\nRCPT TO:<bob@example.org",
        "ann@example.org\r\nBcc: bob@example.org",
        "ann\r\n@example.org",
        "ann@exam\nple.org",
        "ann@example.org\u{0}",
        "ann\u{85}@example.org",
        "ann\u{2028}@example.org",
        "\"ann\r\nBcc: bob\"@example.org",
        "\"ann> <bob\"@example.org",
        "\"ann bob\"@example.org",
        "ann@[127.0.0.1]",
        "ann@127.0.0.1",
        "ann@[IPv6:::1]",
        "ann(comment)@example.org",
        &format!("{}@example.org", "a".repeat(65)),
        &format!("ann@{}org", "example.".repeat(32)),
    ] {
        assert_eq!(recipient(address), None, "{address:?}");
    }
    for address in ["ann@example.org", "ann+gpu@sub.example.org", "o'neil@example.org", "größe@example.org"] {
        assert!(recipient(address).is_some(), "{address}");
    }
}

#[tokio::test]
async fn unwritable_mail_fails_permanently_without_a_connection() {
    // No server listens there: a connection would be retried.
    let mailer = Mailer::new(&config("smtp://127.0.0.1:1")).unwrap();
    let no_address = mailer.send("ann@example.org\r\nBcc: bob@example.org", &MAIL).await.unwrap_err();
    assert_eq!((no_address.is_final, no_address.why.as_str()), (true, "that is no address that mail can be sent to"));
    for body in [
        "",
        "{}",
        r#"{"id":"1","type":"x","time":"1969-12-31T23:59:59Z"}"#,
        r#"{"id":"1","type":"x","time":"+10000-01-01T00:00:00Z"}"#,
    ] {
        let unreadable = mailer.send("ann@example.org", &Mail { body, ..MAIL }).await.unwrap_err();
        assert!(unreadable.is_final, "{body}: {unreadable}");
    }
    let refused = mailer.send("ann@example.org", &MAIL).await.unwrap_err();
    assert!(!refused.is_final && refused.why.contains("no connection to the mail server"), "{refused}");
}

#[test]
fn notification_content_never_becomes_a_mail_header() {
    let hostile = "x\r\nBcc: victim@example.com\r\n\r\ninjected";
    let output = serde_json::json!({
        "id": hostile, "type": hostile, "time": "2026-11-23T08:00:00Z",
        "data": { "reason": hostile, "message": format!("{hostile} größer"), "state": hostile },
    });
    for kind in [hostile, "notification.announced", "node.state_changed"] {
        let body = serde_json::Value::Object({
            let mut output = output.as_object().unwrap().clone();
            output.insert("type".to_owned(), kind.into());
            output
        });
        let mail = Mail { message_id: hostile, endpoint_id: hostile, body: &body.to_string() };
        let mail = formatted(&mailer(), "ann@example.org", &mail);
        let (headers, _) = mail.split_once("\r\n\r\n").unwrap();
        let names: Vec<_> = headers.split("\r\n").filter(|line| !line.starts_with(' ')).collect();
        assert_eq!(names.len(), 9, "{headers}");
        assert!(names.iter().all(|line| !line.starts_with("Bcc")), "{headers}");
        assert!(!mail.replace("\r\n", "").contains(['\r', '\n']), "no bare line break");
    }
}

#[tokio::test]
async fn server_without_a_login_by_password_is_named_as_such() {
    // Microsoft 365 with security defaults, and a relay that knows its clients by their addresses.
    for greeting in ["250-mail.example\r\n250 AUTH XOAUTH2\r\n", "250 mail.example\r\n"] {
        let mailer = server_with_login("EHLO", greeting, "ann:hunter2@").await;
        let failure = mailer.send("ann@example.org", &MAIL).await.unwrap_err();
        assert!(!failure.is_final && failure.why.contains("offers no login by password"), "{failure}");
    }
}

/// A mail server that answers the command with these lines, and any other one with 250.
async fn server_that_refuses(command: &'static str, answer: &'static str) -> Mailer {
    server_with_login(command, answer, "").await
}

/// The same for a mailer that logs in, where `login` is not empty.
async fn server_with_login(command: &'static str, answer: &'static str, login: &str) -> Mailer {
    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let (read, mut write) = stream.into_split();
        write.write_all(b"220 mail.example\r\n").await.unwrap();
        let mut lines = BufReader::new(read).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let answer = if line.starts_with(command) { answer } else { "250 OK\r\n" };
            write.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    Mailer::new(&config(&format!("smtp://{login}127.0.0.1:{port}"))).unwrap()
}

#[tokio::test]
async fn refusal_of_the_sender_is_temporary_and_names_the_settings_and_one_of_the_recipient_is_final() {
    let (log, _guard) = test_host::CapturedLog::start();
    for (answer, is_final) in [
        // Amazon SES, Exchange, Microsoft 365, Gmail, Postfix.
        ("554 Message rejected: Email address is not verified.\r\n", false),
        ("554 5.7.1 <ann@example.org>: Relay access denied\r\n", false),
        ("550 5.7.60 SMTP; Client does not have permissions to send as this sender\r\n", false),
        (
            "550-5.4.5 Daily user sending limit exceeded. For more information on Gmail\r\n550 5.4.5 sending limits\r\n",
            false,
        ),
        ("550 relay not permitted\r\n", false),
        ("553 5.1.8 <no-reply@example.com>: Sender address rejected: Domain not found\r\n", false),
        ("553 5.7.1 <no-reply@example.com>: Sender address rejected: not owned by user\r\n", false),
        ("554 5.7.1 Service unavailable; Client host [192.0.2.1] blocked using a list\r\n", false),
        ("554 5.2.252 SendAsDenied; the login is not allowed to send as this address\r\n", false),
        ("552 5.3.4 message size exceeds the limit\r\n", true),
        ("550 5.4.1 Recipient address rejected: Access denied. AS(201806281)\r\n", true),
        ("550 5.7.1 only members may post to this list\r\n", true),
        ("550 5.7.1 this message is likely unsolicited\r\n", true),
        ("530 5.7.0 Must issue a STARTTLS command first\r\n", false),
        ("550 5.1.1 <ann@example.org>: Recipient address rejected: User unknown\r\n", true),
        ("552 5.2.2 Mailbox full\r\n", true),
        ("554 5.6.0 message content is not accepted\r\n", true),
        ("550 No such user here\r\n", true),
        ("550 5.5.0 Requested action not taken: mailbox unavailable\r\n", true),
        ("501 5.1.3 Bad recipient address syntax\r\n", true),
        ("451 4.7.1 Greylisted\r\n", false),
    ] {
        let before = log.text().matches("SVC_SMTP_FROM").count();
        let failure = server_that_refuses("RCPT", answer).await.send("ann@example.org", &MAIL).await.unwrap_err();
        assert_eq!(failure.is_final, is_final, "{answer}: {failure}");
        let is_logged = log.text().matches("SVC_SMTP_FROM").count() > before;
        assert_eq!(is_logged, !is_final && answer.starts_with('5'), "{answer}: {}", log.text());
    }
    assert!(log.text().contains("5.7.60") && !log.text().contains("ann@example.org"), "{}", log.text());
    // A refused sender is never the recipient's fault.
    let sender = "550 5.1.0 <no-reply@example.com>: sender rejected\r\n";
    let before = log.text().matches("SVC_SMTP_FROM").count();
    let failure = server_that_refuses("MAIL", sender).await.send("ann@example.org", &MAIL).await.unwrap_err();
    assert!(!failure.is_final && log.text().matches("SVC_SMTP_FROM").count() > before, "{failure}: {}", log.text());
}
