//! The Pod Security Standard *restricted*, with what it takes over from *baseline*
//! (https://kubernetes.io/docs/concepts/security/pod-security-standards/).

use serde_json::{Value, json};

/// Volumes that *restricted* admits.
const VOLUMES: [&str; 8] =
    ["configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"];
/// Kernel parameters that *baseline* admits.
const SYSCTLS: [&str; 9] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
];
const SELINUX_TYPES: [&str; 4] = ["container_t", "container_init_t", "container_kvm_t", "container_engine_t"];

/// What of a resource's pods the standard refuses. Other resources have none.
pub(super) fn violations(resource: &Value) -> Vec<String> {
    let template = match resource["kind"].as_str() {
        Some("Pod") => resource,
        Some("CronJob") => &resource["spec"]["jobTemplate"]["spec"]["template"],
        Some("Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet" | "Job") => &resource["spec"]["template"],
        _ => return Vec::new(),
    };
    let mut found = Vec::new();
    of_the_pod(template, &mut found);
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for container in items(&template["spec"][list]) {
            of_a_container(&template["spec"], container, &mut found);
        }
    }
    found
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

fn of_the_pod(template: &Value, found: &mut Vec<String>) {
    let (spec, context) = (&template["spec"], &template["spec"]["securityContext"]);
    for name in ["hostNetwork", "hostPID", "hostIPC"] {
        if spec[name] == true {
            found.push(format!("{name} is true"));
        }
    }
    for volume in items(&spec["volumes"]) {
        let sources = volume.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
        found.extend(
            sources.filter(|name| *name != "name" && !VOLUMES.contains(name)).map(|name| format!("a volume is {name}")),
        );
    }
    for sysctl in items(&context["sysctls"]) {
        if !SYSCTLS.iter().any(|safe| sysctl["name"] == *safe) {
            found.push(format!("sysctl {}", sysctl["name"]));
        }
    }
    let annotations = template["metadata"]["annotations"].as_object().into_iter().flatten();
    for (name, value) in annotations.filter(|(name, _)| name.starts_with("container.apparmor.security.beta")) {
        let profile = value.as_str().unwrap_or_default();
        if profile != "runtime/default" && !profile.starts_with("localhost/") {
            found.push(format!("{name} is {profile}"));
        }
    }
    of_a_context("the pod", context, found);
}

fn of_a_container(spec: &Value, container: &Value, found: &mut Vec<String>) {
    let (name, own) = (&container["name"], &container["securityContext"]);
    // The container's own value, else the pod's.
    let effective = |field: &str| if own[field].is_null() { &spec["securityContext"][field] } else { &own[field] };
    of_a_context(&name.to_string(), own, found);
    let mut require = |holds: bool, rule: &str| {
        if !holds {
            found.push(format!("{name}: {rule}"));
        }
    };
    require(own["privileged"] != true, "privileged is true");
    require(own["allowPrivilegeEscalation"] == false, "allowPrivilegeEscalation is not false");
    require(effective("runAsNonRoot") == true, "runAsNonRoot is not true");
    let seccomp = &effective("seccompProfile")["type"];
    require(
        seccomp == "RuntimeDefault" || seccomp == "Localhost",
        "seccompProfile is neither RuntimeDefault nor Localhost",
    );
    require(items(&own["capabilities"]["drop"]).any(|it| it == "ALL"), "capabilities are not dropped");
    require(items(&own["capabilities"]["add"]).all(|it| it == "NET_BIND_SERVICE"), "capabilities are added");
    require(items(&container["ports"]).all(|it| it["hostPort"].as_u64().unwrap_or(0) == 0), "a hostPort");
    require(own["procMount"].is_null() || own["procMount"] == "Default", "procMount is not Default");
    for hook in ["postStart", "preStop"] {
        for action in ["httpGet", "tcpSocket"] {
            require(container["lifecycle"][hook][action]["host"].is_null(), "a hook with a host");
        }
    }
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        for action in ["httpGet", "tcpSocket"] {
            require(container[probe][action]["host"].is_null(), "a probe with a host");
        }
    }
}

