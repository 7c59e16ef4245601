//! `deploy/kubernetes`, as Debian's kubectl renders it: valid in three releases of Kubernetes, within the Pod Security Standard *restricted*, and
//! consistent in itself and with the program.

mod page;
mod pod_security;
mod pods;

use crate::external_tools::{installed, root, run};
use serde_json::Value;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// The releases whose schemas are checked.
const RELEASES: [&str; 3] = ["1.35", "1.36", "1.37"];
/// What the Prometheus operator defines, of which Kubernetes has no schema.
const OF_PROMETHEUS: &str = "monitoring.coreos.com/v1";
/// How the pods are distributed, and what is added to either.
const OVERLAYS: [&str; 3] = ["single-replica", "three-replicas", "split-roles"];
const ADDITIONS: [&str; 3] = ["monitoring", "network-policies", "migrate"];
/// Files of an operator's secrets.
const SECRETS: [&str; 4] = ["gpuaas", "gpuaas-nats-api", "gpuaas-nats-nodes", "gpuaas-nats-entities"];

/// What an operator has of these folders: their resources, in a namespace, with an image and secrets.
async fn site(folders: &[&str]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let manifests = root().join("deploy/kubernetes");
    // A base has to be named relative to its site.
    std::os::unix::fs::symlink(&manifests, folder.path().join("kubernetes")).unwrap();
    let site = folder.path().join("site");
    std::fs::create_dir(&site).unwrap();
    let mut text = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: gpuaas\nimages:\n- name: gpuaas\n  \
        newName: registry.example/gpuaas\n  newTag: 0.1.0\nbases:\n"
        .to_owned();
    folders.iter().for_each(|name| text += &format!("- ../kubernetes/{name}\n"));
    text += "secretGenerator:\n";
    for name in SECRETS {
        text += &format!("- name: {name}\n  files:\n  - gpuaas.env\n");
    }
    std::fs::write(site.join("kustomization.yaml"), text).unwrap();
    std::fs::write(site.join("gpuaas.env"), "SVC_PUBLIC_URL=https://gpuaas.example\n").unwrap();
    let mut kubectl = Command::new(installed("kubernetes/kubectl"));
    kubectl.arg("kustomize").arg(&site);
    let rendered = run(kubectl).await;
    (folder, rendered)
}

/// The resources of rendered YAML.
fn resources(yaml: &str) -> Vec<Value> {
    let mut python = Command::new(installed("kubernetes-validate/bin/python"));
    python.args(["-c", "import json, sys, yaml; json.dump(list(yaml.safe_load_all(sys.stdin)), sys.stdout)"]);
    let mut child = python.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(yaml.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "it is no YAML: {yaml}");
    let found: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert!(!found.is_empty(), "{yaml}");
    found
}

async fn rendered(folders: &[&str]) -> Vec<Value> {
    resources(&site(folders).await.1)
}

/// The only resource of this kind and name.
fn find<'a>(resources: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = resources.iter().find(|it| it["kind"] == kind && it["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("there is no {kind} {name}"))
}

/// The exit status and the output of the check of a file against the schemas of a release.
async fn check_schemas(release: &str, file: &Path) -> Result<(), String> {
    let mut check = Command::new(installed("kubernetes-validate/bin/kubernetes-validate"));
    check.args(["--strict", "--kubernetes-version", release]).arg(file);
    let output = tokio::task::spawn_blocking(move || check.output()).await.unwrap().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&printed).into_owned()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_overlay_is_valid_in_three_releases_and_admitted_as_restricted() {
    let folder = tempfile::tempdir().unwrap();
    let mut all = Vec::new();
    for overlay in OVERLAYS {
        let added: &[&str] = if overlay == "single-replica" { &ADDITIONS } else { &[] };
        let found = rendered(&[&[overlay], added].concat()).await;
        for it in &found {
            assert_eq!(it["metadata"]["namespace"], "gpuaas", "{it:#}");
            let violations = pod_security::violations(it);
            assert!(violations.is_empty(), "{overlay}: {} {}: {violations:#?}", it["kind"], it["metadata"]["name"]);
        }
        all.extend(found);
    }
    let known: Vec<_> = all.iter().filter(|it| it["apiVersion"] != OF_PROMETHEUS).collect();
    assert_eq!(known.len() + 2, all.len(), "one PodMonitor and one PrometheusRule");
    let write = |name: &str, resources: &[&Value]| {
        let path = folder.path().join(name);
        let documents: Vec<_> = resources.iter().map(ToString::to_string).collect();
        std::fs::write(&path, documents.join("\n---\n")).unwrap();
        path
    };
    let file = write("all.yaml", &known);
    let checks = RELEASES.map(|release| check_schemas(release, &file));
    for (release, checked) in RELEASES.iter().zip(futures::future::join_all(checks).await) {
        checked.unwrap_or_else(|printed| panic!("{release}: {printed}"));
    }
    // It would have found something.
    let mut misspelled = find(&all, "Deployment", "gpuaas").clone();
    misspelled["spec"]["template"]["spec"]["terminationGracePeriod"] = 45.into();
    let refused = check_schemas(RELEASES[0], &write("wrong.yaml", &[&misspelled])).await.unwrap_err();
    assert!(refused.contains("terminationGracePeriod"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_for_the_prometheus_operator_are_the_alerts_that_are_tested() {
    const HEAD: &str = "# The alerts of deploy/alerts for the Prometheus operator. Made by the code: `UPDATE_DOCS=1 cargo test -p tests \
        kubernetes` regenerates it.\napiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: gpuaas\n  labels:\n    \
        app.kubernetes.io/name: gpuaas\nspec:\n  groups:\n";
    let files = std::fs::read_dir(root().join("deploy/alerts")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|it| it == "yaml")).collect();
    files.sort();
    let mut wanted = HEAD.to_owned();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        wanted += text.split_once("\ngroups:\n").unwrap_or_else(|| panic!("{} has no groups", file.display())).1;
    }
    let path = root().join("deploy/kubernetes/monitoring/rules.yaml");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == wanted, "{} is not what deploy/alerts says; regenerate it with UPDATE_DOCS=1", path.display());

    let found = rendered(&["single-replica", "monitoring"]).await;
    let rules = &find(&found, "PrometheusRule", "gpuaas")["spec"];
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.yaml");
    std::fs::write(&file, rules.to_string()).unwrap();
    let mut promtool = Command::new(installed("prometheus/promtool"));
    promtool.args(["check", "rules"]).arg(&file);
    assert!(run(promtool).await.contains("SUCCESS"));
    // The job that the alerts name is the value of a label of the pods, and the port is one of theirs.
    let monitor = &find(&found, "PodMonitor", "gpuaas")["spec"];
    let pod = &find(&found, "Deployment", "gpuaas")["spec"]["template"];
    let label = monitor["jobLabel"].as_str().unwrap();
    assert_eq!(pod["metadata"]["labels"][label], "gpuaas", "{pod:#}");
    assert_eq!(monitor["selector"]["matchLabels"], pod["metadata"]["labels"]);
    assert_eq!(monitor["podMetricsEndpoints"][0]["port"], "operators");
}
