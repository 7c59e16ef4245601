//! The overrides of the table of health findings, written by administrators (decision 0051). There is one entity for all of them.

use crate::audit::{AuditAction, AuditRecord};
use crate::authz::Action;
use crate::event::Event;
use crate::explanation::{Explanation, RejectionCode};
use crate::finding::{CodePattern, Judgement, OverrideFault, RuleOverride, RuleOverrides};
use crate::id::{EntityKind, EntityRef, HealthRulesId};
use crate::state_machine::{self, Effect, Machine, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The name of the entity, from which its id follows.
pub const NAME: &str = "health_rules";

/// The bound of overrides. Every process reads all of them.
pub const MAX_OVERRIDES: usize = 100;

/// The state: all overrides.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthRules {
    pub overrides: RuleOverrides,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Replaces the override of the same pattern.
    Write {
        judgement: Box<Judgement>,
        reason: String,
    },
    TakeBack {
        pattern: CodePattern,
        reason: String,
    },
    Tick,
}

impl state_machine::Command for Command {
    const TICK: Self = Self::Tick;

    fn name(&self) -> &'static str {
        self.into_str()
    }

    fn action(&self) -> Action {
        match self {
            Self::Write { .. } | Self::TakeBack { .. } => Action::ManageNodes,
            Self::Tick => Action::Advance,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Written { written: Box<RuleOverride> },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("no override was ever written")]
    NotFound,
    #[error("there is no override of {pattern}")]
    NotSet { pattern: CodePattern },
    #[error("the override is refused: {fault}")]
    Refused { fault: OverrideFault },
    #[error("there are {limit} overrides")]
    TooMany { limit: usize },
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotSet { pattern } => Explanation::new(
                RejectionCode::NotFound,
                format!("There is no override of {pattern}; GET /api/v1/admin/health-rules lists those there are."),
            ),
            Self::Refused { fault: OverrideFault::WithoutClass } => Explanation::invalid(
                "`classes` must name at least one class; `warn` alone shows the finding.",
                "classes",
            ),
            Self::Refused { fault: OverrideFault::WithoutMessage } => Explanation::invalid(
                "`tenant_message` is required with `evacuate` or `billing_credit`: the tenant reads why.",
                "tenant_message",
            ),
            Self::Refused { fault: OverrideFault::CausedByTenants { rows } } => {
                let which = if rows.is_empty() { "`cause` is tenant".to_owned() } else { rows.join(", ") };
                Explanation::invalid(
                    format!(
                        "A tenant's program can cause what this override is for ({which}). Such a finding may have the class `warn` \
                         alone: it never stops a meter and takes no GPU out of rent. Choose a narrower pattern."
                    ),
                    "classes",
                )
                .detail("rows", json!(rows))
            }
            Self::TooMany { limit } => Explanation::conflict(format!(
                "There are {limit} overrides, which is the most; take one back, or write one with a wider pattern."
            )),
            rejection @ Self::NotFound => Explanation::unexpected(&rejection),
        }
    }
}

impl Machine for HealthRules {
    const KIND: EntityKind = EntityKind::HealthRules;
    /// The most overrides, each with its texts.
    const SNAPSHOT_MOST: usize = 512 * 1024;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (state, Command::Write { judgement, reason }) => {
                state.cloned().unwrap_or_default().write(*judgement, reason, ctx)
            }
            (Some(rules), Command::TakeBack { pattern, reason }) => rules.take_back(&pattern, &reason, ctx),
            (None, Command::TakeBack { pattern, .. }) => Err(Rejection::NotSet { pattern }),
            (Some(_), Command::Tick) => Ok(Transition::stay(Reply::Done)),
            (None, Command::Tick) => Err(Rejection::NotFound),
        }
    }

    fn state(&self) -> &'static str {
        "present"
    }
}

impl HealthRules {
    fn write(
        mut self,
        judgement: Judgement,
        reason: String,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        judgement.check().map_err(|fault| Rejection::Refused { fault })?;
        let pattern = judgement.pattern.clone();
        let old = self.overrides.0.get(&pattern).map(|written| written.judgement.clone());
        if old.is_none() && self.overrides.0.len() >= MAX_OVERRIDES {
            return Err(Rejection::TooMany { limit: MAX_OVERRIDES });
        }
        let written =
            RuleOverride { judgement, reason: reason.clone(), written_by: ctx.by.to_string(), written_at: ctx.now };
        let metadata =
            json!({ "pattern": pattern, "old_value": old, "new_value": written.judgement, "reason": reason });
        self.overrides.0.insert(pattern.clone(), written.clone());
        let reply = Reply::Written { written: Box::new(written) };
        Ok(self.changed(
            reply,
            format!("{pattern} is overridden: {reason}"),
            AuditAction::HealthRulesWrite,
            metadata,
            ctx,
        ))
    }

