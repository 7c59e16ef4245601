//! Overrides of the table by administrators (decision 0051): a new Xid is classified without a release.

use super::{FindingCause, FindingClass, FindingRule, Repair, TABLE, lineage};
use crate::time::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Bytes of a pattern.
const MAX_PATTERN: usize = 64;

/// The findings that an override is for: `probe/code`, where the code may end in `*`. Without it, the codes below the code are meant too:
/// `xid/145` is for `145.fatal.rlw`, as an override that was written before agents told them apart has to be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CodePattern(String);

impl CodePattern {
    /// `None` where the text is no pattern.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (probe, code) = text.split_once('/').filter(|_| text.len() <= MAX_PATTERN)?;
        let is_probe = probe.starts_with(|first: char| first.is_ascii_lowercase())
            && probe.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
        let exact = code.strip_suffix('*').unwrap_or(code);
        let is_code = exact.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        (is_probe && is_code && !code.is_empty()).then(|| Self(text.to_owned()))
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    #[must_use]
    pub fn matches(&self, probe: &str, code: &str) -> bool {
        let Some((of_probe, of_code)) = self.0.split_once('/') else { return false };
        let is_above = || lineage(code).any(|above| above == of_code);
        let has_code = of_code.strip_suffix('*').map_or_else(is_above, |begin| code.starts_with(begin));
        of_probe == probe && has_code
    }

    /// The order of patterns that match the same finding: the longest wins, and of two that differ in the `*` alone the one without it.
    fn specificity(&self) -> (usize, bool) {
        let without_star = self.without_star();
        (without_star.len(), without_star.len() == self.0.len())
    }

    fn without_star(&self) -> &str {
        self.0.strip_suffix('*').unwrap_or(&self.0)
    }

    /// The row by which the findings of this pattern are judged, if they are of one code.
    fn row(&self) -> Option<&'static FindingRule> {
        let (probe, code) = self.without_star().split_once('/')?;
        Some(FindingRule::of(probe, code))
    }
}

impl fmt::Display for CodePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<CodePattern> for String {
    fn from(pattern: CodePattern) -> Self {
        pattern.0
    }
}

impl TryFrom<String> for CodePattern {
    type Error = NoPattern;

    fn try_from(text: String) -> Result<Self, NoPattern> {
        Self::parse(&text).ok_or(NoPattern(text))
    }
}

/// A text that is no pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no pattern such as xid/79 or xid/14*")]
pub struct NoPattern(String);

/// What an override says of the findings of its pattern, in place of their row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judgement {
    pub pattern: CodePattern,
    pub classes: BTreeSet<FindingClass>,
    pub cause: FindingCause,
    pub repair: Repair,
    /// Empty where nothing concerns the tenant.
    pub tenant_message: String,
}

impl Judgement {
    /// True where more follows than that the finding is shown.
    fn has_consequences(&self) -> bool {
        self.classes.iter().any(|class| *class != FindingClass::Warn)
    }

    /// Checks what holds for every row of the table too.
    ///
    /// # Errors
    /// [`OverrideFault`]
    pub fn check(&self) -> Result<(), OverrideFault> {
        if self.classes.is_empty() {
            return Err(OverrideFault::WithoutClass);
        }
        let above = self.pattern.row();
        let tenants: Vec<String> = of_tenants()
            .filter(|rule| self.pattern.matches(rule.probe, rule.code) || above == Some(*rule))
            .map(|rule| format!("{}/{}", rule.probe, rule.code))
            .collect();
        if self.has_consequences() && (self.cause == FindingCause::Tenant || !tenants.is_empty()) {
            return Err(OverrideFault::CausedByTenants { rows: tenants });
        }
        let concerns_tenant = [FindingClass::Evacuate, FindingClass::BillingCredit];
        if self.tenant_message.is_empty() && concerns_tenant.iter().any(|class| self.classes.contains(class)) {
            return Err(OverrideFault::WithoutMessage);
        }
        Ok(())
    }
}

