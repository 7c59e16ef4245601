// What an administrator does about an allocation whose release has failed.
import type { ReactNode } from "react";
import { api, dataOf, keyed } from "../api/client.ts";
import type { Allocation } from "../api/queries.ts";
import { gpuctl } from "../format/text.ts";
import { REASON, type ActionSpec } from "../ui/action.tsx";

type Failed = Pick<Allocation, "id">;

interface Rescue {
  way: "retry-release" | "force-release";
  label: string;
  title: string;
  consequences: ReactNode;
  danger?: boolean;
}

function rescue({ id }: Failed, { way, label, title, consequences, danger = false }: Rescue): ActionSpec<unknown> {
  return {
    id: `${way}:${id}`,
    label,
    title,
    danger,
    consequences,
    fields: [REASON],
    command: (values) => gpuctl("allocations", way, id, ["--reason", values["reason"]], ...(way === "force-release" ? ["--yes"] : [])),
    send: (values, key) =>
      dataOf(api.POST(`/api/v1/admin/allocations/{id}/${way}`, { params: { path: { id }, ...keyed(key) }, body: { reason: values["reason"] ?? "" } })),
    refreshes: ["allocation", "allocations", "balance", "capacity"],
  };
}

export function retryRelease(allocation: Failed): ActionSpec<unknown> {
  return rescue(allocation, {
    way: "retry-release",
    label: "Retry the release…",
    title: "Try the clean-up again",
    consequences: <p>The node is asked again to prove that it is clean. The fence around it is lifted.</p>,
  });
}

export function forceRelease(allocation: Failed): ActionSpec<unknown> {
  return rescue(allocation, {
    way: "force-release",
    label: "Force the release…",
    title: "End the release without a clean-up proof",
    danger: true,
    consequences: (
      <p>
        The allocation ends, and <strong>its data may still be on the node</strong>. The node is quarantined until an administrator has found it in order.
      </p>
    ),
  });
}
