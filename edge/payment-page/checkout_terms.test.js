import assert from "node:assert/strict";
import { test } from "node:test";
import { ofTerms, termsOf } from "./checkout_terms.js";

test("amounts are read in their currency's own digits", () => {
  assert.equal(ofTerms({ amount_minor: 5000, currency: "EUR" }, "en"), "€50.00");
  assert.equal(ofTerms({ amount_minor: 1, currency: "USD" }, "en"), "$0.01");
  assert.equal(ofTerms({ amount_minor: 5000, currency: "JPY" }, "en"), "¥5,000");
});

test("the secret stays in the browser", async () => {
  const asked = [];
  const answering = (status, body) => async (url, how) => {
    asked.push([url, how]);
    return { status, json: async () => body };
  };
  const terms = await termsOf("p1", "pi_1_secret_x", answering(200, { amount_minor: 1 }));
  assert.equal(terms.amount_minor, 1);
  assert.equal(asked[0][0], "/billing/checkout/p1/terms/pi_1");
  assert.ok(!JSON.stringify(asked).includes("secret_x"));
  assert.match((await termsOf("p1", "pi_1_secret_x", answering(404, {}))).failed, /no such payment/);
  assert.match((await termsOf("p1", "pi_1_secret_x", answering(503, {}))).failed, /503/);
  assert.match((await termsOf("p1", "pi_1_secret_x", () => Promise.reject(new Error()))).failed, /cannot be reached/);
});