/// Why an override is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum OverrideFault {
    #[error("an override has at least one class")]
    WithoutClass,
    #[error("what a tenant's program can cause is shown and has no other consequence")]
    CausedByTenants { rows: Vec<String> },
    #[error("what concerns a tenant has a message for the tenant")]
    WithoutMessage,
}

/// An override, and its author.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleOverride {
    pub judgement: Judgement,
    pub reason: String,
    pub written_by: String,
    pub written_at: Timestamp,
}

/// All overrides in force, by pattern.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleOverrides(pub BTreeMap<CodePattern, RuleOverride>);

impl RuleOverrides {
    /// What the most specific override says of a finding; `None` where its row holds.
    ///
    /// An override that a release wrote before it knew that tenants can cause the finding has no consequence.
    #[must_use]
    pub fn judgement_of(&self, probe: &str, code: &str) -> Option<&Judgement> {
        let matching = self.0.values().map(|written| &written.judgement);
        let matching = matching.filter(|judgement| judgement.pattern.matches(probe, code));
        let judgement = matching.max_by_key(|judgement| judgement.pattern.specificity())?;
        let is_of_tenant = FindingRule::of(probe, code).cause == FindingCause::Tenant;
        Some(judgement).filter(|judgement| !(is_of_tenant && judgement.has_consequences()))
    }
}

