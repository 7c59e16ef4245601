// One allocation: its state and why, how to reach it, what it uses and costs, and what became of it.
import { Suspense } from "react";
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { allocationQuery, newestFirst, usableSshKeysQuery, type Allocation } from "../api/queries.ts";
import { POLL_MS, pollEvery, pollUnreported } from "../api/query-client.ts";
import { labelChanges, labelsText } from "../format/labels.ts";
import { money } from "../format/money.ts";
import { count, gpuctl, mebibytes, shortId, readable } from "../format/text.ts";
import { useMay, useMe } from "../session/me.ts";
import { Action, RoleNeeded, type ActionSpec } from "../ui/action.tsx";
import { Card, Facts, Head } from "../ui/layout.tsx";
import { lazyPart } from "../ui/lazy-part.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { Copyable, DevicePaths, Id, Labels, Plain } from "../ui/text.tsx";
import { FullTime, When } from "../ui/time.tsx";
import { PagedTable, Table } from "../ui/table.tsx";
import { useAddress, usePart } from "../ui/use-address.ts";
import type { Values } from "../ui/use-draft.ts";
import { CleanUpProof } from "./allocation-clean-up.tsx";
import { forceRelease, retryRelease } from "./allocation-rescue.tsx";
import { readSamples, type GpuSamples } from "./gpu-samples.ts";
import { killTerminal, RecordingLink } from "./terminals.tsx";

const GpuUse = lazyPart(() => import("./gpu-use.tsx"), () => <p className="soft">The chart cannot be shown before the page is loaded again.</p>);

export default function AllocationPage() {
  const id = usePart("id");
  const allocation = useQuery(allocationQuery(id));
  return (
    <Loaded query={allocation}>
      {(data) => (
        <>
          <Head title={data.name ?? `Allocation ${shortId(data.id)}`} age={<Age query={allocation} />}>
            <Actions of={data} />
          </Head>
          <Notices of={data} />
          <div className="columns">
            <div>
              <Access of={data} />
              <CleanUpProof of={data} />
              <Gpus of={data} />
              <FurtherDevices of={data} />
              <History of={data} />
            </div>
            <aside>
              <Summary of={data} />
              {data.state === "active" && <OpenTerminals id={data.id} />}
              <Recordings id={data.id} />
            </aside>
          </div>
        </>
      )}
    </Loaded>
  );
}

const GONE = ["releasing", "released"];
const REFRESHES = ["allocation", "allocations", "balance", "capacity"];

function Actions({ of: allocation }: { of: Allocation }) {
  const { id } = allocation;
  const may = useMay();
  const isOwn = useMe().user_id === allocation.user_id;
  const path = { id };
  return (
    <>
      {allocation.state === "active" && isOwn && may("open_terminals") && (
        <a className="button primary" href={`/terminal/${id}`} target="_blank" rel="noopener">
          Open a terminal
        </a>
      )}
      {allocation.state !== "released" && <Action needs="revise_allocations" spec={revise(allocation)} />}
      {(allocation.state === "active" || allocation.state === "provisioning") && <ChooseKeys of={allocation} />}
      {allocation.state === "release_failed" && (
        <>
          <Action needs="rescue_allocations" spec={retryRelease(allocation)} />
          <Action needs="rescue_allocations" spec={forceRelease(allocation)} />
        </>
      )}
      {!GONE.includes(allocation.state) && allocation.state !== "release_failed" && (
        <Action
          needs="release"
          spec={{
            id: `release:${id}`,
            label: "Release…",
            title: allocation.active_at ? "Release this allocation" : "Cancel this allocation",
            danger: true,
            consequences: (
              <ul>
                <li>All programs and terminals on it end at once.</li>
                <li>
                  <strong>All local data on its GPUs and in its home is erased.</strong>
                </li>
                <li>Billing ends when the release begins. It has cost {money(allocation.cost_to_date_minor, allocation.price.currency)} so far.</li>
              </ul>
            ),
            fields: [{ name: "issue", label: "Was something wrong with it?", maxLength: 500, help: "Operators read this." }],
            command: (values) => gpuctl("allocations", "release", id, ["--issue", values["issue"]]),
            send: (values, key) =>
              dataOf(
                api.POST("/api/v1/allocations/{id}/release", {
                  params: { path, ...keyed(key) },
                  body: values["issue"]?.trim() ? { issue: values["issue"].trim() } : {},
                }),
              ),
            refreshes: REFRESHES,
          }}
        />
      )}
    </>
  );
}

