// The processor's script in a development environment: the part of Stripe.js that the payment page uses. In place of fields for a card it
// offers test cards.
(() => {
  const { origin } = new URL(document.currentScript.src);
  const CARDS = {
    pm_card_visa: "Visa ending in 4242: pays",
    pm_card_authenticationRequired: "Visa ending in 3184: is declined",
  };

  function testCards() {
    const select = document.createElement("select");
    for (const [card, text] of Object.entries(CARDS)) select.append(new Option(text, card));
    Object.assign(select.style, { display: "block", width: "100%", font: "inherit", padding: "0.3rem" });
    const label = document.createElement("label");
    label.append("Test card of the development environment: no money is moved", select);
    return {
      mount: (at) => document.querySelector(at).append(label),
      chosen: () => select.value,
    };
  }

  window.Stripe = (key) => ({
    elements: () => ({ create: testCards }),
    async confirmCardPayment(secret, { payment_method: { card } }) {
      const intent = secret.slice(0, secret.indexOf("_secret_"));
      const body = new URLSearchParams({ key, client_secret: secret, payment_method: card.chosen() });
      const answer = await fetch(`${origin}/v1/payment_intents/${intent}/confirm`, { method: "POST", body, credentials: "omit" });
      const found = await answer.json();
      return answer.ok ? { paymentIntent: found } : { error: found.error };
    },
  });
})();