/// The rules for the contexts of pods and of containers alike.
fn of_a_context(of: &str, context: &Value, found: &mut Vec<String>) {
    let mut require = |holds: bool, rule: &str| {
        if !holds {
            found.push(format!("{of}: {rule}"));
        }
    };
    require(context["runAsUser"] != 0, "runAsUser is 0");
    require(context["runAsNonRoot"] != false, "runAsNonRoot is false");
    require(context["seccompProfile"]["type"] != "Unconfined", "seccompProfile is Unconfined");
    require(context["windowsOptions"]["hostProcess"] != true, "hostProcess is true");
    require(context["appArmorProfile"]["type"] != "Unconfined", "appArmorProfile is Unconfined");
    let options = &context["seLinuxOptions"];
    let is_known = options["type"].as_str().is_none_or(|it| it.is_empty() || SELINUX_TYPES.contains(&it));
    require(is_known, "seLinuxOptions has another type");
    let is_blank = |name: &str| options[name].as_str().is_none_or(str::is_empty);
    require(is_blank("user") && is_blank("role"), "seLinuxOptions has a user or role");
}

#[test]
fn violations_of_the_standard_are_found() {
    let admitted = json!({
        "kind": "Pod", "metadata": {},
        "spec": {
            "securityContext": { "runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": { "type": "RuntimeDefault" } },
            "containers": [{
                "name": "one",
                "securityContext": { "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } },
                "ports": [{ "containerPort": 1 }],
            }],
            "volumes": [{ "name": "files", "secret": {} }],
        },
    });
    assert_eq!(violations(&admitted), [""; 0]);
    let container = "/spec/containers/0";
    let refused = [
        ("/spec/hostNetwork", json!(true)),
        ("/spec/hostPID", json!(true)),
        ("/spec/hostIPC", json!(true)),
        ("/spec/volumes/0/hostPath", json!({ "path": "/" })),
        ("/spec/securityContext/sysctls", json!([{ "name": "kernel.msgmax", "value": "1" }])),
        ("/spec/securityContext/runAsUser", json!(0)),
        ("/spec/securityContext/runAsNonRoot", json!(false)),
        ("/spec/securityContext/seccompProfile/type", json!("Unconfined")),
        ("/spec/securityContext/seccompProfile/type", json!("Another")),
        ("/spec/securityContext/seLinuxOptions", json!({ "type": "spc_t" })),
        ("/spec/securityContext/seLinuxOptions", json!({ "user": "root" })),
        ("/spec/securityContext/windowsOptions", json!({ "hostProcess": true })),
        ("/spec/securityContext/appArmorProfile", json!({ "type": "Unconfined" })),
        ("/metadata/annotations", json!({ "container.apparmor.security.beta.kubernetes.io/one": "unconfined" })),
        ("/securityContext/privileged", json!(true)),
        ("/securityContext/allowPrivilegeEscalation", json!(true)),
        ("/securityContext/capabilities/drop", json!([])),
        ("/securityContext/capabilities/add", json!(["SYS_PTRACE"])),
        ("/securityContext/procMount", json!("Unmasked")),
        ("/securityContext/runAsUser", json!(0)),
        ("/ports/0/hostPort", json!(80)),
        ("/livenessProbe", json!({ "httpGet": { "host": "metadata.example" } })),
        ("/lifecycle", json!({ "preStop": { "tcpSocket": { "host": "metadata.example" } } })),
    ];
    for (at, value) in refused {
        let at = if at.starts_with("/spec") || at.starts_with("/metadata") {
            at.to_owned()
        } else {
            format!("{container}{at}")
        };
        let mut pod = admitted.clone();
        let (parent, name) = at.rsplit_once('/').unwrap();
        pod.pointer_mut(parent).unwrap_or_else(|| panic!("{parent}"))[name] = value.clone();
        assert!(!violations(&pod).is_empty(), "{at} {value}");
    }
}
