//! The operator's page about MAAS, run word by word against a provider whose deployments boot a machine, whose cloud-init gets the user
//! data, and whose releases throw the machine's disk away.

use super::{IMAGE, MACHINE, with_settings};
use crate::agent_package::bare_machine::static_installer;
use crate::docs_recipes::followed;
use crate::external_tools::tools;
use crate::node_pages::{follow, package, package_settings};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tests::cluster::fake_maas::FakeMaas;
use tests::cluster::{GPU_MEMORY_MIB, NodeHandle, REGION, ssh_public_key};
use tests::package_registry::PackageRegistryServer;
use tests::systemd_container::{Deployment, DiskFile, OTHERS_PORTS, SystemdContainer};
use tokio::task::JoinHandle;

const SKU: &str = "h100x1";
const HOST: &str = "gpu-1";
/// What is left on the disk of the first installation.
const LEFT: &str = "/opt/left";
const DEPLOYED_WITHIN: Duration = Duration::from_secs(180);

/// The machine, while it is deployed.
type Machine = Arc<Mutex<Option<SystemdContainer>>>;

/// Looks at the machine, when its first boot has ended: its agent may report, and its node be active, before that.
fn on<T>(machine: &Machine, look: impl FnOnce(&SystemdContainer) -> T) -> T {
    let until = Instant::now() + DEPLOYED_WITHIN;
    loop {
        if let Some(machine) = machine.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            return look(machine);
        }
        assert!(Instant::now() < until, "the machine is not deployed");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The image: its digest, and one simulated GPU for the agent that the user data installs.
fn image() -> Vec<DiskFile> {
    let start = format!(
        "[Service]\n{OTHERS_PORTS}\nExecStart=\nExecStart=/opt/gpuaas/current/bin/gpuaas-agent --env-file /etc/gpuaas/agent.env \
         --executor system --simulate-gpus 1 --gpu-memory-mib {GPU_MEMORY_MIB}\n"
    );
    vec![
        DiskFile::new("/etc/systemd/system/gpuaas-agent.service.d/program.conf", 0o644, start),
        DiskFile::new("/etc/tmpfiles.d/nvidia.conf", 0o644, "c /dev/nvidia0 0666 - - - 1:3\n"),
        DiskFile::new("/etc/gpuaas/image-digest", 0o644, format!("{IMAGE}\n")),
    ]
}

/// Boots and wipes the machine as its status at the provider says, until it is aborted.
fn provide(maas: Arc<FakeMaas>, machine: Machine) -> JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            let known = maas.machine(MACHINE);
            match known.status {
                "Deploying" => {
                    let user_data = known.deployments.last().cloned().expect("it is deployed");
                    let instance = format!("{MACHINE}-{}", known.deployments.len());
                    let deployment = Deployment { instance, user_data };
                    let boot =
                        move || SystemdContainer::start_from(&tools(), &[], &image(), Some(&deployment)).unwrap();
                    let booted = tokio::task::spawn_blocking(boot).await.unwrap();
                    *machine.lock().unwrap() = booted;
                    maas.change(MACHINE, |machine| machine.status = "Deployed");
                }
                "Disk erasing" => {
                    let erased = machine.lock().unwrap().take();
                    tokio::task::spawn_blocking(move || drop(erased)).await.unwrap();
                    maas.change(MACHINE, |machine| {
                        (machine.status, machine.power, machine.owner) = ("Ready", "off", String::new());
                    });
                }
                _ => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn page_about_maas_holds_word_by_word_with_a_machine_that_boots() {
    let Some(installer) = static_installer() else { return };
    if !SystemdContainer::is_possible(&tools()) {
        return;
    }
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let registry = PackageRegistryServer::start(&tools()).await;
    let package = package("1.3.0", None);
    registry.push(package.folder.path()).await;
    let maas = Arc::new(FakeMaas::start().await);
    maas.add(MACHINE, HOST);
    let folder = tempfile::tempdir().unwrap();
    let settings = package_settings(&registry, &package.digest.to_string(), &installer, folder.path());
    let plan = settings.iter().fold(with_settings(&maas), |plan, (name, value)| plan.variable(name, value));
    let mut cluster = plan.start().await;
    cluster.register_secret("the provider's API key", "secret-of-a-test");
    cluster.offer_sku(SKU, 1).await;
    let checkout = followed(&cluster);
    std::fs::write(checkout.path().join("operators.pub"), ssh_public_key("operators")).unwrap();
    let machine = Machine::default();
    let provider = provide(Arc::clone(&maas), Arc::clone(&machine));
    let names = [("machine", HOST.to_owned()), ("sku", SKU.to_owned()), ("region", REGION.to_owned())];
    let attempt = |code: &str| on(&machine, |machine| machine.attempt(code));
    let page = async |title: &str| follow("maas.md", title, &names, &checkout, &attempt).await;

    page("Set it up").await;
    let printed = page("Bring a machine in").await;
    assert!(printed.contains("status: done") && printed.contains("is set up;"), "{printed}");
    assert!(printed.contains(&package.digest.name()), "{printed}");
    assert!(printed.contains("MAAS deploys the machine") && !printed.contains("nodes script"), "{printed}");
    let is_shown = |title: &str, value: &str| {
        let mut lines = printed.lines().filter_map(|line| line.strip_prefix(title));
        lines.any(|rest| rest.trim() == value)
    };
    assert!(is_shown("machine step", "deploying") || is_shown("machine step", "deployed"), "{printed}");
    assert_eq!((maas.machine(MACHINE).deployments.len(), maas.machine(MACHINE).erasures), (1, 0));

    // The user data stays on the disk.
    let readable = "find / -xdev -type f -perm /044 -exec grep -l SVC_ENROLLMENT_TOKEN= {} + || true";
    assert_eq!(on(&machine, |machine| machine.run(readable)), "", "tenants can read it");
    on(&machine, |machine| machine.run(&format!("touch {LEFT}")));
    let first = on(&machine, |machine| machine.run("cat /etc/machine-id"));
    let reinstalled = page("Reinstall a machine").await;
    assert!(reinstalled.lines().any(|line| line.starts_with("reimage stage")), "{reinstalled}");
    assert_ne!(on(&machine, |machine| machine.run("cat /etc/machine-id")), first);
    on(&machine, |machine| machine.run(&format!("test ! -e {LEFT}")));

    page("full-reimage").await;
    let resolved = "/api/v1/admin/policy-values/resolve?key=allocation.isolation_model";
    cluster.admin.wait_until(resolved, "the policy value holds", |it| it["value"] == "full-reimage").await;
    // The provider takes its time with the disks: the machine is given back before it is installed once more.
    provider.abort();
    let rented = page("A tenant under full-reimage").await;
    for shown in ["released", "quarantined", "The machine is being reinstalled", "releasing", "installation"] {
        assert!(rented.contains(shown), "{shown}: {rented}");
    }
    maas.wait_for(MACHINE, "it is erased after its tenant", |machine| machine.erasures == 2).await;
    let nodes = cluster.admin.get("/api/v1/admin/nodes").await.ok();
    let node = NodeHandle::of(&nodes["items"][0], cluster.admin.clone());
    #[allow(clippy::async_yields_async, reason = "the provider goes on beside the page")]
    let erased = async {
        node.expect_state("removing").await;
        provide(Arc::clone(&maas), Arc::clone(&machine))
    };
    let (_, provider) = tokio::join!(page("Give a machine back"), erased);
    let given_back = maas.machine(MACHINE);
    assert_eq!((given_back.status, given_back.erasures), ("Ready", 2));
    provider.abort();
    for user_data in given_back.deployments {
        let token = user_data.split_once("SVC_ENROLLMENT_TOKEN='\\''").expect("it has a token").1;
        cluster.register_secret("a token", token.split('\'').next().unwrap().trim_end_matches('\\'));
    }
    cluster.shutdown().await;
}
