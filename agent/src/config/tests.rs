use clap::{CommandFactory as _, Parser as _};
use wire::bundle::BootstrapBundle;
use wire::verifier_set::PublicKey;

use super::system_settings::{DEVICES, HOMES, SHARED, SSH_LISTEN, SUDO_COMMANDS, TENANT_DEVICES, UIDS};
use super::*;

const CA: &str = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";

const LONG_DEVICE: &str = concat!(
    "/dev/",
    "0123456789012345678901234567890123456789012345678901234567890123456789",
    "0123456789012345678901234567890123456789012345678901234567890123456789"
);

fn bundle(folder: &Path) -> BootstrapBundle {
    let key = ed25519_dalek::SigningKey::from_bytes(&[1; 32]);
    let at = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    BootstrapBundle {
        node_id: Uuid::from_u128(5),
        enrollment_token: SecretToken::new("hunter2"),
        api_url: "https://nodes.example.com/".into(),
        task_signing_pubkeys: PublicKey::from(&key).to_string(),
        ca_bundle_path: at("etc/ca.pem"),
        node_cert_ca_bundle_path: at("etc/node-ca.pem"),
        cert_path: at("etc/node.pem"),
        key_path: at("etc/node.key"),
        ca_bundle_pem: CA.into(),
        ca_bundle_fingerprint: fingerprint(CA),
        package: Default::default(),
    }
}

fn gather(folder: &Path, text: &str) -> Result<AgentConfig, AgentConfigError> {
    let path = folder.join("agent.env");
    std::fs::write(&path, text).unwrap();
    let state_dir = Some(folder.join("state"));
    AgentConfig::gather(&Flags { env_file: Some(path), state_dir, max_concurrent_tasks: 1, ..Flags::default() }, |_| {
        None
    })
}

#[test]
fn the_flags_are_consistent() {
    Flags::command().debug_assert();
    for lonely in ["--simulate-provision-delay-ms=5", "--simulate-failure=release"] {
        assert!(Flags::try_parse_from(["gpuaas-agent", lonely]).is_err(), "{lonely} without --simulate-gpus");
        assert!(Flags::try_parse_from(["gpuaas-agent", lonely, "--simulate-gpus=1"]).is_ok());
    }
}

#[test]
fn bundle_environment_file_is_sufficient_and_its_ca_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let config = gather(folder.path(), &bundle(folder.path()).to_env_file().unwrap()).unwrap();
    assert_eq!(config.node_id, Uuid::from_u128(5));
    assert_eq!(config.api_url, "https://nodes.example.com");
    assert_eq!(config.ca_bundle_pem, CA);
    assert_eq!(std::fs::read_to_string(folder.path().join("etc/ca.pem")).unwrap(), CA);
    assert!(!format!("{config:?}").contains("hunter2"));
}

#[test]
fn account_settings_are_accepted_or_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let whole = bundle(folder.path()).to_env_file().unwrap();
    let path = folder.path().join("agent.env");
    std::fs::write(&path, whole).unwrap();
    let gather = |name: &'static str, value: &'static str| {
        let flags = Flags { env_file: Some(path.clone()), executor: ExecutorChoice::System, ..Flags::default() };
        AgentConfig::gather(&flags, |asked| (asked == name).then(|| value.to_owned()))
    };
    let settings = |name, value| gather(name, value).unwrap().system.unwrap();
    assert_eq!(settings("NONE", ""), Settings::default());
    assert_eq!(settings(UIDS, "5000-5009").uids, 5000..=5009);
    assert_eq!(settings(SUDO_COMMANDS, "/bin/a, /bin/b").sudo_commands.len(), 2);
    let further = settings(TENANT_DEVICES, "/dev/fuse, /dev/infiniband/uverbs0,").tenant_devices;
    assert_eq!(further, ["/dev/fuse", "/dev/infiniband/uverbs0"].map(PathBuf::from));
    assert_eq!(settings(SHARED, "/scratch, /data/all").shared, ["/scratch", "/data/all"].map(PathBuf::from));
    for (name, value) in [
        (UIDS, "0-5"),
        (UIDS, "5000"),
        (UIDS, "6000-5000"),
        (UIDS, "5000-4294967295"),
        (SUDO_COMMANDS, "ALL"),
        (SUDO_COMMANDS, "/bin/sh *"),
        (SHARED, "/scratch, data"),
        (SHARED, "/"),
        (HOMES, "home"),
        (DEVICES, "../dev"),
        (TENANT_DEVICES, "fuse"),
        (TENANT_DEVICES, "/dev"),
        (TENANT_DEVICES, "/dev/../etc/shadow"),
        (TENANT_DEVICES, "/dev/x rw"),
        // The control plane takes no longer path.
        (TENANT_DEVICES, LONG_DEVICE),
    ] {
        assert!(
            matches!(gather(name, value), Err(AgentConfigError::Value { name: found, .. }) if found == name),
            "{value}"
        );
    }
}

