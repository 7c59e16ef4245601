// The restart of one worker of a member.
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { gpuctl } from "../format/text.ts";
import { Action } from "../ui/action.tsx";
import { Plain } from "../ui/text.tsx";

export function RestartWorker({ member, worker }: { member: Pick<Schemas["MemberNode"], "id" | "name">; worker: string }) {
  return (
    <Action
      quiet
      needs="operate_runtime"
      spec={{
        id: `restart-worker:${member.id}:${worker}`,
        label: "Restart…",
        title: `Restart ${worker}`,
        consequences: (
          <p>
            The worker on <Plain>{member.name}</Plain> stops and begins again; its failures are cleared.
          </p>
        ),
        fields: [{ name: "reason", label: "Reason", maxLength: 500, help: "Recorded in the audit log." }],
        command: (values) => gpuctl("restart", worker, ["--member", member.name], ["--reason", values["reason"]], "--yes"),
        send: (values, key) =>
          dataOf(
            api.POST("/api/v1/admin/runtime/members/{member}/workers/{worker}/restart", {
              params: { path: { member: member.id, worker }, ...keyed(key) },
              body: values["reason"]?.trim() ? { reason: values["reason"].trim() } : {},
            }),
          ),
        refreshes: ["tree"],
      }}
    />
  );
}
