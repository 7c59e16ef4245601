//! Findings that the machine was altered: quarantine, and acceptance by an administrator.

use super::health::found;
use super::*;
use crate::finding::{CodePattern, FindingCause, FindingClass, Judgement, Repair, RuleOverride, RuleOverrides, TABLE};

fn setuid(count: u64) -> ReportedFinding {
    ReportedFinding { count, detail: "1 (abc): /var/lib/.x".into(), ..found("privilege", "setuid", None) }
}

fn accepted(story: &Story) -> Vec<(String, u64)> {
    let Reply::HeartbeatAccepted { accepted, .. } = &story.reply else { panic!("no answer to a heartbeat") };
    accepted.iter().map(|finding| (finding.code.clone(), finding.count)).collect()
}

#[test]
fn altered_machine_takes_no_new_tenant_and_the_present_one_runs_on_and_pays() {
    for rule in TABLE.iter().filter(|rule| rule.has(FindingClass::Quarantine)) {
        let altered = node().active().ready().finds(&[found(rule.probe, rule.code, None)]).expect("quarantined");
        assert_eq!(altered.node.lifecycle.reason.code, StateCode::IntegrityFinding, "{}", rule.code);
        assert!(altered.node.lifecycle.reason.message.contains(rule.code), "{}", altered.node.lifecycle.reason.message);
        assert!(matches!(altered.node.tenancy.holds[&TENANT].phase, HoldPhase::Ready));
        assert!(!altered.published.iter().any(|event| matches!(event, Event::TenantFaulted { .. })), "{}", rule.code);
        assert!(matches!(altered.refuses(&worker(), reserve(OTHER, 1)), Rejection::NotSchedulable { .. }));
        let refused = altered.refuses(&admin(), Request::ReleaseQuarantine { reason: "r".into() });
        assert!(matches!(refused, Rejection::NotInOrder { .. }), "{refused}");
        altered.finds(&[]).expect("active");
    }
}

#[test]
fn cleared_finding_is_accepted_as_it_was_reported_until_the_agent_has_learned_that() {
    let altered = node().active().finds(&[setuid(1)]).expect("quarantined");
    assert_eq!(accepted(&altered), []);
    let cleared = altered.clears(0).expect("active").finds(&[setuid(1)]).expect("active");
    assert_eq!(accepted(&cleared), [("setuid".to_owned(), 1)]);
    let repeated = cleared.clone().finds(&[setuid(1)]);
    assert_eq!(accepted(&repeated), [("setuid".to_owned(), 1)], "the answer may be lost");
    let learned = repeated.finds(&[]).expect("active");
    assert_eq!(accepted(&learned), []);
    // Another occurrence was not looked at.
    let other = cleared.finds(&[setuid(2)]).expect("quarantined");
    assert_eq!(accepted(&other), []);
    let both = other.clears(0).expect("active").finds(&[setuid(2)]);
    assert_eq!(accepted(&both), [("setuid".to_owned(), 2)]);
}

#[test]
fn other_findings_are_not_accepted_by_being_cleared() {
    let altered = node().active().finds(&[found("package", "altered", None)]).expect("quarantined");
    let cleared = altered.clears(0).expect("active").finds(&[found("package", "altered", None)]).expect("active");
    assert_eq!(accepted(&cleared), []);
}

#[test]
fn hold_names_all_findings_and_ends_with_the_last() {
    let sudoers = found("privilege", "sudoers", None);
    let both = node().active().finds(&[setuid(1)]).finds(&[setuid(1), sudoers.clone()]).expect("quarantined");
    let message = both.node.lifecycle.quarantine_holds()[0].message.clone();
    assert!(message.contains("/var/lib/.x") && message.contains("privilege/sudoers"), "{message}");
    assert_eq!(both.node.lifecycle.quarantine_holds().len(), 1);
    both.finds(&[sudoers]).expect("quarantined").finds(&[]).expect("active");
}

#[test]
fn drift_and_altered_machine_are_holds_of_their_own() {
    let story = node().active().finds(&[setuid(1)]).quarantined().finds(&[]).expect("quarantined");
    let authors: Vec<_> = story.node.lifecycle.quarantine_holds().iter().map(|hold| hold.author).collect();
    assert_eq!(authors, [HoldAuthor::Administrator]);
}

#[test]
fn override_weakens_a_row_for_a_fleet_whose_ports_change() {
    let judgement = Judgement {
        pattern: CodePattern::parse("privilege/listening_port").unwrap(),
        classes: [FindingClass::Warn].into(),
        cause: FindingCause::Software,
        repair: Repair::None,
        tenant_message: String::new(),
    };
    let mut story = node().active();
    let (reason, written_by) = ("r".to_owned(), "user:root".to_owned());
    let written = RuleOverride { judgement: judgement.clone(), reason, written_by, written_at: start() };
    story.policy.set_health_rules(RuleOverrides([(judgement.pattern, written)].into()));
    story.finds(&[found("privilege", "listening_port", None)]).expect("active");
}

#[test]
fn hold_names_eight_findings_at_most() {
    let altered = TABLE.iter().filter(|rule| rule.has(FindingClass::Quarantine));
    let all: Vec<_> = altered.map(|rule| found(rule.probe, rule.code, None)).collect();
    let held = node().active().finds(&all).expect("quarantined");
    let named = |message: &str| all.iter().filter(|it| message.contains(&format!("{}/{},", it.probe, it.code))).count();
    assert!(all.len() > 8);
    assert_eq!(named(&held.node.lifecycle.reason.message), 8, "{}", held.node.lifecycle.reason.message);
}

#[test]
fn hold_that_lasts_is_the_same_one_from_report_to_report() {
    let altered = node().active().finds(&[setuid(1)]).expect("quarantined").publishes(&["node.state_changed"]);
    altered.finds(&[setuid(1)]).expect("quarantined").unmoved();
}
