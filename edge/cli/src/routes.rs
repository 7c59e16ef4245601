//! The routes of the API and the commands that call them. Messages of the service name routes; for users of the command line they are
//! replaced by commands. The test compares the table with the API's description.

/// A route as the API describes it, and a command that calls it. Words in capitals are placeholders.
pub(crate) const COMMANDS: &[(&str, &str)] = &[
    ("GET /api/v1/me", "whoami"),
    ("GET /api/v1/me/sessions", "sessions list"),
    ("POST /api/v1/me/sessions/{id}/end", "sessions end SESSION"),
    ("GET /api/v1/admin/browser-sessions", "sessions list --all"),
    ("POST /api/v1/admin/browser-sessions/{id}/end", "sessions kill SESSION --reason TEXT"),
    ("GET /api/v1/capacity", "capacity"),
    ("GET /api/v1/skus", "skus list"),
    ("GET /api/v1/admin/skus", "skus list --all"),
    (
        "POST /api/v1/admin/skus",
        "skus create NAME --price PRICE --region REGION --gpu-vendor TEXT --gpu-model TEXT --gpu-memory-mib N --gpus N --cpu-model TEXT --cores N --memory-mib N --storage-gib N",
    ),
    ("GET /api/v1/admin/skus/{id}", "skus show SKU"),
    ("PATCH /api/v1/admin/skus/{id}", "skus update SKU --price PRICE"),
    ("POST /api/v1/admin/skus/{id}/activate", "skus activate SKU --reason TEXT"),
    ("POST /api/v1/admin/skus/{id}/deprecate", "skus deprecate SKU --reason TEXT"),
    ("POST /api/v1/admin/skus/{id}/deactivate", "skus deactivate SKU --reason TEXT"),
    ("GET /api/v1/admin/nodes", "nodes list"),
    (
        "POST /api/v1/admin/nodes",
        "nodes create HOST --sku SKU --region REGION --gpus N --ssh-user NAME --ssh-public-key FILE",
    ),
    ("GET /api/v1/admin/nodes/{id}", "nodes show NODE"),
    ("PATCH /api/v1/admin/nodes/{id}", "nodes update NODE --host HOST"),
    ("POST /api/v1/admin/nodes/{id}/enrollment-token", "nodes token NODE"),
    ("POST /api/v1/admin/nodes/{id}/reissue-enrollment", "nodes reissue NODE --reason TEXT"),
    ("POST /api/v1/admin/nodes/{id}/bootstrap-script", "nodes script NODE"),
    ("POST /api/v1/admin/nodes/{id}/retire", "nodes retire NODE --reason TEXT"),
    ("POST /api/v1/admin/nodes/{id}/reactivate", "nodes reactivate NODE --reason TEXT"),
    ("POST /api/v1/admin/nodes/{id}/remove", "nodes remove NODE --reason TEXT"),
    ("POST /api/v1/admin/nodes/{id}/quarantine", "nodes quarantine NODE --reason TEXT"),
    ("POST /api/v1/admin/nodes/{id}/release-quarantine", "nodes release-quarantine NODE --reason TEXT"),
    ("POST /api/v1/admin/nodes/{id}/validate", "nodes validate NODE --reason TEXT"),
    ("POST /api/v1/admin/nodes/{id}/update-agent", "nodes update-agent NODE --reason TEXT"),
    ("POST /api/v1/admin/nodes/{id}/reimage", "nodes reimage NODE --reason TEXT"),
    ("POST /api/v1/admin/nodes/{id}/gpus/{gpu_uuid}/reset", "nodes reset-gpu NODE GPU --reason TEXT"),
    ("POST /api/v1/admin/nodes/{id}/findings/{finding_id}/clear", "nodes clear-finding NODE FINDING --reason TEXT"),
    ("GET /api/v1/admin/nodes/{id}/tasks", "nodes tasks NODE"),
    ("POST /api/v1/admin/nodes/{id}/tasks", "nodes run NODE TASK-TYPE --reason TEXT"),
    ("POST /api/v1/admin/nodes/{id}/tasks/{task_id}/resume", "nodes resume NODE TASK --reason TEXT"),
    ("GET /api/v1/admin/audit-log", "audit list"),
    ("GET /api/v1/allocations", "allocations list"),
    ("POST /api/v1/allocations", "allocations create --sku SKU"),
    ("GET /api/v1/allocations/{id}", "allocations show ALLOCATION"),
    ("PATCH /api/v1/allocations/{id}", "allocations set ALLOCATION --name NAME"),
    ("GET /api/v1/allocations/{id}/events", "allocations events ALLOCATION --follow"),
    ("GET /api/v1/allocations/{id}/telemetry", "allocations telemetry ALLOCATION"),
    ("POST /api/v1/allocations/{id}/release", "allocations release ALLOCATION"),
    ("PUT /api/v1/allocations/{id}/ssh-keys", "allocations ssh-keys ALLOCATION --default"),
    ("POST /api/v1/admin/allocations/{id}/retry-release", "allocations retry-release ALLOCATION --reason TEXT"),
    ("POST /api/v1/admin/allocations/{id}/force-release", "allocations force-release ALLOCATION --reason TEXT"),
    ("POST /api/v1/allocations/{id}/terminal-tokens", "terminal ALLOCATION"),
    ("GET /api/v1/allocations/{id}/terminal-sessions", "terminal sessions list ALLOCATION"),
    ("DELETE /api/v1/allocations/{id}/terminal-sessions/{session_id}", "terminal sessions end ALLOCATION SESSION"),
    ("GET /api/v1/admin/terminal-sessions", "terminal sessions list --all"),
    ("GET /api/v1/admin/terminal-sessions/{id}", "terminal sessions show SESSION"),
    ("POST /api/v1/admin/terminal-sessions/{id}/kill", "terminal sessions kill SESSION --reason TEXT"),
    ("GET /api/v1/allocations/{id}/recordings", "recordings list ALLOCATION"),
    ("GET /api/v1/recordings/{id}", "recordings show RECORDING"),
    ("GET /api/v1/recordings/{id}/asciicast", "recordings download RECORDING --to -"),
    ("GET /api/v1/admin/recordings", "recordings list --all"),
    ("GET /api/v1/billing/balance", "billing balance"),
    ("GET /api/v1/billing/ledger", "billing ledger"),
    ("GET /api/v1/billing/estimate", "billing estimate --sku SKU"),
    ("POST /api/v1/billing/checkout-sessions", "billing top-up --amount AMOUNT --no-open"),
    ("GET /api/v1/billing/payments", "billing payments"),
    ("GET /api/v1/billing/payments/{id}", "billing payment PAYMENT"),
    ("POST /api/v1/billing/payments/{id}/checkout-session", "billing pay PAYMENT --no-open"),
    ("POST /api/v1/billing/payments/{id}/cancel", "billing cancel-payment PAYMENT"),
    ("POST /api/v1/billing/refunds", "billing refund --payment PAYMENT --reason TEXT"),
    ("GET /api/v1/billing/statements", "billing statements"),
    ("GET /api/v1/billing/statements/{month}", "billing statement MONTH"),
    ("GET /api/v1/billing/statements/{month}/csv", "billing statement MONTH --as csv --to -"),
    ("GET /api/v1/billing/statements/{month}/pdf", "billing statement MONTH --as pdf --to -"),
    ("GET /api/v1/admin/billing/accounts", "billing accounts"),
    ("POST /api/v1/admin/billing/accounts", "billing open-account --user USER --currency CODE"),
    ("GET /api/v1/admin/billing/accounts/{id}", "billing balance --account ACCOUNT"),
    ("GET /api/v1/admin/billing/accounts/{id}/ledger", "billing ledger --account ACCOUNT"),
    ("GET /api/v1/admin/billing/accounts/{id}/payments", "billing payments --account ACCOUNT"),
    ("POST /api/v1/admin/billing/accounts/{id}/adjustments", "billing adjust ACCOUNT --amount AMOUNT --reason TEXT"),
    ("GET /api/v1/admin/billing/accounts/{id}/statements", "billing statements --account ACCOUNT"),
    ("GET /api/v1/admin/billing/accounts/{id}/statements/{month}", "billing statement MONTH --account ACCOUNT"),
    (
        "GET /api/v1/admin/billing/accounts/{id}/statements/{month}/csv",
        "billing statement MONTH --account ACCOUNT --as csv --to -",
    ),
    (
        "GET /api/v1/admin/billing/accounts/{id}/statements/{month}/pdf",
        "billing statement MONTH --account ACCOUNT --as pdf --to -",
    ),
    (
        "POST /api/v1/admin/billing/payments/{id}/settle-review",
        "billing settle-review PAYMENT --review REVIEW --reason TEXT",
    ),
    (
        "POST /api/v1/admin/billing/payments/{id}/dismiss-review",
        "billing dismiss-review PAYMENT --review REVIEW --reason TEXT",
    ),
    ("GET /api/v1/admin/billing/processor-events", "processor-events list"),
    ("GET /api/v1/admin/billing/processor-events/{id}", "processor-events show EVENT"),
    ("POST /api/v1/admin/billing/processor-events/{id}/retry", "processor-events retry EVENT --reason TEXT"),
    ("POST /api/v1/admin/billing/processor-events/{id}/dismiss", "processor-events dismiss EVENT --reason TEXT"),
    ("GET /api/v1/notifications/ws", "notifications watch"),
    ("POST /api/v1/admin/notifications/broadcast", "notifications broadcast TEXT"),
    ("GET /api/v1/ssh-keys", "ssh-keys list"),
    ("POST /api/v1/ssh-keys", "ssh-keys add FILE"),
    ("GET /api/v1/ssh-keys/{id}", "ssh-keys show KEY"),
    ("DELETE /api/v1/ssh-keys/{id}", "ssh-keys delete KEY"),
    ("POST /api/v1/ssh-keys/{id}/default", "ssh-keys default KEY"),
    ("GET /api/v1/admin/users/{user_id}/ssh-keys", "ssh-keys list --user USER"),
    ("GET /api/v1/admin/users/{user_id}/ssh-keys/{id}", "ssh-keys show KEY --user USER"),
    ("DELETE /api/v1/admin/users/{user_id}/ssh-keys/{id}", "ssh-keys delete KEY --user USER"),
    ("POST /api/v1/admin/users/{user_id}/ssh-keys/{id}/default", "ssh-keys default KEY --user USER"),
    ("GET /api/v1/notification-endpoints", "notification-endpoints list"),
    ("POST /api/v1/notification-endpoints", "notification-endpoints create --url URL"),
    ("GET /api/v1/notification-endpoints/{id}", "notification-endpoints show ENDPOINT"),
    ("PATCH /api/v1/notification-endpoints/{id}", "notification-endpoints set ENDPOINT --disable"),
    ("DELETE /api/v1/notification-endpoints/{id}", "notification-endpoints delete ENDPOINT"),
    ("GET /api/v1/notification-endpoints/{id}/secret", "notification-endpoints secret ENDPOINT"),
    ("POST /api/v1/notification-endpoints/{id}/secret", "notification-endpoints rotate-secret ENDPOINT"),
    ("POST /api/v1/notification-endpoints/{id}/test", "notification-endpoints test ENDPOINT"),
    ("GET /api/v1/notification-endpoints/{id}/dead-letters", "notification-endpoints dead-letters ENDPOINT"),
    ("POST /api/v1/notification-endpoints/{id}/dead-letters/resend", "notification-endpoints resend ENDPOINT"),
    ("POST /api/v1/notification-endpoints/{id}/dead-letters/dismiss", "notification-endpoints dismiss ENDPOINT"),
    ("GET /api/v1/admin/notification-endpoints", "notification-endpoints list --all"),
    ("GET /api/v1/service-accounts", "service-accounts list"),
    ("POST /api/v1/service-accounts", "service-accounts create NAME"),
    ("POST /api/v1/service-accounts/token", "login --service-account CLIENT"),
    ("GET /api/v1/service-accounts/{id}", "service-accounts show SERVICE-ACCOUNT"),
    ("DELETE /api/v1/service-accounts/{id}", "service-accounts delete SERVICE-ACCOUNT"),
    ("POST /api/v1/service-accounts/{id}/keys", "service-accounts add-key SERVICE-ACCOUNT"),
    ("DELETE /api/v1/service-accounts/{id}/keys/{key_id}", "service-accounts revoke-key SERVICE-ACCOUNT KEY"),
    ("GET /api/v1/admin/platform-roles/bindings", "roles list"),
    ("POST /api/v1/admin/platform-roles/bindings", "roles bind USER ROLE --reason TEXT"),
    ("DELETE /api/v1/admin/platform-roles/bindings", "roles revoke USER ROLE"),
    ("GET /api/v1/admin/platform-roles/bindings/{id}", "roles show BINDING"),
    ("GET /api/v1/admin/overview", "overview"),
    ("GET /api/v1/admin/alerts", "alerts"),
    ("GET /api/v1/admin/telemetry/fleet", "fleet"),
    ("GET /api/v1/admin/fleet-history", "fleet-history"),
    ("GET /api/v1/admin/policies", "policy catalog"),
    ("GET /api/v1/admin/rollouts", "rollouts list"),
    (
        "POST /api/v1/admin/rollouts",
        "rollouts create --max-unavailable 2 --soak-seconds 900 --sku h100x8 --reason TEXT",
    ),
    ("GET /api/v1/admin/rollouts/{id}", "rollouts show ROLLOUT"),
    ("GET /api/v1/admin/rollouts/{id}/nodes", "rollouts nodes ROLLOUT"),
    ("POST /api/v1/admin/rollouts/{id}/pause", "rollouts pause ROLLOUT --reason TEXT"),
    ("POST /api/v1/admin/rollouts/{id}/resume", "rollouts resume ROLLOUT --reason TEXT"),
    ("POST /api/v1/admin/rollouts/{id}/abort", "rollouts abort ROLLOUT --reason TEXT"),
    ("GET /api/v1/admin/health-rules", "health-rules list"),
    ("POST /api/v1/admin/health-rules", "health-rules set xid/79 --class warn --reason TEXT"),
    ("DELETE /api/v1/admin/health-rules", "health-rules unset xid/79 --reason TEXT"),
    ("GET /api/v1/admin/policy-values", "policy list"),
    ("POST /api/v1/admin/policy-values", "policy set POLICY VALUE --reason TEXT"),
    ("DELETE /api/v1/admin/policy-values", "policy unset POLICY --reason TEXT"),
    ("GET /api/v1/admin/policy-values/resolve", "policy resolve POLICY"),
    ("GET /api/v1/admin/policy-values/{id}", "policy show POLICY-VALUE"),
    ("GET /api/v1/admin/keys", "keys list"),
    ("POST /api/v1/admin/keys/stage", "keys stage PURPOSE --reason TEXT"),
    ("POST /api/v1/admin/keys/activate", "keys activate PURPOSE KEY --reason TEXT"),
    ("POST /api/v1/admin/keys/retire", "keys retire PURPOSE KEY --reason TEXT"),
    ("POST /api/v1/admin/keys/rewrap", "keys rewrap --reason TEXT"),
    ("GET /api/v1/admin/runtime/tree", "tree"),
    ("GET /api/v1/admin/runtime/cluster", "cluster"),
    ("GET /api/v1/admin/runtime/entities/{kind}/{id}", "entity ENTITY"),
    ("POST /api/v1/admin/runtime/entities/{kind}/{id}/restart", "restart ENTITY"),
    ("POST /api/v1/admin/runtime/members/{member}/workers/{worker}/restart", "restart WORKER --member MEMBER"),
];

