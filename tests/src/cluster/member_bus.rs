//! Messages that a test sends as a member of the cluster, with the keys that only members have.

use super::TestCluster;
use chrono::Utc;
use domain::MemberId;
use edge::trust::current_keys::{CurrentKeys, Keys};
use edge::trust::node_certificate::TrustDomain;
use persistence::envelope_encryption::KeyRing;
use persistence::membership::Member;
use persistence::{Reads, Secrets};
use prometheus::Registry;
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;
use supervisors::cluster::ClusterView;
use supervisors::cluster::authentication::MemberAuthenticator;
use supervisors::cluster::bus::Bus;
use supervisors::cluster::nats;
use tokio::sync::Notify;
use uuid::Uuid;

impl TestCluster {
    /// The bus of a member without workers: its messages are authenticated.
    pub async fn member_bus(&self) -> Bus {
        const NAME: &str = "test";
        let ring = Arc::new(KeyRing::load(&self.settings.key_ring_path).expect("the key ring can be read"));
        let (secrets, reads) = (Secrets::new(self.pool.clone(), ring), Reads::new(self.pool.clone()));
        let domain = TrustDomain::parse("gpuaas").expect("the default is a trust domain");
        let keys = Keys::read(&secrets, &reads, &domain).await.expect("the keys can be read");
        let (id, details) = (MemberId(Uuid::new_v4()), json!({ "authenticates": true }));
        let view = Arc::new(ClusterView::new(Member { id, name: NAME.to_owned(), started_at: Utc::now(), details }));
        // Postgres runs on this machine.
        view.clock.measure(Instant::now(), Utc::now());
        let members = MemberAuthenticator::register(&Registry::new(), Arc::clone(&view), CurrentKeys::new(keys));
        let members = Arc::new(members.expect("the registry is empty"));
        Bus::new(self.bus().await, nats::inbox_of(NAME), members, view, Arc::new(Notify::new()))
    }
}
