// All allocations of the caller; those of all users for administrators.
import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { allocationsQuery } from "../api/queries.ts";
import { useMay } from "../session/me.ts";
import { Filters, type Filter } from "../ui/filters.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { PagedTable } from "../ui/table.tsx";
import { useAddress } from "../ui/use-address.ts";
import { COLUMNS, OWNER } from "./allocation-table.tsx";

const STATES = ["requested", "provisioning", "active", "releasing", "release_failed", "released"];

export default function AllocationsPage() {
  const [address, set] = useAddress();
  const allocations = useQuery(allocationsQuery(address));
  const may = useMay();
  const filters: Filter[] = [
    { name: "state", label: "State", options: STATES },
    { name: "sku", label: "SKU" },
    { name: "name", label: "Name" },
    { name: "label", label: "Label", hint: "key=value" },
    ...(may("rescue_allocations") ? [{ name: "user_id", label: "User" }] : []),
  ];
  return (
    <>
      <Head title="Allocations" age={<Age query={allocations} />}>
        {may("rent") && (
          <Link className="button primary" to="/catalog">
            Rent GPUs
          </Link>
        )}
      </Head>
      <Filters of={filters} address={address} set={set} />
      <PagedTable
        label="Allocations"
        query={allocations}
        page={address["page"]}
        open={(page) => set({ page })}
        columns={may("rescue_allocations") ? [...COLUMNS, OWNER] : COLUMNS}
        keyOf={(row) => row.id}
        none={<Nothing address={address}>There is no allocation. Choose a SKU in the catalog to rent GPUs.</Nothing>}
      />
    </>
  );
}
