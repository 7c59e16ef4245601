//! What the bare-metal provider has to do for a node, and what follows from its answers.

use super::*;

const DEPLOY: TimeDelta = TimeDelta::seconds(3600);
pub(super) const TOKEN: [u8; 32] = HASH;

/// A registered node whose machine the provider has ready.
pub(super) fn provided() -> Story {
    let machine = PreparedMachine { system_id: "abc123".into(), image_digest: Some("sha256:1".into()) };
    let policy = PolicyBook::default();
    let registration = Registration { onboarding_mode: OnboardingMode::Maas, ..registration() };
    let command = Request::Register { registration: Box::new(registration), probe: None, machine: Some(machine) };
    let step = Node::decide(None, command.into(), &ctx(start(), &policy, &admin())).unwrap();
    Story {
        node: step.next.unwrap(),
        now: start(),
        policy,
        published: step.events,
        effects: step.effects,
        reply: step.reply,
        wrote: true,
    }
}

pub(super) fn token() -> Fact {
    ordered_with(None)
}

/// The token of a deployment that a worker orders with this image.
pub(super) fn ordered_with(image: Option<OrderedImage>) -> Fact {
    Fact::MachineTokenMade { token_id: TokenId(Uuid::from_u128(5)), token_sha256: TOKEN, image }
}

impl Story {
    #[track_caller]
    pub(super) fn at_the_provider(self, report: ProviderReport) -> Self {
        let since = self.machine().since;
        self.after_fact(Fact::MachineReported { since, report })
    }

    pub(super) fn machine(&self) -> &ProvidedMachine {
        self.node.machine.provided.as_ref().unwrap()
    }

    /// The provider deploys it, its agent enrolls and polls.
    pub(super) fn deployed(self) -> Self {
        self.after_fact(token()).agent(provided_enrollment("old")).at_the_provider(ProviderReport::Done).agent(poll())
    }
}

/// An enrollment of a system with this machine id and the image.
pub(super) fn provided_enrollment(machine_id: &str) -> Request {
    let Request::Enroll(mut enrollment) = enrollment() else { unreachable!() };
    enrollment.inventory.system =
        Some(ReportedSystem { machine_id: Some(machine_id.into()), image_digest: Some("sha256:1".into()) });
    Request::Enroll(enrollment)
}

fn failed_at_provider() -> ProviderReport {
    ProviderReport::Failed { why: "Failed deployment".into() }
}

fn lost() -> ProviderReport {
    ProviderReport::Lost { why: "The machine is Ready.".into() }
}

#[test]
fn registered_node_has_its_machine_deployed_until_its_agent_polls() {
    let registered = provided().publishes(&["node.state_changed", "node.machine_due"]).expect("registered");
    assert!(Node::claims(&registered.node).contains("machine/abc123"));
    let asked = registered.after_fact(token()).expect("bootstrap-issued");
    let deployed = asked.agent(provided_enrollment("old")).at_the_provider(ProviderReport::Done).agent(poll());
    assert_eq!(deployed.expect("active").machine().step, ProviderStep::Deployed);
}

#[test]
fn what_is_outstanding_is_published_again_with_growing_pauses_up_to_a_minute() {
    let mut story = provided();
    let mut pauses = Vec::new();
    for _ in 0..7 {
        let before = story.now;
        story = story.at_its_timer().ticked().publishes(&["node.machine_due"]);
        pauses.push((story.now - before).num_seconds());
    }
    assert_eq!(pauses, [5, 5, 10, 20, 40, 60, 60]);
}

#[test]
fn token_holds_for_the_deployment_and_the_time_of_any_other() {
    let story = provided().after_fact(token());
    let expires_at = story.node.identity.token.as_ref().unwrap().expires_at;
    assert_eq!(expires_at, start() + DEPLOY + TimeDelta::seconds(3600));
    // A second one, after a kill between both, voids the first.
    let repeated = Fact::MachineTokenMade { token_id: TokenId(Uuid::from_u128(6)), token_sha256: [9; 32], image: None };
    let repeated = story.after_fact(repeated);
    let refused = repeated.refuses(&agent(), provided_enrollment("old"));
    assert_eq!(refused, Rejection::TokenRefused { cause: EnrollmentTokenFault::Mismatch });
}

#[test]
fn token_of_a_machine_that_is_not_to_be_deployed_is_refused() {
    let failing = provided().after_fact(token()).at_the_provider(failed_at_provider());
    let failed = failing.clone().at_the_provider(ProviderReport::Done);
    let releasing = failed.clone().admin(Request::Reimage { reason: "repaired".into() });
    for story in [failing, failed, releasing] {
        let story = story.expect("registered");
        let refused = story.refuses(&worker(), token());
        assert!(matches!(refused, Rejection::WrongState { .. }), "{:?}: {refused:?}", story.machine().step);
    }
}

