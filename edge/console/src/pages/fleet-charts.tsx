// The fleet over time: use of the GPUs, rentals and their waits, revenue against capacity; as charts, and as a table.
import { useCallback, useMemo } from "react";
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import uPlot from "uplot";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { pollEvery } from "../api/query-client.ts";
import { serviceNow } from "../api/service-clock.ts";
import { minorDigits, moneyMicro } from "../format/money.ts";
import { count } from "../format/text.ts";
import { duration } from "../format/time.ts";
import { Filters } from "../ui/filters.tsx";
import { Card } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { Plot, type PlotContent, type PlotLook } from "../ui/plot.tsx";
import { GrowingTable } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { FullTime } from "../ui/time.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";

const HOUR_MS = 3_600_000;
/** The ranges that can be chosen, in hours; the first one where none is. */
const RANGES: Readonly<Record<string, number>> = { "7 days": 168, "24 hours": 24, "31 days": 743 };
const DEFAULT_RANGE = "7 days";

type Hour = Schemas["FleetHour"];

/** One hour of all GPUs that were asked for. What was not measured is null. */
export interface HourSums {
  /** Its beginning, in milliseconds. */
  at: number;
  total: number | null;
  held: number | null;
  free: number | null;
  unavailable: number | null;
  begun: number | null;
  p50: number | null;
  p95: number | null;
  /** By currency, in millionths of minor units; null where it is not added up. */
  revenue: ReadonlyMap<string, bigint> | null;
}

export function sumsOf({ hour, gpus, rentals, revenue }: Hour): HourSums {
  const sum = (field: "gpus_total" | "gpus_held" | "gpus_free" | "gpus_unavailable") => gpus?.reduce((all, group) => all + group[field], 0) ?? null;
  return {
    at: Date.parse(hour),
    total: sum("gpus_total"),
    held: sum("gpus_held"),
    free: sum("gpus_free"),
    unavailable: sum("gpus_unavailable"),
    begun: rentals?.begun ?? null,
    p50: rentals?.active_after_seconds_p50 ?? null,
    p95: rentals?.active_after_seconds_p95 ?? null,
    revenue: revenue ? new Map(revenue.map(({ currency, revenue_micro }) => [currency, BigInt(revenue_micro)])) : null,
  };
}

/** The part of the capacity that was held, of the hours that were measured; null where none was. */
export function meanUse(hours: readonly HourSums[]): number | null {
  const measured = hours.filter(({ total }) => total !== null && total > 0);
  const sum = (of: (hour: HourSums) => number | null) => measured.reduce((all, hour) => all + (of(hour) ?? 0), 0);
  return measured.length === 0 ? null : (sum(({ held }) => held) / sum(({ total }) => total)) * 100;
}

/** The use of each SKU in each region over the hours, the most used first. */
export function useByGroup(hours: readonly Hour[]): { sku: string; region: string; use: number; total: number }[] {
  const groups = new Map<string, { sku: string; region: string; held: number; total: number; hours: number }>();
  for (const { sku_id, sku, region_code, gpus_held, gpus_total } of hours.flatMap(({ gpus }) => gpus ?? [])) {
    const key = `${sku_id}:${region_code}`;
    const { held, total, hours: before } = groups.get(key) ?? { held: 0, total: 0, hours: 0 };
    groups.set(key, { sku, region: region_code, held: held + gpus_held, total: total + gpus_total, hours: before + 1 });
  }
  const shown = [...groups.values()].filter(({ total }) => total > 0).map(({ sku, region, held, total, hours }) => ({ sku, region, use: (held / total) * 100, total: total / hours }));
  return shown.sort((a, b) => b.use - a.use || a.sku.localeCompare(b.sku) || a.region.localeCompare(b.region));
}

interface FleetChartsProps {
  /** The SKUs and the regions that can be chosen. */
  skus: readonly string[];
  regions: readonly string[];
}

