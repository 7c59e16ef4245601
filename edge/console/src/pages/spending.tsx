// What was spent on each of the last thirty days, as a chart and as a table, and what will be spent if nothing changes.
import { useCallback, useMemo } from "react";
import { useQuery } from "@tanstack/react-query";
import uPlot from "uplot";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { serviceNow } from "../api/service-clock.ts";
import { minorDigits, money, moneyMicro } from "../format/money.ts";
import { count } from "../format/text.ts";
import { Card, Facts } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { Plot, type PlotContent, type PlotLook } from "../ui/plot.tsx";
import { Table } from "../ui/table.tsx";

const DAYS = 30;
/** At most this many pages of postings are read, and as many postings are counted. */
const MAX_PAGES = 10;
const MAX_POSTINGS = 2_000;
const DAY_MS = 86_400_000;

export interface DaySpent {
  /** The beginning of the day in UTC, in milliseconds. */
  day: number;
  micro: bigint;
}

type Usage = Pick<Schemas["LedgerPosting"], "number" | "at" | "change_micro">;

interface SpendingData {
  /** The newest first. */
  postings: readonly Usage[];
  /** True where older postings were left out. */
  partial: boolean;
}

/** What was spent on each day since the first of `days`, the days without postings included. */
export function perDay(postings: readonly Pick<Schemas["LedgerPosting"], "at" | "change_micro">[], now: number, days = DAYS): DaySpent[] {
  const today = Math.floor(now / DAY_MS) * DAY_MS;
  const spent = new Map(Array.from({ length: days }, (_, index) => [today - (days - 1 - index) * DAY_MS, 0n]));
  for (const posting of postings) {
    const day = Math.floor(Date.parse(posting.at) / DAY_MS) * DAY_MS;
    const before = spent.get(day);
    if (before !== undefined) spent.set(day, before - BigInt(posting.change_micro));
  }
  return [...spent].map(([day, micro]) => ({ day, micro }));
}

/** The postings of the last thirty days. Those that were read `before` are not read again: a posting is never changed. */
async function readSpending(before: SpendingData | undefined): Promise<SpendingData> {
  const from = new Date(Math.floor(serviceNow() / DAY_MS) * DAY_MS - (DAYS - 1) * DAY_MS).toISOString();
  const newest = before?.postings[0]?.number;
  const postings: Usage[] = [];
  let token: string | null | undefined;
  let pages = 0;
  do {
    const query = { kind: "usage" as const, from, limit: 200, ...(token ? { page_token: token } : {}) };
    const page: Schemas["Items_LedgerPosting"] = await dataOf(api.GET("/api/v1/billing/ledger", { params: { query } }));
    const unread = page.items.filter(({ number }) => newest === undefined || number > newest);
    postings.push(...unread);
    token = page.next_page;
    pages += 1;
    if (before && newest !== undefined && unread.length < page.items.length) {
      return joined(postings, before, from);
    }
  } while (token && pages < MAX_PAGES);
  return { postings, partial: Boolean(token) };
}

function joined(newer: readonly Usage[], before: SpendingData, from: string): SpendingData {
  const all = [...newer, ...before.postings].filter(({ at }) => Date.parse(at) >= Date.parse(from));
  return { postings: all.slice(0, MAX_POSTINGS), partial: before.partial || all.length > MAX_POSTINGS };
}

/** How many days of the forecast are drawn. */
const FORECAST_DAYS = 7;

export interface Forecast {
  /** Since the first of the month in UTC, as far as the days reach back. */
  monthToDate: bigint;
  /** By the end of the month, at the current cost. */
  month: bigint;
  /** Of the last seven whole days. */
  averagePerDay: bigint;
  /** At the cost of now. */
  perDay: bigint;
}

/** What is spent by the end of the month (UTC), where what runs goes on; in millionths of minor units. */
export function forecast(days: readonly DaySpent[], burnMinorPerHour: number | bigint, now: number): Forecast {
  const at = new Date(now);
  const month = Date.UTC(at.getUTCFullYear(), at.getUTCMonth(), 1);
  const end = Date.UTC(at.getUTCFullYear(), at.getUTCMonth() + 1, 1);
  const perHour = BigInt(burnMinorPerHour) * 1_000_000n;
  const sum = (of: readonly DaySpent[]) => of.reduce((total, { micro }) => total + micro, 0n);
  const monthToDate = sum(days.filter(({ day }) => day >= month));
  const whole = days.slice(0, -1).slice(-7);
  return {
    monthToDate,
    month: monthToDate + (perHour * BigInt(end - now)) / 3_600_000n,
    averagePerDay: whole.length === 0 ? 0n : sum(whole) / BigInt(whole.length),
    perDay: perHour * 24n,
  };
}

