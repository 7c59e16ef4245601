// What can be rented: hardware, price, what is free, and how long the balance lasts.
import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { balanceQuery, capacityQuery, catalogQuery } from "../api/queries.ts";
import type { Schemas } from "../api/client.ts";
import { money } from "../format/money.ts";
import { duration } from "../format/time.ts";
import { count, mebibytes } from "../format/text.ts";
import { useMay } from "../session/me.ts";
import { Facts, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { SortBy, sortedBy, type SortChoice } from "../ui/sort-by.tsx";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { useAddress } from "../ui/use-address.ts";

export default function CatalogPage() {
  const catalog = useQuery(catalogQuery);
  const capacity = useQuery(capacityQuery);
  const balance = useQuery(balanceQuery);
  const [address, set] = useAddress();
  return (
    <>
      <Head title="Catalog" age={<Age query={capacity} polled />} />
      <Loaded query={catalog}>
        {({ items, next_page }) =>
          items.length === 0 ? (
            <p className="none">Nothing is offered at the moment.</p>
          ) : (
            <>
              <SortBy choices={ORDERS} address={address} set={set} />
              <ul className="offers">
                {sortedBy(offersOf(items, capacity.data?.items), ORDERS, address).map(({ sku, free }) => (
                  <Offer key={sku.id} sku={sku} free={free} account={balance.data} />
                ))}
              </ul>
              {next_page && <p className="soft">More SKUs are offered than are shown here: gpuctl skus list shows all of them.</p>}
            </>
          )
        }
      </Loaded>
    </>
  );
}

type Offered = Pick<OfferProps, "sku" | "free">;

/** Each SKU with what is free of it; nothing where that is not known. */
function offersOf(skus: readonly Schemas["OfferedSku"][], free: readonly Schemas["FreeGpus"][] | undefined): Offered[] {
  return skus.map((sku) => ({ sku, free: free?.filter((row) => row.sku_id === sku.id) }));
}

function freeGpus(free: Offered["free"]): number | undefined {
  return free?.reduce((sum, row) => sum + row.gpus_free, 0);
}

/** Prices of another currency are compared by their amount, too: an installation has one. */
const ORDERS: readonly SortChoice<Offered>[] = [
  { name: "name", label: "by name", valueOf: ({ sku }) => sku.name },
  { name: "price", label: "lowest price first", valueOf: ({ sku }) => sku.price?.amount_minor_per_gpu_hour },
  { name: "-free", label: "most free GPUs first", valueOf: ({ free }) => freeGpus(free) },
];

/** How long what is available lasts for one GPU, in seconds. */
export function lastsSeconds(available: number | bigint, perHour: number | bigint): number | null {
  if (BigInt(perHour) <= 0n) return null;
  const seconds = (BigInt(available) * 3600n) / BigInt(perHour);
  return seconds < 0n ? 0 : Number(seconds);
}

interface OfferProps {
  sku: Schemas["OfferedSku"];
  free: Schemas["FreeGpus"][] | undefined;
  account: Schemas["BillingAccount"] | undefined;
}

function Offer({ sku, free, account }: OfferProps) {
  const may = useMay();
  const total = freeGpus(free);
  const lasts = sku.price && account?.currency === sku.price.currency ? lastsSeconds(account.available_minor, sku.price.amount_minor_per_gpu_hour) : null;
  return (
    <li className="card offer" aria-label={sku.name}>
      <div className="card-head">
        <h2>
          <Plain>{sku.name}</Plain>
        </h2>
        {sku.status !== "active" && <State of={sku.status} />}
      </div>
      <p className="price">
        {sku.price ? (
          <>
            <strong>{money(sku.price.amount_minor_per_gpu_hour, sku.price.currency)}</strong> <span className="soft">per GPU and hour</span>
          </>
        ) : (
          <span className="soft">No price yet</span>
        )}
      </p>
      <Facts
        of={[
          ["GPUs", `${sku.gpu.count} × ${sku.gpu.vendor} ${sku.gpu.model}, ${mebibytes(sku.gpu.memory_mib)} each`],
          ["Processor", `${sku.cpu.model}, ${count(sku.cpu.cores)} cores`],
          ["Memory", `${mebibytes(sku.memory_mib)}, ${count(sku.storage_gib)} GiB storage`],
          sku.interconnect ? ["Interconnect", <Plain key="i">{sku.interconnect}</Plain>] : null,
          ["Free", <Free key="f" rows={free} regions={sku.allowed_regions} />],
          lasts === null ? null : ["Balance lasts", `${duration(lasts)} for one GPU`],
        ]}
      />
      {may("rent") && (
        <div className="buttons">
          <Link className="button primary" to="/rent" search={{ sku: sku.name } as never} aria-label={`Rent ${sku.name}`}>
            Rent
          </Link>
          {total === 0 && <span className="soft">Nothing is free: a request can wait in the queue.</span>}
        </div>
      )}
    </li>
  );
}

function Free({ rows, regions }: { rows: Schemas["FreeGpus"][] | undefined; regions: readonly string[] }) {
  if (rows === undefined) return <span className="soft">not known</span>;
  const known = rows.length > 0 ? rows : regions.map((region_code) => ({ region_code, gpus_free: 0, largest_free: 0 }));
  return (
    <ul className="plain-list">
      {known.map((row) => (
        <li key={row.region_code}>
          <strong>{count(row.gpus_free)}</strong> in <Plain>{row.region_code}</Plain>
          {row.gpus_free > 0 && <span className="soft"> · up to {count(row.largest_free)} on one node</span>}
        </li>
      ))}
    </ul>
  );
}
