//! `gpuaas config --check`: the settings of an environment file are checked before anything starts with them.

use crate::external_tools::root;
use local_servers::pki::Authority;
use local_servers::private_files;
use persistence::envelope_encryption::KeyRing;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

fn check(file: &Path, outside: &[(&str, &str)]) -> (Option<i32>, String) {
    let program = private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas").unwrap();
    let mut command = Command::new(program);
    command.args(["config", "--check"]).arg(file).env_clear().envs(outside.iter().copied());
    let output = command.output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(printed).unwrap())
}

#[test]
fn complete_settings_pass_and_all_mistakes_of_a_file_are_named_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::create(&folder.path().join("pki")).unwrap();
    let server = authority.server_certificate("control-plane").unwrap();
    let (ring, file) = (folder.path().join("ring"), folder.path().join("gpuaas.env"));
    KeyRing::create(&ring).unwrap();
    let complete = [
        ("SVC_DATABASE_URL", "postgres:///gpuaas?host=/run/postgresql&user=gpuaas"),
        ("SVC_NATS_URL", "tls://replica-1:hunter2@nats.example:4222"),
        ("SVC_TLS_CERT_PATH", server.certificate_path.to_str().unwrap()),
        ("SVC_TLS_KEY_PATH", server.key_path.to_str().unwrap()),
        ("SVC_TLS_CA_PATH", authority.certificate_path().to_str().unwrap()),
        ("SVC_PUBLIC_URL", "https://gpuaas.example:8443"),
        ("SVC_NODE_PUBLIC_URL", "https://nodes.gpuaas.example:9443"),
        ("SVC_OIDC_ISSUER", "https://identity.example"),
        ("SVC_OIDC_AUDIENCE", "gpuaas"),
    ];
    let write = |settings: &[(&str, &str)], more: &str| {
        let mut text = String::from("# Settings\n");
        settings.iter().for_each(|(name, value)| writeln!(text, "{name}={value}").unwrap());
        std::fs::write(&file, text + more).unwrap();
    };
    write(&complete, "");
    // What the file does not set is taken from outside.
    let outside = [("SVC_KEK_FILE", ring.to_str().unwrap())];
    let (code, printed) = check(&file, &outside);
    assert_eq!(code, Some(0), "{printed}");
    let (code, printed) = check(&file, &[]);
    assert!(code == Some(78) && printed.contains("SVC_KEK_FILE is not set"), "{printed}");
    // What the unit passes is found where it passes it from.
    std::fs::copy(&ring, folder.path().join("kek")).unwrap();
    std::fs::copy(&server.certificate_path, folder.path().join("tls.pem")).unwrap();
    std::fs::copy(&server.key_path, folder.path().join("tls.key")).unwrap();
    let of_the_page: Vec<_> = complete
        .into_iter()
        .filter(|(name, _)| !name.starts_with("SVC_TLS_KEY") && !name.starts_with("SVC_TLS_CERT"))
        .collect();
    write(&of_the_page, "");
    let (code, printed) = check(&file, &[]);
    assert_eq!(code, Some(0), "{printed}");

    write(
        &complete[1..],
        "SVC_DATABSE_URL=postgres:///gpuaas\nSVC_NATS_URL=nats.example\nexport SVC_ROLES=api\nSVC_MIGRATE_ON_START=yes\n\
         SVC_HOST_ROLE=lab\nSVC_PUBLIC_LISTEN=8443\nSVC_NODE_LISTEN=0.0.0.0:9464\nRUST_LOG=info\nHTTPS_PROXY=http://proxy.example\n",
    );
    let (code, printed) = check(&file, &outside);
    assert_eq!(code, Some(78), "{printed}");
    for named in [
        "SVC_DATABSE_URL is no setting of `gpuaas serve`; did you mean SVC_DATABASE_URL?",
        "SVC_DATABASE_URL is not set",
        "line 11 sets SVC_NATS_URL, as line 2 does",
        "SVC_NATS_URL is no URL",
        "line 12 begins with `export`",
        "SVC_MIGRATE_ON_START is \"yes\"; it must be true or false",
        "SVC_PUBLIC_LISTEN is \"8443\"",
        "SVC_NODE_LISTEN is 0.0.0.0:9464 and SVC_OPERATIONS_LISTEN is 127.0.0.1:9464",
        "\"lab\"",
    ] {
        assert_eq!(printed.matches(named).count(), 1, "{named}: {printed}");
    }
    assert!(printed.contains("the configuration has 9 problems") && !printed.contains("hunter2"), "{printed}");

    let (code, printed) = check(&folder.path().join("absent.env"), &outside);
    assert!(code == Some(78) && printed.contains("cannot be read"), "{printed}");
}

/// What a package installs is what an operator edits first.
#[test]
fn settings_of_the_debian_package_have_no_unknown_name() {
    let text = std::fs::read_to_string(root().join("deploy/debian/gpuaas/gpuaas.env")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gpuaas.env");
    std::fs::write(&file, text.replace("\n#SVC_", "\nSVC_")).unwrap();
    let (_, printed) = check(&file, &[]);
    assert!(printed.contains("SVC_KEK_FILE is not set") && !printed.contains("no setting of"), "{printed}");
}