interface SpendingProps {
  account: string;
  currency: string;
  burn: number | bigint;
}

export default function Spending({ account, currency, burn }: SpendingProps) {
  const key = ["spending", account];
  const spending = useQuery({
    queryKey: key,
    queryFn: ({ client }) => readSpending(client.getQueryData<SpendingData>(key)),
    // It is read again with each balance that is another one.
    refetchInterval: pollEvery(POLL_MS),
  });
  return (
    <Card title="Spending per day" actions={<Age query={spending} polled />}>
      <Loaded query={spending}>{(data) => <Days of={data} currency={currency} burn={burn} />}</Loaded>
    </Card>
  );
}

function Days({ of: { postings, partial }, currency, burn }: { of: SpendingData } & Omit<SpendingProps, "account">) {
  const days = useMemo(() => perDay(postings, serviceNow()), [postings]);
  return (
    <>
      <Chart days={days} currency={currency} perDay={BigInt(burn) * 24_000_000n} />
      <Outlook of={forecast(days, burn, serviceNow())} currency={currency} />
      {partial && <p className="soft">Only the newest {count(MAX_POSTINGS)} postings are counted; the statements have all of them.</p>}
      <details>
        <summary>As a table</summary>
        <Table
          label="Spending per day"
          rows={[...days].reverse().filter(({ micro }) => micro !== 0n)}
          keyOf={({ day }) => String(day)}
          none={<p>Nothing was spent.</p>}
          columns={[
            { title: "Day (UTC)", cell: ({ day }) => dayText(day) },
            { title: "Spent", number: true, cell: ({ micro }) => moneyMicro(micro, currency) },
          ]}
        />
      </details>
    </>
  );
}

function Outlook({ of, currency }: { of: Forecast; currency: string }) {
  return (
    <Facts
      of={[
        ["This month", `${rounded(of.monthToDate, currency)} so far`],
        ["Forecast", <strong key="f">{rounded(of.month, currency)} by the end of the month, where what runs goes on</strong>],
        ["Per day", `${rounded(of.perDay, currency)} at the current cost, ${rounded(of.averagePerDay, currency)} on average of the last seven days`],
      ]}
    />
  );
}

/** A forecast in minor units: its fractions would say more than it knows. */
function rounded(micro: bigint, currency: string): string {
  return money(micro / 1_000_000n, currency);
}

function dayText(day: number): string {
  return new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeZone: "UTC" }).format(day);
}

const shortDay = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", timeZone: "UTC" });

/** The chart is drawn with rounded values; the table has the exact ones. */
function Chart({ days, currency, perDay }: { days: readonly DaySpent[]; currency: string; perDay: bigint }) {
  const content = useCallback(
    ({ accent, axis }: PlotLook): PlotContent => {
      const scale = 10 ** (minorDigits(currency) + 6);
      const last = days[days.length - 1]?.day ?? 0;
      const ahead = Array.from({ length: FORECAST_DAYS }, (_, index) => last + (index + 1) * DAY_MS);
      const bars = { paths: uPlot.paths.bars?.({ size: [0.7, 40] }) ?? null, points: { show: false } } as uPlot.Series;
      return {
        options: {
          tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC"),
          scales: { y: { range: (_, __, most) => [0, Math.max(most * 1.1, 1 / 100)] } },
          axes: [{ ...axis, values: (_, days) => days.map((seconds) => shortDay.format(seconds * 1000)) }, { ...axis, size: 64 }],
          series: [{}, { ...bars, stroke: accent, width: 0, fill: accent }, { ...bars, stroke: accent, width: 1, dash: [3, 3] }],
        },
        data: [
          [...days.map(({ day }) => day), ...ahead].map((day) => day / 1000),
          [...days.map(({ micro }) => Number(micro) / scale), ...ahead.map(() => null)],
          [...days.map(() => null), ...ahead.map(() => Number(perDay) / scale)],
        ],
      };
    },
    [days, currency, perDay],
  );
  const total = days.reduce((sum, { micro }) => sum + micro, 0n);
  return <Plot content={content} label={`Spent in the last ${days.length} days: ${moneyMicro(total, currency)}; the dashed bars are the forecast`} />;
}
