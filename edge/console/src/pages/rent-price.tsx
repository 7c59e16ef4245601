// What a rental costs: the price that its form shows, and the one that the service has when it is sent.
import { queryOptions } from "@tanstack/react-query";
import { api, dataOf, sendOnce, type Schemas } from "../api/client.ts";
import { BALANCE_MS } from "../api/queries.ts";
import { pollUnreported } from "../api/query-client.ts";
import { money } from "../format/money.ts";
import { numberProblem } from "../ui/fields.tsx";

export type Price = Schemas["Price"];

const DAY_SECONDS = 86_400;

const estimateOf = (sku: string, gpus: string) => ({ params: { query: { sku, gpu_count: Number(gpus), seconds: DAY_SECONDS } } });

/** The cost of so many GPUs of a SKU, which has at most `max` on a node. It is read where both are chosen. */
export const estimateQuery = (sku: string | undefined, gpus: string, max: number | undefined) =>
  queryOptions({
    queryKey: ["estimate", sku, gpus],
    queryFn: () => dataOf(api.GET("/api/v1/billing/estimate", estimateOf(sku ?? "", gpus))),
    enabled: sku !== undefined && gpus !== "" && numberProblem(gpus, { min: 1, max: max ?? 64 }) === null,
    // The balance goes down all the time, which no event reports.
    refetchInterval: pollUnreported(BALANCE_MS),
  });

/** So long is the price waited for before a rental is sent. */
const WAIT_MS = 10_000;

/**
 * The estimate of this moment; null where it cannot be read. The rental is sent then: whatever keeps the one from an answer most likely keeps
 * the other, too, and the failure of the rental says what to do.
 */
export async function estimateNow(sku: string, gpus: string): Promise<Schemas["BillingEstimate"] | null> {
  try {
    return await dataOf(api.GET("/api/v1/billing/estimate", { ...estimateOf(sku, gpus), fetch: sendOnce, signal: AbortSignal.timeout(WAIT_MS) }));
  } catch {
    return null;
  }
}

export function isSamePrice(one: Price | null | undefined, other: Price | null | undefined): boolean {
  if (!one || !other) return !one && !other;
  return one.currency === other.currency && BigInt(one.amount_minor_per_gpu_hour) === BigInt(other.amount_minor_per_gpu_hour);
}

const priceText = (price: Price | null | undefined) => (price ? money(price.amount_minor_per_gpu_hour, price.currency) : "not set");

/** Both prices, where that of the form's opening is not the one of this moment. */
export function PriceChange({ before, now }: { before: Price | null | undefined; now: Price }) {
  return (
    <p className="banner" role="alert">
      <span>
        The price has changed since you opened this form: it is <strong>{priceText(now)}</strong> per GPU and hour, and was {priceText(before)}. Nothing is sent before you confirm it.
      </span>
    </p>
  );
}
