// The SSH keys of the caller.
import { useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { sshKeysQuery } from "../api/queries.ts";
import { gpuctl } from "../format/text.ts";
import { Action, Guard } from "../ui/action.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { PagedTable } from "../ui/table.tsx";
import { useAddress } from "../ui/use-address.ts";

const KEY = "^\\s*(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)|sk-[a-z0-9@.\\-]+) [A-Za-z0-9+\\/]+={0,2}( .*)?\\s*$";

export default function SshKeysPage() {
  const [address, set] = useAddress();
  const keys = useQuery(sshKeysQuery(address["page"]));
  return (
    <Guard needs="keep_keys">
      <Head title="SSH keys" age={<Age query={keys} ofOperators />}>
        <Action
          spec={{
            id: "add-ssh-key",
            primary: true,
            label: "Add a key…",
            title: "Add an SSH key",
            consequences: <p>Allocations that you rent from now on can be opened by it. Paste the public half; the private half never leaves your device.</p>,
            fields: [
              { name: "name", label: "Name", required: true, maxLength: 100 },
              { name: "public_key", label: "Public key", required: true, maxLength: 8192, pattern: KEY, help: "The line of a .pub file: ssh-ed25519 AAAA… comment" },
            ],
            command: (values) => gpuctl("ssh-keys", "add", "id_ed25519.pub", ["--name", values["name"]]),
            send: (values, key) =>
              dataOf(
                api.POST("/api/v1/ssh-keys", {
                  params: keyed(key),
                  body: { name: values["name"]?.trim() ?? "", public_key: values["public_key"]?.trim() ?? "" },
                }),
              ),
            refreshes: ["ssh-keys"],
          }}
        />
      </Head>
      <PagedTable
        label="SSH keys"
        query={keys}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(key) => key.id}
        none={<p>You have no SSH key. With one, allocations are reached by ssh; without one, by the terminal in the browser.</p>}
        columns={[
          { title: "Name", cell: (key) => <Plain>{key.name}</Plain> },
          { title: "Fingerprint", cell: (key) => <code>{key.fingerprint}</code> },
          { title: "Type", cell: (key) => key.key_type },
          { title: "Added", cell: (key) => <When at={key.created_at} /> },
          { title: "State", cell: (key) => (key.revoked_at ? <State of="revoked" /> : key.is_default ? <State of="default" /> : <State of="usable" />) },
          { title: "Actions", cell: (key) => <KeyActions of={key} heir={heirOf(key, keys.data?.items)} /> },
        ]}
      />
    </Guard>
  );
}

function KeyActions({ of: { id, name, is_default, revoked_at }, heir }: { of: Schemas["SshKey"]; heir: Schemas["SshKey"] | null }) {
  if (revoked_at) return null;
  return (
    <span className="row-actions">
      {!is_default && (
        <Action
          quiet
          spec={{
            id: `default-ssh-key:${id}`,
            label: "Make default…",
            title: "Make it the default key",
            consequences: (
              <p>
                New allocations are opened by <Plain>{name}</Plain> where no other key is chosen.
              </p>
            ),
            command: () => gpuctl("ssh-keys", "default", id),
            send: (_, key) => dataOf(api.POST("/api/v1/ssh-keys/{id}/default", { params: { path: { id }, ...keyed(key) } })),
            refreshes: ["ssh-keys"],
          }}
        />
      )}
      <Action
        quiet
        spec={{
          id: `delete-ssh-key:${id}`,
          label: "Delete…",
          title: "Delete this key",
          danger: true,
          consequences: (
            <ul>
              <li>
                <Plain>{name}</Plain> opens no allocation any more, including those that run.
              </li>
              {is_default && <NextDefault heir={heir} />}
            </ul>
          ),
          command: () => gpuctl("ssh-keys", "delete", id),
          send: () => dataOf(api.DELETE("/api/v1/ssh-keys/{id}", { params: { path: { id } } })),
          refreshes: ["ssh-keys"],
        }}
      />
    </span>
  );
}

/** The key that becomes the default where this one is deleted: the oldest other one of those that are read, oldest first. */
export function heirOf({ id }: Schemas["SshKey"], all: readonly Schemas["SshKey"][] = []): Schemas["SshKey"] | null {
  return all.find((key) => key.id !== id && !key.revoked_at) ?? null;
}

/** What becomes the default key, and what it opens. */
export function NextDefault({ heir }: { heir: Schemas["SshKey"] | null }) {
  if (heir === null) return <li>It is the default key, and no other one is on this page: the oldest other key becomes the default, where there is one.</li>;
  return (
    <li>
      It is the default key. <Plain>{heir.name}</Plain> (<code>{heir.fingerprint}</code>), the oldest other one, becomes the default: it opens allocations for which no key was chosen, those that
      run included.
    </li>
  );
}
