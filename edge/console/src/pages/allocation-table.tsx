// Allocations as rows.
import type { ReactNode } from "react";
import { Link } from "@tanstack/react-router";
import type { Allocation } from "../api/queries.ts";
import { money } from "../format/money.ts";
import { shortId, readable } from "../format/text.ts";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { Table, type Column } from "../ui/table.tsx";

export const COLUMNS: readonly Column<Allocation>[] = [
  {
    title: "Allocation",
    cell: (row) => (
      <Link to="/allocations/$id" params={{ id: row.id }} className="row-link">
        {row.name ? <Plain>{row.name}</Plain> : <code title={row.id}>{shortId(row.id)}</code>}
      </Link>
    ),
  },
  { title: "State", cell: (row) => <State of={row.state} overdue={row.overdue} /> },
  { title: "Why", cell: (row) => <Plain>{readable(row.state_reason)}</Plain> },
  { title: "SKU", short: true, cell: (row) => <Plain>{row.sku}</Plain> },
  { title: "GPUs", number: true, cell: (row) => row.gpu_count },
  { title: "Cost to date", number: true, cell: (row) => money(row.cost_to_date_minor, row.price.currency) },
  { title: "Since", cell: (row) => <When at={row.active_at ?? row.requested_at} /> },
];

/** Whose it is, where the list has those of several users. */
export const OWNER: Column<Allocation> = { title: "User", short: true, cell: (row) => <Plain>{row.user_id}</Plain> };

export function AllocationTable({ rows, none }: { rows: readonly Allocation[]; none: ReactNode }) {
  return <Table label="Allocations" rows={rows} columns={COLUMNS} keyOf={(row) => row.id} none={none} />;
}
