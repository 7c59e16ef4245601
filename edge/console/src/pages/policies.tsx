// Policies: what each key means, its bounds, the values in force and those scheduled, and which value wins for a caller.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { serviceNow } from "../api/service-clock.ts";
import { everyPage } from "../api/queries.ts";
import { pollEvery } from "../api/query-client.ts";
import { gpuctl } from "../format/text.ts";
import { Action, Guard, REASON, type ActionSpec } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Card, Facts, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { Problem } from "../ui/problem.tsx";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { PagedTable } from "../ui/table.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";
import type { Values } from "../ui/use-draft.ts";

type Entry = Schemas["PolicyKeyEntry"];
type Value = Schemas["PolicyValueOfKey"];

export default function PoliciesPage() {
  const [address, set] = useAddress();
  const catalog = useQuery({ queryKey: ["policy-keys"], queryFn: () => dataOf(api.GET("/api/v1/admin/policies")), staleTime: 300_000 });
  const chosen = catalog.data?.items.find(({ key }) => key === address["key"]);
  return (
    <Guard needs="manage_policy">
      <Head title="Policies" age={<Age query={catalog} />} />
      <Loaded query={catalog}>
        {({ items }) => (
          <label className="filters">
            <span>Key</span>
            <select value={address["key"] ?? ""} onChange={(event) => set({ key: event.target.value })}>
              <option value="">all keys</option>
              {items.map(({ key }) => (
                <option key={key} value={key}>
                  {key}
                </option>
              ))}
            </select>
          </label>
        )}
      </Loaded>
      {chosen && (
        <div className="columns">
          <Chosen of={chosen} />
          <Resolve key={chosen.key} of={chosen} />
        </div>
      )}
      <Written entry={chosen} />
    </Guard>
  );
}

/** Bounds as a person reads them. */
export function boundsText(bounds: Record<string, unknown>): string {
  const { min, max } = bounds;
  const values = bounds["enum"];
  if (Array.isArray(values)) return `one of ${values.join(", ")}`;
  if (min !== undefined && max !== undefined) return `${String(min)} to ${String(max)}`;
  if (min !== undefined) return `at least ${String(min)}`;
  return max === undefined ? "any" : `at most ${String(max)}`;
}

/** What was typed, as a value of the key's type. */
export function valueOf(entry: Pick<Entry, "type">, typed: string): Value {
  if (entry.type === "int") return Number(typed);
  return entry.type === "bool" ? typed === "true" : typed;
}

function valueText(value: Value | null): string {
  return value === null ? "not set" : String(value);
}

function oldValueText(expected: Value | null | undefined): string | undefined {
  return expected === undefined ? undefined : String(expected);
}

/** The kinds of scope, the winning one first, with the options of gpuctl. */
const SCOPE_OPTIONS = { user_id: "--user", project_id: "--project", org_id: "--org", plan: "--plan" } as const;
type ScopeKind = keyof typeof SCOPE_OPTIONS;
const isScopeKind = (name: string): name is ScopeKind => name in SCOPE_OPTIONS;

/** The scope as the options of gpuctl. */
function scopeOptions(scope: Schemas["PolicyScope"]): (readonly [string, string])[] {
  return Object.entries(scope).flatMap(([kind, id]) => (isScopeKind(kind) && typeof id === "string" ? [[SCOPE_OPTIONS[kind], id] as const] : []));
}

function scopeOf(values: Values): Schemas["PolicyScope"] {
  return values["scope"] ? { [values["scope"]]: values["scope_id"]?.trim() ?? "" } : {};
}

/** A scope in words. */
export function scopeText(scope: Schemas["PolicyScope"] | null | undefined): string {
  return Object.entries(scope ?? {}).map(([kind, id]) => `${kind}=${String(id)}`).join(" ") || "all users";
}

/** An instant that a person typed as local time, in UTC; null where none was. */
function instantOf(typed: string | undefined): string | null {
  if (!typed?.trim()) return null;
  const at = new Date(typed.trim());
  if (Number.isNaN(at.getTime())) throw new Error("Write the instant as 2026-12-24T18:00.");
  return at.toISOString();
}

/** The same for a command line, where what is typed so far may be no instant. */
function instantText(typed: string | undefined): string | null {
  try {
    return instantOf(typed);
  } catch {
    return typed ?? null;
  }
}

