//! What a pass reports of a machine that the provider has given away, or does not have any more.

use super::*;
use edge::outbound::maas::PowerState;

fn found(status: MachineStatus, owner: Option<&str>) -> MaasMachine {
    MaasMachine {
        system_id: "abc123".into(),
        hostname: "gpu-1".into(),
        fqdn: "gpu-1.maas".into(),
        status,
        status_name: format!("{status:?}"),
        power: PowerState::On,
        owner: owner.map(str::to_owned),
    }
}

#[test]
fn deployed_machine_that_was_released_or_given_to_another_user_is_lost() {
    let is_lost = |status, owner: Option<&str>| lost(&found(status, owner), owner == Some("gpuaas")).is_some();
    for status in [MachineStatus::Ready, MachineStatus::Releasing, MachineStatus::FailedReleasing] {
        assert!(is_lost(status, None) && is_lost(status, Some("gpuaas")), "{status:?}");
    }
    for status in [
        MachineStatus::Allocated,
        MachineStatus::Deploying,
        MachineStatus::Deployed,
        MachineStatus::FailedDeployment,
        MachineStatus::Broken,
        MachineStatus::Other,
    ] {
        assert!(is_lost(status, Some("somebody")), "{status:?}");
        assert!(!is_lost(status, Some("gpuaas")), "{status:?}");
    }
}

#[test]
fn machine_that_the_provider_does_not_have_is_lost_fails_its_deployment_and_needs_no_release() {
    let report = |step| absent(&step).map(|report| std::mem::discriminant(&report));
    let like = |report: ProviderReport| Some(std::mem::discriminant(&report));
    let why = String::new;
    assert_eq!(report(ProviderStep::Deploying), like(ProviderReport::Failed { why: why() }));
    assert_eq!(report(ProviderStep::Deployed), like(ProviderReport::Lost { why: why() }));
    assert_eq!(report(ProviderStep::Failing { why: why() }), like(ProviderReport::Done));
    assert_eq!(report(ProviderStep::Releasing { then_deploy: false }), like(ProviderReport::Done));
    // It may come back, and must not be deployed without the erasure.
    assert_eq!(report(ProviderStep::Releasing { then_deploy: true }), like(ProviderReport::Waiting { status: why() }));
    assert_eq!((report(ProviderStep::Failed { why: why() }), report(ProviderStep::Released)), (None, None));
}