/// A message of the service for the user of the command line: routes become commands, and positions in the request's body are left out,
/// since the user does not see it.
pub(crate) fn for_people(message: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in without_position(message).split(' ') {
        let (path, after) = word.split_at(word.trim_end_matches(['.', ',', ';', ':', ')', '`']).len());
        let before = words.last().map(|last| last.trim_start_matches(['`', '(']).to_owned());
        let command = before.as_deref().and_then(|method| Some((method.len(), command_of(method, path)?)));
        match (command, words.last_mut()) {
            (Some((method, command)), Some(last)) => {
                let opening = last[..last.len() - method].trim_end_matches('`');
                *last = format!("{opening}`gpuctl {command}`{}", after.trim_start_matches('`'));
            }
            _ => words.push(word.to_owned()),
        }
    }
    words.join(" ")
}

/// The command that calls the route, whose parameters may be values or names in braces.
fn command_of(method: &str, path: &str) -> Option<&'static str> {
    let found = COMMANDS.iter().filter(|(route, _)| {
        route.split_once(' ').is_some_and(|(known, template)| known == method && fits(template, path))
    });
    // A literal part takes precedence over a name in braces.
    found.min_by_key(|(route, _)| route.matches('{').count()).map(|(_, command)| *command)
}

/// Whether the path matches the template.
fn fits(template: &str, path: &str) -> bool {
    let same = |(part, given): (&str, &str)| part == given || (part.starts_with('{') && !given.is_empty());
    template.split('/').count() == path.split('/').count() && template.split('/').zip(path.split('/')).all(same)
}

/// Removes ` (line 1, column 15)` and ` at line 1, column 15`.
fn without_position(message: &str) -> String {
    let mut text = message.to_owned();
    for (begin, end) in [(" (line ", ")"), (" at line ", "")] {
        let Some(at) = text.find(begin) else { continue };
        let rest = &text[at + begin.len()..];
        let number = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (line, after) = rest.split_at(number(rest));
        let Some(after) = after.strip_prefix(", column ").or_else(|| after.strip_prefix(" column ")) else { continue };
        let (column, after) = after.split_at(number(after));
        if let (false, false, Some(after)) = (line.is_empty(), column.is_empty(), after.strip_prefix(end)) {
            text = format!("{}{after}", &text[..at]);
        }
    }
    text
}

#[cfg(test)]
mod tests;
