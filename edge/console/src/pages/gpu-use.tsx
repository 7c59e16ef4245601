// The use of an allocation's GPUs since its page was opened. The service stores no samples; the tab has those that it has read.
import { useCallback, useMemo } from "react";
import uPlot from "uplot";
import { count } from "../format/text.ts";
import { Plot, type PlotContent, type PlotLook } from "../ui/plot.tsx";
import { GrowingTable } from "../ui/table.tsx";
import { FullTime } from "../ui/time.tsx";
import { meanUse, type GpuSample } from "./gpu-samples.ts";

/** A longer pause between two samples is shown as one: the tab was hidden, or the node silent. */
const PAUSE_MS = 60_000;

type Point = readonly [at: number, use: number | null, memory: number | null];

/** The points of the chart, with one without a value in each pause. */
export function pointsOf(samples: readonly GpuSample[]): Point[] {
  return samples.flatMap((sample, index): Point[] => {
    const at = Date.parse(sample.at);
    const before = samples[index - 1];
    const began = before === undefined ? at : Date.parse(before.at);
    const point: Point = [at, sample.use, sample.memory];
    return at - began > PAUSE_MS ? [[(at + began) / 2, null, null], point] : [point];
  });
}

const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "short" });

export default function GpuUse({ samples }: { samples: readonly GpuSample[] }) {
  const points = useMemo(() => pointsOf(samples), [samples]);
  const content = useCallback(
    ({ accent, ink, axis }: PlotLook): PlotContent => ({
      options: {
        scales: { y: { range: [0, 100] } },
        axes: [{ ...axis, values: (_, times) => times.map((seconds) => clock.format(seconds * 1000)) }, { ...axis, size: 48, values: (_, parts) => parts.map((part) => `${part} %`) }],
        series: [{}, { stroke: accent, width: 2, points: { show: false } }, { stroke: ink, width: 1, dash: [4, 4], points: { show: false } }] satisfies uPlot.Series[],
      },
      data: [points.map(([at]) => at / 1000), points.map(([, use]) => use), points.map(([, , memory]) => memory)],
    }),
    [points],
  );
  if (samples.length < 2) return <p className="soft">A chart of their use begins with the next sample.</p>;
  const mean = meanUse(samples);
  return (
    <>
      <Plot content={content} label={`Use of the GPUs since this page was opened, ${mean === null ? "not reported" : `${count(mean)} % on average`}`} />
      <p className="soft">Since this page was opened, on average of its GPUs: the line is their use, the dashed line their memory.</p>
      <details>
        <summary>As a table</summary>
        <GrowingTable
          label="Use of the GPUs"
          rows={[...samples].reverse()}
          keyOf={({ at }) => at}
          none={null}
          columns={[
            { title: "At", cell: ({ at }) => <FullTime at={at} /> },
            { title: "Use", number: true, cell: ({ use }) => percent(use) },
            { title: "Memory", number: true, cell: ({ memory }) => percent(memory) },
          ]}
        />
      </details>
    </>
  );
}

function percent(value: number | null): string {
  return value === null ? "–" : `${count(Math.round(value))} %`;
}
