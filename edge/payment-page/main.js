// The page on which a user pays: the processor's script reads the card, this one shows the payment's state.

import { paying } from "./card_payment.js";
import { ofTerms, termsOf } from "./checkout_terms.js";

const at = (id) => document.getElementById(id);

function say(state, words) {
  at("state").dataset.state = state;
  at("state").textContent = words;
}

/** Nothing can be done here any more, but to leave. */
function close(words, back) {
  at("pay").hidden = true;
  say("failed", words);
  offer(back);
}

function offer(back) {
  if (back) {
    at("back").href = back;
    at("back").hidden = false;
  }
}

async function begin() {
  const payment = location.pathname.split("/").pop();
  const secret = location.hash.slice(1);
  if (!/^pi_\w+_secret_\w+$/.test(secret)) {
    return close("This address is not whole. Open the one that you were given, or begin the payment again.");
  }
  const terms = await termsOf(payment, secret);
  if (terms.failed) {
    return close(terms.failed);
  }
  at("amount").textContent = ofTerms(terms);
  document.title = `Payment of ${ofTerms(terms)}`;
  if (terms.state === "paid" || terms.state === "deposited") {
    say("paid", "This is paid.");
    return location.replace(terms.success_url);
  }
  if (terms.state === "refused") {
    return close("This was paid, and goes back to you: the account is in another currency.", terms.cancel_url);
  }
  if (terms.state !== "open") {
    return close("This payment was canceled, or its time is over. Begin another one.", terms.cancel_url);
  }
  if (typeof window.Stripe !== "function") {
    return close("The payment processor cannot be reached. Load the page again in a while.", terms.cancel_url);
  }
  const processor = window.Stripe(document.querySelector("main").dataset.publishableKey);
  const card = processor.elements().create("card");
  card.mount("#card");
  at("pay").hidden = false;
  at("confirm").textContent = `Pay ${ofTerms(terms)}`;
  offer(terms.cancel_url);
  const pay = paying(processor, secret, card);
  at("pay").addEventListener("submit", async (event) => {
    event.preventDefault();
    at("confirm").disabled = true;
    say("waits", "The payment processor is asked …");
    const said = await pay();
    say(said.state, said.words);
    if (said.state === "paid") {
      at("pay").hidden = true;
      at("back").hidden = true;
      return location.replace(terms.success_url);
    }
    at("confirm").disabled = false;
  });
}

begin();
