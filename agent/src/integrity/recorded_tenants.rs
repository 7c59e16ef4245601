//! Who is a tenant: only the accounts that an agent of this machine has recorded as such. A uid of their range, or a name like theirs, is
//! not enough, since everyone with the rights of root can make such an account.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use serde::de::DeserializeOwned;

use super::accounts::below;
use super::bounded_file;
use super::privileges::name_of;
use crate::system_executor::account_records::{ACCOUNT_RECORDS, AccountRecords, UID_CLAIMS, UidClaims, WrittenFiles};
use crate::system_executor::accounts::TenantAccount;

/// The largest file of account records that is read.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;
/// The most agents on one machine.
const MAX_AGENTS: usize = 64;

/// The tenants of this machine's agents.
#[derive(Debug, Clone, Default)]
pub struct RecordedTenants {
    by_name: BTreeMap<String, RecordedTenant>,
    /// Why tenants may be missing. They count as accounts of others then: account records that cannot be read hide nothing.
    pub incomplete: Option<String>,
}

/// A tenant's account as an agent has recorded it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedTenant {
    /// Also its gid.
    pub uid: u32,
    pub written: WrittenFiles,
}

impl RecordedTenants {
    /// Those of the agent with this state folder, and of the other agents of the machine below the root folder.
    #[must_use]
    pub fn read(root: &Path, state_dir: &Path) -> Self {
        let mut tenants = Self::default();
        let own = state_dir.join(ACCOUNT_RECORDS);
        tenants.add_records(&own, &own);
        let claims: UidClaims = tenants.parsed(&below(root, Path::new(UID_CLAIMS)), UID_CLAIMS.as_ref());
        for other in claims.0.keys().filter(|records| **records != own).take(MAX_AGENTS) {
            tenants.add_records(&below(root, other), other);
        }
        tenants
    }

    fn add_records(&mut self, file: &Path, shown: &Path) {
        let AccountRecords { accounts, mut written, .. } = self.parsed(file, shown);
        for (allocation_id, TenantAccount { name, uid }) in accounts {
            let written = written.remove(&allocation_id).unwrap_or_default();
            self.by_name.insert(name, RecordedTenant { uid, written });
        }
    }

    /// Nothing where there is no such file.
    fn parsed<T: DeserializeOwned + Default>(&mut self, file: &Path, shown: &Path) -> T {
        let content = bounded_file::read(file, MAX_FILE_BYTES);
        let parsed = content.and_then(|content| match content {
            Some((content, _)) => serde_json::from_slice(&content).map_err(io::Error::other),
            None => Ok(T::default()),
        });
        parsed.unwrap_or_else(|error| {
            self.incomplete.get_or_insert_with(|| format!("{}: {error}", name_of(shown)));
            T::default()
        })
    }

    /// The tenant of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&RecordedTenant> {
        self.by_name.get(name)
    }

    /// Whether an account with this name and uid is a tenant's.
    #[must_use]
    pub fn has(&self, name: &str, uid: u32) -> bool {
        self.get(name).is_some_and(|tenant| tenant.uid == uid)
    }

    /// The uids of tenants, which are their gids, too.
    #[must_use]
    pub fn uids(&self) -> BTreeSet<u32> {
        self.by_name.values().map(|tenant| tenant.uid).collect()
    }

    /// All of them by their names.
    pub fn all(&self) -> impl Iterator<Item = (&str, &RecordedTenant)> {
        self.by_name.iter().map(|(name, tenant)| (name.as_str(), tenant))
    }

    /// Whether there is certainly no tenant.
    #[must_use]
    pub fn is_certainly_empty(&self) -> bool {
        self.incomplete.is_none() && self.by_name.is_empty()
    }

    /// Tenants with these names and uids, for tests.
    #[cfg(test)]
    pub(crate) fn of(tenants: &[(&str, u32, WrittenFiles)]) -> Self {
        let tenant = |(name, uid, written): &(&str, u32, WrittenFiles)| {
            ((*name).to_owned(), RecordedTenant { uid: *uid, written: written.clone() })
        };
        Self { by_name: tenants.iter().map(tenant).collect(), incomplete: None }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const TENANT: &str =
        r#"{"last_uid":70001,"accounts":{"00000000-0000-0000-0000-00000000000N":{"name":"NAME","uid":70001}}}"#;

    #[test]
    fn tenants_are_those_in_the_records_of_all_agents_and_no_others() {
        let root = tempfile::tempdir().unwrap();
        let (own, other) = (root.path().join("state"), root.path().join("srv/other"));
        fs::create_dir_all(&own).unwrap();
        fs::create_dir_all(&other).unwrap();
        fs::create_dir_all(root.path().join("var/lib")).unwrap();
        assert!(RecordedTenants::read(root.path(), &own).is_certainly_empty());
        fs::write(own.join(ACCOUNT_RECORDS), TENANT.replace("00N", "001").replace("NAME", "ours")).unwrap();
        fs::write(
            other.join(ACCOUNT_RECORDS),
            TENANT.replace("00N", "002").replace("NAME", "theirs").replace("70001", "70002"),
        )
        .unwrap();
        assert_eq!(RecordedTenants::read(root.path(), &own).uids(), BTreeSet::from([70_001]));
        let claims = r#"{"/srv/other/accounts.json":[70002,70002],"/srv/gone/accounts.json":[70003,70003]}"#;
        fs::write(root.path().join(UID_CLAIMS.trim_start_matches('/')), claims).unwrap();
        let tenants = RecordedTenants::read(root.path(), &own);
        assert_eq!((tenants.uids(), &tenants.incomplete), (BTreeSet::from([70_001, 70_002]), &None));
        assert!(tenants.has("theirs", 70_002) && !tenants.has("theirs", 70_001) && !tenants.has("eve", 70_001));
    }

    #[test]
    fn account_records_that_cannot_be_read_name_no_tenant_and_are_not_certainly_empty() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join(ACCOUNT_RECORDS), "{").unwrap();
        let tenants = RecordedTenants::read(root.path(), root.path());
        assert!(tenants.uids().is_empty() && !tenants.is_certainly_empty());
        assert!(tenants.incomplete.unwrap().contains("accounts.json"));
    }

    #[test]
    fn records_of_so_many_agents_are_read_and_of_no_more() {
        let root = tempfile::tempdir().unwrap();
        let mut claims = std::collections::BTreeMap::new();
        for n in 0..=MAX_AGENTS {
            let folder = root.path().join(format!("srv/{n:03}"));
            fs::create_dir_all(&folder).unwrap();
            let (name, uid) = (format!("ten{n}"), (70_000 + n).to_string());
            let records = TENANT.replace("00N", "001").replace("NAME", &name).replace("70001", &uid);
            fs::write(folder.join(ACCOUNT_RECORDS), records).unwrap();
            claims.insert(format!("/srv/{n:03}/accounts.json"), [70_000 + n, 70_000 + n]);
        }
        fs::create_dir_all(root.path().join("var/lib")).unwrap();
        let claims = serde_json::to_vec(&claims).unwrap();
        fs::write(root.path().join(UID_CLAIMS.trim_start_matches('/')), claims).unwrap();
        let tenants = RecordedTenants::read(root.path(), &root.path().join("state"));
        assert_eq!((tenants.all().count(), tenants.incomplete), (MAX_AGENTS, None));
    }
}
