// What is to be paid, as the service has it. Whoever asks shows the processor's name of the payment, which stands in the address; the secret
// beside it stays in the browser.

/**
 * @param {string} payment
 * @param {string} secret
 * @param {typeof fetch} ask
 * @returns {Promise<{amount_minor: number, currency: string, state: string, success_url: string, cancel_url: string} | {failed: string}>}
 */
export async function termsOf(payment, secret, ask = fetch) {
  const intent = secret.slice(0, secret.indexOf("_secret_"));
  let answer;
  try {
    answer = await ask(`/billing/checkout/${payment}/terms/${intent}`, { cache: "no-store", credentials: "omit", redirect: "error" });
  } catch {
    return { failed: "The service cannot be reached. Load the page again." };
  }
  if (answer.status === 404) {
    return { failed: "There is no such payment. Open the address that you were given." };
  }
  if (answer.status !== 200) {
    return { failed: `The service answers ${answer.status}. Load the page again in a while.` };
  }
  return answer.json();
}

/** An amount as people read it: 5000 EUR minor units are €50.00. */
export function ofTerms({ amount_minor, currency }, language = undefined) {
  const format = new Intl.NumberFormat(language, { style: "currency", currency });
  return format.format(amount_minor / 10 ** format.resolvedOptions().maximumFractionDigits);
}
