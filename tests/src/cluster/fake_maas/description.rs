//! MAAS's description of its API, by which python-libmaas knows what there is to call.

use serde_json::{Value, json};

/// The description of what the provider has, at this address.
pub(super) fn describe(base: &str) -> Value {
    let action = |name: &str, method: &str, op: Option<&str>| json!({ "name": name, "method": method, "op": op, "restful": op.is_none(), "doc": "" });
    let resource = |name: &str, path: &str, params: &[&str], actions: Vec<Value>| {
        let (path, uri) = (format!("/MAAS/api/2.0/{path}"), format!("{base}/api/2.0/{path}"));
        let handler =
            json!({ "name": name, "doc": "", "path": path, "uri": uri, "params": params, "actions": actions });
        json!({ "name": name, "auth": handler, "anon": null })
    };
    let users = vec![action("whoami", "GET", Some("whoami"))];
    let machines = vec![action("read", "GET", None), action("allocate", "POST", Some("allocate"))];
    let machine = vec![
        action("read", "GET", None),
        action("deploy", "POST", Some("deploy")),
        action("release", "POST", Some("release")),
        action("mark_broken", "POST", Some("mark_broken")),
    ];
    json!({
        "doc": "MAAS API",
        "hash": "",
        "resources": [
            resource("UsersHandler", "users/", &[], users),
            resource("MachinesHandler", "machines/", &[], machines),
            resource("MachineHandler", "machines/{system_id}/", &["system_id"], machine),
        ],
    })
}