#[test]
fn a_flag_wins_over_the_environment_and_the_environment_over_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.env");
    std::fs::write(&path, bundle(folder.path()).to_env_file().unwrap()).unwrap();
    let environment = |name: &str| match name {
        "SVC_NODE_AGENT_ENV_FILE" => Some(path.to_str().unwrap().to_owned()),
        "SVC_NODE_ID" => Some(Uuid::from_u128(6).to_string()),
        "SVC_API_URL" => Some("https://environment".to_owned()),
        _ => None,
    };
    let flags = Flags { api_url: Some("https://flag".to_owned()), ..Flags::default() };
    let config = AgentConfig::gather(&flags, environment).unwrap();
    assert_eq!((config.node_id, config.api_url.as_str()), (Uuid::from_u128(6), "https://flag"));
}

#[test]
fn ca_file_that_differs_from_the_bundle_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = bundle(folder.path()).to_env_file().unwrap();
    let altered = BootstrapBundle { ca_bundle_pem: "other".into(), ..bundle(folder.path()) };
    let refused = gather(folder.path(), &altered.to_env_file().unwrap());
    assert!(matches!(refused, Err(AgentConfigError::Fingerprint { .. })));
    assert!(!folder.path().join("etc/ca.pem").exists());
    std::fs::create_dir(folder.path().join("etc")).unwrap();
    std::fs::write(folder.path().join("etc/ca.pem"), "stale").unwrap();
    assert!(matches!(gather(folder.path(), &text), Err(AgentConfigError::Fingerprint { .. })));
}

#[test]
fn all_configuration_problems_are_reported_together() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.env");
    std::fs::write(&path, "SVC_NODE_ID=node-1\n").unwrap();
    let flags = Flags { env_file: Some(path), executor: ExecutorChoice::System, ..Flags::default() };
    let environment = |name: &str| match name {
        UIDS => Some("0-5".to_owned()),
        SSH_LISTEN => Some("2222".to_owned()),
        _ => None,
    };
    let error = AgentConfig::gather(&flags, environment).unwrap_err().to_string();
    for name in ["SVC_NODE_ID", "SVC_API_URL", "SVC_TASK_SIGNING_PUBKEYS", "SVC_CA_BUNDLE_PEM", UIDS, SSH_LISTEN] {
        assert_eq!(error.matches(name).count(), 1, "{name}: {error}");
    }
    assert!(error.starts_with("6 problems: "), "{error}");
}

#[test]
fn missing_or_invalid_settings_are_reported_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let whole = bundle(folder.path()).to_env_file().unwrap();
    let without = |name: &str| {
        let stored: Vec<&str> = whole.lines().filter(|line| !line.starts_with(&format!("{name}="))).collect();
        stored.join("\n")
    };
    for name in ["SVC_NODE_ID", "SVC_API_URL", "SVC_TASK_SIGNING_PUBKEYS"] {
        let error = gather(folder.path(), &without(name)).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("bundle"), "{error}");
    }
    let plain = whole.replace("https://", "http://");
    assert!(matches!(gather(folder.path(), &plain), Err(AgentConfigError::Address { name: "SVC_API_URL", .. })));
    assert!(matches!(gather(folder.path(), "A=$(b)"), Err(AgentConfigError::EnvFile { .. })));
    let flags = Flags { env_file: Some(folder.path().join("absent")), ..Flags::default() };
    assert!(matches!(AgentConfig::gather(&flags, |_| None), Err(AgentConfigError::NoEnvFile(_))));
}
