// Filters of a list. A choice is applied at once, a text by Enter or the button.
import { useEffect, useRef, useState } from "react";
import type { Address } from "./use-address.ts";

export interface Filter {
  name: string;
  label: string;
  options?: readonly string[];
  /** What it means that none is chosen. */
  any?: string;
  hint?: string;
  /** As wide as an id that is shown in full. */
  wide?: boolean;
}

export function Filters({ of, address, set }: { of: readonly Filter[]; address: Address; set: (change: Address) => void }) {
  const [typed, setTyped] = useState<Address>(address);
  const before = useRef(address);
  // What another part of the address does not concern stays as it was typed.
  useEffect(() => {
    const changed = of.filter(({ name }) => address[name] !== before.current[name]);
    before.current = address;
    if (changed.length > 0) setTyped((typed) => ({ ...typed, ...Object.fromEntries(changed.map(({ name }) => [name, address[name]])) }));
  }, [address]);
  const any = of.some((filter) => address[filter.name]);
  return (
    <form
      className="filters"
      role="search"
      onSubmit={(event) => {
        event.preventDefault();
        set(Object.fromEntries(of.map((filter) => [filter.name, typed[filter.name]?.trim()])));
      }}
    >
      {of.map((filter) => (
        <label key={filter.name} data-wide={filter.wide || undefined}>
          <span>{filter.label}</span>
          {filter.options ? (
            <select value={address[filter.name] ?? ""} onChange={(event) => set({ [filter.name]: event.target.value })}>
              <option value="">{filter.any ?? "any"}</option>
              {filter.options.map((option) => (
                <option key={option} value={option}>
                  {option.replaceAll("_", " ")}
                </option>
              ))}
            </select>
          ) : (
            <input
              type="search"
              value={typed[filter.name] ?? ""}
              placeholder={filter.hint}
              maxLength={320}
              onChange={(event) => setTyped({ ...typed, [filter.name]: event.target.value })}
            />
          )}
        </label>
      ))}
      <button type="submit">Apply</button>
      {any && (
        <button type="button" className="quiet" onClick={() => set(Object.fromEntries(of.map((filter) => [filter.name, undefined])))}>
          Clear
        </button>
      )}
    </form>
  );
}
