//! Lists that grow with time: the caller chooses whether the oldest or the newest come first.

use super::harness::{ApiHarness, TestResponse};
use super::payments::{PAYMENTS, checkout, checkout_body, deposited, id_of};
use serde_json::{Value, json};

fn ids(page: &TestResponse) -> Vec<Value> {
    page.is(200)["items"].as_array().unwrap().iter().map(|item| item["id"].clone()).collect()
}

#[tokio::test]
async fn payments_begin_with_the_newest_where_the_caller_asks_for_it() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    // The account is there with its first deposit.
    let mut made = vec![json!(deposited(&api, &processor, "a", 5_000).await)];
    for key in ["b", "c"] {
        made.push(json!(id_of(&checkout(&api, key, &checkout_body(5_000)).await)));
    }
    let read = async |query: &str| api.get(&format!("{PAYMENTS}?{query}")).user("ann").send().await;
    assert_eq!(ids(&read("").await), made);
    assert_eq!(ids(&read("order=oldest_first").await), made);

    let newest = read("order=newest_first&limit=2").await;
    assert_eq!(ids(&newest), [made[2].clone(), made[1].clone()]);
    let token = newest.body["next_page"].as_str().unwrap();
    let rest = read(&format!("order=newest_first&limit=2&page_token={token}")).await;
    assert_eq!((ids(&rest), &rest.body["next_page"]), (vec![made[0].clone()], &Value::Null));
    let other_order = read(&format!("limit=2&page_token={token}")).await;
    assert_eq!(other_order.refused(400, "invalid_request")["field"], "page_token");
    assert_eq!(read("order=newest").await.refused(400, "invalid_request")["field"], "order");

    let account = newest.body["items"][0]["account_id"].as_str().unwrap();
    let of_account = format!("/api/v1/admin/billing/accounts/{account}/payments?order=newest_first&limit=1");
    assert_eq!(ids(&api.get(&of_account).admin().send().await), [made[2].clone()]);
}

#[tokio::test]
async fn every_list_that_grows_with_time_takes_an_order() {
    let api = ApiHarness::new().await;
    for list in [
        "/api/v1/allocations",
        "/api/v1/admin/recordings",
        "/api/v1/admin/terminal-sessions",
        "/api/v1/admin/browser-sessions",
        "/api/v1/admin/rollouts",
        "/api/v1/admin/billing/processor-events",
    ] {
        let read = async |order: &str| api.get(&format!("{list}?order={order}")).admin().send().await;
        for order in ["newest_first", "oldest_first"] {
            assert_eq!(ids(&read(order).await), Vec::<Value>::new(), "{list}");
        }
        assert_eq!(read("newest").await.refused(400, "invalid_request")["field"], "order", "{list}");
    }
}
