// The choice of an order where a list has no column heads.
import { orderOf, sorted, type SortValue } from "./order.ts";
import type { Address, SetAddress } from "./use-address.ts";

/** One order: its name in the address, what it is called, and what is compared. */
export interface SortChoice<T> {
  name: string;
  label: string;
  valueOf: (row: T) => SortValue;
}

/** The rows as the address orders them: by one of the choices, or as they are. */
export function sortedBy<T>(rows: readonly T[], choices: readonly SortChoice<T>[], address: Address): readonly T[] {
  const choice = choices.find(({ name }) => name === address["sort"]);
  return choice ? sorted(rows, choice.valueOf, orderOf(choice.name)?.isDescending ?? false) : rows;
}

interface SortByProps {
  choices: readonly Pick<SortChoice<never>, "name" | "label">[];
  address: Address;
  set: SetAddress;
}

export function SortBy({ choices, address, set }: SortByProps) {
  const chosen = choices.find(({ name }) => name === address["sort"]);
  return (
    <label className="filters">
      <span>Order</span>
      <select value={chosen?.name ?? ""} onChange={(event) => set({ sort: event.target.value }, { inPlace: true })}>
        <option value="">as the service lists them</option>
        {choices.map(({ name, label }) => (
          <option key={name} value={name}>
            {label}
          </option>
        ))}
      </select>
    </label>
  );
}