export default function FleetCharts({ skus, regions }: FleetChartsProps) {
  const [address, set] = useAddress();
  const range = RANGES[address["range"] ?? DEFAULT_RANGE] ?? 168;
  const part = queryOf({ sku: address["sku"], region: address["region"] }, ["sku", "region"]);
  const history = useQuery({
    queryKey: ["fleet-history", range, part],
    queryFn: () => {
      const from = new Date(serviceNow() - range * HOUR_MS).toISOString();
      return dataOf(api.GET("/api/v1/admin/fleet-history", { params: { query: { from, ...part } } }));
    },
    placeholderData: keepPreviousData,
    // An hour is measured once.
    refetchInterval: pollEvery(300_000),
  });
  return (
    <Card title="Over time" actions={<Age query={history} polled />}>
      <Filters
        of={[
          { name: "sku", label: "SKU", options: skus },
          { name: "region", label: "Region", options: regions },
          { name: "range", label: "Range", options: Object.keys(RANGES).filter((name) => name !== DEFAULT_RANGE), any: DEFAULT_RANGE },
        ]}
        address={address}
        set={(change) => set(change, { inPlace: true })}
      />
      <Loaded query={history}>{({ hours }) => <Charts of={hours} />}</Loaded>
    </Card>
  );
}

function Charts({ of: hours }: { of: readonly Hour[] }) {
  const sums = useMemo(() => hours.map(sumsOf), [hours]);
  const gaps = sums.slice(0, -1).filter(({ total }) => total === null).length;
  const currencies = [...new Set(sums.flatMap(({ revenue }) => [...(revenue?.keys() ?? [])]))].sort();
  const use = meanUse(sums);
  const begun = sums.reduce((all, hour) => all + (hour.begun ?? 0), 0);
  return (
    <>
      <div className="charts">
        <figure>
          <figcaption>GPUs: held (solid line), all (dashed line), unavailable (dotted line)</figcaption>
          <Lines label={`GPUs by hour, ${use === null ? "not measured" : `${percent(use)} held on average`}`} of={sums} lines={GPU_LINES} />
        </figure>
        <figure>
          <figcaption>Rentals that began, by hour</figcaption>
          <Lines label={`Rentals by hour, ${count(begun)} in all`} of={sums} lines={BEGUN_LINES} bars />
        </figure>
        <figure>
          <figcaption>Seconds from the request until the allocation is active: median (solid line), 95th percentile (dashed line)</figcaption>
          <Lines label={`Waiting times by hour, ${waitText(sums)}`} of={sums} lines={WAIT_LINES} />
        </figure>
        {currencies.map((currency) => (
          <Revenue key={currency} of={sums} currency={currency} />
        ))}
      </div>
      {gaps > 0 && <p className="soft">In {gaps === 1 ? "one hour" : `${count(gaps)} hours`} the GPUs were not counted: the lines have a gap there.</p>}
      <GrowingTable
        label="Use by SKU and region"
        rows={useByGroup(hours)}
        keyOf={({ sku, region }) => `${sku}:${region}`}
        none={<p>No GPUs were counted in this time.</p>}
        columns={[
          { title: "SKU", cell: ({ sku }) => <Plain>{sku}</Plain> },
          { title: "Region", cell: ({ region }) => <Plain>{region}</Plain> },
          { title: "GPUs on average", number: true, cell: ({ total }) => count(Math.round(total)) },
          { title: "Held on average", number: true, cell: ({ use }) => percent(use) },
        ]}
      />
      <details>
        <summary>Each hour as a table</summary>
        <Hours of={sums} currencies={currencies} />
      </details>
    </>
  );
}

function Hours({ of: sums, currencies }: { of: readonly HourSums[]; currencies: readonly string[] }) {
  const number = (value: number | null) => (value === null ? "not measured" : count(value));
  const seconds = (value: number | null) => (value === null ? "–" : duration(value));
  return (
    <GrowingTable
      label="The fleet by hour"
      rows={[...sums].reverse()}
      keyOf={({ at }) => String(at)}
      none={null}
      columns={[
        { title: "Hour", cell: ({ at }) => <FullTime at={new Date(at).toISOString()} /> },
        { title: "GPUs", number: true, cell: ({ total }) => number(total) },
        { title: "Held", number: true, cell: ({ held }) => number(held) },
        { title: "Free", number: true, cell: ({ free }) => number(free) },
        { title: "Unavailable", number: true, cell: ({ unavailable }) => number(unavailable) },
        { title: "Rentals", number: true, cell: ({ begun }) => number(begun) },
        { title: "Median wait", number: true, cell: ({ p50 }) => seconds(p50) },
        { title: "95th percentile", number: true, cell: ({ p95 }) => seconds(p95) },
        ...currencies.map((currency) => ({
          title: `Revenue in ${currency}`,
          number: true,
          cell: ({ revenue }: HourSums) => (revenue ? moneyMicro(revenue.get(currency) ?? 0n, currency) : "not measured"),
        })),
      ]}
    />
  );
}

