//! The reason codes of all entities, against the table.

use super::*;
use crate::allocation::{FailureCode, StatusReason};
use crate::browser_session::EndReason;
use crate::node::StateCode;
use crate::rollout_outcome::{SkipReason, failure};
use crate::tenant::SshKeyFault;
use crate::terminal_session::CloseCode;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use strum::VariantNames as _;

#[test]
fn the_reason_codes_are_as_reviewed() {
    let mut table = String::new();
    for row in ALL {
        let places: Vec<&str> = row.appears_in.iter().map(|place| place.into_str()).collect();
        writeln!(table, "{} ({}): {}", row.code, places.join(", "), row.meaning).unwrap();
    }
    insta::assert_snapshot!(table);
}

#[test]
fn each_code_has_one_row_in_snake_case() {
    let codes: BTreeSet<&str> = ALL.iter().map(|row| row.code).collect();
    assert_eq!(codes.len(), ALL.len());
    for row in ALL {
        assert!(is_code(row.code) && !row.code.contains('/'), "{}", row.code);
        assert!(!row.meaning.is_empty() && row.appears_in.is_sorted(), "{}", row.code);
    }
}

#[test]
fn finding_has_the_form_of_a_code_and_a_sentence_has_not() {
    for code in ["silent", "xid/79", "privilege/setuid", "driver/R580.1-b"] {
        assert!(is_code(code), "{code}");
    }
    for text in ["", "the balance is depleted", "Silent", "a-b", "xid/", "/79", "a/b/c", "silent: a detail"] {
        assert!(!is_code(text), "{text}");
    }
}

/// `open` is the variant that carries text of other releases or of agents.
fn assert_lists(place: ReasonPlace, variants: &[&'static str], open: Option<&str>) {
    let listed: BTreeSet<&str> = ALL.iter().filter(|row| row.appears_in.contains(&place)).map(|row| row.code).collect();
    let written: BTreeSet<&str> = variants.iter().copied().filter(|name| Some(*name) != open).collect();
    assert_eq!(written, listed, "{place:?}");
}

#[test]
fn table_has_exactly_the_codes_of_each_closed_list() {
    assert_lists(ReasonPlace::NodeState, StateCode::VARIANTS, Some("other"));
    assert_lists(ReasonPlace::AllocationStatus, StatusReason::VARIANTS, Some("text"));
    assert_lists(ReasonPlace::TerminalEnd, CloseCode::VARIANTS, None);
    assert_lists(ReasonPlace::BrowserSessionEnd, EndReason::VARIANTS, None);
    assert_lists(ReasonPlace::SshKeyRefusal, SshKeyFault::VARIANTS, None);
    let skips: Vec<&str> = SkipReason::ALL.iter().map(|reason| reason.name()).collect();
    assert_lists(ReasonPlace::RolloutSkip, &skips, None);
    let failures = [failure::UPDATE_UNSUPPORTED, failure::NO_RESULT, failure::OFFLINE];
    assert_lists(ReasonPlace::RolloutFailure, &failures, None);
    for code in FailureCode::VARIANTS.iter().filter(|name| **name != "reported") {
        assert!(is_listed(code), "{code}");
    }
}
