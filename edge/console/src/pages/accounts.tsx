// The billing accounts of all users and organizations.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { Link, useNavigate } from "@tanstack/react-router";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { pollUnreported } from "../api/query-client.ts";
import { money } from "../format/money.ts";
import { count, gpuctl } from "../format/text.ts";
import { Action, Guard, type ActionSpec } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { State } from "../ui/state.tsx";
import { PagedTable } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";

type Account = Schemas["BillingAccount"];

export default function AccountsPage() {
  const [address, set] = useAddress();
  const navigate = useNavigate();
  const accounts = useQuery({
    queryKey: ["accounts", address],
    queryFn: () => dataOf(api.GET("/api/v1/admin/billing/accounts", { params: { query: queryOf(address, ["user_id", "org_id"]) } })),
    placeholderData: keepPreviousData,
    // Changes are reported to operators alone, and others may see accounts.
    refetchInterval: pollUnreported(30_000),
  });
  return (
    <Guard needs="see_billing">
      <Head title="Accounts" age={<Age query={accounts} ofOperators />}>
        <Action needs="adjust_billing" spec={{ ...openAccount, done: (account) => void navigate({ to: "/accounts/$id", params: { id: account.id } }) }} />
      </Head>
      <Filters
        of={[
          { name: "user_id", label: "User", hint: "its id" },
          { name: "org_id", label: "Organization", hint: "its id" },
        ]}
        address={address}
        set={set}
      />
      <PagedTable
        label="Accounts"
        query={accounts}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(account) => account.id}
        none={<Nothing address={address}>No account is open. One opens with the first payment of its holder, or above.</Nothing>}
        columns={[
          {
            title: "Holder",
            cell: (account) => (
              <Link to="/accounts/$id" params={{ id: account.id }} className="row-link">
                <Plain>{holderOf(account)}</Plain>
              </Link>
            ),
          },
          { title: "State", cell: (account) => <State of={account.state} /> },
          { title: "Balance", number: true, cell: (account) => money(account.balance_minor, account.currency) },
          { title: "Available", number: true, cell: (account) => money(account.available_minor, account.currency) },
          { title: "Per hour", number: true, cell: (account) => money(account.burn_minor_per_hour, account.currency) },
          { title: "Running", number: true, cell: (account) => count(account.running) },
          { title: "Lasts", cell: (account) => <When at={account.lasts_until} /> },
        ]}
      />
    </Guard>
  );
}

export function holderOf({ user_id, org_id }: Pick<Account, "user_id" | "org_id">): string {
  return org_id ? `organization ${org_id}` : (user_id ?? "–");
}

const openAccount: ActionSpec<Account> = {
  id: "open-account",
  label: "Open…",
  title: "Open an account",
  consequences: <p>It has no money yet. Its currency cannot be changed.</p>,
  fields: [
    {
      name: "kind",
      label: "Holder",
      kind: "select",
      required: true,
      initial: "user",
      options: [
        { value: "user", label: "a user" },
        { value: "org", label: "an organization" },
      ],
    },
    { name: "id", label: "Id of the holder", required: true, maxLength: 255 },
    { name: "currency", label: "Currency", required: true, maxLength: 3, pattern: "[A-Z]{3}", initial: "EUR" },
  ],
  command: (values) => gpuctl("billing", "open-account", [values["kind"] === "org" ? "--org" : "--user", values["id"]], ["--currency", values["currency"]]),
  send: (values, key) => {
    const id = values["id"]?.trim() ?? "";
    const body: Schemas["NewAccount"] = { currency: values["currency"]?.trim() ?? "", ...(values["kind"] === "org" ? { org_id: id } : { user_id: id }) };
    return dataOf(api.POST("/api/v1/admin/billing/accounts", { params: keyed(key), body })) as Promise<Account>;
  },
  refreshes: ["accounts"],
};
