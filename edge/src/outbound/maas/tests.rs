//! The requests are those that MAAS documents, and each way in which an answer can be wrong has an error of its own.

use super::*;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use wiremock::matchers::{method, path, query_param};
use wiremock::{Mock, MockServer, Request, ResponseTemplate};

fn maas_at(address: &str) -> Maas {
    // Longer than any pause of the machine.
    maas_within(address, Duration::from_secs(60))
}

fn maas_within(address: &str, timeout: Duration) -> Maas {
    crate::testing::install_crypto();
    Maas::new(MaasSettings {
        base_url: format!("{address}/MAAS/"),
        key: ApiKey::parse(&"consumer:token:s&cret".into()).unwrap(),
        timeout,
        authorities_pem: None,
        image: Some("custom/gpu-1".into()),
        image_digest: None,
    })
    .unwrap()
}

fn machine(status_name: &str) -> Value {
    json!({
        "system_id": "abc123", "hostname": "gpu-1", "fqdn": "gpu-1.maas", "status_name": status_name, "status": 4,
        "power_state": "off", "owner": "", "interface_set": [], "resource_uri": "/MAAS/api/2.0/machines/abc123/"
    })
}

async fn answering(answer: ResponseTemplate) -> (MockServer, Maas) {
    let server = MockServer::start().await;
    Mock::given(path("/MAAS/api/2.0/machines/abc123/")).respond_with(answer).mount(&server).await;
    let maas = maas_at(&server.uri());
    (server, maas)
}

async fn only_request(server: &MockServer) -> (Request, Vec<(String, String)>) {
    let request = server.received_requests().await.unwrap().pop().unwrap();
    let form = Url::parse(&format!("http://x/?{}", String::from_utf8(request.body.clone()).unwrap())).unwrap();
    (request, form.query_pairs().into_owned().collect())
}

#[tokio::test]
async fn request_is_signed_with_all_three_parts_of_the_key() {
    let (server, maas) = answering(ResponseTemplate::new(200).set_body_json(machine("Ready"))).await;
    let read = maas.machine("abc123").await.unwrap().unwrap();
    assert_eq!((read.status, read.power, read.owner), (MachineStatus::Ready, PowerState::Off, None));
    let (request, _) = only_request(&server).await;
    let header = request.headers["authorization"].to_str().unwrap().to_owned();
    for part in ["oauth_consumer_key=\"consumer\"", "oauth_token=\"token\"", "oauth_signature=\"%26s%2526cret\""] {
        assert!(header.starts_with("OAuth ") && header.contains(part), "{header}");
    }
    assert!(header.contains("oauth_signature_method=\"PLAINTEXT\"") && header.contains("oauth_version=\"1.0\""));
    maas.machine("abc123").await.unwrap();
    let (again, _) = only_request(&server).await;
    assert_ne!(again.headers["authorization"].to_str().unwrap(), header, "each request has a nonce of its own");
    assert!(!format!("{maas:?} {:?}", maas.settings).contains("s&cret"));
}

#[tokio::test]
async fn machine_is_deployed_with_its_user_data_and_the_image() {
    let server = MockServer::start().await;
    Mock::given(method("POST"))
        .and(path("/MAAS/api/2.0/machines/abc123/"))
        .and(query_param("op", "deploy"))
        .respond_with(ResponseTemplate::new(200).set_body_json(machine("Deploying")))
        .mount(&server)
        .await;
    let deployed = maas_at(&server.uri()).deploy("abc123", b"#!/bin/sh\n").await.unwrap();
    assert_eq!(deployed.status, MachineStatus::Deploying);
    let (_, form) = only_request(&server).await;
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(form, [pair("user_data", "IyEvYmluL3NoCg=="), pair("distro_series", "custom/gpu-1")]);
}

#[tokio::test]
async fn machine_is_released_with_its_disks_erased_and_allocated_for_its_node() {
    let (server, maas) = answering(ResponseTemplate::new(200).set_body_json(machine("Disk erasing"))).await;
    assert_eq!(maas.release("abc123", "gone").await.unwrap().status, MachineStatus::Releasing);
    let (request, form) = only_request(&server).await;
    assert_eq!(request.url.query(), Some("op=release"));
    assert!(form.contains(&("erase".to_owned(), "true".to_owned())), "{form:?}");
    Mock::given(path("/MAAS/api/2.0/machines/"))
        .respond_with(ResponseTemplate::new(200).set_body_json(machine("Allocated")))
        .mount(&server)
        .await;
    assert_eq!(maas.allocate("abc123", "node").await.unwrap().status, MachineStatus::Allocated);
    let (_, form) = only_request(&server).await;
    assert_eq!(
        form,
        [("system_id".to_owned(), "abc123".to_owned()), ("agent_name".to_owned(), "gpuaas-node".to_owned())]
    );
}

#[tokio::test]
async fn only_machines_of_exactly_that_name_are_found() {
    let server = MockServer::start().await;
    let mut other = machine("Ready");
    other["fqdn"] = "gpu-1.elsewhere".into();
    Mock::given(path("/MAAS/api/2.0/machines/"))
        .and(query_param("hostname", "gpu-1"))
        .respond_with(ResponseTemplate::new(200).set_body_json(json!([machine("Ready"), other])))
        .mount(&server)
        .await;
    let maas = maas_at(&server.uri());
    assert_eq!(maas.find("gpu-1.maas").await.unwrap().len(), 1);
    assert_eq!(maas.find("gpu-1").await.unwrap().len(), 2);
    assert!(maas.find("gpu-1.nowhere").await.unwrap().is_empty());
}

