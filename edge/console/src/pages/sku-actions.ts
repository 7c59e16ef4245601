// What an administrator changes in the catalog: new entries, and prices, regions and expected hardware of those that exist.
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { parseMoney, plainAmount } from "../format/money.ts";
import { gpuctl } from "../format/text.ts";
import type { ActionSpec, FieldSpec } from "../ui/action.tsx";
import { whole, type Values } from "../ui/use-draft.ts";

type Sku = Schemas["Sku"];

const REFRESHES = ["skus", "catalog", "sku-names"];
const CURRENCY = "[A-Z]{3}";

/** `eu-1, eu-2` as its parts. */
function listOf(typed: string | undefined): string[] {
  return (typed ?? "").split(/[\s,]+/).filter(Boolean);
}

function priceOf(values: Values): Schemas["NewPrice"] {
  const currency = values["currency"]?.trim() ?? "";
  if ((values["amount"] ?? "").trim().match(/^0(\.0*)?$/)) return { currency, amount_minor_per_gpu_hour: 0 };
  const amount = parseMoney(values["amount"] ?? "", currency);
  if ("problem" in amount) throw new Error(amount.problem);
  return { currency, amount_minor_per_gpu_hour: amount.minor };
}

function priceText(values: Values): string | null {
  return values["amount"] ? `${values["amount"].trim()} ${values["currency"]?.trim() ?? ""}` : null;
}

const PRICE: readonly FieldSpec[] = [
  { name: "amount", sentAs: "price.amount_minor_per_gpu_hour", label: "Price per GPU and hour", required: true, maxLength: 20 },
  { name: "currency", sentAs: "price.currency", label: "Currency", required: true, maxLength: 3, pattern: CURRENCY, initial: "EUR" },
];

export const createSku: ActionSpec<unknown> = {
  id: "create-sku",
  primary: true,
  label: "Create…",
  title: "Create a SKU: a kind of machine in the catalog",
  consequences: "It is a draft, and cannot be rented before two people have approved its activation. Its hardware cannot be changed later.",
  fields: [
    { name: "name", label: "Name", required: true, maxLength: 64 },
    { name: "gpu_vendor", sentAs: "gpu.vendor", label: "Maker of the GPUs", required: true, maxLength: 64, initial: "NVIDIA" },
    { name: "gpu_model", sentAs: "gpu.model", label: "Model of the GPUs", required: true, maxLength: 64, help: "As the driver names it: inventories are compared with it." },
    { name: "gpu_memory_mib", sentAs: "gpu.memory_mib", label: "Memory of a GPU in MiB", kind: "number", required: true, min: 1 },
    { name: "gpus", sentAs: "gpu.count", label: "GPUs of a machine", kind: "number", required: true, min: 1, max: 64 },
    { name: "cpu_model", sentAs: "cpu.model", label: "Processor", required: true, maxLength: 64 },
    { name: "cores", sentAs: "cpu.cores", label: "Cores", kind: "number", required: true, min: 1 },
    { name: "memory_mib", label: "Memory in MiB", kind: "number", required: true, min: 1 },
    { name: "storage_gib", label: "Storage in GiB", kind: "number", required: true, min: 0 },
    { name: "interconnect", label: "Interconnect", maxLength: 64 },
    { name: "regions", sentAs: "allowed_regions", label: "Regions", required: true, maxLength: 1000, help: "Separated by commas." },
    ...PRICE,
  ],
  command: (values) =>
    gpuctl(
      "skus", "create", [values["name"]?.trim() || "NAME"], ["--price", priceText(values)], ...listOf(values["regions"]).map((region) => ["--region", region] as const),
      ["--gpu-vendor", values["gpu_vendor"]], ["--gpu-model", values["gpu_model"]], ["--gpu-memory-mib", values["gpu_memory_mib"]], ["--gpus", values["gpus"]],
      ["--cpu-model", values["cpu_model"]], ["--cores", values["cores"]], ["--memory-mib", values["memory_mib"]], ["--storage-gib", values["storage_gib"]],
      ["--interconnect", values["interconnect"]],
    ),
  send: async (values, key) => {
    const text = (name: string) => values[name]?.trim() ?? "";
    const number = (name: string) => whole(values[name]) ?? 0;
    const body: Schemas["NewSku"] = {
      name: text("name"),
      gpu: { vendor: text("gpu_vendor"), model: text("gpu_model"), memory_mib: number("gpu_memory_mib"), count: number("gpus") },
      cpu: { model: text("cpu_model"), cores: number("cores") },
      memory_mib: number("memory_mib"),
      storage_gib: number("storage_gib"),
      allowed_regions: listOf(values["regions"]),
      price: priceOf(values),
      interconnect: text("interconnect") || null,
    };
    return dataOf(api.POST("/api/v1/admin/skus", { params: keyed(key), body }));
  },
  refreshes: REFRESHES,
};

