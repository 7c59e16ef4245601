use super::*;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};
use uuid::Uuid;
use wire::bundle::Package;

/// Values that a shell, a file format or a terminal could take for more than text.
const HOSTILE: [&str; 8] = [
    "$(touch HIT)",
    "`touch HIT`",
    "'; touch HIT; '",
    "\"; touch HIT; \"",
    "-rf\ntouch HIT\r\nHIT=1",
    "\\' touch HIT #",
    "--\u{2028}touch HIT\u{2028}",
    "%s%n ${HIT:=1} ~ *",
];

/// `env_file` and `unit` where the package puts them.
fn installed(bundle: BootstrapBundle, env_file: &str, unit: &str) -> BootstrapBundle {
    let package = Package {
        env_file_path: Some(env_file.to_owned()),
        systemd_unit_name: Some(unit.to_owned()),
        ..Package::default()
    };
    BootstrapBundle { package, ..bundle }
}

fn bundle(folder: &Path, api_url: &str, ca_pem: &str) -> BootstrapBundle {
    let at = |name: &str| folder.join("state").join(name).to_str().unwrap().to_owned();
    BootstrapBundle {
        node_id: Uuid::from_u128(5),
        enrollment_token: SecretToken::new("gpuenr_x"),
        api_url: api_url.to_owned(),
        task_signing_pubkeys: api_url.to_owned(),
        ca_bundle_path: at("ca.pem"),
        node_cert_ca_bundle_path: at("node-ca.pem"),
        cert_path: at("node.pem"),
        key_path: at("node.key"),
        ca_bundle_pem: ca_pem.to_owned(),
        ca_bundle_fingerprint: fingerprint(ca_pem),
        package: Package::default(),
    }
}

/// A machine whose systemctl records its arguments, and where the test's user is root.
fn run(folder: &Path, script: &str) -> Output {
    let programs = folder.join("bin");
    fs::create_dir_all(&programs).unwrap();
    let asked = folder.join("asked");
    for (name, body) in [("systemctl", format!("echo \"$@\" >>'{}'", asked.display())), ("id", "echo 0".to_owned())] {
        let path = programs.join(name);
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    Command::new("sh").args(["-c", script]).env("PATH", path).current_dir(folder).output().unwrap()
}

/// Every file under a folder by its name, with its mode and content.
fn files(folder: &Path) -> BTreeMap<String, (u32, String)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
            found.insert(path.display().to_string(), (mode, fs::read_to_string(&path).unwrap()));
        }
    }
    found
}

#[test]
fn the_script_sets_a_machine_up_and_can_be_run_twice() {
    let folder = tempfile::tempdir().unwrap();
    let env_file = folder.path().join("etc/agent.env");
    let bundle = bundle(folder.path(), "https://nodes.example", "PEM\n");
    let bundle = installed(bundle, env_file.to_str().unwrap(), "agent.service");
    let script = bootstrap_script(&bundle).unwrap();
    fs::create_dir(folder.path().join("state")).unwrap();
    fs::write(&bundle.cert_path, "old").unwrap();
    let mut seen = Vec::new();
    for _ in 0..2 {
        let ran = run(folder.path(), &script);
        assert!(ran.status.success(), "{ran:?}");
        fs::write(&bundle.key_path, "of the last run").unwrap();
        seen.push(files(folder.path()).into_iter().filter(|(name, _)| !name.ends_with("asked")).collect::<Vec<_>>());
    }
    assert_eq!(seen[0], seen[1]);
    assert_eq!(files(&folder.path().join("etc"))[env_file.to_str().unwrap()], (0o600, bundle.to_env_file().unwrap()));
    assert_eq!(files(folder.path())[&bundle.ca_bundle_path], (0o644, "PEM\n".to_owned()));
    assert!(!Path::new(&bundle.cert_path).exists());
    assert!(fs::read_to_string(folder.path().join("asked")).unwrap().contains("restart -- agent.service"));
}

#[test]
fn script_stops_before_writing_on_a_foreign_ca_bundle() {
    let folder = tempfile::tempdir().unwrap();
    let env_file = folder.path().join("etc/agent.env");
    let bundle = bundle(folder.path(), "https://nodes.example", "PEM\n");
    let mut bundle = installed(bundle, env_file.to_str().unwrap(), "u");
    bundle.ca_bundle_pem = "another".to_owned();
    let ran = run(folder.path(), &bootstrap_script(&bundle).unwrap());
    assert!(!ran.status.success() && String::from_utf8_lossy(&ran.stderr).contains("fingerprint"));
    assert!(!env_file.exists() && !Path::new(&bundle.ca_bundle_path).exists());
}