/** Its name and labels. */
function revise({ id, name, labels }: Allocation): ActionSpec<Allocation> {
  return {
    id: `revise-allocation:${id}`,
    label: "Edit…",
    title: "Name and labels",
    consequences: <p>They are for you alone: nothing that runs changes.</p>,
    fields: [
      { name: "name", label: "Name", maxLength: 63, initial: name ?? "" },
      { name: "labels", label: "Labels", maxLength: 4000, initial: labelsText(labels), help: "As key=value, separated by commas." },
    ],
    command: (values) =>
      gpuctl(
        "allocations", "set", id, ...(values["name"]?.trim() ? [["--name", values["name"].trim()] as const] : name ? ["--no-name"] : []),
        ...Object.entries(labelChanges(labels, values["labels"] ?? "")).map(([key, value]) => (value === null ? (["--remove-label", key] as const) : (["--label", `${key}=${value}`] as const))),
      ),
    send: (values) => {
      const changes = labelChanges(labels, values["labels"] ?? "");
      const body = { name: values["name"]?.trim() || null, ...(Object.keys(changes).length > 0 ? { labels: changes } : {}) };
      return dataOf(api.PATCH("/api/v1/allocations/{id}", { params: { path: { id } }, body }));
    },
    refreshes: ["allocation", "allocations"],
  };
}

/** The keys of the owner; administrators choose none for others. */
function ChooseKeys({ of: { id, user_id, ssh } }: { of: Allocation }) {
  const keys = useQuery(usableSshKeysQuery);
  const isOwn = useMe().user_id === user_id;
  // A form that opens before the keys are read would choose none of them.
  if (!isOwn || !keys.data) return null;
  const { keys: usable, isPartial } = keys.data;
  const chosen = (values: Values) => usable.filter((key) => values[key.id] === "yes");
  return (
    <Action
      needs="keep_keys"
      spec={{
        id: `choose-keys:${id}`,
        label: "SSH keys…",
        title: "Which keys open this allocation",
        consequences: (
          <p>
            A key that is not chosen does not open it any more, within seconds; sessions that are open stay. Without any key it is reached by the terminal alone.
            {isPartial && " Only the oldest of your keys are listed here: the others do not open it afterwards."}
          </p>
        ),
        fields: [
          { name: "default", label: "My default key, whichever that is", kind: "checkbox" },
          ...usable.map((key) => ({ name: key.id, label: `${key.name} (${key.fingerprint})`, kind: "checkbox" as const, initial: ssh?.key_fingerprints.includes(key.fingerprint) ? "yes" : "" })),
        ],
        command: (values) =>
          gpuctl("allocations", "ssh-keys", id, ...(values["default"] === "yes" ? ["--default"] : chosen(values).length === 0 ? ["--none"] : chosen(values).map((key) => ["--ssh-key", key.name] as const))),
        send: (values) =>
          dataOf(
            api.PUT("/api/v1/allocations/{id}/ssh-keys", {
              params: { path: { id } },
              body: { ssh_key_ids: values["default"] === "yes" ? null : chosen(values).map((one) => one.id) },
            }),
          ),
        refreshes: ["allocation"],
      }}
    />
  );
}

function OpenTerminals({ id }: { id: string }) {
  const sessions = useQuery({
    queryKey: ["terminals", "of-allocation", id],
    queryFn: () => dataOf(api.GET("/api/v1/allocations/{id}/terminal-sessions", { params: { path: { id } } })),
    refetchInterval: pollEvery(POLL_MS),
  });
  return (
    <Card title="Open terminals" actions={<Age query={sessions} />}>
      <Loaded query={sessions}>
        {({ items }) => (
          <Table
            label="Open terminals"
            rows={items}
            keyOf={(session) => session.id}
            none={<p>No terminal is open.</p>}
            columns={[
              { title: "State", cell: (session) => <State of={session.state} /> },
              { title: "Opened", cell: (session) => <When at={session.opened_at} /> },
              { title: "Actions", cell: (session) => <EndTerminal of={session} /> },
            ]}
          />
        )}
      </Loaded>
    </Card>
  );
}

/** Its user ends it; an administrator ends that of another with a reason. */
function EndTerminal({ of: session }: { of: Schemas["TerminalSession"] }) {
  const { id, allocation_id, user_id } = session;
  if (useMe().user_id !== user_id) return <Action quiet needs="operate_terminals" spec={killTerminal(session)} />;
  return (
    <Action
      quiet
      needs="open_terminals"
      spec={{
        id: `end-terminal:${id}`,
        label: "End…",
        title: "End this terminal",
        danger: true,
        consequences: <p>Its shell and what runs in it end at once. The allocation goes on.</p>,
        command: () => gpuctl("terminal", "sessions", "end", allocation_id, id),
        send: () => dataOf(api.DELETE("/api/v1/allocations/{id}/terminal-sessions/{session_id}", { params: { path: { id: allocation_id, session_id: id } } })),
        refreshes: ["terminals", "recordings"],
      }}
    />
  );
}

