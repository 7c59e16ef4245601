// The use of an allocation's GPUs as a chart, out of the samples that the tab has read.
import { describe, expect, it } from "vitest";
import { act, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { meanUse, MOST_SAMPLES, sampleOf, withSample, type GpuSample } from "../src/pages/gpu-samples.ts";
import { pointsOf } from "../src/pages/gpu-use.tsx";
import { uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

const START = Date.parse("2026-11-29T12:00:00Z");
const at = (seconds: number) => new Date(START + seconds * 1000).toISOString();
const sample = (seconds: number, use: number | null = 50): GpuSample => ({ at: at(seconds), use, memory: 10 });
const gpu = (index: number, use: number | null) => ({ index, uuid: `GPU-${index}`, utilization_percent: use, memory_used_mib: 20, memory_total_mib: index === 0 ? 80 : null });

describe("a sample of the use of GPUs", () => {
  it("is the average of those that report it", () => {
    expect(sampleOf({ at: at(0), gpus: [gpu(0, 90), gpu(1, 30), gpu(2, null)] })).toEqual({ at: at(0), use: 60, memory: 25 });
  });

  it("is none before the node has reported", () => {
    expect(sampleOf({ at: null, gpus: [gpu(0, 90)] })).toBeNull();
    expect(sampleOf({ at: at(0), gpus: [] })).toBeNull();
  });

  it("that was read before is counted once, and so is an older one", () => {
    const one = withSample([], sample(10));
    expect(withSample(one, sample(10))).toBe(one);
    expect(withSample(one, sample(5))).toBe(one);
    expect(withSample(one, sample(20))).toHaveLength(2);
  });

  it("takes the place of the oldest where there are too many", () => {
    const all = Array.from({ length: MOST_SAMPLES + 5 }, (_, index) => sample(index * 10)).reduce<readonly GpuSample[]>(withSample, []);
    expect(all).toHaveLength(MOST_SAMPLES);
    expect(all[0]?.at).toBe(at(50));
  });

  it("after a pause is not joined to the one before", () => {
    expect(pointsOf([sample(0), sample(10), sample(200)]).map(([, use]) => use)).toEqual([50, 50, null, 50]);
  });

  it("without a value changes no average", () => {
    expect(meanUse([sample(0, 20), sample(10, null), sample(20, 41)])).toBe(31);
    expect(meanUse([sample(0, null)])).toBeNull();
  });
});

describe("the chart of an allocation's GPUs", () => {
  it("begins with the second sample, and has all of them as a table, too", async () => {
    let seconds = 0;
    mock.overrides.push(({ url }) =>
      new URL(url).pathname.endsWith("/telemetry") ? Response.json({ allocation_id: uuid(101), at: at(seconds), gpus: [gpu(0, 40 + seconds), gpu(1, 60 + seconds)] }) : null,
    );
    const { queries } = openConsole(`/allocations/${uuid(101)}`);
    const card = within(await screen.findByRole("region", { name: "GPUs" }));
    expect(await card.findByText("A chart of their use begins with the next sample.")).toBeTruthy();
    seconds = 10;
    await act(() => queries.refetchQueries({ queryKey: ["telemetry"] }));
    expect(await card.findByRole("img", { name: "Use of the GPUs since this page was opened, 55 % on average" })).toBeTruthy();
    await userEvent.click(card.getByText("As a table"));
    const rows = within(card.getByRole("group", { name: "Use of the GPUs" })).getAllByRole("row").slice(1);
    expect(rows.map((row) => row.querySelector('[data-title="Use"]')?.textContent)).toEqual(["60 %", "50 %"]);
  });

  it("is not there where nothing runs", async () => {
    openConsole(`/allocations/${uuid(102)}`);
    await screen.findByRole("region", { name: "GPUs" });
    await waitFor(() => expect(document.querySelector(".loading")).toBeNull());
    expect(screen.queryByText(/chart of their use/)).toBeNull();
  });
});