#[test]
fn values_are_never_executed_in_the_script_or_the_command() {
    for hostile in HOSTILE {
        let folder = tempfile::tempdir().unwrap();
        // A folder of that name, as far as a name can be it.
        let place = folder.path().join(hostile.replace('/', "_"));
        let env_file = place.join("etc/agent.env").to_str().unwrap().to_owned();
        let bundle = installed(bundle(&place, hostile, hostile), &env_file, hostile);
        let ran = run(folder.path(), &bootstrap_script(&bundle).unwrap());
        assert!(ran.status.success(), "{hostile:?}: {}", String::from_utf8_lossy(&ran.stderr));
        assert_eq!(fs::read_to_string(&env_file).unwrap(), bundle.to_env_file().unwrap());
        let read = BootstrapBundle::from_env_file(&fs::read_to_string(&env_file).unwrap()).unwrap();
        assert_eq!((read.api_url.as_str(), read.ca_bundle_pem.as_str()), (hostile, hostile));

        fs::write(&bundle.key_path, "old").unwrap();
        let renewed = BootstrapBundle { enrollment_token: SecretToken::new("gpuenr_y"), ..bundle.clone() };
        let ran = run(folder.path(), &restart_command(&renewed).unwrap());
        assert!(ran.status.success(), "{hostile:?}: {}", String::from_utf8_lossy(&ran.stderr));
        let read = BootstrapBundle::from_env_file(&fs::read_to_string(&env_file).unwrap()).unwrap();
        assert_eq!(read.enrollment_token.expose(), "gpuenr_y");
        assert_eq!(read.api_url, hostile);
        assert!(!Path::new(&bundle.key_path).exists());
        let hit = files(folder.path()).into_keys().find(|name| name.ends_with("/HIT"));
        assert_eq!(hit, None, "{hostile:?}");
    }
}

#[test]
fn command_that_cannot_write_the_token_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let env_file = folder.path().join("etc/agent.env");
    let bundle = installed(bundle(folder.path(), "https://nodes.example", "PEM\n"), env_file.to_str().unwrap(), "u");
    fs::create_dir_all(folder.path().join("state")).unwrap();
    fs::write(&bundle.key_path, "key").unwrap();
    let command = restart_command(&bundle).unwrap();
    // A machine that was never set up; then one whose file cannot be replaced.
    for is_there in [false, true] {
        if is_there {
            fs::create_dir(folder.path().join("etc")).unwrap();
            fs::write(&env_file, "SVC_API_URL='x'\n").unwrap();
            fs::create_dir(folder.path().join("etc/agent.env.new")).unwrap();
        }
        assert!(!run(folder.path(), &command).status.success());
        assert_eq!(fs::read_to_string(&bundle.key_path).unwrap(), "key");
        assert!(!folder.path().join("asked").exists(), "nothing is restarted");
    }
    assert_eq!(fs::read_to_string(&env_file).unwrap(), "SVC_API_URL='x'\n");
}

#[test]
fn configured_package_is_in_the_bundle_with_its_target_paths() {
    let folder = tempfile::tempdir().unwrap();
    let plain = bundle(folder.path(), "https://nodes.example", "PEM\n");
    let package = serde_json::to_value(&plain).unwrap()["package"].clone();
    assert_eq!(package.as_object().unwrap().len(), 9);
    assert!(package.as_object().unwrap().values().all(serde_json::Value::is_null), "{package}");
    let (script, command) = (bootstrap_script(&plain).unwrap(), restart_command(&plain).unwrap());
    assert!(script.contains("env_file='/etc/gpuaas/agent.env'") && command.contains("/etc/gpuaas/agent.env"));
    let configured = installed(plain, "/srv/agent.env", "rented.service");
    assert_eq!(serde_json::to_value(&configured).unwrap()["package"]["env_file_path"], "/srv/agent.env");
    assert!(configured.to_env_file().unwrap().contains("SVC_NODE_AGENT_SYSTEMD_UNIT='rented.service'"));
    let (script, command) = (bootstrap_script(&configured).unwrap(), restart_command(&configured).unwrap());
    assert!(script.contains("env_file='/srv/agent.env'") && script.contains("unit='rented.service'"));
    assert!(command.contains("/srv/agent.env") && command.contains("rented.service"));
}

/// A first program that is a shell script, which runs on any machine.
fn first_program(body: &str) -> FirstProgram {
    use base64::Engine as _;
    use std::io::Write as _;
    let text = format!("#!/bin/sh\n{body}\n");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(text.as_bytes()).unwrap();
    let encoded = base64::engine::general_purpose::STANDARD.encode(gzip.finish().unwrap());
    let sha256 = hex::encode(<sha2::Sha256 as sha2::Digest>::digest(text.as_bytes()));
    FirstProgram { encoded: format!("{encoded}\n").into(), sha256, machine: std::env::consts::ARCH }
}

