//! Nodes whose machine is reinstalled: after a tenant, and on an operator's order.

use super::provided_machine::{TOKEN, ordered_with, provided, provided_enrollment, token};
use super::*;
use crate::validation::ValidationLevel;

fn whole() -> Instruction {
    Instruction::Reserve { allocation_id: TENANT, gpu_count: GPUS, keys: Vec::new(), revision: 0, reimages: true }
}

fn reimage() -> Request {
    Request::Reimage { reason: "r".into() }
}

fn validate(level: ValidationLevel) -> Request {
    Request::Validate { level, reason: "r".into() }
}

impl Story {
    /// The tenant of the whole node is set up, released, and proved to be gone.
    fn after_whole_tenant(self) -> Self {
        let deadline_at = self.now + TimeDelta::seconds(600);
        self.after_fact(whole())
            .after_fact(Instruction::Provision { allocation_id: TENANT, deadline_at })
            .reports(TaskOutcome::Succeeded { proof: None })
            .cleaning(1)
            .reports(PROVED)
    }

    /// The provider has erased it and installs it.
    fn reinstalled(self) -> Self {
        self.reinstalled_with(None)
    }

    /// The provider has erased it and installs this image.
    fn reinstalled_with(self, image: Option<OrderedImage>) -> Self {
        self.at_the_provider(ProviderReport::Done).after_fact(ordered_with(image)).at_the_provider(ProviderReport::Done)
    }

    fn validated(self, verdict: TaskOutcome) -> Self {
        let open = self.node.tasks.by_id.values().find(|task| task.phase == NodeTaskPhase::Open).unwrap();
        let (task_id, attempt) = (open.work.task_id, open.work.attempt);
        let output = Some(super::validation::report(1));
        self.agent(Request::Report { serial: SERIAL.into(), task_id, attempt, verdict, output, unproved: None })
    }
}

const FIT: TaskOutcome = TaskOutcome::Succeeded { proof: None };

#[test]
fn only_whole_nodes_that_can_be_reimaged_are_reserved() {
    let part = |gpu_count| Instruction::Reserve {
        allocation_id: TENANT,
        gpu_count,
        keys: Vec::new(),
        revision: 0,
        reimages: true,
    };
    let is_refused = |story: &Story, reserve: Instruction| {
        matches!(story.refuses(&worker(), reserve), Rejection::NotSchedulable { .. } | Rejection::NotEnoughGpus { .. })
    };
    let ready = provided().deployed();
    assert!(is_refused(&ready, part(GPUS - 1)));
    assert!(is_refused(&ready.clone().after_fact(reserve(OTHER, 1)), whole()));
    assert!(is_refused(&node().active(), whole()), "a machine without a provider");
    let silent = provided().after_fact(token()).agent(enrollment()).agent(poll());
    assert!(is_refused(&silent, whole()), "an agent that reports no machine id");
    ready.after_fact(whole());
}

#[test]
fn tenant_is_gone_with_its_proof_and_no_gpu_is_free_before_the_new_system_is_validated() {
    let held = provided().deployed().after_whole_tenant().expect("quarantined");
    assert!(held.published.iter().any(|event| event.subject() == "node.tenant_gone"), "the user sees released");
    assert_eq!((held.node.lifecycle.reason.code.as_str(), held.node.gpus_free()), ("reimaging", 0));
    assert_eq!(held.refuses(&agent(), poll()), Rejection::CertificateUnknown, "the old system has no identity");
    let installed = held.reinstalled().agent(provided_enrollment("new")).agent(poll()).expect("quarantined");
    assert_eq!((installed.pending_tasks(), installed.node.gpus_free()), (vec!["node.validate"], 0));
    let done = installed.after_heartbeat().validated(FIT).expect("active");
    assert_eq!((done.node.gpus_free(), done.node.machine.reimage.clone()), (GPUS, None));
    assert_eq!(done.node.id, NODE);
}

#[test]
fn tenant_that_was_never_set_up_needs_no_reimage() {
    let story = provided().deployed().after_fact(whole()).after_fact(Instruction::Unreserve { allocation_id: TENANT });
    assert_eq!(story.expect("active").node.gpus_free(), GPUS);
}

