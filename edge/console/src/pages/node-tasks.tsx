// The tasks of a node: those without a result, the outcomes of its own, and what its agent has reported.
import type { ReactNode } from "react";
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { gpuctl, shortId } from "../format/text.ts";
import { useMay } from "../session/me.ts";
import { Action, REASON } from "../ui/action.tsx";
import { Card } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { Copyable, Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { GrowingTable, Pager, Table } from "../ui/table.tsx";
import { useAddress } from "../ui/use-address.ts";

type Outcome = Schemas["NodeTaskOutcome"];

/** The tasks with a page of reports. The tasks are the same on every page. */
export function useNodeTasks(id: string, page: string | undefined) {
  return useQuery({
    queryKey: ["tasks", id, page],
    queryFn: () => dataOf(api.GET("/api/v1/admin/nodes/{id}/tasks", { params: { path: { id }, query: page ? { page_token: page } : {} } })),
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(POLL_MS),
  });
}

interface NodeTasksProps {
  id: string;
  /** What is drawn of the outcomes beside the tasks. */
  children: (ended: readonly Outcome[]) => ReactNode;
}

export function NodeTasks({ id, children }: NodeTasksProps) {
  const [address, set] = useAddress();
  const page = address["reports_page"];
  const open = (reports_page: string | undefined) => set({ reports_page }, { inPlace: true });
  const tasks = useNodeTasks(id, page);
  // The token of a page may be refused: the first page needs none.
  const isLost = page !== undefined && tasks.error !== null && tasks.data === undefined;
  return (
    <>
      <Card title="Tasks" actions={<Age query={tasks} />}>
        <Loaded query={tasks}>{({ open, ended }) => <OpenAndEnded node={id} open={open} ended={[...ended].reverse()} />}</Loaded>
        {isLost && <Pager label="Reports" page={page} next={null} open={open} />}
      </Card>
      {tasks.data && (
        <>
          {children(tasks.data.ended)}
          <Card title="Reports of its agent">
            <Reports rows={tasks.data.reports} />
            {(page || tasks.data.next_page) && <Pager label="Reports" page={page} next={tasks.data.next_page} open={open} />}
          </Card>
        </>
      )}
    </>
  );
}

function OpenAndEnded({ node, open, ended }: { node: string; open: readonly Schemas["NodeTask"][]; ended: readonly Outcome[] }) {
  return (
    <>
      <Table
        label="Open tasks"
        rows={open}
        keyOf={(task) => task.task_id}
        none={<p>No task is open.</p>}
        columns={[
          { title: "Task", cell: (task) => task.type },
          { title: "State", cell: (task) => <State of={task.state} overdue={task.overdue} /> },
          { title: "Withheld", cell: (task) => <Plain>{task.withheld_because}</Plain> },
          { title: "Attempt", number: true, cell: (task) => task.attempt },
          { title: "Deadline", cell: (task) => <When at={task.deadline_at} /> },
          { title: "Actions", cell: (task) => <Resume node={node} of={task} /> },
        ]}
      />
      {ended.length > 0 && (
        <GrowingTable
          label="Ended tasks"
          rows={ended}
          keyOf={(task) => `${task.task_id}:${task.attempt}`}
          none={null}
          columns={[
            { title: "Task", cell: (task) => task.type },
            { title: "Result", cell: (task) => <State of={task.succeeded ? "succeeded" : "failed"} /> },
            { title: "Error", cell: (task) => <Plain>{task.error?.message}</Plain> },
            { title: "Ended", cell: (task) => <When at={task.ended_at} /> },
            { title: "Output", cell: (task) => <Output of={task} /> },
          ]}
        />
      )}
    </>
  );
}

function Output({ of: { output, type } }: { of: Outcome }) {
  if (!output || Object.keys(output).length === 0) return <span className="soft">–</span>;
  return (
    <details>
      <summary>Show</summary>
      <Copyable text={JSON.stringify(output, null, 2)} label={`output of ${type}`} />
    </details>
  );
}

function Reports({ rows }: { rows: readonly Schemas["NodeReport"][] }) {
  const mayTrace = useMay()("read_audit");
  return (
    <Table
      label="Reports of its agent"
      rows={rows}
      keyOf={(report) => String(report.generation)}
      none={<p>Its agent has reported no task.</p>}
      columns={[
        { title: "At", cell: (report) => <When at={report.at} /> },
        { title: "Outcome", cell: (report) => <Plain>{report.outcome}</Plain> },
        { title: "Task", cell: ({ task_id }) => (task_id ? <code title={task_id}>{shortId(task_id)}</code> : "") },
        {
          title: "Request",
          cell: ({ correlation_id }) => {
            const id = <code title={correlation_id}>{shortId(correlation_id)}</code>;
            return mayTrace ? (
              <Link to="/requests" search={{ correlation_id } as never}>
                {id}
              </Link>
            ) : (
              id
            );
          },
        },
      ]}
    />
  );
}

function Resume({ node, of: task }: { node: string; of: Schemas["NodeTask"] }) {
  if (task.state !== "awaits_operator") return null;
  return (
    <Action
      quiet
      spec={{
        id: `resume:${task.task_id}`,
        label: "Resume…",
        title: "Order the task again",
        consequences: <p>The task is dispatched to the agent again, with as many attempts as a new one.</p>,
        fields: [REASON],
        command: (values) => gpuctl("nodes", "resume", node, task.task_id, ["--reason", values["reason"]]),
        send: (values, key) =>
          dataOf(
            api.POST("/api/v1/admin/nodes/{id}/tasks/{task_id}/resume", {
              params: { path: { id: node, task_id: task.task_id }, ...keyed(key) },
              body: { reason: values["reason"] ?? "" },
            }),
          ),
        refreshes: ["tasks", "node"],
      }}
    />
  );
}