/** The values in force of one key by scope: what a write is compared with, so that of two administrators the later one sees the other's. */
export function inForce(values: readonly Schemas["PolicyValue"][], now: number): Record<string, Value> {
  const begun = values.filter((value) => Date.parse(value.effective_at) <= now).sort((a, b) => Date.parse(a.effective_at) - Date.parse(b.effective_at));
  return Object.fromEntries(begun.map((value) => [scopeKey(value.scope), value.value]));
}

function scopeKey(scope: Schemas["PolicyScope"]): string {
  return Object.entries(scope).map(([kind, id]) => `${kind}=${id}`).join(" ");
}

/** The value that the form's scope had when the form opened; undefined where that is not known. */
function expectedBy(values: Values, scope: Schemas["PolicyScope"]): Value | null | undefined {
  const shown = values["shown"];
  return shown ? ((JSON.parse(shown) as Record<string, Value>)[scopeKey(scope)] ?? null) : undefined;
}

/** As many values of one key as are read. */
const MOST_VALUES = 2000;

function Chosen({ of: entry }: { of: Entry }) {
  const written = useQuery({
    queryKey: ["policy-values", "in-force", entry.key],
    queryFn: () =>
      everyPage(MOST_VALUES, (page_token) => dataOf(api.GET("/api/v1/admin/policy-values", { params: { query: { key: entry.key, limit: 200, ...(page_token ? { page_token } : {}) } } }))),
    refetchInterval: pollEvery(30_000),
  });
  // Of more values than that, none is compared.
  const shown = written.data && !written.data.isPartial ? JSON.stringify(inForce(written.data.items, serviceNow())) : "";
  const scopes = entry.scopes.filter(isScopeKind);
  const bounds = boundsText(entry.bounds);
  return (
    <Card
      title={entry.key}
      actions={
        // A form that opens before the values are read could be compared with none.
        written.data && (
          <Action
            spec={{
              id: `policy:${entry.key}`,
              label: "Set a value…",
              title: `Set ${entry.key}`,
              consequences: <p>It decides for everyone in its scope who has no value of a narrower one, at once or from the given instant on. Default: {String(entry.default)}.</p>,
              fields: [
                {
                  name: "value",
                  label: "Value",
                  required: true,
                  maxLength: 1000,
                  help: bounds,
                  ...(entry.type === "bool"
                    ? { kind: "select" as const, options: ["true", "false"].map((value) => ({ value, label: value })) }
                    : entry.type === "int"
                      ? { pattern: "-?\\d{1,15}" }
                      : {}),
                },
                { name: "scope", label: "Scope", kind: "select", options: scopes.map((value) => ({ value, label: value })), help: "All users where it is left open." },
                { name: "scope_id", label: "Id in the scope", maxLength: 255 },
                { name: "effective_at", label: "From", maxLength: 30, help: "Local time, as 2026-12-24T18:00. At once where it is left open." },
                { name: "shown", label: "Values in force", kind: "hidden", initial: shown },
                REASON,
              ],
              command: (values) =>
                gpuctl(
                  "policy", "set", entry.key, [values["value"] || "VALUE"],
                  ...(values["scope"] ? scopeOptions(scopeOf(values)) : []), ["--reason", values["reason"]],
                  ["--effective-at", instantText(values["effective_at"])], ["--old-value", oldValueText(expectedBy(values, scopeOf(values)))],
                ),
              conflict: (failure, values) => {
                if (!("current_value" in failure.details)) return null;
                const current = failure.details["current_value"] as Value | null;
                const scope = scopeOf(values);
                const shownBefore = JSON.parse(values["shown"] || "{}") as Record<string, Value>;
                const { [scopeKey(scope)]: expected, ...others } = shownBefore;
                return {
                  note: (
                    <p>
                      Another administrator has changed it. The value is <strong>{valueText(current)}</strong>, and it was {valueText(expected ?? null)} when you opened this
                      form. You want <strong>{values["value"]}</strong>.
                    </p>
                  ),
                  label: `Continue from ${valueText(current)}`,
                  values: { shown: JSON.stringify(current === null ? others : { ...others, [scopeKey(scope)]: current }) },
                };
              },
              send: async (values, key) => {
                const effective_at = instantOf(values["effective_at"]);
                const expected = expectedBy(values, scopeOf(values));
                const body: Schemas["NewPolicyValue"] = {
                  key: entry.key,
                  value: valueOf(entry, values["value"] ?? ""),
                  scope: scopeOf(values),
                  reason: values["reason"] ?? "",
                  ...(effective_at ? { effective_at } : {}),
                  ...(expected === undefined ? {} : { old_value: expected }),
                };
                return dataOf(api.POST("/api/v1/admin/policy-values", { params: keyed(key), body }));
              },
              refreshes: REFRESHES,
            }}
          />
        )
      }
    >
      {written.error && <Problem error={written.error} again={() => void written.refetch()} />}
      <p>{entry.meaning}</p>
      <p className="soft">
        {entry.type}, {bounds}; default {String(entry.default)}
      </p>
      <p className="soft">
        Scopes, the winning one first: <strong>{entry.scopes.join(" › ")}</strong>
      </p>
    </Card>
  );
}

