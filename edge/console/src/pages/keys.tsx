// The service's own keys: their phases, what depends on each, and the steps of their rotation.
import { useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { count, gpuctl, readable, shortId } from "../format/text.ts";
import { Action, Guard, REASON, type ActionSpec } from "../ui/action.tsx";
import { GuardedLink } from "../ui/guarded-link.tsx";
import { Card, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { Table } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { FullTime, When } from "../ui/time.tsx";

type KeySet = Schemas["KeySet"];
type Key = Schemas["Key"];
type Changed = Schemas["Changed"];

const SIGNS: Record<Schemas["KeyPurpose"], string> = {
  task_signing: "signs the tasks of agents",
  node_ca: "signs the certificates of nodes",
  service_tokens: "signs the access tokens of service accounts",
  member_messages: "authenticates messages between members",
};

export default function KeysPage() {
  const keys = useQuery({ queryKey: ["keys"], queryFn: () => dataOf(api.GET("/api/v1/admin/keys")), refetchInterval: pollEvery(POLL_MS) });
  return (
    <Guard needs="rotate_keys">
      <Head title="Keys" age={<Age query={keys} />} />
      <p className="soft page-note">
        A key is staged first, so that all replicas and agents know it; then active, while the one before it has grace; then retired, once nothing depends on it.
      </p>
      <Loaded query={keys}>
        {({ sets, at_rest, replicas }) => (
          <>
            {sets.map((set) => (
              <KeySetCard key={set.purpose} of={set} />
            ))}
            <AtRest of={at_rest} />
            <Replicas rows={replicas} />
          </>
        )}
      </Loaded>
    </Guard>
  );
}

function KeySetCard({ of: set }: { of: KeySet }) {
  return (
    <Card title={readable(set.purpose)} actions={<Action spec={stage(set)} />}>
      <p className="soft">It {SIGNS[set.purpose]}.</p>
      <Table
        label={readable(set.purpose)}
        rows={set.keys}
        keyOf={(key) => key.key_id}
        none={<p>There is none.</p>}
        columns={[
          { title: "Key", cell: (key) => <code title={key.key_id}>{shortId(key.key_id)}</code> },
          { title: "Phase", cell: (key) => <State of={key.phase} /> },
          { title: "Since", cell: (key) => <When at={key.since} /> },
          { title: "Until", cell: (key) => <When at={key.until} /> },
          { title: "Depend on it", number: true, cell: (key) => (key.dependents == null ? "–" : count(key.dependents)) },
          { title: "Made", cell: (key) => <When at={key.made_at} /> },
          { title: "Actions", cell: (key) => <Steps set={set} of={key} /> },
        ]}
      />
    </Card>
  );
}

const REFRESHES = ["keys"];

function stage({ purpose }: KeySet): ActionSpec<Changed> {
  return {
    id: `stage-key:${purpose}`,
    label: "Stage a new key…",
    title: `Stage a new key: ${readable(purpose)}`,
    consequences: <p>It is made and sent to all replicas and agents. Nothing is signed by it before it is activated.</p>,
    fields: [REASON],
    command: (values) => gpuctl("keys", "stage", purpose.replaceAll("_", "-"), ["--reason", values["reason"]], "--yes"),
    send: (values, key) => dataOf(api.POST("/api/v1/admin/keys/stage", { params: keyed(key), body: { purpose, reason: values["reason"] ?? "" } })),
    refreshes: REFRESHES,
    result: (changed) => <Outcome of={changed} />,
  };
}

function Steps({ set, of: key }: { set: KeySet; of: Key }) {
  if (key.phase === "staged") {
    return <Action quiet spec={step(set, key, "activate", "Activate…", "The service signs by it from now on. The key before it has grace: what it has signed is still accepted.")} />;
  }
  if (key.phase === "grace") {
    return <Action quiet spec={step(set, key, "retire", "Retire…", "What it has signed is refused from now on. This cannot be undone.", true)} />;
  }
  return null;
}

function step({ purpose }: KeySet, { key_id }: Key, way: "activate" | "retire", label: string, consequences: string, danger = false): ActionSpec<Changed> {
  return {
    id: `${way}-key:${key_id}`,
    label,
    title: `${way === "activate" ? "Activate" : "Retire"} a key: ${readable(purpose)}`,
    danger,
    consequences: <p>{consequences}</p>,
    fields: [{ name: "force", label: "Also where something still depends on it", kind: "checkbox", help: "Without it, the key is not retired while something depends on it, and the answer says what." }, REASON],
    command: (values) => gpuctl("keys", way, purpose.replaceAll("_", "-"), key_id, ["--reason", values["reason"]], "--yes", ...(values["force"] ? ["--force"] : [])),
    send: (values, key) =>
      dataOf(
        api.POST(`/api/v1/admin/keys/${way}`, { params: keyed(key), body: { purpose, key_id, reason: values["reason"] ?? "", ...(values["force"] === "yes" ? { force: true } : {}) } }),
      ),
    refreshes: REFRESHES,
    result: (changed) => <Outcome of={changed} />,
  };
}

function Outcome({ of: { key_id, waiting_for, cut_off } }: { of: Changed }) {
  return (
    <>
      <p>
        Key <code title={key_id}>{shortId(key_id)}</code>: {waiting_for.length === 0 ? "all replicas have it." : `${count(waiting_for.length)} replicas do not have it yet: ${waiting_for.join(", ")}.`}
      </p>
      {cut_off.length > 0 && (
        <Table
          label="Nodes that have to enroll again"
          rows={cut_off}
          keyOf={(node) => node.node_id}
          none={null}
          columns={[
            {
              title: "Node that has to enroll again",
              cell: (node) => (
                <GuardedLink needs="manage_nodes" to="/nodes/$id" params={{ id: node.node_id }}>
                  <Plain>{node.name ?? node.host}</Plain>
                </GuardedLink>
              ),
            },
            { title: "Its certificate ends", cell: (node) => <FullTime at={node.certificate_not_after} /> },
          ]}
        />
      )}
    </>
  );
}

function AtRest({ of: { keys, version } }: { of: Schemas["KeysAtRest"] }) {
  return (
    <Card
      title="Keys of the database"
      actions={
        <Action
          spec={{
            id: "rewrap",
            label: "Rewrap…",
            title: "Seal everything by the active key",
            consequences: <p>What another key of the key ring has sealed is sealed by the active one, in the background. Then the other key can leave the ring.</p>,
            fields: [REASON],
            command: (values) => gpuctl("keys", "rewrap", ["--reason", values["reason"]], "--yes"),
            send: (values, key) => dataOf(api.POST("/api/v1/admin/keys/rewrap", { params: keyed(key), body: { reason: values["reason"] ?? "" } })),
            refreshes: REFRESHES,
          }}
        />
      }
    >
      <p className="soft">They seal the secrets in the database. They are in the key ring of each replica, and nowhere here.</p>
      <Table
        label="Keys of the database"
        rows={keys}
        keyOf={(key) => key.key_id}
        none={<p>Nothing is sealed.</p>}
        columns={[
          { title: "Key", cell: (key) => <code>{key.key_id}</code> },
          { title: "Phase", cell: (key) => (key.phase ? <State of={key.phase} /> : version === 0 ? "no rotation yet" : "not in the ring") },
          { title: "Seals", number: true, cell: (key) => count(key.sealed) },
          { title: "Since", cell: (key) => <When at={key.since} /> },
        ]}
      />
    </Card>
  );
}

function Replicas({ rows }: { rows: readonly Schemas["ReplicaKeys"][] }) {
  return (
    <Card title="What the replicas know">
      <Table
        label="Replicas"
        rows={rows}
        keyOf={(replica) => replica.name}
        none={<p>No replica answers. The page Fleet has those that are known.</p>}
        columns={[
          { title: "Replica", cell: (replica) => <Plain>{replica.name}</Plain> },
          { title: "Answers", cell: (replica) => <State of={replica.answers ? "ok" : "unreachable"} /> },
          { title: "Seals with", cell: (replica) => <Plain>{replica.seals_with}</Plain> },
          { title: "Versions", cell: (replica) => Object.entries(replica.versions).map(([purpose, version]) => `${readable(purpose)} ${version}`).join(", ") },
        ]}
      />
    </Card>
  );
}
