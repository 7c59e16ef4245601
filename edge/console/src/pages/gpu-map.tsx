// The GPUs of all nodes: the allocations and users that hold them, which are free, which have a finding or are reset. Only the rows on screen are drawn.
import { useCallback, useEffect, useMemo, useState } from "react";
import { useInfiniteQuery, useQuery, type UseInfiniteQueryResult } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { allocationQuery } from "../api/queries.ts";
import { count, shortId } from "../format/text.ts";
import { Guard } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { Plain } from "../ui/text.tsx";
import { SortBy, sortedBy, type SortChoice } from "../ui/sort-by.tsx";
import { State } from "../ui/state.tsx";
import { queryOf, useAddress, type Address } from "../ui/use-address.ts";
import { VirtualTable } from "../ui/virtual-table.tsx";

type Node = Schemas["Node"];

/** What a GPU does, the first that is true. */
export type GpuUse = "missing" | "resetting" | "faulty" | "held" | "free" | "withheld";

export interface GpuCell {
  index: number;
  uuid: string | null;
  use: GpuUse;
  allocation: string | null;
  /** Why it is faulty. */
  why: string | null;
}

/** The GPUs of a node by their index; those that its agent has not reported are missing. */
export function cellsOf(node: Pick<Node, "state" | "inventory" | "gpus_total" | "health" | "gpu_resets">): GpuCell[] {
  const gpus = node.inventory?.gpus ?? [];
  const cells = gpus.map((gpu): GpuCell => {
    const finding = node.health.findings.find(({ gpu_uuid, cleared_at }) => gpu_uuid === gpu.uuid && !cleared_at);
    const isReset = node.gpu_resets.some(({ gpu_uuid, phase }) => gpu_uuid === gpu.uuid && (phase === "resetting" || phase === "validating"));
    const use = isReset ? "resetting" : finding ? "faulty" : gpu.allocation_id ? "held" : gpu.is_free && node.state === "active" ? "free" : "withheld";
    return { index: gpu.index, uuid: gpu.uuid, use, allocation: gpu.allocation_id ?? null, why: finding ? `${finding.probe} ${finding.code}: ${finding.meaning}` : null };
  });
  const known = new Set(cells.map(({ index }) => index));
  for (let index = 0; cells.length < node.gpus_total && index < node.gpus_total + gpus.length; index += 1) {
    if (!known.has(index)) cells.push({ index, uuid: null, use: "missing", allocation: null, why: null });
  }
  return cells.sort((a, b) => a.index - b.index);
}

const MEANINGS: Record<GpuUse, string> = {
  held: "held by an allocation",
  free: "free",
  withheld: "not held, and not offered",
  faulty: "has an open finding",
  resetting: "is being reset",
  missing: "not reported by the agent",
};

interface MapRow {
  node: Node;
  cells: GpuCell[];
}

const many = (use: GpuUse) => ({ cells }: MapRow) => cells.filter((cell) => cell.use === use).length;

const ORDERS: readonly SortChoice<MapRow>[] = [
  { name: "name", label: "by name", valueOf: ({ node }) => node.name ?? node.host },
  { name: "state", label: "by state", valueOf: ({ node }) => node.state },
  { name: "-free", label: "most free GPUs first", valueOf: many("free") },
  { name: "-held", label: "most held GPUs first", valueOf: many("held") },
  { name: "-faulty", label: "most faulty GPUs first", valueOf: many("faulty") },
];

const LEAST_STATES: Schemas["NodeState"][] = ["active", "draining", "offline", "quarantined", "registered", "bootstrap-issued", "enrolling", "retired"];

/** As many nodes as the API gives in one answer. */
const LIMIT = 200;
/** So many pages at most are read again by themselves: each is a request, of which a user has a number per minute. */
const REFRESHED_PAGES = 5;
/** A row of eight GPUs. */
const ROW_PX = 43;

/** The rows of all pages that were read. A node that moved to another page between two reads is in one of them. */
function rowsOf(pages: readonly Schemas["Items_Node"][]): MapRow[] {
  const nodes = new Map(pages.flatMap(({ items }) => items.map((node) => [node.id, node] as const)));
  return [...nodes.values()].map((node) => ({ node, cells: cellsOf(node) }));
}

export default function GpuMapPage() {
  const [address, set] = useAddress();
  const filter = queryOf({ ...address, page: undefined }, ["sku", "state"]) as { sku?: string; state?: Schemas["NodeState"] };
  const nodes = useInfiniteQuery({
    queryKey: ["gpu-map", filter.sku, filter.state],
    queryFn: ({ pageParam }) => dataOf(api.GET("/api/v1/admin/nodes", { params: { query: { ...filter, limit: LIMIT, ...(pageParam ? { page_token: pageParam } : {}) } } })),
    initialPageParam: "",
    getNextPageParam: ({ next_page }) => next_page ?? undefined,
    refetchInterval: pollEvery(POLL_MS),
    enabled: (query) => isRefreshed(query.state.data?.pages ?? []),
    // What was read is not stored when the page is left: thousands of nodes would be shown as they were, and not be read again.
    gcTime: 0,
  });
  return (
    <Guard needs="manage_nodes">
      <Head title="GPUs" age={<Age query={nodes} polled={!isRefreshed(nodes.data?.pages ?? [])} />} />
      <Filters
        of={[
          { name: "state", label: "State of the node", options: LEAST_STATES },
          { name: "sku", label: "SKU" },
        ]}
        address={address}
        set={set}
      />
      <SortBy choices={ORDERS} address={address} set={set} />
      <Loaded query={nodes}>{({ pages }) => <GpuMap pages={pages} nodes={nodes} filter={filter} address={address} />}</Loaded>
    </Guard>
  );
}

