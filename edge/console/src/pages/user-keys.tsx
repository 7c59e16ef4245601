// The SSH keys of another user, for administrators.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { pollEvery } from "../api/query-client.ts";
import { gpuctl } from "../format/text.ts";
import { Action, Guard, type ActionSpec } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { PagedTable } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { useAddress } from "../ui/use-address.ts";
import { heirOf, NextDefault } from "./ssh-keys.tsx";

type Key = Schemas["SshKey"];

export default function UserKeysPage() {
  const [address, set] = useAddress();
  const [user_id, page] = [address["user_id"] ?? "", address["page"]];
  const keys = useQuery({
    queryKey: ["ssh-keys", "of-user", user_id, page],
    queryFn: () => dataOf(api.GET("/api/v1/admin/users/{user_id}/ssh-keys", { params: { path: { user_id }, query: page ? { page_token: page } : {} } })),
    enabled: user_id !== "",
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(60_000),
  });
  return (
    <Guard needs="manage_nodes">
      <Head title="Keys of users" age={<Age query={keys} />} />
      <Filters of={[{ name: "user_id", label: "User", hint: "its id" }]} address={address} set={set} />
      {user_id === "" ? (
        <p className="none">Give the id of a user to see the SSH keys.</p>
      ) : (
        <PagedTable
          label="SSH keys"
          query={keys}
          page={page}
          open={(next) => set({ page: next })}
          keyOf={(key) => key.id}
          none={<p>The user has no SSH key. Users add theirs on their page SSH keys.</p>}
          columns={[
            { title: "Name", cell: (key) => <Plain>{key.name}</Plain> },
            { title: "Fingerprint", cell: (key) => <code>{key.fingerprint}</code> },
            { title: "Added", cell: (key) => <When at={key.created_at} /> },
            { title: "By", cell: (key) => <Plain>{key.created_by}</Plain> },
            { title: "State", cell: (key) => <State of={key.revoked_at ? "revoked" : key.is_default ? "default" : "usable"} /> },
            { title: "Actions", cell: (key) => (key.revoked_at ? "" : <KeyActions user={user_id} of={key} heir={heirOf(key, keys.data?.items)} />) },
          ]}
        />
      )}
    </Guard>
  );
}

function KeyActions({ user, of: key, heir }: { user: string; of: Key; heir: Key | null }) {
  return (
    <span className="row-actions">
      {!key.is_default && <Action quiet spec={makeDefault(user, key)} />}
      <Action quiet spec={remove(user, key, heir)} />
    </span>
  );
}

const REFRESHES = ["ssh-keys", "allocation"];

function makeDefault(user_id: string, { id, name }: Key): ActionSpec<unknown> {
  return {
    id: `default-user-key:${id}`,
    label: "Make default…",
    title: "Make it the user's default key",
    consequences: (
      <p>
        New allocations of the user are opened by <Plain>{name}</Plain> where no other key is chosen.
      </p>
    ),
    command: () => gpuctl("ssh-keys", "default", id, ["--user", user_id]),
    send: (_, key) => dataOf(api.POST("/api/v1/admin/users/{user_id}/ssh-keys/{id}/default", { params: { path: { user_id, id }, ...keyed(key) } })),
    refreshes: REFRESHES,
  };
}

function remove(user_id: string, { id, name, is_default }: Key, heir: Key | null): ActionSpec<unknown> {
  return {
    id: `delete-user-key:${id}`,
    label: "Delete…",
    title: "Delete this user's key",
    danger: true,
    consequences: (
      <ul>
        <li>
          <Plain>{name}</Plain> opens no allocation any more, running ones included. SSH sessions that are open stay.
        </li>
        {is_default && <NextDefault heir={heir} />}
      </ul>
    ),
    command: () => gpuctl("ssh-keys", "delete", id, ["--user", user_id]),
    send: () => dataOf(api.DELETE("/api/v1/admin/users/{user_id}/ssh-keys/{id}", { params: { path: { user_id, id } } })),
    refreshes: REFRESHES,
  };
}
