//! Monthly statements: their content, which is the same in every format to the millionth.

use super::billing::{ACCOUNTS, adjust, metered, opened};
use super::harness::ApiHarness;
use domain::AllocationId;
use domain::billing_account::{BillingAccount, Command, Instruction};
use domain::state_machine::Command as _;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use uuid::Uuid;

const STATEMENTS: &str = "/api/v1/billing/statements";
const RENTED: u128 = 0xA110;

/// An account that was opened in September, with a deposit and the cost of one allocation across the end of the month: 3,600 minor units
/// an hour.
async fn two_months(api: &ApiHarness) -> Uuid {
    api.stop_clock_at("2026-09-30T23:58:00Z");
    let account = opened(api).await;
    adjust(api, account, "a", json!(10_000)).await.is(201);
    metered(api, account, AllocationId(Uuid::from_u128(RENTED)), "2026-09-30T23:58:00Z".parse().unwrap()).await;
    for at in ["2026-09-30T23:59:00Z", "2026-10-01T00:00:00Z", "2026-10-01T00:01:30.5Z"] {
        api.stop_clock_at(at);
        api.ask_as_system::<BillingAccount>(account, Command::TICK).await;
    }
    let until = Some("2026-10-01T00:01:10.000001Z".parse().unwrap());
    let from = Some("2026-09-30T23:58:00Z".parse().unwrap());
    let allocation_id = AllocationId(Uuid::from_u128(RENTED));
    api.ask_as_system::<BillingAccount>(account, Instruction::MeterUsage { allocation_id, from, until }).await;
    api.stop_clock_at("2026-10-31T23:59:59.999999Z");
    let body = json!({"amount_minor": -250, "currency": "EUR", "reason": "=HYPERLINK(\"x\"), a correction"});
    let path = format!("{ACCOUNTS}/{account}/adjustments");
    api.post(&path).user("biller").key("b").json(&body).send().await.is(201);
    api.stop_clock_at("2026-11-05T12:00:00Z");
    account
}

async fn bytes(api: &ApiHarness, path: &str) -> (u16, BTreeMap<String, String>, Vec<u8>) {
    let response = api.get(path).user("ann").response().await;
    let text = |value: &axum::http::HeaderValue| value.to_str().unwrap().to_owned();
    let headers = response.headers().iter().map(|(name, value)| (name.to_string(), text(value))).collect();
    let status = response.status().as_u16();
    (status, headers, axum::body::to_bytes(response.into_body(), 1 << 24).await.unwrap().to_vec())
}

/// The lines of a file, each by the names of its columns.
fn table(file: &[u8]) -> Vec<BTreeMap<String, String>> {
    csv::Reader::from_reader(file).deserialize().map(|row| row.unwrap()).collect()
}

fn micro(row: &BTreeMap<String, String>, column: &str) -> i64 {
    row[column].parse().unwrap_or_else(|_| panic!("{column} of {row:?}"))
}