function isRefreshed(pages: readonly unknown[]): boolean {
  return pages.length <= REFRESHED_PAGES;
}

type Paging = Pick<UseInfiniteQueryResult, "hasNextPage" | "fetchNextPage" | "isFetching" | "isFetchingNextPage" | "isFetchNextPageError">;

interface GpuMapProps {
  pages: readonly Schemas["Items_Node"][];
  nodes: Paging;
  filter: Address;
  address: Address;
}

function GpuMap({ pages, nodes, filter, address }: GpuMapProps) {
  const { hasNextPage, fetchNextPage, isFetching, isFetchingNextPage, isFetchNextPageError } = nodes;
  const rows = useMemo(() => sortedBy(rowsOf(pages), ORDERS, address), [pages, address]);
  const [shown, setShown] = useState<ShownGpu | null>(null);
  const atEnd = useCallback(() => {
    // After a failure, the button does.
    if (hasNextPage && !isFetching && !isFetchNextPageError) void fetchNextPage();
  }, [hasNextPage, isFetching, isFetchNextPageError, fetchNextPage]);
  if (rows.length === 0) {
    return (
      <div className="none">
        <Nothing address={filter}>No node is registered. Register one on the page Nodes.</Nothing>
      </div>
    );
  }
  return (
    <>
      <Legend rows={rows} />
      <Holder of={shown} />
      <VirtualTable
        label="Nodes"
        kind="gpu-map"
        columns={COLUMNS}
        rows={rows}
        keyOf={keyOf}
        rowPx={ROW_PX}
        isMeasured
        isPartial={hasNextPage}
        atEnd={atEnd}
        cells={({ node, cells }) => [
          <span className="gpu-node">
            <Link to="/nodes/$id" params={{ id: node.id }}>
              <Plain>{node.name ?? node.host}</Plain>
            </Link>
          </span>,
          <State of={node.state} overdue={node.overdue} />,
          <ul className="gpus" aria-label={`GPUs of ${node.name ?? node.host}`}>
            {cells.map((cell) => (
              <li key={cell.index}>
                <Gpu of={cell} show={(allocation) => setShown({ gpu: `GPU ${cell.index} of ${node.name ?? node.host}`, allocation })} />
              </li>
            ))}
          </ul>,
        ]}
      />
      {!isRefreshed(pages) && <p className="soft">So many nodes are not read again by themselves. Narrow the filter, or press ↻ at the title to read them again.</p>}
      {hasNextPage && (
        <div className="pager">
          <p className="soft">{count(rows.length)} nodes are shown, counted and ordered; there are more.</p>
          <button type="button" onClick={() => !isFetchingNextPage && void fetchNextPage()}>
            {isFetchingNextPage ? "Reading…" : "Show more nodes"}
          </button>
        </div>
      )}
    </>
  );
}

const COLUMNS = ["Node", "State", "GPUs"];
const keyOf = ({ node }: MapRow) => node.id;

/** A GPU that was pointed at, or has the focus. */
interface ShownGpu {
  gpu: string;
  allocation: string;
}

/** A pointer that only crosses GPUs asks for nothing. */
const SETTLED_MS = 200;

/** The user who holds a GPU, which the list of nodes does not have. */
function Holder({ of }: { of: ShownGpu | null }) {
  const [settled, setSettled] = useState<ShownGpu | null>(null);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(of), SETTLED_MS);
    return () => clearTimeout(timer);
  }, [of]);
  const allocation = useQuery({ ...allocationQuery(settled?.allocation ?? ""), enabled: settled !== null });
  return (
    <div className="gpu-holder" role="status">
      {settled === null ? (
        <span className="soft">Point at a held GPU, or go there by the keyboard, to see who holds it.</span>
      ) : allocation.data ? (
        <>
          <Plain>{settled.gpu}</Plain> is held by <Plain>{allocation.data.user_id}</Plain>: allocation <Plain>{allocation.data.name ?? shortId(allocation.data.id)}</Plain>{" "}
          <State of={allocation.data.state} overdue={allocation.data.overdue} />
        </>
      ) : allocation.error ? (
        <Plain>{allocation.error.message}</Plain>
      ) : (
        <span className="soft">Loading…</span>
      )}
    </div>
  );
}

function Legend({ rows }: { rows: readonly MapRow[] }) {
  const many = useMemo(() => {
    const found = new Map<GpuUse, number>();
    for (const { use } of rows.flatMap(({ cells }) => cells)) found.set(use, (found.get(use) ?? 0) + 1);
    return found;
  }, [rows]);
  return (
    <ul className="gpu-legend" aria-label="Legend">
      {(Object.keys(MEANINGS) as GpuUse[]).map((use) => (
        <li key={use}>
          <span className="gpu" data-use={use} aria-hidden="true" /> <strong>{count(many.get(use) ?? 0)}</strong> {MEANINGS[use]}
        </li>
      ))}
    </ul>
  );
}

function Gpu({ of: { index, uuid, use, allocation, why }, show }: { of: GpuCell; show: (allocation: string) => void }) {
  const text = `GPU ${index}, ${why ?? MEANINGS[use]}${allocation ? `, allocation ${shortId(allocation)}` : ""}`;
  const title = uuid ? `${text}\n${uuid}` : text;
  if (allocation === null) {
    return (
      <span className="gpu" data-use={use} title={title} role="img" aria-label={text}>
        {index}
      </span>
    );
  }
  return (
    <Link className="gpu" data-use={use} title={title} aria-label={text} to="/allocations/$id" params={{ id: allocation }} onFocus={() => show(allocation)} onMouseEnter={() => show(allocation)}>
      {index}
    </Link>
  );
}
