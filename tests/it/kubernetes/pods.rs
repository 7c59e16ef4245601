//! The pods of `deploy/kubernetes`, and what is connected to them by names and numbers.

use super::{OVERLAYS, find, rendered};
use crate::external_tools::root;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use supervisors::config::settings_table;
use supervisors::exit_status;
use supervisors::process_roles::{ProcessRole, parse_roles};
use supervisors::shutdown::SHUTDOWN_TIMEOUT;

/// What the ordered end of a pod may take beside that of its process.
const SPARE: Duration = Duration::from_secs(10);
const SPLIT: [&str; 3] = ["api", "nodes", "entities"];

fn pods(resources: &[Value]) -> Vec<&Value> {
    resources.iter().filter(|it| it["kind"] == "Deployment").map(|it| &it["spec"]["template"]).collect()
}

fn container(pod: &Value) -> &Value {
    &pod["spec"]["containers"][0]
}

/// The entry of a list by its name.
fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    let found = list.as_array().unwrap().iter().find(|it| it["name"] == name);
    found.unwrap_or_else(|| panic!("there is no {name} in {list:#}"))
}

fn is_selected(selector: &Value, pod: &Value) -> bool {
    selector.as_object().unwrap().iter().all(|(label, value)| pod["metadata"]["labels"][label] == *value)
}

