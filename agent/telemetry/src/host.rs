//! The fields that tell the machines of a lab apart (specification, *Observability surface*).

/// Fields of every log line of a process, if they are configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFields {
    pub host_role: Option<String>,
    pub host_name: Option<String>,
    pub lab_stack: Option<String>,
    pub node_id: Option<String>,
}

/// The roles of a lab's machines.
const ROLES: [&str; 3] = ["platform_control", "app_control", "worker_compute"];

/// `SVC_HOST_ROLE` is not a role of the lab.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownHostRole(pub String);

impl std::fmt::Display for UnknownHostRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SVC_HOST_ROLE is {:?}; it must be one of {}", self.0, ROLES.join(", "))
    }
}

impl std::error::Error for UnknownHostRole {}

impl HostFields {
    /// From `SVC_HOST_ROLE`, `SVC_HOST_NAME`, `SVC_LAB_STACK` and `SVC_NODE_ID`; `None` for a variable that is not set.
    ///
    /// # Errors
    /// The role is not one of the lab's.
    pub fn gather(environment: impl Fn(&str) -> Option<String>) -> Result<Self, UnknownHostRole> {
        let get = |name| environment(name).filter(|value| !value.trim().is_empty());
        let host_role = get("SVC_HOST_ROLE");
        if let Some(role) = &host_role
            && !ROLES.contains(&role.as_str())
        {
            return Err(UnknownHostRole(role.clone()));
        }
        Ok(Self {
            host_role,
            host_name: get("SVC_HOST_NAME"),
            lab_stack: get("SVC_LAB_STACK"),
            node_id: get("SVC_NODE_ID"),
        })
    }

    /// Names and values of the configured fields, in order.
    pub fn fields(&self) -> impl Iterator<Item = (&'static str, &str)> {
        [
            ("host_role", &self.host_role),
            ("host_name", &self.host_name),
            ("lab_stack", &self.lab_stack),
            ("node_id", &self.node_id),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value.as_deref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_fields_follow_the_environment_and_an_unknown_role_is_refused() {
        let set = |name: &str| match name {
            "SVC_HOST_ROLE" => Some("app_control".to_owned()),
            "SVC_LAB_STACK" => Some("three-host".to_owned()),
            "SVC_HOST_NAME" => Some(" ".to_owned()),
            _ => None,
        };
        let fields = HostFields::gather(set).unwrap();
        let pairs: Vec<_> = fields.fields().collect();
        assert_eq!(pairs, [("host_role", "app_control"), ("lab_stack", "three-host")]);
        let wrong = HostFields::gather(|_| Some("mainframe".to_owned())).unwrap_err();
        assert!(wrong.to_string().contains("worker_compute"), "{wrong}");
    }
}
