// From nothing to a shell: what a user does who has not worked on an allocation yet.
import { useState, type ReactNode } from "react";
import { queryOptions, useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { freshFor, pollEvery, POLL_SOON_MS } from "../api/query-client.ts";
import { isChanging, type Allocation } from "../api/queries.ts";
import { money } from "../format/money.ts";
import { readable } from "../format/text.ts";
import { ROLE_FOR, useMay, useMe, type Permission } from "../session/me.ts";
import { readStored, store } from "../ui/browser-storage.ts";
import { Card } from "../ui/layout.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";

/** Who has more allocations than this is not new. */
const MOST = 5;

type Page = Schemas["Items_Allocation"];

/** The first allocation of a new user: null before it; `not-new` where the steps are of no use any more. */
export function firstAllocation({ items, next_page }: Pick<Page, "items" | "next_page">): Allocation | null | "not-new" {
  if (next_page || items.some(({ active_at, state }) => active_at && state !== "active")) return "not-new";
  const current = items.filter(({ state }) => state === "requested" || state === "provisioning" || state === "active");
  return current.length > 1 ? "not-new" : (current[0] ?? null);
}

/** The first of the user's allocations, those that have ended included. Where there are enough, they are not read again. */
const firstAllocationsQuery = (user_id: string) =>
  queryOptions({
    queryKey: ["allocations", "first", user_id],
    queryFn: () => dataOf(api.GET("/api/v1/allocations", { params: { query: { user_id, limit: MOST } } })),
    enabled: (query) => query.state.data === undefined || firstAllocation(query.state.data) !== "not-new",
    staleTime: freshFor,
    refetchInterval: (query) => pollEvery(query.state.data?.items.some(isChanging) ? POLL_SOON_MS : 60_000)(),
  });

/** The allocation whose steps its user has left: opened a terminal, or hidden them. No more than that is stored. */
const STORED = "gpuaas-first-steps";

interface FirstStep {
  title: string;
  isDone: boolean;
  note: ReactNode;
  /** What does it, where it is the next one. */
  action?: ReactNode;
}

interface FirstStepsProps {
  account: Schemas["BillingAccount"] | undefined;
}

export function FirstSteps({ account }: FirstStepsProps) {
  const me = useMe();
  const may = useMay();
  const [left, setLeft] = useState(() => readStored("local", STORED));
  const allocations = useQuery({ ...firstAllocationsQuery(me.user_id), ...(may("rent") ? {} : { enabled: false }) });
  const first = allocations.data ? firstAllocation(allocations.data) : "not-new";
  if (!account || first === "not-new" || (first !== null && first.id === left)) return null;
  const leave = () => {
    if (first === null) return;
    store("local", STORED, first.id);
    setLeft(first.id);
  };
  const isActive = first?.state === "active";
  const isPaid = first !== null || BigInt(account.available_minor) > 0n;
  const steps: FirstStep[] = [
    {
      title: "Top up your balance",
      isDone: isPaid,
      note: isPaid ? `${money(account.available_minor, account.currency)} available.` : "Allocations are paid from it, for the time that they run.",
      action: <StepLink needs="pay" to="/money" label="Top up" />,
    },
    {
      title: "Choose GPUs and rent them",
      isDone: first !== null,
      note: first ? <Plain>{first.sku}</Plain> : <FailedBefore of={allocations.data?.items ?? []} />,
      action: <StepLink needs="rent" to="/catalog" label="Open the catalog" />,
    },
    {
      title: "Wait until the allocation is active",
      isDone: isActive,
      note: isActive || first === null ? "Its page shows each step, and by when it ends." : <Progress of={first} />,
      action: first && <StepLink needs="rent" to="/allocations/$id" params={{ id: first.id }} label="See its steps" />,
    },
    {
      title: "Open a terminal",
      isDone: false,
      note: may("open_terminals") ? "A shell on the node, in the browser. The page of the allocation has the SSH command, too." : "The page of the allocation has the SSH command.",
      action: first && isActive && <OpenTerminal id={first.id} opened={leave} />,
    },
  ];
  const next = steps.findIndex(({ isDone }) => !isDone);
  return (
    <Card
      title="First steps"
      actions={
        isActive && (
          <button type="button" className="quiet" onClick={leave}>
            Hide
          </button>
        )
      }
    >
      <ol className="ticks" aria-label="First steps">
        {steps.map(({ title, isDone, note, action }, index) => (
          <li key={title} data-done={isDone || undefined} aria-current={index === next ? "step" : undefined}>
            <strong>{title}</strong>
            <span className="hidden">{isDone ? ", done" : ", not done"}</span> <span className="soft">{note}</span> {index === next && action}
          </li>
        ))}
      </ol>
    </Card>
  );
}

/** Why the newest request has ended before it was active. */
function FailedBefore({ of }: { of: readonly Allocation[] }) {
  const failure = of.at(-1)?.failure;
  return failure ? (
    <>
      The last request has failed: <Plain>{failure.message}</Plain>
    </>
  ) : (
    <>The catalog has prices, and what is free.</>
  );
}

function Progress({ of: { state_reason, deadline_at } }: { of: Allocation }) {
  return (
    <>
      <Plain>{readable(state_reason)}</Plain>
      {deadline_at && (
        <>
          {" "}
          · deadline <When at={deadline_at} />
        </>
      )}
    </>
  );
}

interface StepLinkProps {
  needs: Permission;
  to: string;
  label: string;
  params?: Readonly<Record<string, string>>;
}

function StepLink({ needs, to, label, params = {} }: StepLinkProps) {
  const may = useMay();
  if (!may(needs)) return <span className="soft">To do this you need the role {ROLE_FOR[needs]}.</span>;
  return (
    <Link className="button primary" to={to} params={params as never}>
      {label}
    </Link>
  );
}

function OpenTerminal({ id, opened }: { id: string; opened: () => void }) {
  const may = useMay();
  if (!may("open_terminals")) return <StepLink needs="rent" to="/allocations/$id" params={{ id }} label="See the SSH command" />;
  return (
    <a className="button primary" href={`/terminal/${id}`} target="_blank" rel="noopener" onClick={opened}>
      Open a terminal
    </a>
  );
}