#[test]
fn failed_deployment_marks_the_machine_as_broken_and_shows_why() {
    let failing = provided().after_fact(token()).at_the_provider(failed_at_provider()).expect("registered");
    assert_eq!(failing.node.lifecycle.reason.code.as_str(), "deployment_failed");
    assert!(
        failing.node.lifecycle.reason.message.contains("Failed deployment"),
        "{}",
        failing.node.lifecycle.reason.message
    );
    assert!(failing.published.contains(&Event::MachineDue { node_id: NODE }), "it is to be marked as broken");
    assert!(failing.node.identity.token.is_none(), "the token of the failed deployment is void");
    let marked = failing.at_the_provider(ProviderReport::Done);
    assert!(matches!(&marked.machine().step, ProviderStep::Failed { why } if why == "Failed deployment"));
    assert_eq!(marked.node.timer(), None, "nothing is outstanding");
    let repeated = marked.admin(Request::Reimage { reason: "repaired".into() }).expect("registered");
    assert_eq!(repeated.machine().step, ProviderStep::Releasing { then_deploy: true });
    let repeated = repeated.at_the_provider(ProviderReport::Done).publishes(&["node.machine_due"]).deployed();
    repeated.expect("active");
}

#[test]
fn unknown_status_is_progress_until_the_deadline() {
    let waiting = ProviderReport::Waiting { status: "Testing the future".into() };
    let story = provided().after_fact(token()).at_the_provider(waiting.clone());
    let late = story.clone().after(DEPLOY - TimeDelta::seconds(1)).ticked().expect("bootstrap-issued");
    assert_eq!(late.machine().step, ProviderStep::Deploying);
    let over = story.after(DEPLOY).ticked().expect("registered");
    assert!(
        over.node.lifecycle.reason.message.contains("Testing the future"),
        "{}",
        over.node.lifecycle.reason.message
    );
    assert!(matches!(over.machine().step, ProviderStep::Failing { .. }));
}

#[test]
fn deployment_whose_agent_has_enrolled_does_not_fail() {
    let enrolled = provided().after_fact(token()).agent(provided_enrollment("old")).agent(poll()).expect("active");
    let failed = enrolled.clone().at_the_provider(failed_at_provider()).expect("active");
    assert_eq!(failed.machine().step, ProviderStep::Deploying);
    // The provider is down for longer than a deployment may take: that is shown, and has no other consequence.
    let late = enrolled.after_heartbeat().after(DEPLOY);
    assert!(late.node.deadline().is_some_and(|deadline| deadline.at <= late.now));
    assert_eq!(late.ticked().machine().step, ProviderStep::Deploying);
}

#[test]
fn late_report_of_an_earlier_step_has_no_effect() {
    let first = provided();
    let since = first.machine().since;
    let story = first.after(TimeDelta::seconds(30)).deployed();
    assert_eq!(
        story.after_fact(Fact::MachineReported { since, report: failed_at_provider() }).unmoved().node.state(),
        "active"
    );
}

#[test]
fn machine_that_was_released_by_others_quarantines_its_node() {
    let story = provided().deployed().at_the_provider(lost()).expect("quarantined");
    assert_eq!(story.node.lifecycle.reason.code.as_str(), "machine_lost");
    assert_eq!(story.node.gpus_free(), 0);
    let repeated = story.at_the_provider(lost()).unmoved();
    repeated.after_heartbeat().expect("quarantined");
}

#[test]
fn removed_node_is_gone_when_the_provider_has_released_its_machine() {
    let removing = provided().deployed().retired().removing();
    assert_eq!(removing.machine().step, ProviderStep::Releasing { then_deploy: false });
    assert!(removing.published.contains(&Event::MachineDue { node_id: NODE }));
    let waits = removing.after(TimeDelta::seconds(10)).ticked().expect("removing");
    assert!(Node::claims(&waits.node).contains("machine/abc123"), "no other node gets the machine yet");
    let released = waits.at_the_provider(ProviderReport::Done).expect("removed");
    assert!(!Node::claims(&released.node).contains("machine/abc123"));
    assert_eq!(released.node.timer(), None);
}

#[test]
fn release_that_the_provider_never_confirms_is_overdue_and_an_operator_gives_it_up() {
    let removing = provided().deployed().retired().removing().removing().unmoved();
    let overdue = removing.after(TimeDelta::seconds(21_600)).ticked().expect("removing");
    let deadline = overdue.node.deadline().unwrap();
    assert!(deadline.at <= overdue.now && deadline.reason.contains("abc123"), "{deadline:?}");
    overdue.removing().expect("removed");
}

#[test]
fn no_two_nodes_have_one_machine() {
    let machine = PreparedMachine { system_id: "abc123".into(), image_digest: None };
    let (policy, by) = (PolicyBook::default(), admin());
    let command = Request::Register { registration: Box::new(registration()), probe: None, machine: Some(machine) };
    let holders = BTreeMap::from([("machine/abc123".to_owned(), Uuid::from_u128(99))]);
    let refused = Node::decide_without(None, command.into(), &holders, &ctx(start(), &policy, &by));
    assert_eq!(refused.unwrap_err(), Rejection::MachineTaken { node_id: NodeId(Uuid::from_u128(99)) });
}
