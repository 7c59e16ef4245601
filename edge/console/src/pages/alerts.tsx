// The alerts of the service's monitoring: what fires, since when, and the runbook of each.
import { useQuery } from "@tanstack/react-query";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { pollUnreported } from "../api/query-client.ts";
import { count } from "../format/text.ts";
import { Guard } from "../ui/action.tsx";
import { Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { Runbook } from "../ui/runbook.tsx";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { Table } from "../ui/table.tsx";

type Alert = Schemas["Alert"];

/** An alert that always fires, so that a silent monitoring is noticed. */
const WATCHDOG = "none";

export default function AlertsPage() {
  // Alerts come from outside of the service: no event of its stream reports them.
  const alerts = useQuery({ queryKey: ["alerts"], queryFn: () => dataOf(api.GET("/api/v1/admin/alerts")), refetchInterval: pollUnreported(15_000) });
  return (
    <Guard needs="operate_runtime">
      <Head title="Alerts" age={<Age query={alerts} polled />} />
      <p className="soft page-note">What the Alertmanager of this service holds. Each alert has a runbook, which says what it means and what to do.</p>
      <Loaded query={alerts}>
        {({ is_configured, items, total }) =>
          is_configured ? (
            <>
              {!items.some((alert) => alert.severity === WATCHDOG && alert.state === "firing") && (
                <p className="banner" data-tone="bad">
                  <span>The watchdog, which always fires, is missing: Prometheus does not reach the Alertmanager, or evaluates no rules. Follow the runbook ops.monitoring.watchdog.</span>
                </p>
              )}
              {total > items.length && (
                <p className="soft">
                  {count(items.length)} of {count(total)} are shown.
                </p>
              )}
              <Table
                label="Alerts"
                rows={items.filter((alert) => alert.severity !== WATCHDOG)}
                keyOf={(alert) => alert.id}
                none={<p>Nothing fires.</p>}
                columns={[
                  { title: "Severity", cell: (alert) => <State of={alert.severity ?? "unknown"} /> },
                  { title: "Alert", cell: (alert) => <Plain>{alert.name}</Plain> },
                  { title: "State", cell: (alert) => STATES[alert.state] },
                  { title: "Since", cell: (alert) => <When at={alert.since} /> },
                  { title: "Summary", cell: (alert) => <Plain>{alert.summary}</Plain> },
                  { title: "About", cell: (alert) => <Plain>{about(alert)}</Plain> },
                  { title: "Runbook", cell: (alert) => <Runbook id={alert.runbook_id} /> },
                ]}
              />
            </>
          ) : (
            <p className="none">No Alertmanager is configured (SVC_ALERTMANAGER_URL), so it is unknown here whether something fires.</p>
          )
        }
      </Loaded>
    </Guard>
  );
}

const STATES: Record<Alert["state"], string> = { firing: "firing", inhibited: "inhibited: its cause fires", silenced: "silenced by an operator" };

/** The labels that say which part of the service is meant. */
export function about({ labels }: Pick<Alert, "labels">): string {
  const parts = Object.entries(labels).filter(([name]) => name !== "job");
  return parts.map(([name, value]) => `${name} ${value}`).join(", ") || "the service";
}
