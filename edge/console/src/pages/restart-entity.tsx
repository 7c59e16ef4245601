// The restart of one entity.
import { api, dataOf, keyed } from "../api/client.ts";
import { gpuctl, readable } from "../format/text.ts";
import { Action } from "../ui/action.tsx";

export function RestartEntity({ kind, id, quiet = false }: { kind: string; id: string; quiet?: boolean }) {
  return (
    <Action
      quiet={quiet}
      needs="operate_runtime"
      spec={{
        id: `restart:${kind}:${id}`,
        label: "Restart…",
        title: `Restart this ${readable(kind)}`,
        consequences: <p>Its failures are cleared, and its actor begins again from its committed state, on whichever member owns it. Nothing that is committed is lost.</p>,
        fields: [{ name: "reason", label: "Reason", maxLength: 500, help: "Recorded in the audit log." }],
        command: (values) => gpuctl("restart", `${kind}/${id}`, ["--reason", values["reason"]], "--yes"),
        send: (values, key) =>
          dataOf(
            api.POST("/api/v1/admin/runtime/entities/{kind}/{id}/restart", {
              params: { path: { kind, id } as never, ...keyed(key) },
              body: values["reason"]?.trim() ? { reason: values["reason"].trim() } : {},
            }),
          ),
        refreshes: ["tree", "entity", "fleet-overview"],
      }}
    />
  );
}