#[tokio::test]
async fn machine_of_another_user_is_not_ours() {
    let server = MockServer::start().await;
    Mock::given(path("/MAAS/api/2.0/users/"))
        .and(query_param("op", "whoami"))
        .respond_with(ResponseTemplate::new(200).set_body_json(json!({"username": "gpuaas", "is_superuser": false})))
        .expect(1)
        .mount(&server)
        .await;
    let maas = maas_at(&server.uri());
    let of = |owner: &str| {
        let mut record = machine("Deployed");
        record["owner"] = owner.into();
        MaasMachine::from(serde_json::from_value::<MachineRecord>(record).unwrap())
    };
    assert!(maas.is_ours(&of("gpuaas")).await.unwrap());
    assert!(!maas.is_ours(&of("someone")).await.unwrap());
    assert!(!maas.is_ours(&of("")).await.unwrap());
}

#[tokio::test]
async fn each_wrong_answer_has_an_error_of_its_own() {
    let status = |code: u16| StatusCode::from_u16(code).unwrap();
    let text = |code| ResponseTemplate::new(code).set_body_string("No machine\u{7} available.");
    let conflict = MaasError::Conflict("No machine available.".into());
    let busy = MaasError::Busy { status: status(503), text: "No machine available.".into() };
    let page = ResponseTemplate::new(200).set_body_raw("<html>Log in</html>", "text/html; charset=utf-8");
    let redirect = ResponseTemplate::new(302).insert_header("location", "https://elsewhere.example/");
    for (answer, error) in [
        (text(401), MaasError::Unauthorized(status(401))),
        (text(409), conflict),
        (text(503), busy),
        (text(400), MaasError::Status { status: status(400), text: "No machine available.".into() }),
        (page, MaasError::Page),
        (redirect, MaasError::Redirects(status(302))),
    ] {
        let (_server, maas) = answering(answer).await;
        assert_eq!(maas.machine("abc123").await.unwrap_err(), error);
    }
    let late = ResponseTemplate::new(200).set_delay(Duration::from_secs(5)).set_body_json(machine("Ready"));
    let (server, _) = answering(late).await;
    let hasty = maas_within(&server.uri(), Duration::from_millis(500));
    assert_eq!(hasty.machine("abc123").await.unwrap_err(), MaasError::Slow);
    let (_server, maas) = answering(ResponseTemplate::new(200).set_body_string("{}")).await;
    assert!(matches!(maas.machine("abc123").await, Err(MaasError::Unreadable(_))));
    // serde would read the fields of a machine in their order.
    let list =
        ResponseTemplate::new(200).set_body_json(json!(["abc123", "host", "host.maas", "Ready", "on", "gpuaas"]));
    let (_server, maas) = answering(list).await;
    assert!(matches!(maas.machine("abc123").await, Err(MaasError::Unreadable(_))));
    let (_server, maas) = answering(text(404)).await;
    assert_eq!(maas.machine("abc123").await.unwrap(), None);
    let long = ResponseTemplate::new(200).set_body_string(" ".repeat(ANSWER_BYTES + 1));
    let (_server, maas) = answering(long).await;
    assert!(matches!(maas.machine("abc123").await, Err(MaasError::Cut(_))));
}

/// A server that sends these bytes as the answer and closes the connection.
async fn raw_server(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    address
}

#[tokio::test]
async fn answer_that_is_cut_off_is_no_answer() {
    let cut = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n{\"system_id\": ";
    let maas = maas_at(&raw_server(cut).await);
    assert!(matches!(maas.machine("abc123").await, Err(MaasError::Cut(_))));
    let maas = maas_at(&raw_server("").await);
    assert!(matches!(maas.machine("abc123").await, Err(MaasError::Unreachable(_))));
    // Nothing listens there.
    let maas = maas_at("http://127.0.0.1:1");
    assert!(matches!(maas.machine("abc123").await, Err(MaasError::Unreachable(_))));
}

#[test]
fn statuses_of_newer_servers_count_as_progress() {
    for (name, status) in [
        ("Ready", MachineStatus::Ready),
        ("Disk erasing", MachineStatus::Releasing),
        ("Failed disk erasing", MachineStatus::FailedReleasing),
        ("Failed deployment", MachineStatus::FailedDeployment),
        ("Testing the future", MachineStatus::Other),
    ] {
        assert_eq!(MachineStatus::of(name), status, "{name}");
    }
}

#[test]
fn key_has_three_parts_and_the_address_no_api_path() {
    for text in ["", "a:b", "a:b:c:d", "a::c", "a b:c:d"] {
        assert_eq!(ApiKey::parse(&text.into()).unwrap_err(), ApiKeyError, "{text}");
    }
    crate::testing::install_crypto();
    let build = |base_url: &str| {
        let key = ApiKey::parse(&"a:b:c".into()).unwrap();
        let (timeout, base_url) = (Duration::from_secs(1), base_url.to_owned());
        Maas::new(MaasSettings { base_url, key, timeout, authorities_pem: None, image: None, image_digest: None })
    };
    assert!(matches!(build("http://maas.example/MAAS"), Err(MaasSettingsError::Address(_))));
    assert!(matches!(build("https://maas.example/MAAS/api/2.0/"), Err(MaasSettingsError::Address(_))));
    build("https://maas.example/MAAS").unwrap();
}