const REFRESHES = ["policy-values", "policy-resolved"];

/** Which value holds for a caller, and the scope that it comes from. */
function Resolve({ of: entry }: { of: Entry }) {
  const [address, set] = useAddress();
  const scopes = entry.scopes.filter(isScopeKind);
  const query = Object.fromEntries(scopes.flatMap((kind) => (address[kind] ? [[kind, address[kind]]] : [])));
  const resolved = useQuery({
    queryKey: ["policy-resolved", entry.key, query],
    queryFn: () => dataOf(api.GET("/api/v1/admin/policy-values/resolve", { params: { query: { key: entry.key, ...query } } })),
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(30_000),
  });
  return (
    <Card title="What holds for a caller" actions={<Age query={resolved} />}>
      {scopes.length > 0 && <Filters of={scopes.map((name) => ({ name, label: name }))} address={address} set={(change) => set(change, { inPlace: true })} />}
      <Loaded query={resolved}>
        {({ value, source, scope, effective_at }) => (
          <Facts
            of={[
              ["Value", <strong key="v">{String(value)}</strong>],
              ["Source", source === "default" ? "the default: nothing is written" : <Plain key="s">{scopeText(scope)}</Plain>],
              effective_at ? ["Since", <When key="w" at={effective_at} />] : null,
            ]}
          />
        )}
      </Loaded>
    </Card>
  );
}

function Written({ entry }: { entry: Entry | undefined }) {
  const [address, set] = useAddress();
  // The caller for whom a value is resolved is no part of it.
  const query = queryOf(address, ["key"]);
  const values = useQuery({
    queryKey: ["policy-values", query],
    queryFn: () => dataOf(api.GET("/api/v1/admin/policy-values", { params: { query } })),
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(30_000),
  });
  return (
    <Card title={entry ? "Scopes with a value" : "Written values"} actions={<Age query={values} />}>
      <PagedTable
        label="Written values"
        query={values}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(value) => value.id}
        none={<p>No value is written: the defaults hold.</p>}
        columns={[
          { title: "Key", cell: (value) => <code>{value.key}</code> },
          { title: "Scope", cell: (value) => <Plain>{scopeText(value.scope)}</Plain> },
          { title: "Value", cell: (value) => <Plain>{String(value.value)}</Plain> },
          { title: "State", cell: (value) => <State of={isScheduled(value) ? "scheduled" : "in force"} /> },
          { title: "From", cell: (value) => <When at={value.effective_at} /> },
          { title: "By", cell: (value) => <Plain>{value.written_by}</Plain> },
          { title: "Reason", cell: (value) => <Plain>{value.reason}</Plain> },
          { title: "Actions", cell: (value) => <Action quiet spec={takeBack(value)} /> },
        ]}
      />
    </Card>
  );
}

function isScheduled({ effective_at }: Pick<Schemas["PolicyValue"], "effective_at">): boolean {
  return Date.parse(effective_at) > serviceNow();
}

export function takeBack(value: Schemas["PolicyValue"]): ActionSpec<unknown> {
  const { key, scope, effective_at } = value;
  const scheduled = isScheduled(value);
  const query = { key, ...scope, old_value: String(value.value), ...(scheduled ? { effective_at } : {}) };
  return {
    id: `unset-policy:${value.id}`,
    label: "Take back…",
    title: `Remove a value of ${key}`,
    danger: true,
    consequences: (
      <p>
        {scheduled ? "It never comes into force." : "The next wider scope with a value decides, or the default, within a second."} It is refused where the value is not{" "}
        <strong>{String(value.value)}</strong> any more.
      </p>
    ),
    fields: [REASON],
    command: (values) =>
      gpuctl(
        "policy", "unset", key, ...scopeOptions(scope), ["--reason", values["reason"]],
        ["--effective-at", scheduled ? effective_at : null], ["--old-value", String(value.value)],
      ),
    send: (values) => dataOf(api.DELETE("/api/v1/admin/policy-values", { params: { query: { ...query, reason: values["reason"] ?? "" } } })),
    refreshes: REFRESHES,
  };
}
