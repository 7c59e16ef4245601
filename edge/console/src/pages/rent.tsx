// A rental: what it costs and how long the balance lasts for it, then the request.
import { useState } from "react";
import { useQuery, useQueryClient, type UseQueryResult } from "@tanstack/react-query";
import { Link, useNavigate } from "@tanstack/react-router";
import { Form } from "react-aria-components";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { capacityQuery, catalogQuery, usableSshKeysQuery } from "../api/queries.ts";
import { money, moneyMicro } from "../format/money.ts";
import { duration } from "../format/time.ts";
import { labelsOf } from "../format/labels.ts";
import { gpuctl } from "../format/text.ts";
import { Guard, type FieldSpec } from "../ui/action.tsx";
import { Fields } from "../ui/fields.tsx";
import { Facts, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { Problem } from "../ui/problem.tsx";
import { SentBefore } from "../ui/sent-before.tsx";
import { CommandLine } from "../ui/text.tsx";
import { useAddress } from "../ui/use-address.ts";
import { useDraft, type Values } from "../ui/use-draft.ts";
import { Outdated, useSend } from "../ui/use-send.ts";
import { Waiting } from "../ui/waiting.tsx";
import { estimateNow, estimateQuery, isSamePrice, PriceChange, type Price } from "./rent-price.tsx";

export default function RentPage() {
  const catalog = useQuery(catalogQuery);
  const [address] = useAddress();
  return (
    <Guard needs="rent">
      <Head title="Rent GPUs" />
      <Loaded query={catalog}>{({ items, next_page }) => <RentForm key={address["sku"]} skus={items.filter(({ status }) => status === "active")} isPartial={Boolean(next_page)} />}</Loaded>
    </Guard>
  );
}

/** The request that the form's values mean. */
export function newAllocation(values: Values): Schemas["NewAllocation"] {
  const labels = labelsOf(values["labels"] ?? "");
  return {
    sku: values["sku"] ?? "",
    gpu_count: Number(values["gpus"]),
    ...(values["region"] ? { region_code: values["region"] } : {}),
    ...(values["name"]?.trim() ? { name: values["name"].trim() } : {}),
    ...(values["key"] ? { ssh_key_ids: [values["key"]] } : {}),
    ...(values["queue"] ? { queue_seconds: Number(values["queue"]) * 60 } : {}),
    ...(labels.length > 0 ? { labels: Object.fromEntries(labels) } : {}),
  };
}

export function rentCommand(values: Values): string {
  return gpuctl(
    "allocations",
    "create",
    ["--sku", values["sku"]],
    ["--gpus", values["gpus"]],
    ["--region", values["region"]],
    ["--ssh-key", values["key"]],
    ["--queue", values["queue"] && `${values["queue"]}m`],
    ["--name", values["name"]?.trim()],
    ...labelsOf(values["labels"] ?? "").map(([key, value]) => ["--label", `${key}=${value}`] as const),
  );
}

/** What is sent, and the price that was on screen when the button was pressed. */
interface Order {
  values: Values;
  sku: string;
  shown: Price | null | undefined;
}

function RentForm({ skus, isPartial }: { skus: Schemas["OfferedSku"][]; isPartial: boolean }) {
  const [address] = useAddress();
  const navigate = useNavigate();
  const keys = useQuery(usableSshKeysQuery);
  const capacity = useQuery(capacityQuery);
  const queries = useQueryClient();
  // A user decides by the prices of the form's opening.
  const [atOpening] = useState(() => new Map(skus.map(({ id, price }) => [id, price])));
  const wanted = address["sku"] ?? skus[0]?.name ?? "";
  // What was typed for another SKU is not this one's: the SKU of the address is the one that is rented.
  const name = `rent:${wanted}`;
  const draft = useDraft(name, { sku: wanted, gpus: "1", region: address["region"] ?? "" });
  const sku = skus.find(({ name, id }) => name === draft.values["sku"] || id === draft.values["sku"]);
  const gpus = draft.values["gpus"] ?? "";
  const estimate = useQuery(estimateQuery(sku?.name, gpus, sku?.gpu.count));
  const price: Price | null | undefined = estimate.data ?? sku?.price;
  const before = sku && atOpening.has(sku.id) ? atOpening.get(sku.id) : price;
  const isOther = !isSamePrice(before, price);
  const sending = useSend({
    name,
    send: async ({ values, sku, shown }: Order, key) => {
      const gpus = values["gpus"] ?? "";
      const now = await estimateNow(sku, gpus);
      if (now) queries.setQueryData(estimateQuery(sku, gpus, undefined).queryKey, now);
      if (now && !isSamePrice(now, shown)) throw new Outdated("The price has changed. Look at it, and send again.");
      return dataOf(api.POST("/api/v1/allocations", { params: keyed(key), body: newAllocation(values) }));
    },
    refreshes: ["allocations", "balance", "capacity"],
    done: (allocation) => {
      draft.discard();
      void navigate({ to: "/allocations/$id", params: { id: allocation.id } });
    },
  });
  // Both prices are shown where they differ.
  const problem = sending.error instanceof Outdated && isOther ? null : sending.error;
  const usable = keys.data?.keys ?? [];
  const free = (region: string) =>
    capacity.data?.items.filter((row) => row.sku_id === sku?.id && row.region_code === region).reduce((sum, row) => sum + row.gpus_free, 0);
  const fields: FieldSpec[] = [
    {
      name: "sku",
      label: "SKU",
      kind: "select",
      required: true,
      options: skus.map(({ name }) => ({ value: name, label: name })),
      ...(isPartial ? { help: "More SKUs are offered than are listed here: gpuctl skus list shows all of them." } : {}),
    },
    { name: "gpus", sentAs: "gpu_count", label: "GPUs", kind: "number", required: true, min: 1, max: sku?.gpu.count ?? 64, help: "All on one node." },
    {
      name: "region",
      sentAs: "region_code",
      label: "Region",
      kind: "select",
      options: (sku?.allowed_regions ?? []).map((region) => ({ value: region, label: `${region} · ${free(region) ?? "?"} free` })),
      help: "Any region where it is left open.",
    },
    {
      name: "key",
      sentAs: "ssh_key_ids",
      label: "SSH key",
      kind: "select",
      options: usable.map((key) => ({ value: key.id, label: key.is_default ? `${key.name} (default)` : key.name })),
      help: keys.data?.isPartial ? SOME_KEYS : usable.length === 0 && keys.data ? <NoKeys /> : "Your default key where it is left open.",
    },
    { name: "name", label: "Name", maxLength: 63 },
    { name: "labels", label: "Labels", maxLength: 1000, help: "key=value, separated by commas." },
    { name: "queue", sentAs: "queue_seconds", label: "Wait for capacity", kind: "number", min: 1, max: 10_080, help: "In minutes; without it a request that does not fit is refused." },
  ];
  return (
    <Form
      className="columns"
      onSubmit={(event) => {
        event.preventDefault();
        sending.submit({ values: draft.values, sku: sku?.name ?? draft.values["sku"] ?? "", shown: price });
      }}
    >
      <div className="card">
        <Fields
          of={fields}
          values={draft.values}
          set={(name, value) => {
            draft.set(name, value);
            const regions = name === "sku" ? skus.find((other) => other.name === value)?.allowed_regions : undefined;
            if (regions && !regions.includes(draft.values["region"] ?? "")) draft.set("region", "");
            sending.changed();
          }}
        />
      </div>
      <aside className="card" aria-label="What it costs">
        <h2>What it costs</h2>
        <Estimate query={estimate} />
        <p className="soft">
          GPUs are billed from the moment the allocation is active until it is released. When the balance is used up, it is released after a
          notice; its local data is erased.
        </p>
        <Waiting isSending={sending.isSending} />
        {isOther && price && <PriceChange before={before} now={price} />}
        {problem && <Problem error={problem} fields={fields} />}
        <SentBefore error={problem} beginAnew={sending.beginAnew} />
        <div className="buttons">
          <Link className="button" to="/catalog" onClick={draft.discard}>
            Cancel
          </Link>
          <button type="submit" className="primary" disabled={sending.isSending}>
            {sending.isSending ? "Sending…" : isOther ? "Rent at the new price" : problem ? "Send again" : "Rent"}
          </button>
        </div>
        <CommandLine line={rentCommand(draft.values)} />
      </aside>
    </Form>
  );
}

const SOME_KEYS = "Your default key where it is left open. Only the oldest of your keys are listed: choose another one with gpuctl, as below.";

function NoKeys() {
  return (
    <>
      You have no SSH key: the allocation is reached by a terminal alone. <Link to="/ssh-keys">Add a key</Link>
    </>
  );
}

function Estimate({ query: estimate }: { query: UseQueryResult<Schemas["BillingEstimate"]> }) {
  if (!estimate.isEnabled) return <p className="soft">Choose a SKU and a number of GPUs.</p>;
  return (
    <Loaded query={estimate}>
      {(cost) => (
        <>
          <Facts
            of={[
              ["Per hour", <strong key="h">{money(cost.minor_per_hour, cost.currency)}</strong>],
              ["Per day", cost.cost_micro == null ? "–" : moneyMicro(cost.cost_micro, cost.currency)],
              ["To begin", moneyMicro(cost.needed_micro, cost.currency)],
              ["Available", moneyMicro(cost.available_micro, cost.currency)],
              cost.lasts_seconds == null ? null : ["Balance lasts", duration(cost.lasts_seconds)],
            ]}
          />
          <Age query={estimate} polled />
          {!cost.is_covered && (
            <p className="banner" data-tone="bad">
              <span>The balance does not cover the first window.</span>
              <Link to="/money">Top up</Link>
            </p>
          )}
        </>
      )}
    </Loaded>
  );
}