#[tokio::test]
async fn statement_leads_from_opening_to_closing_balance_in_every_format() {
    let api = ApiHarness::new().await;
    let account = two_months(&api).await;
    let list = api.get(STATEMENTS).user("ann").send().await.is(200).clone();
    let mut months = list["items"].clone();
    insta::assert_json_snapshot!("statements", months);
    let months = months.as_array_mut().unwrap();
    for (later, earlier) in months.iter().zip(months.iter().skip(1)) {
        assert_eq!(later["opening_micro"], earlier["closing_micro"], "one opens where the one before closes");
    }
    let balance = api.get("/api/v1/billing/balance").user("ann").send().await.is(200)["balance_micro"].clone();
    assert_eq!(months[0]["closing_micro"], balance);

    let mut october = api.get(&format!("{STATEMENTS}/2026-10")).user("ann").send().await.is(200).clone();
    let mut sum = october["opening_micro"].as_i64().unwrap();
    sum += october["lines"].as_array().unwrap().iter().map(|line| line["change_micro"].as_i64().unwrap()).sum::<i64>();
    assert_eq!(sum, october["closing_micro"]);
    october["account_id"] = "<varies>".into();
    insta::assert_json_snapshot!("statement", october);
    // The user sees the same statement as an operator.
    let theirs = api.get(&format!("{ACCOUNTS}/{account}/statements/2026-10")).user("biller").send().await;
    assert_eq!(theirs.is(200)["lines"], october["lines"]);

    let (status, headers, file) = bytes(&api, &format!("{STATEMENTS}/2026-10/csv")).await;
    assert_eq!((status, headers["content-type"].as_str()), (200, "text/csv; charset=utf-8; header=present"));
    assert_eq!(headers["content-disposition"], format!("attachment; filename=\"statement-2026-10-{account}.csv\""));
    assert_eq!(headers["cache-control"], "no-store");
    let shown = String::from_utf8(file.clone()).unwrap();
    assert_eq!(shown.matches("\r\n").count(), shown.matches('\n').count());
    let shown = shown.strip_prefix('\u{feff}').expect("spreadsheets read it as UTF-8");
    assert!(!shown.contains('\u{feff}'), "the mark is at the beginning alone");
    insta::assert_snapshot!("statement_csv", shown.replace("\r\n", "\n"));
    let rows = table(&file);
    let of = |line: &str| rows.iter().filter(|row| row["line"] == line).collect::<Vec<_>>();
    let changes = |line: &str| of(line).iter().map(|row| micro(row, "change_micro")).sum::<i64>();
    let (opening, closing) = (micro(of("opening")[0], "balance_micro"), micro(of("closing")[0], "balance_micro"));
    assert_eq!((json!(opening), json!(closing)), (october["opening_micro"].clone(), october["closing_micro"].clone()));
    assert_eq!((opening + changes("posting"), opening + changes("total")), (closing, closing));
    let ledger =
        api.get("/api/v1/billing/ledger?from=2026-10-01T00:00:00Z&until=2026-11-01T00:00:00Z").user("ann").send();
    let ledger = ledger.await.is(200)["items"].clone();
    let numbers: Vec<Value> = of("posting").iter().rev().map(|row| json!(micro(row, "number"))).collect();
    assert_eq!(ledger.as_array().unwrap().iter().map(|it| it["number"].clone()).collect::<Vec<_>>(), numbers);

    let (status, headers, file) = bytes(&api, &format!("{STATEMENTS}/2026-10/pdf")).await;
    assert_eq!((status, headers["content-type"].as_str()), (200, "application/pdf"));
    let text = pdf_extract::extract_text_from_mem(&file).unwrap();
    for expected in ["October 2026", "acme", &of("opening")[0]["balance"], &of("closing")[0]["balance"]] {
        assert!(text.contains(expected), "{expected} is not in:\n{text}");
    }
    for row in of("total") {
        assert!(text.contains(&row["change"]), "{row:?} is not in:\n{text}");
    }
}

