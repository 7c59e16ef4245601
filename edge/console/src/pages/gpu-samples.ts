// Samples of the use of an allocation's GPUs, as far as this tab has read them.
import { api, dataOf, type Schemas } from "../api/client.ts";

/** One report of the node, on average of the allocation's GPUs, in percent; null where no GPU reports it. */
export interface GpuSample {
  at: string;
  use: number | null;
  memory: number | null;
}

export interface GpuSamples {
  latest: Schemas["AllocationTelemetry"];
  /** The oldest first. */
  samples: readonly GpuSample[];
}

/** An hour, at a sample every ten seconds. */
export const MOST_SAMPLES = 360;

function mean(values: readonly (number | null | undefined)[]): number | null {
  const known = values.filter((value) => value != null);
  return known.length === 0 ? null : known.reduce((sum, value) => sum + value, 0) / known.length;
}

export function sampleOf({ at, gpus }: Pick<Schemas["AllocationTelemetry"], "at" | "gpus">): GpuSample | null {
  if (!at || gpus.length === 0) return null;
  const share = ({ memory_used_mib: used, memory_total_mib: total }: Schemas["GpuTelemetry"]) => (used == null || !total ? null : (100 * used) / total);
  return { at, use: mean(gpus.map(({ utilization_percent }) => utilization_percent)), memory: mean(gpus.map(share)) };
}

/** The samples with a newer one. A report that was read before is none; the oldest go where there are too many. */
export function withSample(samples: readonly GpuSample[], sample: GpuSample | null): readonly GpuSample[] {
  const last = samples[samples.length - 1];
  if (sample === null || (last && Date.parse(sample.at) <= Date.parse(last.at))) return samples;
  return [...samples, sample].slice(-MOST_SAMPLES);
}

/** The mean use over all samples, as a whole number. */
export function meanUse(samples: readonly GpuSample[]): number | null {
  const all = mean(samples.map(({ use }) => use));
  return all === null ? null : Math.round(all);
}

export async function readSamples(id: string, before: GpuSamples | undefined): Promise<GpuSamples> {
  const latest = await dataOf(api.GET("/api/v1/allocations/{id}/telemetry", { params: { path: { id } } }));
  return { latest, samples: withSample(before?.samples ?? [], sampleOf(latest)) };
}