#[test]
fn package_script_runs_its_first_program_before_it_touches_anything() {
    let folder = tempfile::tempdir().unwrap();
    let env_file = folder.path().join("etc/agent.env");
    let bundle = bundle(folder.path(), "https://nodes.example", "PEM\n");
    let mut bundle = installed(bundle, env_file.to_str().unwrap(), "agent.service");
    let install_root = folder.path().join("opt").display().to_string();
    bundle.package.install_root = Some(install_root.clone());
    fs::create_dir(folder.path().join("state")).unwrap();
    fs::write(&bundle.key_path, "old").unwrap();
    let is_untouched = |ran: &Output, named: &str| {
        let printed = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(!ran.status.success() && printed.contains(named), "{named}: {printed}");
        assert_eq!(fs::read_to_string(&bundle.key_path).unwrap(), "old");
        assert!(
            !env_file.exists() && !folder.path().join("asked").exists() && !Path::new(&bundle.ca_bundle_path).exists()
        );
        assert_eq!(fs::read_dir(&install_root).map_or(0, Iterator::count), 0, "nothing is left");
    };
    let failing = package_script(&bundle, &first_program("echo its reason >&2; exit 1")).unwrap();
    is_untouched(&run(folder.path(), &failing), "its reason");
    let good = first_program("cat \"$2\" >seen; echo \"$1 $3\" >>seen; cat >>seen");
    let altered = FirstProgram { sha256: "0".repeat(64), ..good.clone() };
    is_untouched(&run(folder.path(), &package_script(&bundle, &altered).unwrap()), "not whole");
    let half = format!("{}\n", &good.encoded[..good.encoded.len() / 2]);
    let cut = FirstProgram { encoded: half.into(), ..good.clone() };
    is_untouched(&run(folder.path(), &package_script(&bundle, &cut).unwrap()), "cannot be unpacked");
    let whole = package_script(&bundle, &good).unwrap();
    for lacking in [2, 60, 300, 900] {
        is_untouched(&run(folder.path(), &whole[..whole.len() - lacking]), "");
    }
    let foreign = FirstProgram { machine: "riscv64", ..good.clone() };
    is_untouched(&run(folder.path(), &package_script(&bundle, &foreign).unwrap()), "riscv64");
    assert!(!folder.path().join("seen").exists());

    let ran = run(folder.path(), &package_script(&bundle, &good).unwrap());
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let seen = fs::read_to_string(folder.path().join("seen")).unwrap();
    assert_eq!(seen, format!("{}--env-file --first-install\n", bundle.to_env_file().unwrap()));
    assert_eq!(fs::read_to_string(&env_file).unwrap(), bundle.to_env_file().unwrap());
    assert!(!Path::new(&bundle.key_path).exists());
    let asked = fs::read_to_string(folder.path().join("asked")).unwrap();
    assert_eq!(asked, "daemon-reload\nenable --quiet -- agent.service\nrestart -- agent.service\n");
    assert_eq!(fs::read_dir(&install_root).unwrap().count(), 0, "the first program is removed");
}

#[test]
fn values_are_never_executed_in_the_script_with_a_package() {
    for hostile in HOSTILE {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join(hostile.replace('/', "_"));
        let env_file = place.join("etc/agent.env").to_str().unwrap().to_owned();
        let mut bundle = installed(bundle(&place, hostile, hostile), &env_file, hostile);
        bundle.package.install_root = Some(place.join("opt").to_str().unwrap().to_owned());
        bundle.package.release_keys = Some(hostile.to_owned());
        let ran = run(folder.path(), &package_script(&bundle, &first_program("exit 0")).unwrap());
        assert!(ran.status.success(), "{hostile:?}: {}", String::from_utf8_lossy(&ran.stderr));
        assert_eq!(fs::read_to_string(&env_file).unwrap(), bundle.to_env_file().unwrap());
        let hit = files(folder.path()).into_keys().find(|name| name.ends_with("/HIT"));
        assert_eq!(hit, None, "{hostile:?}");
    }
}

#[test]
fn a_nul_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert!(bootstrap_script(&bundle(folder.path(), "a\0b", "x")).is_err());
    let mut with_nul = bundle(folder.path(), "a", "x");
    with_nul.cert_path = "a\0b".to_owned();
    assert!(restart_command(&with_nul).is_err());
}