fn of_tenants() -> impl Iterator<Item = &'static FindingRule> {
    TABLE.iter().filter(|rule| rule.cause == FindingCause::Tenant)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judgement(pattern: &str, classes: &[FindingClass]) -> Judgement {
        Judgement {
            pattern: CodePattern::parse(pattern).unwrap(),
            classes: classes.iter().copied().collect(),
            cause: FindingCause::Hardware,
            repair: Repair::None,
            tenant_message: "m".into(),
        }
    }

    fn overrides(all: &[Judgement]) -> RuleOverrides {
        let written = |judgement: &Judgement| RuleOverride {
            judgement: judgement.clone(),
            reason: "r".into(),
            written_by: "user:root".into(),
            written_at: Timestamp::UNIX_EPOCH,
        };
        RuleOverrides(all.iter().map(|it| (it.pattern.clone(), written(it))).collect())
    }

    #[test]
    fn patterns_are_a_probe_and_a_code_that_may_end_in_a_star() {
        for text in ["xid/79", "xid/14*", "xid/*", "row_remap/failed", "sxid/12028", "x/a.b-c_D*"] {
            let pattern = CodePattern::parse(text).unwrap();
            assert_eq!(serde_json::from_value::<CodePattern>(text.into()).unwrap(), pattern, "{text}");
        }
        let long = format!("xid/{}", "1".repeat(61));
        for text in
            ["", "xid", "xid/", "/79", "*/79", "xid/1*4", "xid/**", "xid/7 9", "Xid/79", "xid/7/9", "xid/ä", &long]
        {
            assert_eq!(CodePattern::parse(text), None, "{text}");
            assert!(serde_json::from_value::<CodePattern>(text.into()).is_err(), "{text}");
        }
    }

    #[test]
    fn pattern_matches_its_codes_and_no_others() {
        let matches =
            |pattern: &str, probe: &str, code: &str| CodePattern::parse(pattern).unwrap().matches(probe, code);
        assert!(matches("xid/14*", "xid", "14") && matches("xid/14*", "xid", "149") && matches("xid/*", "xid", ""));
        assert!(
            !matches("xid/14*", "xid", "1") && !matches("xid/14", "xid", "149") && !matches("xid/14", "sxid", "14")
        );
    }

    #[test]
    fn pattern_of_a_code_is_for_the_codes_below_it_and_a_longer_one_wins() {
        let all = overrides(&[
            judgement("xid/145", &[FindingClass::Warn]),
            judgement("xid/145*", &[FindingClass::Warn]),
            judgement("xid/145.nonfatal.*", &[FindingClass::Warn]),
            judgement("xid/145.nonfatal", &[FindingClass::Warn]),
            judgement("xid/145.fatal.rlw_ctrl", &[FindingClass::Warn]),
        ]);
        for (code, wanted) in [
            ("145", Some("xid/145")),
            ("145.fatal.rlw_remap", Some("xid/145")),
            ("145.fatal.rlw_ctrl", Some("xid/145.fatal.rlw_ctrl")),
            ("145.nonfatal", Some("xid/145.nonfatal")),
            ("145.nonfatal.rlw_rxpipe", Some("xid/145.nonfatal.*")),
            ("1450", Some("xid/145*")),
            ("144.fatal", None),
        ] {
            let found = all.judgement_of("xid", code).map(|it| it.pattern.as_str());
            assert_eq!(found, wanted, "{code}");
        }
    }

    #[test]
    fn code_below_one_that_tenants_cause_gets_no_consequences() {
        for pattern in ["xid/45.caused_by", "xid/45.caused_by.145", "xid/13.new", "xid/13.new*"] {
            let wrong = judgement(pattern, &[FindingClass::PreventAllocation]);
            assert!(matches!(wrong.check(), Err(OverrideFault::CausedByTenants { .. })), "{pattern}");
        }
        assert_eq!(judgement("xid/145.nonfatal.rlw_rxpipe", &[FindingClass::PreventAllocation]).check(), Ok(()));
    }

    #[test]
    fn most_specific_override_wins() {
        let all = overrides(&[
            judgement("xid/*", &[FindingClass::Warn]),
            judgement("xid/20*", &[FindingClass::PreventAllocation]),
            judgement("xid/2000", &[FindingClass::Evacuate]),
        ]);
        for (code, wanted) in [("2000", "xid/2000"), ("2001", "xid/20*"), ("3", "xid/*")] {
            assert_eq!(all.judgement_of("xid", code).unwrap().pattern.as_str(), wanted, "{code}");
        }
        assert_eq!(all.judgement_of("ecc", "2000"), None);
    }

    #[test]
    fn what_a_tenant_can_cause_gets_no_consequences_by_any_override() {
        for class in [FindingClass::PreventAllocation, FindingClass::Evacuate, FindingClass::BillingCredit] {
            for rule in of_tenants() {
                let name = format!("{}/{}", rule.probe, rule.code);
                for pattern in [name.clone(), format!("{}/*", rule.probe)] {
                    let wrong = judgement(&pattern, &[class]);
                    let Err(OverrideFault::CausedByTenants { rows }) = wrong.check() else { panic!("{pattern}") };
                    assert!(rows.contains(&name), "{pattern}");
                    // Stored by a release that did not know it.
                    assert_eq!(overrides(&[wrong]).judgement_of(rule.probe, rule.code), None, "{pattern}");
                }
            }
            let declared = Judgement { cause: FindingCause::Tenant, ..judgement("xid/2000", &[class]) };
            assert_eq!(declared.check(), Err(OverrideFault::CausedByTenants { rows: vec![] }));
        }
        assert_eq!(judgement("xid/13", &[FindingClass::Warn]).check(), Ok(()));
        assert_eq!(judgement("xid/79", &[FindingClass::Warn]).check(), Ok(()));
    }

    #[test]
    fn override_has_a_class_and_a_message_for_the_tenant_it_concerns() {
        assert_eq!(judgement("xid/2000", &[]).check(), Err(OverrideFault::WithoutClass));
        for class in [FindingClass::Evacuate, FindingClass::BillingCredit] {
            let silent = Judgement { tenant_message: String::new(), ..judgement("xid/2000", &[class]) };
            assert_eq!(silent.check(), Err(OverrideFault::WithoutMessage));
        }
        let withheld = judgement("xid/2000", &[FindingClass::PreventAllocation]);
        assert_eq!(Judgement { tenant_message: String::new(), ..withheld }.check(), Ok(()));
    }
}
