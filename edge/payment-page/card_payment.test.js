import assert from "node:assert/strict";
import { test } from "node:test";
import { meaning, paying } from "./card_payment.js";

test("what succeeded is paid, and nothing else is", () => {
  assert.equal(meaning({ paymentIntent: { status: "succeeded" } }).state, "paid");
  assert.equal(meaning({ paymentIntent: { status: "processing" } }).state, "waits");
  for (const status of ["requires_payment_method", "requires_action", "canceled", undefined]) {
    assert.equal(meaning({ paymentIntent: { status } }).state, "failed", status);
  }
  for (const error of [{}, { message: "" }, { message: 7 }]) {
    assert.match(meaning({ error }).words, /did not go through/);
  }
});

test("a declined card is shown with the processor's message", () => {
  assert.match(meaning({ error: { message: "Your card was declined." } }).words, /^Your card was declined\. You can try again/);
  const failed = { status: "requires_payment_method", last_payment_error: { message: "It failed authentication." } };
  assert.match(meaning({ paymentIntent: failed }).words, /^It failed authentication\./);
});

test("the processor is asked with the secret and the card, and a script that breaks is a failed payment", async () => {
  const asked = [];
  const processor = {
    confirmCardPayment: async (...given) => {
      asked.push(given);
      return { paymentIntent: { status: "succeeded" } };
    },
  };
  assert.equal((await paying(processor, "pi_1_secret_x", "card")()).state, "paid");
  assert.deepEqual(asked, [["pi_1_secret_x", { payment_method: { card: "card" } }]]);
  const broken = { confirmCardPayment: () => Promise.reject(new Error("no network")) };
  assert.equal((await paying(broken, "pi_1_secret_x", "card")()).state, "failed");
});