    fn take_back(
        &self,
        pattern: &CodePattern,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let mut next = self.clone();
        let Some(taken) = next.overrides.0.remove(pattern) else {
            return Err(Rejection::NotSet { pattern: pattern.clone() });
        };
        let metadata = json!({ "pattern": pattern, "old_value": taken.judgement, "new_value": null, "reason": reason });
        let why = format!("{pattern} is not overridden any more: {reason}");
        Ok(next.changed(Reply::Done, why, AuditAction::HealthRulesTakeBack, metadata, ctx))
    }

    fn changed(
        self,
        reply: Reply,
        why: String,
        action: AuditAction,
        metadata: Value,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let audit = AuditRecord::new(action, EntityRef { kind: EntityKind::HealthRules, id: ctx.id }, metadata);
        let event = Event::HealthRulesWritten { rules_id: HealthRulesId(ctx.id) };
        Transition::to(self, reply, why).audit(audit).event(event).effect(Effect::ReadPolicy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authz::Principal;
    use crate::finding::{FindingCause, FindingClass, Repair};
    use crate::policy::PolicyBook;
    use crate::state_machine::Timestamp;
    use uuid::Uuid;

    fn decide(state: Option<&HealthRules>, command: Command) -> Result<Transition<HealthRules>, Rejection> {
        let (policy, by) = (PolicyBook::default(), Principal::system("an operator"));
        let ctx = TransitionContext {
            id: Uuid::from_u128(9),
            version: 0,
            ..TransitionContext::in_test(Timestamp::UNIX_EPOCH, &policy, &by)
        };
        HealthRules::decide(state, command, &ctx)
    }

    fn write(pattern: &str, class: FindingClass) -> Command {
        let judgement = Judgement {
            pattern: CodePattern::parse(pattern).unwrap(),
            classes: [class].into(),
            cause: FindingCause::Hardware,
            repair: Repair::Operator,
            tenant_message: "m".into(),
        };
        Command::Write { judgement: Box::new(judgement), reason: "a new Xid".into() }
    }

    #[test]
    fn override_is_written_replaced_and_taken_back_each_audited_and_published() {
        let first = decide(None, write("xid/2000", FindingClass::Evacuate)).unwrap();
        let second = decide(first.next.as_ref(), write("xid/2000", FindingClass::Warn)).unwrap();
        let pattern = CodePattern::parse("xid/2000").unwrap();
        let take_back = Command::TakeBack { pattern: pattern.clone(), reason: "in the table".into() };
        let third = decide(second.next.as_ref(), take_back.clone()).unwrap();
        for (step, action) in [(&first, "write"), (&second, "write"), (&third, "take_back")] {
            assert_eq!(step.audit[0].action.as_str(), format!("health_rules.{action}"));
            assert_eq!(step.events[0].subject(), "policy.invalidate.health_rules");
            assert_eq!(step.effects, [Effect::ReadPolicy]);
        }
        assert_eq!(second.audit[0].metadata["old_value"]["classes"], json!(["evacuate"]));
        assert_eq!(second.next.as_ref().unwrap().overrides.0.len(), 1);
        assert_eq!(third.next.as_ref().unwrap().overrides, RuleOverrides::default());
        assert_eq!(decide(third.next.as_ref(), take_back.clone()).err(), Some(Rejection::NotSet { pattern }));
        assert!(decide(None, take_back).is_err());
    }

    #[test]
    fn override_of_what_a_tenant_can_cause_is_refused_with_the_rows() {
        let refused = decide(None, write("xid/*", FindingClass::BillingCredit)).err().unwrap();
        let text = state_machine::Rejection::explain(refused).message;
        assert!(text.contains("xid/13") && text.contains("never stops a meter"), "{text}");
        assert!(decide(None, write("xid/13", FindingClass::PreventAllocation)).is_err());
        assert!(decide(None, write("xid/13", FindingClass::Warn)).is_ok());
    }

    #[test]
    fn overrides_are_bounded_in_number_and_size() {
        let mut rules = None;
        for n in 0..MAX_OVERRIDES {
            let Command::Write { mut judgement, .. } = write(&format!("xid/{}", 10_000 + n), FindingClass::Evacuate)
            else {
                unreachable!()
            };
            judgement.tenant_message = "ä".repeat(300);
            let command = Command::Write { judgement, reason: "ä".repeat(500) };
            rules = decide(rules.as_ref(), command).unwrap().next;
        }
        let size = serde_json::to_string(&rules).unwrap().len();
        assert!(size < HealthRules::SNAPSHOT_MOST, "{size}");
        let more = decide(rules.as_ref(), write("xid/1", FindingClass::Warn)).err();
        assert_eq!(more, Some(Rejection::TooMany { limit: MAX_OVERRIDES }));
        assert!(
            decide(rules.as_ref(), write("xid/10000", FindingClass::Warn)).is_ok(),
            "one that is there is replaced"
        );
    }
}
