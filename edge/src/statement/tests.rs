use super::*;
use domain::AllocationId;

fn line(kind: &str, allocation: u128, effect: i64, amount: i64) -> Line {
    let at = |minute| Month::of("2026-11-15T00:00:00Z".parse().unwrap()).begins() + chrono::TimeDelta::minutes(minute);
    let sum = LedgerSum {
        kind: kind.to_owned(),
        allocation: (allocation > 0).then(|| AllocationId(Uuid::from_u128(allocation))),
        together: 0,
        postings: 2,
        effect: MicroAmount::of(effect),
        amount: MicroAmount::of(amount),
        used_from: (allocation > 0).then(|| at(1)),
        used_until: (allocation > 0).then(|| at(61)),
    };
    let rented =
        (allocation > 0).then(|| AllocationUsage { sku: "h100x8".into(), gpu_count: 8, user_id: "ann".into() });
    Line { sum, rented }
}

fn statement(holder: &str, lines: Vec<Line>) -> Statement {
    let effect: i64 = lines.iter().map(|line| line.sum.effect.get()).sum();
    let postings: u64 = lines.iter().map(|line| line.sum.postings).sum();
    let opening = LedgerPosition { number: 7, balance: MicroAmount::of(1_000_000_000_001) };
    Statement {
        account: Uuid::from_u128(0xACC0),
        holder: Holder::Org(holder.into()),
        currency: Currency::parse("EUR").unwrap(),
        month: Month::of("2026-11-15T00:00:00Z".parse().unwrap()),
        opening,
        closing: LedgerPosition {
            number: 7 + i64::try_from(postings).unwrap(),
            balance: opening.balance.plus(MicroAmount::of(effect)),
        },
        lines,
        as_of: "2026-12-02T08:00:00Z".parse().unwrap(),
    }
}

/// The text that a PDF reader finds, page by page.
fn read_back(file: &[u8]) -> Vec<String> {
    pdf_extract::extract_text_from_mem_by_pages(file).unwrap()
}

#[test]
fn statement_sum_is_checked_against_its_balances() {
    let good = statement("acme", vec![line("usage", 1, -100, 100), line("credit", 0, 500, 500)]);
    assert!(good.adds_up());
    let mut wrong = good.clone();
    wrong.closing.balance = wrong.closing.balance.plus(MicroAmount::of(1));
    assert!(!wrong.adds_up(), "by a millionth");
    let mut wrong = good;
    wrong.closing.number += 1;
    assert!(!wrong.adds_up(), "by a posting");
}

#[test]
fn pdf_statement_matches_the_postings() {
    let lines = vec![
        line("usage", 1, -123_456_789, 123_456_789),
        line("usage_credit", 1, 1, 1),
        line("write_off", 2, 0, 7_000_000),
        line("credit", 0, 50_000_000, 50_000_000),
    ];
    let it = statement("acme", lines);
    let file = printed(&it).unwrap();
    let pages = read_back(&file);
    assert_eq!(pages.len(), 1);
    let text = &pages[0];
    for expected in [
        "Statement of account",
        "November 2026",
        "acme",
        "EUR",
        "10000.00000001",
        "-1.23456789",
        "0.00000001",
        "0.50000000",
        "9999.26543213",
        "9999.26",
        "0.07000000 at our cost",
        "8 × h100x8",
        "00000000-0000-0000-0000-000000000001",
        "11-01 00:01:00 to 11-01 01:01:00",
        "8 postings, 8 to 15 of the account",
        "page 1 of 1",
    ] {
        assert!(text.contains(expected), "{expected} is not in:\n{text}");
    }
    assert!(!text.contains("Not final"), "{text}");
}

#[test]
fn names_in_any_script_are_printed_with_glyphs() {
    let holder = "Ærøskøbing Ελλάδα Дарья 山田太郎 김철수 नमस्ते \u{202e}x\u{10ffff}";
    let text = read_back(&printed(&statement(holder, Vec::new())).unwrap()).concat();
    for expected in ["Ærøskøbing Ελλάδα Дарья", "山田太郎", "김철수", "[U+202E]", "[U+10FFFF]", "Nothing was posted."]
    {
        assert!(text.contains(expected), "{expected} is not in:\n{text}");
    }
    // The longest and widest that an identity provider may give.
    for long in ["W".repeat(255), "ﷺ".repeat(255), "e\u{301}".repeat(127), "नि".repeat(120)] {
        assert!(printed(&statement(&long, Vec::new())).unwrap().starts_with(b"%PDF-"));
    }
}

#[test]
fn a_long_statement_has_pages_with_titles_and_all_its_lines() {
    let lines: Vec<Line> = (1..=500).map(|n| line("usage", n, -1, 1)).collect();
    let mut it = statement("acme", lines);
    it.as_of = "2026-11-20T08:00:00Z".parse().unwrap();
    let file = printed(&it).unwrap();
    assert!(file.len() < 500_000, "{} bytes", file.len());
    let pages = read_back(&file);
    assert!((10..40).contains(&pages.len()), "{}", pages.len());
    for (number, page) in (1..).zip(&pages) {
        assert!(page.contains(&format!("page {number} of {}", pages.len())), "{page}");
    }
    let all = pages.concat();
    assert!(all.contains("Not final"));
    for n in 1..=500_u128 {
        assert!(all.contains(&Uuid::from_u128(n).to_string()), "allocation {n}");
    }
}