#[test]
fn machine_that_returns_with_the_old_disk_is_refused_and_the_node_stays_held() {
    let back = provided().deployed().after_whole_tenant().reinstalled().agent(provided_enrollment("old"));
    assert_eq!(back.reply, Reply::SystemRefused);
    let back = back.expect("quarantined");
    assert_eq!(back.node.lifecycle.reason.code.as_str(), "system_refused");
    assert!(
        back.node.lifecycle.reason.message.contains("machine id of the system before"),
        "{}",
        back.node.lifecycle.reason.message
    );
    let repeated = back.refuses(&agent(), provided_enrollment("new"));
    assert_eq!(repeated, Rejection::TokenRefused { cause: EnrollmentTokenFault::NoneIssued }, "its token is void");
    assert!(back.node.deadline().is_some_and(|deadline| deadline.at <= back.now), "overdue, for an operator");
    let refused = back.refuses(&admin(), Request::ReleaseQuarantine { reason: "r".into() });
    assert!(matches!(refused, Rejection::NotInOrder { .. }));
    // Ordered again, it still may not come back as the system that had the tenant.
    let second = back.admin(reimage()).reinstalled();
    let old = second.clone().agent(provided_enrollment("old"));
    assert_eq!(old.reply, Reply::SystemRefused);
    second.agent(provided_enrollment("new")).agent(poll()).validated(FIT).expect("active");
}

#[test]
fn system_with_another_image_or_without_an_id_is_refused() {
    let held = provided().deployed().after_whole_tenant().reinstalled();
    for (machine_id, image_digest) in [(Some("new"), Some("sha256:2")), (Some("new"), None), (None, Some("sha256:1"))] {
        let Request::Enroll(mut shown) = provided_enrollment("new") else { unreachable!() };
        shown.inventory.system = Some(ReportedSystem {
            machine_id: machine_id.map(str::to_owned),
            image_digest: image_digest.map(str::to_owned),
        });
        assert_eq!(
            held.clone().agent(Request::Enroll(shown)).reply,
            Reply::SystemRefused,
            "{machine_id:?} {image_digest:?}"
        );
    }
}

fn image(digest: Option<&str>) -> Option<OrderedImage> {
    Some(OrderedImage { digest: digest.map(str::to_owned) })
}

/// An enrollment of a new system with this image.
fn enrollment_with(image_digest: Option<&str>) -> Request {
    let Request::Enroll(mut shown) = provided_enrollment("new") else { unreachable!() };
    shown.inventory.system =
        Some(ReportedSystem { machine_id: Some("new".into()), image_digest: image_digest.map(str::to_owned) });
    Request::Enroll(shown)
}

#[test]
fn new_system_is_compared_with_the_image_that_its_deployment_was_ordered_with() {
    let held = provided().deployed().after_whole_tenant();
    let (first, second) = (Some("sha256:1"), Some("sha256:2"));
    // What is ordered, and whether a system is taken that shows the image of the registration, the second one, or none.
    let cases = [
        (None, [true, false, false]),
        (image(first), [true, false, false]),
        (image(second), [false, true, false]),
        (image(None), [true, true, true]),
    ];
    for (ordered, taken) in cases {
        let story = held.clone().reinstalled_with(ordered.clone());
        for (shown, is_taken) in [first, second, None].into_iter().zip(taken) {
            let enrolled = story.clone().agent(enrollment_with(shown));
            assert_eq!(enrolled.reply != Reply::SystemRefused, is_taken, "{ordered:?} {shown:?}");
        }
    }
    // A refused system is followed by an order with the image of then.
    let refused = held.reinstalled_with(image(second)).agent(enrollment_with(first)).expect("quarantined");
    let message = &refused.node.lifecycle.reason.message;
    assert!(message.contains("shows the image sha256:1, and sha256:2 was to be installed"), "{message}");
    let third = refused.admin(reimage()).reinstalled_with(image(Some("sha256:3")));
    third.agent(enrollment_with(Some("sha256:3"))).agent(poll()).validated(FIT).expect("active");
}

#[test]
fn image_of_an_order_that_is_repeated_is_that_of_the_last_token() {
    let held = provided().deployed().after_whole_tenant().at_the_provider(ProviderReport::Done);
    // A worker that died between the token and the call, and another one with other settings.
    let story =
        held.after_fact(ordered_with(image(Some("sha256:2")))).after_fact(ordered_with(image(Some("sha256:3"))));
    let story = story.at_the_provider(ProviderReport::Done);
    assert_eq!(story.clone().agent(enrollment_with(Some("sha256:2"))).reply, Reply::SystemRefused);
    story.agent(enrollment_with(Some("sha256:3"))).agent(poll()).validated(FIT).expect("active");
}

