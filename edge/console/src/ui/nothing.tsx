// What a list without a row says.
import type { ReactNode } from "react";
import type { Address } from "./use-address.ts";

/** Where the filter, or the page that is open, is not the reason, what there could be and what to do next. */
export function Nothing({ address, children }: { address: Address; children: ReactNode }) {
  const isFiltered = Object.entries(address).some(([name, value]) => value && !name.endsWith("page"));
  if (isFiltered) return <p>Nothing matches the filter. Clear it to see all.</p>;
  if (address["page"]) return <p>Nothing is left on this page. Go to the first one.</p>;
  return <p>{children}</p>;
}