fn roles(pod: &Value) -> BTreeSet<ProcessRole> {
    let variables = container(pod)["env"].as_array().unwrap();
    let roles = variables.iter().find(|it| it["name"] == "SVC_ROLES").map_or("all", |it| it["value"].as_str().unwrap());
    parse_roles(roles).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_ends_in_order_within_its_grace_period_and_no_replica_is_missed_in_an_update() {
    for overlay in OVERLAYS {
        let found = rendered(&[overlay]).await;
        for deployment in found.iter().filter(|it| it["kind"] == "Deployment") {
            let pod = &deployment["spec"]["template"];
            let seconds = |value: &Value| Duration::from_secs(value.as_u64().unwrap());
            let pause = seconds(&container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]);
            let grace = seconds(&pod["spec"]["terminationGracePeriodSeconds"]);
            assert!(grace >= pause + SHUTDOWN_TIMEOUT + SPARE, "{overlay}: {grace:?}");
            let strategy = &deployment["spec"]["strategy"]["rollingUpdate"];
            assert_eq!((&strategy["maxUnavailable"], &strategy["maxSurge"]), (&json!(0), &json!(1)), "{overlay}");
            assert_eq!(deployment["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"], "{overlay}");
        }
        let budget = &find(&found, "PodDisruptionBudget", "gpuaas")["spec"];
        assert!(pods(&found).into_iter().all(|pod| is_selected(&budget["selector"]["matchLabels"], pod)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn split_roles_are_the_pods_of_the_base_with_all_roles_once() {
    let (one, split) = (rendered(&["single-replica"]).await, rendered(&["split-roles"]).await);
    let mut all = Vec::new();
    for name in SPLIT {
        let mut own = find(&split, "Deployment", &format!("gpuaas-{name}")).clone();
        all.extend(roles(&own["spec"]["template"]));
        let secret = named(&own["spec"]["template"]["spec"]["volumes"], "nats")["secret"]["secretName"].clone();
        assert!(secret.as_str().unwrap().starts_with(&format!("gpuaas-nats-{name}-")), "{secret}");

        // Without what is its own, it is that of the base.
        let base = find(&one, "Deployment", "gpuaas");
        own["metadata"]["name"] = "gpuaas".into();
        own["spec"]["replicas"] = base["spec"]["replicas"].clone();
        for labels in ["/metadata/labels", "/spec/selector/matchLabels", "/spec/template/metadata/labels"]
            .into_iter()
            .chain(["/spec/template/spec/topologySpreadConstraints/0/labelSelector/matchLabels"])
        {
            let removed =
                own.pointer_mut(labels).unwrap().as_object_mut().unwrap().remove("app.kubernetes.io/component");
            assert_eq!(removed, Some(name.into()), "{labels}");
        }
        let pod = &mut own["spec"]["template"]["spec"];
        let keep = |list: &mut Value, extra: &str| list.as_array_mut().unwrap().retain(|it| it["name"] != extra);
        keep(&mut pod["volumes"], "nats");
        keep(&mut pod["containers"][0]["volumeMounts"], "nats");
        keep(&mut pod["containers"][0]["env"], "SVC_ROLES");
        for variable in pod["containers"][0]["env"].as_array_mut().unwrap() {
            if variable["name"] == "SVC_ENV_FILE" {
                assert_eq!(variable["value"], "/etc/gpuaas/gpuaas.env:/etc/gpuaas-nats/nats.env");
                variable["value"] = "/etc/gpuaas/gpuaas.env".into();
            }
        }
        assert_eq!(&own, base, "{name}");
    }
    let count = all.len();
    assert_eq!(all.into_iter().collect::<BTreeSet<_>>(), ProcessRole::ALL.into());
    assert_eq!(count, ProcessRole::ALL.len(), "a role is there twice");
}

/// Settings that name this service itself, or what browsers alone load.
const NOT_CONNECTED_TO: [&str; 4] =
    ["SVC_PUBLIC_URL", "SVC_NODE_PUBLIC_URL", "SVC_TERMINAL_URL", "SVC_PAYMENTS_SCRIPT_URL"];

#[tokio::test(flavor = "multi_thread")]
async fn pods_may_connect_to_every_server_that_a_setting_names_also_in_the_cluster() {
    let found = rendered(&["single-replica", "network-policies"]).await;
    let rule = &find(&found, "NetworkPolicy", "gpuaas")["spec"]["egress"][1];
    assert!(rule["to"].as_array().unwrap().contains(&json!({ "namespaceSelector": {} })), "{rule:#}");
    let admitted: BTreeSet<u64> =
        rule["ports"].as_array().unwrap().iter().map(|port| port["port"].as_u64().unwrap()).collect();

    let page = std::fs::read_to_string(root().join("deploy/docs/src/operator/kubernetes.md")).unwrap();
    let table: Vec<_> = page.lines().skip_while(|line| *line != "| port | of what |").skip(2).collect();
    let rows = || table.iter().map_while(|line| line.strip_prefix("| ")?.split_once(" | "));
    let ports: BTreeSet<u64> =
        rows().flat_map(|(ports, _)| ports.split(", ")).map(|port| port.parse().unwrap()).collect();
    assert_eq!(admitted, ports, "the page has the ports of the policy");

    let names_a_server = |name: &&str| {
        ["_URL", "_ENDPOINT", "_ISSUER", "_API_BASE", "_OCI_REF"].iter().any(|end| name.ends_with(end))
            && !NOT_CONNECTED_TO.contains(name)
    };
    let has_row = |name: &&str| rows().any(|(_, what)| what.contains(&format!("`{name}`")));
    let missing: Vec<_> = settings_table::names().filter(names_a_server).filter(|name| !has_row(name)).collect();
    assert!(missing.is_empty(), "no port of the page's table is for {missing:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_and_what_is_connected_to_them_agree_in_names_and_ports() {
    for overlay in OVERLAYS {
        let found = rendered(&[overlay, "network-policies"]).await;
        for pod in pods(&found) {
            let it = container(pod);
            for variable in it["env"].as_array().unwrap() {
                let name = variable["name"].as_str().unwrap();
                assert!(settings_table::is_known(name), "{name} is no setting");
            }
            // The files that the settings name are mounted, and their folder may not be written.
            let mounts: Vec<_> = it["volumeMounts"].as_array().unwrap().iter().collect();
            for path in it["env"].as_array().unwrap().iter().filter_map(|it| it["value"].as_str()) {
                for path in path.split(':').filter(|path| path.starts_with('/')) {
                    let mount = mounts
                        .iter()
                        .find(|mount| path.starts_with(&format!("{}/", mount["mountPath"].as_str().unwrap())));
                    assert!(mount.is_some_and(|mount| mount["readOnly"] == true), "{path}");
                }
            }
            for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
                assert_eq!(it[probe]["httpGet"]["port"], "operators", "{probe}");
            }
            let open = &find(&found, "NetworkPolicy", "gpuaas")["spec"];
            assert!(is_selected(&open["podSelector"]["matchLabels"], pod));
            let admitted: BTreeSet<u64> = (0..2)
                .flat_map(|rule| open["ingress"][rule]["ports"].as_array().unwrap())
                .map(|port| port["port"].as_u64().unwrap())
                .collect();
            let ports = it["ports"].as_array().unwrap().iter().map(|port| port["containerPort"].as_u64().unwrap());
            assert_eq!(admitted, ports.collect());
            let operators = &open["ingress"][1];
            assert_eq!(operators["ports"], json!([{ "port": named(&it["ports"], "operators")["containerPort"] }]));
            assert_eq!(
                operators["from"].as_array().unwrap().len(),
                1,
                "the operators' port is for the monitoring alone"
            );
        }
        // A service sends to pods with the role that it is for, and to no others.
        for (service, wanted) in [
            ("gpuaas-public", &[ProcessRole::Api, ProcessRole::TerminalGateway, ProcessRole::Webhook][..]),
            ("gpuaas-nodes", &[ProcessRole::NodeApi, ProcessRole::NodeLogGateway]),
        ] {
            let service = &find(&found, "Service", service)["spec"];
            for pod in pods(&found) {
                let has = wanted.iter().all(|role| roles(pod).contains(role));
                assert_eq!(is_selected(&service["selector"], pod), has, "{overlay}: {service:#}");
                for port in service["ports"].as_array().unwrap() {
                    named(&container(pod)["ports"], port["targetPort"].as_str().unwrap());
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn migration_is_not_repeated_where_an_operator_has_to_act() {
    let found = rendered(&["migrate"]).await;
    let job = &find(&found, "Job", "gpuaas-migrate")["spec"];
    let rule = &job["podFailurePolicy"]["rules"][0];
    let codes: Vec<u64> = serde_json::from_value(rule["onExitCodes"]["values"].clone()).unwrap();
    assert_eq!(rule["action"], "FailJob");
    assert_eq!(codes, [exit_status::WAITS, exit_status::CONFIGURATION].map(u64::from));
    let pod = &job["template"]["spec"];
    assert_eq!(pod["restartPolicy"], "Never", "Kubernetes wants it with a failure policy");
    assert_eq!(pod["containers"][0]["args"], json!(["migrate", "--expand"]));
    // The pods expand nothing themselves.
    let one = rendered(&["single-replica"]).await;
    assert_eq!(named(&container(pods(&one)[0])["env"], "SVC_MIGRATE_ON_START")["value"], "false");
}
