// Lists: a table on wide screens, one block per row on narrow ones. The server pages them.
import { useState, type ReactNode } from "react";
import type { UseQueryResult } from "@tanstack/react-query";
import { Loaded } from "./loaded.tsx";
import { nextOrder, orderOf, sorted, type SortValue } from "./order.ts";

export interface Column<T> {
  title: string;
  cell: (row: T) => ReactNode;
  /** Numbers stand at the end of their column. */
  number?: boolean;
  /** Short values stay on one line. */
  short?: boolean;
  /** What rows are compared by, where the table has an order. */
  by?: (row: T) => SortValue;
}

interface TableProps<T> {
  label: string;
  rows: readonly T[];
  columns: readonly Column<T>[];
  keyOf: (row: T) => string;
  /** The text where there are none, with the next step. */
  none: ReactNode;
  /** The order of the address, and what changes it. Only for rows that are here as a whole: what the server pages has the server's order. */
  order?: { of: string | undefined; set: (order: string | undefined) => void };
  /** At most so many rows are shown, the first of the order. */
  most?: number;
}

/** The name of a column in the address. */
const nameOf = ({ title }: Pick<Column<never>, "title">) => title.toLowerCase().replaceAll(" ", "-");

export function Table<T>({ label, rows, columns, keyOf, none, order, most }: TableProps<T>) {
  if (rows.length === 0) return <div className="none">{none}</div>;
  const wanted = orderOf(order?.of);
  const by = columns.find((column) => column.by && nameOf(column) === wanted?.by);
  const ordered = by?.by && wanted ? sorted(rows, by.by, wanted.isDescending) : rows;
  return (
    <div className="table-room" role="group" aria-label={label} tabIndex={0}>
      <table>
        <thead>
          <tr>
            {columns.map((column) => (
              <th
                key={column.title}
                scope="col"
                data-number={column.number || undefined}
                aria-sort={column === by ? (wanted?.isDescending ? "descending" : "ascending") : undefined}
              >
                {order && column.by ? (
                  <button type="button" className="sort" onClick={() => order.set(nextOrder(order.of, nameOf(column)))}>
                    {column.title} <span aria-hidden="true">{column !== by ? "↕" : wanted?.isDescending ? "↓" : "↑"}</span>
                  </button>
                ) : (
                  column.title
                )}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {ordered.slice(0, most).map((row) => (
            <tr key={keyOf(row)}>
              {columns.map((column) => (
                <td key={column.title} data-title={column.title} data-number={column.number || undefined} data-short={column.short || undefined}>
                  {column.cell(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** How many more rows are shown at once. */
const STEP = 20;

/** A list that is read as a whole, of which more rows are shown on demand. */
export function GrowingTable<T>({ rows, ...table }: TableProps<T>) {
  const [shown, setShown] = useState(STEP);
  return (
    <>
      <Table rows={rows.slice(0, shown)} {...table} />
      {rows.length > shown && (
        <div className="pager">
          <button type="button" onClick={() => setShown(shown + STEP)} aria-label={`Show more of ${table.label}`}>
            Show more
          </button>
        </div>
      )}
    </>
  );
}

interface Page<T> {
  items: T[];
  next_page?: string | null;
}

interface PagedProps<T> extends Omit<TableProps<T>, "rows"> {
  query: UseQueryResult<Page<T>>;
  /** The page token of the address. */
  page: string | undefined;
  /** Opens a page: its token, or nothing for the first. */
  open: (page: string | undefined) => void;
}

/** One page of a list, and the way to the next. The browser's own Back leads to the page before. */
export function PagedTable<T>({ query, page, open, ...table }: PagedProps<T>) {
  // The token of a page may be refused: the first page needs none.
  const isLost = page !== undefined && query.error !== null && query.data === undefined;
  return (
    <>
      <Loaded query={query}>{(data) => <Table rows={data.items} {...table} />}</Loaded>
      {(isLost || (query.data && (page || query.data.next_page))) && <Pager label={table.label} page={page} next={query.data?.next_page} open={open} />}
    </>
  );
}

interface PagerProps extends Pick<PagedProps<unknown>, "label" | "page" | "open"> {
  next: string | null | undefined;
}

export function Pager({ label, page, next, open }: PagerProps) {
  return (
    <nav className="pager" aria-label={`Pages of ${label}`}>
      <button type="button" disabled={!page} onClick={() => open(undefined)}>
        First page
      </button>
      <button type="button" disabled={!next} onClick={() => open(next ?? undefined)}>
        Next page
      </button>
    </nav>
  );
}