#[test]
fn order_of_an_earlier_release_names_no_image_and_its_snapshot_keeps_that_of_the_registration() {
    let earlier = serde_json::json!({
        "command": "machine_token", "token_id": Uuid::from_u128(5), "token_sha256": TOKEN,
    });
    let earlier: Fact = serde_json::from_value(earlier).unwrap();
    assert_eq!(earlier, token());
    let snapshot = serde_json::to_value(&provided().deployed().node).unwrap();
    assert_eq!(snapshot["machine"]["image_digest"], "sha256:1");
    let read: Node = serde_json::from_value(snapshot).unwrap();
    assert_eq!(read.machine.provided.unwrap().image_digest.as_deref(), Some("sha256:1"));
}

#[test]
fn new_system_that_is_not_fit_stays_held_until_it_is_validated() {
    let story =
        provided().deployed().after_whole_tenant().reinstalled().agent(provided_enrollment("new")).agent(poll());
    let unfit = story.validated(failed()).expect("quarantined");
    let unfit = unfit.admin(order_task(TaskType::NodeValidate)).validated(FIT).expect("quarantined");
    let fit = unfit.admin(validate(ValidationLevel::Quick)).validated(FIT).expect("active");
    assert_eq!((fit.node.machine.reimage.clone(), fit.node.gpus_free()), (None, GPUS));
}

#[test]
fn new_system_of_a_machine_that_failed_a_deep_validation_has_to_pass_one() {
    let failed = provided().deployed().admin(validate(ValidationLevel::Deep)).validated(failed()).expect("quarantined");
    let story = failed.admin(reimage()).reinstalled().agent(provided_enrollment("new")).agent(poll());
    let deep = story.node.tasks.by_id.values().find_map(|task| task.validation.filter(|_| !task.has_ended())).unwrap();
    assert_eq!(deep.level, ValidationLevel::Deep);
    let (level, load) = (deep.level, deep.load_time());
    assert!(story.node.deadline().unwrap().at >= story.now + load, "{level:?}");
    // A quick one ends neither the reimage nor the hold.
    let quick = story.admin(validate(ValidationLevel::Quick)).ends_validation(ValidationLevel::Quick, 1);
    assert!(quick.node.machine.reimage.is_some());
    let fit = quick.expect("quarantined").validated(FIT).expect("active");
    assert_eq!((fit.node.machine.reimage.clone(), fit.node.gpus_free()), (None, GPUS));
}

#[test]
fn operator_orders_the_reimage_of_an_empty_node_alone() {
    assert_eq!(node().active().refuses(&admin(), reimage()), Rejection::NotProvided);
    let rented = provided().deployed().after_fact(reserve(TENANT, 1));
    assert_eq!(rented.refuses(&admin(), reimage()), Rejection::InUse { allocation_id: TENANT });
    let ordered = provided().deployed().admin(reimage()).expect("quarantined");
    assert_eq!(ordered.effects, [Effect::CloseNode(NODE)]);
    ordered.reinstalled().agent(provided_enrollment("new")).agent(poll()).validated(FIT).expect("active");
}

#[test]
fn failed_reimage_is_overdue_until_it_is_ordered_again() {
    let held = provided().deployed().after_whole_tenant().at_the_provider(ProviderReport::Done).after_fact(token());
    let failed = held.at_the_provider(ProviderReport::Failed { why: "Failed deployment".into() }).expect("quarantined");
    assert!(
        failed.node.lifecycle.reason.message.contains("Failed deployment"),
        "{}",
        failed.node.lifecycle.reason.message
    );
    let marked = failed.at_the_provider(ProviderReport::Done);
    assert!(marked.node.deadline().is_some_and(|deadline| deadline.at <= marked.now));
    let repeated = marked.admin(reimage()).reinstalled().agent(provided_enrollment("new")).agent(poll());
    repeated.validated(FIT).expect("active");
}

#[test]
fn retired_node_comes_back_only_with_a_new_system() {
    let retired = provided().deployed().after_whole_tenant().retired().expect("retired");
    let back = Request::Reactivate { reason: "r".into() };
    assert!(matches!(retired.refuses(&admin(), back.clone()), Rejection::NotInOrder { .. }));
    let repeated = retired.admin(reimage()).reinstalled().agent(provided_enrollment("new")).agent(poll());
    repeated.after_heartbeat().validated(FIT).expect("retired").admin(back).expect("active");
}

#[test]
fn draining_node_is_retired_once_it_is_reimaged() {
    let deadline_at = start() + TimeDelta::seconds(600);
    let story = provided().deployed().after_fact(whole());
    let story = story.after_fact(Instruction::Provision { allocation_id: TENANT, deadline_at }).reports(FIT);
    let held = story.admin(retire(true)).expect("draining").cleaning(1).reports(PROVED).expect("quarantined");
    held.reinstalled().agent(provided_enrollment("new")).agent(poll()).validated(FIT).expect("retired");
}
