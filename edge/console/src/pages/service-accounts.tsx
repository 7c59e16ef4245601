// Programs that act for the caller, and their keys.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { pollUnreported } from "../api/query-client.ts";
import { gpuctl, readable } from "../format/text.ts";
import { useMe } from "../session/me.ts";
import { Action, Guard } from "../ui/action.tsx";
import { Facts, Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Copyable, Id, Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { PagedTable } from "../ui/table.tsx";
import { useAddress } from "../ui/use-address.ts";

export default function ServiceAccountsPage() {
  const [address, set] = useAddress();
  const page = address["page"];
  const me = useMe();
  const accounts = useQuery({
    queryKey: ["service-accounts", page],
    queryFn: () => dataOf(api.GET("/api/v1/service-accounts", { params: { query: page ? { page_token: page } : {} } })),
    placeholderData: keepPreviousData,
    refetchInterval: pollUnreported(60_000),
  });
  return (
    <Guard needs="keep_service_accounts">
      <Head title="Service accounts" age={<Age query={accounts} ofOperators />}>
        <Action
          spec={{
            id: "create-service-account",
            primary: true,
            label: "Create…",
            title: "Create a service account",
            consequences: <p>A program with a key of it acts for you: it rents and releases on your balance. It has no more rights than you.</p>,
            fields: [
              { name: "name", label: "Name", required: true, maxLength: 100 },
              { name: "role", sentAs: "roles", label: "Role", kind: "select", required: true, initial: "user", options: me.roles.map((role) => ({ value: role, label: role })) },
            ],
            command: (values) => gpuctl("service-accounts", "create", [values["name"]?.trim() || "NAME"], ["--role", values["role"]]),
            send: (values, key) =>
              dataOf(
                api.POST("/api/v1/service-accounts", {
                  params: keyed(key),
                  body: { name: values["name"]?.trim() ?? "", roles: [values["role"] as "user" | "admin"] },
                }),
              ),
            refreshes: ["service-accounts"],
          }}
        />
      </Head>
      <PagedTable
        label="Service accounts"
        query={accounts}
        page={page}
        open={(next) => set({ page: next })}
        keyOf={(account) => account.id}
        none={<p>You have no service account. One lets a program rent for you without your password.</p>}
        columns={[
          { title: "Name", cell: (account) => <Plain>{account.name}</Plain> },
          { title: "Client id", cell: (account) => <Id>{account.id}</Id> },
          { title: "Roles", cell: (account) => account.roles.map(readable).join(", ") },
          { title: "Created", cell: (account) => <When at={account.created_at} /> },
          { title: "Keys", cell: (account) => <Keys of={account} /> },
          { title: "Actions", cell: (account) => <AccountActions of={account} /> },
        ]}
      />
    </Guard>
  );
}

function Keys({ of: account }: { of: Schemas["ServiceAccount"] }) {
  if (account.keys.length === 0) return <span className="soft">none</span>;
  return (
    <ul className="plain-list">
      {account.keys.map((key) => (
        <li key={key.id}>
          <Id>{key.id}</Id>{" "}
          <span className="soft">
            <When at={key.created_at} />
          </span>{" "}
          <Action
            quiet
            spec={{
              id: `revoke-key:${key.id}`,
              label: "Revoke…",
              title: "Revoke this key",
              danger: true,
              consequences: <p>Programs that use it get no more access, from the next request on.</p>,
              command: () => gpuctl("service-accounts", "revoke-key", account.id, key.id),
              send: () => dataOf(api.DELETE("/api/v1/service-accounts/{id}/keys/{key_id}", { params: { path: { id: account.id, key_id: key.id } } })),
              refreshes: ["service-accounts"],
            }}
          />
        </li>
      ))}
    </ul>
  );
}

function AccountActions({ of: { id, name, owner_user_id } }: { of: Schemas["ServiceAccount"] }) {
  const me = useMe();
  return (
    <span className="row-actions">
      {owner_user_id === me.user_id && (
        <Action
          quiet
          spec={{
            id: `add-key:${id}`,
            label: "New key…",
            title: "Make a key",
            consequences: <p>The key is shown once, and stored by the service as a hash alone.</p>,
            command: () => gpuctl("service-accounts", "add-key", id),
            send: (_, key) => dataOf(api.POST("/api/v1/service-accounts/{id}/keys", { params: { path: { id }, ...keyed(key) } })),
            refreshes: ["service-accounts"],
            result: ({ client_id, client_secret }) => (
              <>
                <p>
                  <strong>This is the only time that the secret is shown.</strong> Store it where the program finds it.
                </p>
                <Facts
                  of={[
                    ["Client id", <Copyable key="i" text={client_id} label="client id" />],
                    ["Client secret", <Copyable key="s" text={client_secret} label="client secret" />],
                  ]}
                />
              </>
            ),
          }}
        />
      )}
      <Action
        quiet
        spec={{
          id: `delete-service-account:${id}`,
          label: "Delete…",
          title: "Delete this service account",
          danger: true,
          consequences: (
            <p>
              All keys of <Plain>{name}</Plain> are void from the next request on. What it rented stays yours.
            </p>
          ),
          command: () => gpuctl("service-accounts", "delete", id, "--yes"),
          send: () => dataOf(api.DELETE("/api/v1/service-accounts/{id}", { params: { path: { id } } })),
          refreshes: ["service-accounts"],
        }}
      />
    </span>
  );
}