function Notices({ of: { failure, health, deadline_at, state, state_reason, overdue } }: { of: Allocation }) {
  return (
    <>
      {failure && (
        <p className="banner" data-tone="bad">
          <span>
            <strong>{readable(failure.phase)} failed:</strong> <Plain>{failure.message}</Plain> {failure.retryable && "It is tried again."}
          </span>
        </p>
      )}
      {state === "release_failed" && <RoleNeeded needs="rescue_allocations" to="retry the release" />}
      {health && health.status !== "ok" && (
        <p className="banner" data-tone={health.release_at ? "bad" : "waits"}>
          <span>
            <Plain>{health.message}</Plain> {health.release_at && <>It is released <When at={health.release_at} />.</>}
          </span>
        </p>
      )}
      <ol className="steps" aria-label="Progress">
        {["requested", "provisioning", "active", "releasing", "released"].map((step) => (
          <li key={step} data-is={step === state || (state === "release_failed" && step === "releasing") || undefined} aria-current={step === state ? "step" : undefined}>
            {readable(step)}
          </li>
        ))}
      </ol>
      <p className="why">
        <State of={state} overdue={overdue} /> <span className="soft">·</span> <Plain>{readable(state_reason)}</Plain>
        {deadline_at && (
          <span className="soft">
            {" "}
            · deadline <When at={deadline_at} />
          </span>
        )}
      </p>
    </>
  );
}

function Access({ of: { id, ssh, state } }: { of: Allocation }) {
  if (state === "released") return null;
  const command = ssh && `ssh ${ssh.port === 22 ? "" : `-p ${ssh.port} `}${ssh.username}@${ssh.host}`;
  return (
    <Card title="Access">
      {!ssh || state !== "active" ? (
        <p className="soft">It can be reached once it is active.</p>
      ) : (
        <>
          {!ssh.keys_written && <p className="soft">The node has not applied your keys yet; this takes some seconds.</p>}
          <Facts
            of={[
              ["SSH", <Copyable key="s" text={command ?? ""} label="SSH command" />],
              [
                "Host key",
                ssh.host_key_fingerprint ? <Copyable key="h" text={ssh.host_key_fingerprint} label="host key fingerprint" /> : <span key="h" className="soft">The node has not reported one.</span>,
              ],
              ["Checked by gpuctl", <Copyable key="g" text={gpuctl("ssh", id)} label="gpuctl command" />],
              [
                "Opened by",
                ssh.key_fingerprints.length === 0 ? (
                  <span key="k" className="soft">No SSH key; use a terminal.</span>
                ) : (
                  <ul key="k" className="plain-list">
                    {ssh.key_fingerprints.map((fingerprint) => (
                      <li key={fingerprint}>
                        <code>{fingerprint}</code>
                      </li>
                    ))}
                  </ul>
                ),
              ],
            ]}
          />
        </>
      )}
    </Card>
  );
}

function Gpus({ of: { id, devices, state } }: { of: Allocation }) {
  const key = ["telemetry", id];
  const telemetry = useQuery({
    queryKey: key,
    queryFn: ({ client }) => readSamples(id, client.getQueryData<GpuSamples>(key)),
    enabled: state === "active",
    // Samples, which no event reports.
    refetchInterval: pollUnreported(POLL_MS),
  });
  const gpus = telemetry.data?.latest.gpus;
  return (
    <Card title="GPUs" actions={state === "active" && <Age query={telemetry} polled />}>
      <Table
        label="GPUs"
        rows={devices}
        keyOf={(device) => device.uuid}
        none={<p>No GPU is reserved yet.</p>}
        columns={[
          { title: "GPU", number: true, cell: (device) => device.index },
          { title: "UUID", cell: (device) => <code>{device.uuid}</code> },
          {
            title: "Use",
            number: true,
            cell: (device) => <Use of={gpus?.find((gpu) => gpu.uuid === device.uuid)?.utilization_percent} />,
          },
          {
            title: "Memory",
            number: true,
            cell: (device) => {
              const gpu = gpus?.find(({ uuid }) => uuid === device.uuid);
              return gpu?.memory_used_mib == null || gpu.memory_total_mib == null ? "–" : `${mebibytes(gpu.memory_used_mib)} of ${mebibytes(gpu.memory_total_mib)}`;
            },
          },
          {
            title: "Temperature",
            number: true,
            cell: (device) => {
              const degrees = gpus?.find(({ uuid }) => uuid === device.uuid)?.temperature_celsius;
              return degrees == null ? "–" : `${degrees} °C`;
            },
          },
        ]}
      />
      {state === "active" && telemetry.data && (
        <Suspense fallback={null}>
          <GpuUse samples={telemetry.data.samples} />
        </Suspense>
      )}
    </Card>
  );
}

