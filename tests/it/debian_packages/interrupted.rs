//! Installations, upgrades and removals that end half-way, and an upgrade while clients write.

use super::{FIRST, SECOND, Site, UNIT};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use supervisors::dev::api::DevApi;
use tests::cluster::sku_body;

const CLIENTS: usize = 4;
/// The files that a first installation makes of templates.
const TEMPLATES: [(&str, &str); 3] =
    [("gpuaas", "gpuaas.env"), ("gpuaas-agent", "log-collector.env"), ("gpuaas-agent", "telemetry-edge.env")];

#[tokio::test(flavor = "multi_thread")]
async fn packages_that_were_interrupted_complete_and_a_busy_upgrade_loses_nothing_acknowledged() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let Some(mut site) = Site::new(&[]).await else { return };
    site.repository.build("@first", FIRST, &["gpuaas", "gpuaas-agent"]).await;
    site.repository.build("@second", SECOND, &["gpuaas"]).await;
    site.add_repository("@first").await;
    site.follow_to_the_end("Use a database on the same machine");

    first_configuration_on_a_full_disk(&site);
    power_lost_before_the_first_configuration(&mut site).await;
    site.it.write_settings("/srv/files/gpuaas.env", &site.it.settings());
    site.follow_to_the_end("Install a replica");
    assert!(site.is_ready().await, "{}", site.it.machine.journal(UNIT));
    busy_upgrade(&site).await;
    power_lost_before_an_upgrade_is_configured(&mut site).await;
    removals_that_are_killed_or_fail(&site);
}

/// The scripts of both packages fail, and their next attempt makes whole files.
fn first_configuration_on_a_full_disk(site: &Site) {
    let machine = &site.it.machine;
    machine.run("mkdir -p /etc/gpuaas && mount -t tmpfs -o size=64k,mode=0755 none /etc/gpuaas");
    machine.run("head -c 1M /dev/zero > /etc/gpuaas/filler 2>/dev/null || true");
    let install = "DEBIAN_FRONTEND=noninteractive apt-get install -y gpuaas gpuaas-agent";
    let printed = machine.attempt(install).unwrap_err();
    assert!(printed.contains("No space left on device"), "{printed}");
    assert_eq!(["gpuaas", "gpuaas-agent"].map(|package| site.status(package)), ["half-configured"; 2], "{printed}");
    machine.run("rm /etc/gpuaas/filler");
    site.follow_to_the_end("Finish an interrupted upgrade");
    site.expect_templates();
    assert_eq!(machine.run("find /etc/gpuaas -name '.*' -type f"), "", "nothing half-made is left");
    site.apt("purge gpuaas gpuaas-agent");
    assert_eq!(machine.run("ls -A /etc/gpuaas"), "");
    machine.run("umount /etc/gpuaas && rmdir /etc/gpuaas");
}

async fn power_lost_before_the_first_configuration(site: &mut Site) {
    let unpack = format!("cd /srv/files && apt-get download gpuaas={FIRST} && dpkg --unpack ./gpuaas_{FIRST}_*.deb");
    site.it.machine.run(&unpack);
    site.it.machine.lose_power().await;
    assert_eq!(site.status("gpuaas"), "unpacked");
    site.follow_to_the_end("Finish an interrupted upgrade");
    site.it.machine.run("cmp /usr/share/gpuaas/gpuaas.env /etc/gpuaas/gpuaas.env");
    let enabled = site.it.machine.attempt("systemctl is-enabled gpuaas").unwrap_or_else(|printed| printed);
    assert!(enabled.starts_with("disabled"), "{enabled}");
}

/// Clients create SKUs, each again under its key until it is answered.
async fn create(api: DevApi, client: usize, is_over: Arc<AtomicBool>) -> Vec<String> {
    let mut created = Vec::new();
    for number in 0.. {
        let sku = sku_body(&format!("sku-{client}-{number}"), 1);
        let answer =
            api.post("/api/v1/admin/skus", &sku).await.unwrap_or_else(|error| panic!("sku {number}: {error:#}"));
        created.push(answer["id"].as_str().unwrap().to_owned());
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    created
}

async fn busy_upgrade(site: &Site) {
    let is_over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> =
        (0..CLIENTS).map(|client| tokio::spawn(create(site.it.api("admin"), client, Arc::clone(&is_over)))).collect();
    site.repository.publish("@second").await;
    tokio::task::block_in_place(|| site.follow_to_the_end("Upgrade"));
    assert_eq!(site.installed_version("gpuaas"), SECOND);
    is_over.store(true, Ordering::Relaxed);
    let admin = site.it.api("admin");
    for client in clients {
        let created = client.await.unwrap();
        assert!(created.len() > 1, "each client was answered before and after: {created:?}");
        for sku in created {
            admin.get(&format!("/api/v1/admin/skus/{sku}")).await.unwrap();
        }
    }
}

/// The new program is in its place, and nothing was told to use it: the next boot does.
async fn power_lost_before_an_upgrade_is_configured(site: &mut Site) {
    site.apt(&format!("install --allow-downgrades gpuaas={FIRST}"));
    let unpack = format!("cd /srv/files && apt-get download gpuaas={SECOND} && dpkg --unpack ./gpuaas_{SECOND}_*.deb");
    site.it.machine.run(&unpack);
    assert!(site.is_ready().await, "the release before serves on");
    site.it.machine.lose_power().await;
    site.it.machine.expect_property(UNIT, "ActiveState", "active").await;
    assert!(site.is_ready().await, "{}", site.it.machine.journal(UNIT));
    assert_eq!(site.status("gpuaas"), "unpacked");
    site.follow_to_the_end("Finish an interrupted upgrade");
    assert_eq!((site.installed_version("gpuaas").as_str(), site.it.machine.run("dpkg --audit").as_str()), (SECOND, ""));
    assert!(site.is_ready().await, "{}", site.it.machine.journal(UNIT));
}

fn removals_that_are_killed_or_fail(site: &Site) {
    let machine = &site.it.machine;
    for pause in ["0.02", "0.2"] {
        machine.run(&format!("dpkg --remove gpuaas >/dev/null 2>&1 & sleep {pause}; kill -KILL $! || true; wait"));
        machine.run("dpkg --configure -a");
        site.apt("remove gpuaas");
        assert_eq!(site.status("gpuaas"), "config-files", "after {pause} s");
        assert_eq!(machine.property(UNIT, "ActiveState"), "inactive", "after {pause} s");
        site.apt("install gpuaas");
        assert_eq!(machine.run("systemctl is-enabled gpuaas"), "enabled\n", "after {pause} s");
    }
    // The settings cannot be removed, and then they can.
    machine.run("mount --bind /etc/gpuaas/gpuaas.env /etc/gpuaas/gpuaas.env");
    machine.attempt("apt-get purge -y gpuaas").unwrap_err();
    machine.run("umount /etc/gpuaas/gpuaas.env");
    site.apt("purge gpuaas");
    machine.run("test ! -e /etc/gpuaas/gpuaas.env && test -s /etc/gpuaas/kek");
    machine.attempt("dpkg-query -W gpuaas").unwrap_err();
}

impl Site {
    /// How far `dpkg` has come with a package.
    fn status(&self, package: &str) -> String {
        self.it.machine.run(&format!("dpkg-query -W -f '${{db:Status-Status}}' {package}"))
    }

    fn expect_templates(&self) {
        for (package, file) in TEMPLATES {
            self.it.machine.run(&format!("cmp /usr/share/{package}/{file} /etc/gpuaas/{file}"));
        }
    }
}
