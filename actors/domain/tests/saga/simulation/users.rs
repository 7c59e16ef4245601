//! What users ask for.

use super::{GPUS, MOST_LIVE, Simulation, USERS, person};
use domain::allocation::{self, Allocation};
use domain::authz::{ResourceOwner, TokenRole};
use domain::metadata::{Metadata, MetadataPatch, PatchValue};
use domain::money::Price;
use domain::state_machine::Machine as _;
use domain::tenant;
use domain::{AllocationId, SkuId, UserId};
use uuid::Uuid;

impl Simulation {
    pub(super) fn request(&mut self, user: u8, gpus: u8, queue: u8, wish: u8) {
        if self.allocations.values().filter(|it| it.state() != "released").count() >= MOST_LIVE {
            return;
        }
        let user_id = UserId(format!("user-{}", user % USERS));
        let id = AllocationId(Uuid::from_u128(0xA000_0000 + u128::from(self.next())));
        let request = allocation::AllocationRequest {
            owner: ResourceOwner { user_id: user_id.clone(), org_id: None, project_id: None, plan: None },
            sku_id: SkuId(Uuid::nil()),
            sku: "h100x4".into(),
            region_code: (wish % 8 == 7).then(|| "mars".into()),
            node_id: (wish % 8 == 6).then(|| self.node(wish)),
            gpu_count: 1 + u32::from(gpus) % (GPUS + 1),
            ssh_keys: self.tenants.get(&user_id).map(|tenant| tenant.authorized_keys(None)).unwrap_or_default(),
            follows_default: true,
            logins_revision: self.tenants.get(&user_id).map_or(0, |tenant| tenant.logins_revision),
            isolation_model: "user-revoke".into(),
            price: Price::new("EUR", 100).unwrap(),
            queue_seconds: queue.is_multiple_of(3).then_some(u32::from(queue) / 4),
            scheduler_request_enc: None,
            metadata: Metadata::default(),
        };
        let command = allocation::Request::Create(Box::new(request));
        self.tell_allocation(id, &person(&user_id, TokenRole::User), command).unwrap();
    }

    /// A user adds a key, deletes one, or makes another the default.
    pub(super) fn change_keys(&mut self, user: u8, how: u8) {
        let user_id = UserId(format!("user-{}", user % USERS));
        let keys: Vec<_> = self.tenants.get(&user_id).iter().flat_map(|it| it.keys.keys()).copied().collect();
        let nth = keys.get(usize::from(how / 3) % keys.len().max(1)).copied();
        let command = match (how % 3, nth) {
            (1, Some(key)) => tenant::Request::DeleteKey { key },
            (2, Some(key)) => tenant::Request::MakeDefault { key },
            _ => {
                let n = self.next();
                tenant::Request::AddKey {
                    user_id: user_id.clone(),
                    name: format!("key {n}"),
                    key_type: "ssh-ed25519".into(),
                    public_key: format!("ssh-ed25519 {n}"),
                    fingerprint: format!("SHA256:{n}"),
                }
            }
        };
        self.tell_tenant(&user_id, command).unwrap();
    }

    /// The user chooses keys for one allocation after a read; a stale read is rejected.
    pub(super) fn choose_logins(&mut self, which: u8, how: u8) {
        let Some(id) = self.pick_allocation(which, |_| true) else { return };
        let user_id = self.allocations[&id].asked.owner.user_id.clone();
        let Some(tenant) = self.tenants.get(&user_id) else { return };
        let chosen = (!how.is_multiple_of(4)).then(|| tenant.keys.keys().take(usize::from(how % 4)).copied().collect());
        let chosen: Option<Vec<_>> = chosen;
        let (keys, logins_revision) = (tenant.authorized_keys(chosen.as_deref()), tenant.logins_revision);
        let command = allocation::Request::ChooseLogins { chosen, keys, logins_revision };
        match self.tell_allocation(id, &person(&user_id, TokenRole::User), command) {
            Ok(()) | Err(allocation::Rejection::WrongState { .. } | allocation::Rejection::KeysMoved) => {}
            Err(other) => panic!("{other}"),
        }
    }

    /// A label comes or goes; of the saga nothing changes by it.
    pub(super) fn label(&mut self, which: u8, how: u8) {
        let Some(id) = self.pick_allocation(which, |_| true) else { return };
        let before = self.allocations[&id].clone();
        let value = how.is_multiple_of(2).then(|| format!("v{}", how % 8));
        let labels = PatchValue::Set([(format!("k{}", how % 3), value)].into());
        let metadata = MetadataPatch { name: PatchValue::Keep, labels };
        let by = person(&before.asked.owner.user_id, TokenRole::User);
        self.tell_allocation(id, &by, allocation::Request::Revise { metadata, if_version: None }).unwrap();
        let after = Allocation { metadata: before.metadata.clone(), ..self.allocations[&id].clone() };
        assert_eq!(after, before, "a label changes nothing else");
    }

    pub(crate) fn release(&mut self, id: AllocationId) {
        let user_id = self.allocations[&id].asked.owner.user_id.clone();
        self.tell_allocation(id, &person(&user_id, TokenRole::User), allocation::Request::Release { issue: None })
            .unwrap();
    }
}