#[tokio::test]
async fn statement_exists_for_each_month_of_an_account_alone() {
    let api = ApiHarness::new().await;
    assert_eq!(api.get(STATEMENTS).user("ann").send().await.is(200)["items"], json!([]));
    let account = two_months(&api).await;
    let mut refusals = Vec::new();
    for month in ["2026-08", "2026-12", "2026-13", "26-1", "2026-11-01", "2026-11.csv", "%E2%82%AC"] {
        for form in ["", "/csv", "/pdf"] {
            let line = api.get(&format!("{STATEMENTS}/{month}{form}")).user("ann").send().await.line();
            refusals.push(format!("{month}{form}: {line}"));
        }
    }
    insta::assert_snapshot!("refused_statements", refusals.join("\n"));
    let now = api.get(&format!("{STATEMENTS}/2026-11")).user("ann").send().await.is(200).clone();
    assert_eq!((&now["is_final"], &now["postings"], &now["lines"]), (&json!(false), &json!(0), &json!([])));
    // The pages together equal one list.
    let mut found = Vec::new();
    let mut path = format!("{STATEMENTS}?limit=2");
    loop {
        let page = api.get(&path).user("ann").send().await.is(200).clone();
        found.extend(page["items"].as_array().unwrap().iter().map(|it| it["month"].as_str().unwrap().to_owned()));
        let Some(token) = page["next_page"].as_str() else { break };
        path = format!("{STATEMENTS}?limit=2&page_token={token}");
    }
    assert_eq!(found, ["2026-11", "2026-10", "2026-09"]);
    // Users of other accounts see nothing of it.
    for path in ["", "/2026-10", "/2026-10/csv", "/2026-10/pdf"] {
        let path = format!("{ACCOUNTS}/{account}/statements{path}");
        api.get(&path).user("ann").send().await.refused(403, "forbidden");
        assert_eq!(api.get(&path).user("biller").response().await.status(), 200, "{path}");
    }
    api.get(&format!("{ACCOUNTS}/{}/statements", Uuid::nil())).admin().send().await.refused(404, "not_found");
}

#[tokio::test]
async fn postings_are_filtered_by_kind_allocation_and_time() {
    let api = ApiHarness::new().await;
    two_months(&api).await;
    let rented = Uuid::from_u128(RENTED);
    for (query, numbers) in [
        ("".to_owned(), vec![6, 5, 4, 3, 2, 1]),
        ("?kind=credit".to_owned(), vec![1]),
        ("?kind=usage&from=2026-10-01T00:00:00Z".to_owned(), vec![5, 4, 3]),
        (format!("?allocation_id={rented}&until=2026-10-01T00:00:00Z"), vec![2]),
        (format!("?allocation_id={}", Uuid::nil()), vec![]),
        ("?from=2026-10-01T00:00:00.000001Z".to_owned(), vec![6, 5, 4]),
    ] {
        let found = api.get(&format!("/api/v1/billing/ledger{query}")).user("ann").send().await.is(200).clone();
        let found: Vec<i64> =
            found["items"].as_array().unwrap().iter().map(|it| it["number"].as_i64().unwrap()).collect();
        assert_eq!(found, numbers, "{query}");
    }
    for wrong in ["kind=gift", "from=yesterday", "allocation_id=7", "at=2026-10-01T00:00:00Z"] {
        let path = format!("/api/v1/billing/ledger?{wrong}");
        api.get(&path).user("ann").send().await.refused(400, "invalid_request");
    }
}

/// More postings than a download has in memory, in many chunks.
#[tokio::test]
async fn csv_of_a_long_month_is_complete() {
    let api = ApiHarness::new().await;
    api.stop_clock_at("2026-10-01T00:00:00Z");
    let account = opened(&api).await;
    adjust(&api, account, "a", json!(100_000)).await.is(201);
    let begin: domain::Timestamp = "2026-10-01T00:00:00Z".parse().unwrap();
    for n in 0..30 {
        metered(&api, account, AllocationId(Uuid::from_u128(RENTED + n)), begin).await;
    }
    for minute in 1..=70 {
        api.stop_clock_at(&(begin + chrono::TimeDelta::minutes(minute)).to_rfc3339());
        api.ask_as_system::<BillingAccount>(account, Command::TICK).await;
    }
    api.stop_clock_at("2026-11-05T12:00:00Z");
    let (_, _, file) = bytes(&api, &format!("{STATEMENTS}/2026-10/csv")).await;
    let rows = table(&file);
    let numbers: Vec<i64> =
        rows.iter().filter(|row| row["line"] == "posting").map(|row| micro(row, "number")).collect();
    assert!(numbers.len() > 1_500, "{} postings", numbers.len());
    assert!(numbers.iter().copied().eq(1..=i64::try_from(numbers.len()).unwrap()), "each once, in order");
    assert_eq!(rows.last().unwrap()["line"], "closing");
}
