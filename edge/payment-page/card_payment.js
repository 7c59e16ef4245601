// What the processor's script is asked, and what its answer means. It has the shape of Stripe.js.

/**
 * @typedef {object} Said
 * @property {"paid" | "failed" | "waits"} state
 * @property {string} words   for the payer
 */

/**
 * @param {{confirmCardPayment: (secret: string, data: object) => Promise<{error?: object, paymentIntent?: object}>}} processor
 * @param {string} secret   the payment's, from the address
 * @param {object} card     where the payer has typed
 * @returns {() => Promise<Said>}  never rejects
 */
export function paying(processor, secret, card) {
  return async () => {
    try {
      return meaning(await processor.confirmCardPayment(secret, { payment_method: { card } }));
    } catch {
      return meaning({ error: {} });
    }
  };
}

/** @returns {Said} */
export function meaning({ error, paymentIntent }) {
  if (error) {
    const why = typeof error.message === "string" && error.message !== "" ? error.message : "The payment did not go through.";
    return { state: "failed", words: `${why} You can try again, with this card or another one.` };
  }
  switch (paymentIntent?.status) {
    case "succeeded":
      return { state: "paid", words: "Paid. You are being sent back." };
    case "processing":
      return { state: "waits", words: "Your bank is working on it. You can close this page; your balance shows when it is there." };
    default: {
      const why = paymentIntent?.last_payment_error?.message ?? "The payment is not complete.";
      return { state: "failed", words: `${why} You can try again, with this card or another one.` };
    }
  }
}
