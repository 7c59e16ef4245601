//! The page on which users pay, in a real Chromium, with the script of a processor that somebody else wrote (localstripe).

use crate::browser::Browser;
use crate::tool::{root, run};
use reqwest::Method;
use serde_json::{Value, json};
use std::process::Command;
use tests::world::payments::Begun;
use tests::world::{World, id_of};
use uuid::Uuid;

/// A card whose bank asks its holder first: the one kind that localstripe's script lets a browser pay with.
const ASKS_ITS_HOLDER: [(&str, &str); 5] = [
    ("type", "card"),
    ("card[number]", "4000002500003155"),
    ("card[exp_month]", "12"),
    ("card[exp_year]", "2030"),
    ("card[cvc]", "123"),
];

/// A payment of so much, and the address at which it is made.
async fn begun(world: &mut World, amount: i64) -> (Begun, String) {
    let back = format!("{}/billing/returned", world.stranger().base());
    let wanted =
        json!({ "amount_minor": amount, "success_url": format!("{back}?paid"), "cancel_url": format!("{back}?later") });
    let key = Uuid::new_v4().to_string();
    let asked = world.user.request(Method::POST, "/api/v1/billing/checkout-sessions").header("Idempotency-Key", key);
    let answer = world.user.send(asked.json(&wanted)).await.created();
    let url = answer["url"].as_str().unwrap().to_owned();
    world.keep_secret("a client secret", url.split_once('#').expect("the page is ours").1);
    let intent = supervisors::dev::processor::intent_in(&url).unwrap();
    (Begun { id: id_of(&answer), intent }, url)
}

/// Stripe's script sends the card with the confirmation; localstripe's leaves that to whoever has the secret key.
async fn give_card(world: &World, payment: &Begun) {
    let there = world.processor();
    let card = there.post("/v1/payment_methods", &ASKS_ITS_HOLDER).await.unwrap();
    let intent = format!("/v1/payment_intents/{}", payment.intent);
    there.post(&intent, &[("payment_method", card["id"].as_str().unwrap())]).await.unwrap();
    there.post(&format!("{intent}/confirm"), &[]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_pays_in_a_browser_and_comes_back_with_the_money_in_their_account() {
    let mut world = World::plan().penniless().with_processor().start().await;
    let mut browser = Browser::start(&[]).await;
    let (payment, url) = begun(&mut world, 5_000).await;
    assert_eq!(browser.open(&url).await, 200);
    browser.reads("#amount", "50.00").await;
    browser.reads("#confirm", "Pay").await;
    browser.fill("#card input[placeholder=number]", ASKS_ITS_HOLDER[1].1).await;

    // Whose bank says no is told so, and may try again.
    give_card(&world, &payment).await;
    browser.click("#confirm").await;
    browser.click("text=Fail authentication").await;
    browser.reads("#state", "failed authentication").await;
    assert_eq!(world.expect_payment(&payment, "open").await["paid_at"], Value::Null);

    give_card(&world, &payment).await;
    browser.click("#confirm").await;
    browser.click("text=Complete authentication").await;
    browser.reads("main", "You can close this page").await;
    assert!(browser.url().await.ends_with("/billing/returned?paid"), "{}", browser.url().await);
    world.expect_payment(&payment, "deposited").await;
    assert_eq!(world.balance_micro().await, 5_000_000_000);

    // Opened again, the page of what is paid leads back.
    browser.open(&format!("{}/billing/assets/style.css", world.stranger().base())).await;
    let leave = "url => { setTimeout(() => { location.href = url; }, 0); return null; }";
    browser.run(leave, json!(url)).await;
    browser.reads("main", "You can close this page").await;

    let seen = browser.seen().await;
    assert!(seen.complaints.is_empty() && seen.dialogs.is_empty() && seen.windows == 0, "{seen:?}");
    let (own, processor) = (world.stranger().base().to_owned(), world.processor().url());
    for asked in seen.asked.iter().filter(|asked| !asked.starts_with("data:")) {
        assert!(asked.starts_with(&own) || asked.starts_with(&processor), "the page asks {asked}");
        assert!(!asked.split('#').next().unwrap().contains("_secret_"), "the secret left the browser in {asked}");
    }
    browser.end().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_is_not_whole_or_over_says_what_to_do() {
    let mut world = World::plan().penniless().with_processor().start().await;
    let mut browser = Browser::start(&[]).await;
    let (payment, url) = begun(&mut world, 5_000).await;
    let (page, secret) = url.split_once('#').unwrap();
    browser.open(page).await;
    browser.reads("#state", "not whole").await;
    // Another fragment alone would load nothing.
    browser.open(&format!("{}/billing/returned", world.stranger().base())).await;
    browser.open(&format!("{page}#pi_another_secret_{}", secret.rsplit('_').next().unwrap())).await;
    browser.reads("#state", "There is no such payment").await;
    let other = page.replace(&payment.id.to_string(), &Uuid::new_v4().to_string());
    browser.open(&format!("{other}#{secret}")).await;
    browser.reads("#state", "There is no such payment").await;
    assert_eq!(browser.shown("#pay").await, None);
    browser.end().await;
    world.end().await;
}

#[tokio::test]
async fn the_page_s_own_tests_pass() {
    let mut tests = Command::new("node");
    tests.arg("--test").current_dir(root().join("edge/payment-page"));
    let said = run(tests).await;
    assert!(said.contains("pass ") && !said.contains("\n# pass 0"), "{said}");
}
