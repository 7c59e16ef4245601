// The filters, the page and the order of a list, and what is opened of it, in the address.
import { useNavigate, useParams, useSearch } from "@tanstack/react-router";

export type Address = Readonly<Record<string, string | undefined>>;

/** Changes some parts of the address. In place: the list stays at its page, and the window where it is. */
export type SetAddress = (change: Address, options?: { inPlace?: boolean }) => void;

/** The address's filters, and a function that changes some of them. Another filter begins at the first page. */
export function useAddress(): [Address, SetAddress] {
  const address: Address = useSearch({ strict: false });
  const navigate = useNavigate();
  const set: SetAddress = (change, { inPlace = false } = {}) => {
    const after = { ...address, ...(inPlace ? {} : { page: undefined }), ...change };
    const search = Object.fromEntries(Object.entries(after).filter(([, value]) => value));
    void navigate({ to: ".", search: search as never, resetScroll: !inPlace });
  };
  return [address, set];
}

/** A parameter of the path. */
export function usePart(name: string): string {
  const parts: Record<string, string | undefined> = useParams({ strict: false });
  return parts[name] ?? "";
}

/** The parameters of a list's request out of its address: `page` is the page token. */
export function queryOf<K extends string>({ page, ...filters }: Address, names: readonly K[]): { page_token?: string } & { [name in K]?: string } {
  const query: Record<string, string> = {};
  if (page) query["page_token"] = page;
  for (const name of names) {
    const value = filters[name];
    if (value) query[name] = value;
  }
  return query as { page_token?: string } & { [name in K]?: string };
}