/** The nodes of `/dev` beside those of its GPUs: which these are is a setting of the machine (decision 0089). */
function FurtherDevices({ of: { further_devices, state } }: { of: Allocation }) {
  // Before and after, no program of its user runs on the machine.
  if (state !== "active") return null;
  return (
    <Card title="Further devices">
      {further_devices.length === 0 ? (
        <p className="soft">None: its programs open the nodes of its own GPUs, and those that every GPU program needs.</p>
      ) : (
        <>
          <p>Its programs may open these, too. The other tenants of the machine may do the same.</p>
          <DevicePaths of={further_devices} />
        </>
      )}
    </Card>
  );
}

function Use({ of: percent }: { of: number | null | undefined }) {
  if (percent == null) return <>–</>;
  return (
    <span className="use">
      <meter min={0} max={100} value={percent} aria-label="Use" /> {percent} %
    </span>
  );
}

function History({ of: { status_history } }: { of: Allocation }) {
  return (
    <Card title="History">
      <Table
        label="History"
        rows={status_history.map((entry, index) => ({ ...entry, index })).reverse()}
        keyOf={(entry) => String(entry.index)}
        none={null}
        columns={[
          { title: "State", cell: (entry) => <State of={entry.state} /> },
          { title: "Why", cell: (entry) => <Plain>{readable(entry.reason)}</Plain> },
          { title: "At", cell: (entry) => <FullTime at={entry.at} /> },
        ]}
      />
    </Card>
  );
}

function Summary({ of: allocation }: { of: Allocation }) {
  const { price, gpu_count } = allocation;
  return (
    <Card title="Summary">
      <Facts
        of={[
          ["Cost to date", <strong key="c">{money(allocation.cost_to_date_minor, price.currency)}</strong>],
          ["Cost per hour", money(BigInt(price.amount_minor_per_gpu_hour) * BigInt(gpu_count), price.currency)],
          ["Billed until", <When key="b" at={allocation.billed_until} />],
          ["User", <Plain key="u">{allocation.user_id}</Plain>],
          ["SKU", <Plain key="s">{allocation.sku}</Plain>],
          ["Region", <Plain key="r">{allocation.region_code}</Plain>],
          ["Isolation", readable(allocation.isolation_model)],
          ["Requested", <FullTime key="q" at={allocation.requested_at} />],
          allocation.active_at ? ["Active", <FullTime key="a" at={allocation.active_at} />] : null,
          allocation.released_at ? ["Released", <FullTime key="e" at={allocation.released_at} />] : null,
          ["Labels", <Labels key="l" of={allocation.labels} />],
          ["Id", <Id key="i">{allocation.id}</Id>],
        ]}
      />
    </Card>
  );
}

/** As many recordings as a page of them has. */
const RECORDINGS_OF_PAGE = 20;

function Recordings({ id }: { id: string }) {
  const [address, set] = useAddress();
  const page = address["recordings_page"];
  const recordings = useQuery({
    queryKey: ["recordings", id, page],
    queryFn: () => {
      const query = { limit: RECORDINGS_OF_PAGE, ...(page ? { page_token: page } : {}) };
      return newestFirst((order) => dataOf(api.GET("/api/v1/allocations/{id}/recordings", { params: { path: { id }, query: { ...query, ...order } } })));
    },
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(60_000),
  });
  return (
    <Card title="Terminal recordings" actions={<Age query={recordings} />}>
      <PagedTable
        label="Terminal recordings"
        query={recordings}
        page={page}
        open={(recordings_page) => set({ recordings_page }, { inPlace: true })}
        keyOf={(recording) => recording.id}
        none={page ? <p>Nothing is left on this page. Go to the first one.</p> : <p>No terminal was recorded.</p>}
        columns={[
          {
            title: "Recording",
            cell: (recording) => <RecordingLink of={recording} />,
          },
          { title: "Lasts", number: true, cell: (recording) => `${count(Math.round(recording.duration_ms / 1000))} s` },
        ]}
      />
    </Card>
  );
}