function percent(value: number): string {
  return `${count(Math.round(value))} %`;
}

/** The longest of the waits, for those who do not see the chart. */
function waitText(sums: readonly HourSums[]): string {
  const longest = sums.reduce<number | null>((most, { p95 }) => (p95 === null ? most : Math.max(most ?? 0, p95)), null);
  return longest === null ? "no rental began" : `at most ${duration(longest)} at the 95th percentile`;
}

interface Line {
  of: (hour: HourSums) => number | null;
  colour: "accent" | "ink";
  dash?: number[];
}

const GPU_LINES: readonly Line[] = [
  { of: ({ held }) => held, colour: "accent" },
  { of: ({ total }) => total, colour: "ink", dash: [6, 4] },
  { of: ({ unavailable }) => unavailable, colour: "ink", dash: [1, 3] },
];
const BEGUN_LINES: readonly Line[] = [{ of: ({ begun }) => begun, colour: "accent" }];
const WAIT_LINES: readonly Line[] = [
  { of: ({ p50 }) => p50, colour: "accent" },
  { of: ({ p95 }) => p95, colour: "ink", dash: [6, 4] },
];

const hourText = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "numeric" });
/** From zero on, so that heights can be compared. */
const fromZero = (_: unknown, __: number, most: number): uPlot.Range.MinMax => [0, Math.max((most || 0) * 1.1, 1 / 100)];

function Lines({ label, of: sums, lines, bars = false }: { label: string; of: readonly HourSums[]; lines: readonly Line[]; bars?: boolean }) {
  const content = useCallback(
    (look: PlotLook): PlotContent => ({
      options: {
        scales: { y: { range: fromZero } },
        axes: [timeAxis(look), { ...look.axis, size: 56 }],
        series: [{}, ...lines.map(({ colour, dash }) => (bars ? barsOf(look) : { stroke: look[colour], width: 2, points: { show: false }, ...(dash ? { dash } : {}) }))],
      },
      data: [sums.map(({ at }) => at / 1000), ...lines.map(({ of }) => sums.map(of))] as uPlot.AlignedData,
    }),
    [sums, lines, bars],
  );
  return <Plot content={content} label={label} />;
}

function timeAxis({ axis }: PlotLook): uPlot.Axis {
  return { ...axis, space: 90, values: (_, times) => times.map((seconds) => hourText.format(seconds * 1000)) };
}

function barsOf({ accent }: PlotLook): uPlot.Series {
  return { paths: uPlot.paths.bars?.({ size: [0.8, 40] }) ?? null, points: { show: false }, stroke: accent, width: 0, fill: accent } as uPlot.Series;
}

/** The chart is drawn with rounded amounts; the table has the exact ones. */
function Revenue({ of: sums, currency }: { of: readonly HourSums[]; currency: string }) {
  const content = useCallback(
    (look: PlotLook): PlotContent => {
      const scale = 10 ** (minorDigits(currency) + 6);
      return {
        options: {
          scales: { y: { range: (_, least, most) => [Math.min(0, least * 1.1), Math.max(most * 1.1, 1 / 100)] }, gpus: { range: fromZero } },
          axes: [timeAxis(look), { ...look.axis, size: 64 }, { ...look.axis, scale: "gpus", side: 1, size: 56, grid: { show: false } }],
          series: [{}, barsOf(look), { scale: "gpus", stroke: look.ink, width: 2, dash: [6, 4], points: { show: false } }],
        },
        data: [
          sums.map(({ at }) => at / 1000),
          sums.map(({ revenue }) => (revenue ? Number(revenue.get(currency) ?? 0n) / scale : null)),
          sums.map(({ total }) => total),
        ],
      };
    },
    [sums, currency],
  );
  const total = sums.reduce((all, { revenue }) => all + (revenue?.get(currency) ?? 0n), 0n);
  return (
    <figure>
      <figcaption>Revenue in {currency} by hour, and all GPUs (dashed line, on the right)</figcaption>
      <Plot content={content} label={`Revenue in ${currency} by hour, ${moneyMicro(total, currency)} in all`} />
    </figure>
  );
}