/** A new version of the price, other regions, and what inventories are compared with. */
export function priceSku(sku: Sku): ActionSpec<unknown> {
  const { price, expected_hardware: expected } = sku;
  return {
    id: `change-sku:${sku.id}`,
    label: "Change…",
    title: `Change ${sku.name}`,
    consequences: "What runs keeps the price that it began with. Nodes are compared with the expected hardware from their next contact on; one that differs is quarantined.",
    fields: [
      { name: "amount", sentAs: "price.amount_minor_per_gpu_hour", label: "Price per GPU and hour", required: true, maxLength: 20, initial: price ? plainAmount(price.amount_minor_per_gpu_hour, price.currency) : "" },
      { name: "currency", sentAs: "price.currency", label: "Currency", required: true, maxLength: 3, pattern: CURRENCY, initial: price?.currency ?? "EUR" },
      { name: "regions", sentAs: "allowed_regions", label: "Regions", required: true, maxLength: 1000, initial: sku.allowed_regions.join(", ") },
      { name: "cpu_model", sentAs: "expected_hardware.cpu_model", label: "Expected processor", maxLength: 64, initial: expected?.cpu_model ?? "", help: "A part of its name." },
      { name: "cpu_cores", sentAs: "expected_hardware.cpu_cores", label: "Expected logical processors", kind: "number", initial: numberText(expected?.cpu_cores) },
      { name: "memory_mib", sentAs: "expected_hardware.memory_mib", label: "Expected memory in MiB", kind: "number", initial: numberText(expected?.memory_mib) },
      { name: "storage_gib", sentAs: "expected_hardware.storage_gib", label: "Expected storage in GiB", kind: "number", initial: numberText(expected?.storage_gib) },
      // A replica of the release before has none.
      { name: "generation", label: "Version", kind: "hidden", initial: String(sku.generation ?? "") },
      { name: "driver", sentAs: "expected_hardware.driver_version_min", label: "Oldest driver", maxLength: 32, initial: expected?.driver_version_min ?? "" },
    ],
    command: (values) =>
      gpuctl(
        "skus", "update", [sku.name], ["--price", priceText(values)], ...listOf(values["regions"]).map((region) => ["--region", region] as const),
        ["--expect-cpu-model", values["cpu_model"]], ["--expect-cores", values["cpu_cores"]], ["--expect-memory-mib", values["memory_mib"]],
        ["--expect-storage-gib", values["storage_gib"]], ["--expect-driver-version-min", values["driver"]],
      ),
    send: async (values) => {
      const body: Schemas["SkuChange"] = {
        price: priceOf(values),
        allowed_regions: listOf(values["regions"]),
        expected_hardware: {
          cpu_model: values["cpu_model"]?.trim() || null,
          cpu_cores: whole(values["cpu_cores"]),
          memory_mib: whole(values["memory_mib"]),
          storage_gib: whole(values["storage_gib"]),
          driver_version_min: values["driver"]?.trim() || null,
        },
      };
      // The version that the form began with: a change of another administrator is not overwritten unseen.
      const header = values["generation"] ? { "If-Match": `"${values["generation"]}"` } : {};
      return dataOf(api.PATCH("/api/v1/admin/skus/{id}", { params: { path: { id: sku.id }, header }, body }));
    },
    conflict: ({ details }) => {
      const current = details["current_generation"];
      if (current === undefined) return null;
      return { note: "Another administrator has changed this SKU since you opened this form. The fields here have the same values as before, or the ones that you entered. Continue to send your change.", label: "Continue", values: { generation: String(current) } };
    },
    refreshes: REFRESHES,
  };
}

function numberText(value: number | null | undefined): string {
  return value == null ? "" : String(value);
}
