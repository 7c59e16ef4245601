//! What the agents of a machine have recorded of their tenants' accounts: who they are, and what was written for them.
//!
//! ```text
//! STATE/accounts.json          the account records of one agent
//! /var/lib/gpuaas-uids.json    the files of account records of all agents of the machine, with the uids of each
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::accounts::TenantAccount;

/// The name of the account records in an agent's state folder.
pub const ACCOUNT_RECORDS: &str = "accounts.json";
/// Where the machine's agents share which uids they have given.
pub const UID_CLAIMS: &str = "/var/lib/gpuaas-uids.json";

/// The records that outlive a restart: which uids were given, and to which allocation.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct AccountRecords {
    /// The highest uid that was ever given on this node.
    pub last_uid: Option<u32>,
    pub accounts: BTreeMap<Uuid, TenantAccount>,
    /// What was written for the accounts. Allocations of an earlier release have none.
    #[serde(default)]
    pub written: BTreeMap<Uuid, WrittenFiles>,
}

/// The digests of what the agent has written for a tenant into the machine's files, so that it can tell them from what others wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenFiles {
    /// `None`: it is not known.
    pub authorized_keys: Option<String>,
    /// `None`: the tenant has none.
    pub sudo_rules: Option<String>,
}

/// The digest by which content is recorded.
#[must_use]
pub fn content_digest(content: &[u8]) -> String {
    hex::encode(Sha256::digest(content))
}

/// The uids that each agent of this machine has given, by the file of its account records: the first and the last. Other agents give none between
/// them.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UidClaims(pub BTreeMap<PathBuf, (u32, u32)>);

impl UidClaims {
    /// Whether another agent may have given the uid.
    pub(super) fn has_another(&self, records: &Path, uid: u32) -> bool {
        self.0.iter().any(|(of, (first, last))| of != records && (*first..=*last).contains(&uid))
    }

    /// Records that the agent with these account records gives the uid. An agent whose file is gone has left the machine.
    pub(super) fn claim(&mut self, records: &Path, uid: u32) {
        self.0.retain(|of, _| of == records || of.exists());
        let (first, last) = self.0.get(records).copied().unwrap_or((uid, uid));
        self.0.insert(records.to_owned(), (first.min(uid), last.max(uid)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uid_that_another_agent_gave_is_not_free() {
        let (ours, theirs) = (Path::new("/a/accounts.json"), Path::new("/b/accounts.json"));
        let claims =
            UidClaims(BTreeMap::from([(ours.to_owned(), (70_000, 70_004)), (theirs.to_owned(), (70_002, 70_006))]));
        let free: Vec<u32> = (70_000..=70_008).filter(|uid| !claims.has_another(ours, *uid)).collect();
        assert_eq!(free, [70_000, 70_001, 70_007, 70_008]);
    }

    #[test]
    fn account_records_of_an_earlier_release_are_read() {
        let text =
            r#"{"last_uid":70000,"accounts":{"00000000-0000-0000-0000-000000000001":{"name":"tena","uid":70000}}}"#;
        let records: AccountRecords = serde_json::from_str(text).unwrap();
        assert_eq!((records.accounts.len(), records.written.len()), (1, 0));
    }
}
