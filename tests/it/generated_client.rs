//! A client that a public generator makes from the served description runs the first rental.

use crate::external_tools::{description, python_program, root, run};
use secrecy::ExposeSecret as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use tests::cluster::{TestCluster, ssh_public_key};
use wire::bundle::BootstrapBundle;

/// The first rental, with the generated client alone. It prints its progress line by line, and waits for a line if the test has
/// to do something.
struct Script {
    process: Child,
    output: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Script {
    fn start(mut command: Command) -> Self {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the script starts");
        let output = BufReader::new(process.stdout.take().expect("its output is read")).lines();
        Self { process, output }
    }

    /// The text after `word` on the next line.
    fn next(&mut self, word: &str) -> String {
        let line = self.output.next().unwrap_or_else(|| panic!("the script ended before it printed {word}")).unwrap();
        line.strip_prefix(word).unwrap_or_else(|| panic!("the script printed {line}, and not {word}")).trim().to_owned()
    }

    fn go_on(&mut self) {
        self.process.stdin.as_mut().unwrap().write_all(b"\n").expect("the script listens");
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn generated_client_runs_the_first_rental() {
    let mut cluster = TestCluster::start().await;
    let folder = tempfile::tempdir().unwrap();
    let described = description(&cluster, folder.path()).await;
    let client = folder.path().join("client");
    let mut generate = Command::new(python_program("openapi-python-client"));
    // Warnings fail the test: a client does not have what the generator leaves out.
    generate.args(["generate", "--meta", "none", "--overwrite", "--fail-on-warning", "--path"]).arg(&described);
    generate.arg("--output-path").arg(client.join("gpuaas_api"));
    // Recordings and printed statements are binary files.
    let config = folder.path().join("generator.yaml");
    let files =
        ["application/x-asciicast", "application/pdf"].map(|kind| format!("  {kind}: application/octet-stream\n"));
    std::fs::write(&config, format!("content_type_overrides:\n{}", files.concat())).unwrap();
    generate.arg("--config").arg(&config);
    // It formats its output with the ruff in the same folder.
    let beside = python_program("ruff");
    let path = std::env::var("PATH").unwrap_or_default();
    generate.env("PATH", format!("{}:{path}", beside.parent().unwrap().display()));
    run(generate).await;

    let token = |username: &str| cluster.identity.token_of(username).unwrap().expose_secret().to_owned();
    let subject = |username: &str| cluster.identity.person(username).unwrap().id.to_string();
    let mut command = Command::new(python_program("python"));
    command
        .arg(root().join("tests/it/generated_client/first_rental.py"))
        .env("PYTHONPATH", &client)
        .env("PYTHONUNBUFFERED", "1")
        .env("SVC_BASE_URL", cluster.admin.base())
        .env("SVC_CA_BUNDLE_PATH", cluster.authority.certificate_path())
        .env("ADMIN_TOKEN", token("admin"))
        .env("ADMIN_TOKEN_2", token("admin2"))
        .env("ADMIN_SUBJECT", subject("admin"))
        .env("ADMIN_SUBJECT_2", subject("admin2"))
        .env("USER_TOKEN", token("user"))
        .env("SSH_PUBLIC_KEY", ssh_public_key("generated"));
    let mut script = Script::start(command);
    let bundle: BootstrapBundle = serde_json::from_str(&script.next("BUNDLE")).expect("the bundle came through whole");
    cluster.register_secret("an enrollment token", bundle.enrollment_token.expose());
    cluster.start_agent("by-generated-client", &bundle);
    script.go_on();
    for reached in ["NODE active", "ALLOCATION active", "ALLOCATION released", "REFUSED not_found", "DONE"] {
        assert_eq!(script.next(""), reached);
    }
    assert!(script.process.wait().unwrap().success());
    cluster.shutdown().await;
}
