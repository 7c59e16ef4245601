// A table of any length: only the rows on screen are drawn, and assistive technology is given their place among all.
import { useCallback, useEffect, useRef, useState, type ReactNode } from "react";
import { defaultRangeExtractor, useVirtualizer, type Range } from "@tanstack/react-virtual";

interface VirtualTableProps<T> {
  label: string;
  /** The style of its columns. */
  kind: "entities" | "gpu-map";
  columns: readonly string[];
  /** The same array as long as its rows are the same. */
  rows: readonly T[];
  /** The same function in each rendering: places are calculated again for another one. */
  keyOf: (row: T) => string;
  /** One for each column. */
  cells: (row: T) => readonly ReactNode[];
  /** The height of a row; of one that is measured, before it is drawn. */
  rowPx: number;
  /** Rows have the height of their content. */
  isMeasured?: boolean;
  /** More rows are to come: how many there are is not known. */
  isPartial?: boolean;
  /** The last row is on screen, or soon. */
  atEnd?: () => void;
}

const OVERSCAN = 12;

export function VirtualTable<T>({ label, kind, columns, rows, keyOf, cells, rowPx, isMeasured = false, isPartial = false, atEnd }: VirtualTableProps<T>) {
  const room = useRef<HTMLDivElement>(null);
  // The row that has the focus stays, wherever the table is scrolled to: without it the focus would be lost.
  const [focused, setFocused] = useState<number | null>(null);
  const rangeExtractor = useCallback(
    (range: Range) => {
      const shown = defaultRangeExtractor(range);
      if (focused === null || focused >= range.count || shown.includes(focused)) return shown;
      return [...shown, focused].sort((a, b) => a - b);
    },
    [focused],
  );
  const getItemKey = useCallback(
    (index: number) => {
      const row = rows[index];
      return row === undefined ? index : keyOf(row);
    },
    [rows, keyOf],
  );
  const virtual = useVirtualizer({
    count: rows.length,
    getScrollElement: () => room.current,
    estimateSize: () => rowPx,
    getItemKey,
    overscan: OVERSCAN,
    rangeExtractor,
  });
  const reachesEnd = virtual.range !== null && virtual.range.endIndex + OVERSCAN >= rows.length - 1;
  useEffect(() => {
    if (reachesEnd) atEnd?.();
  }, [reachesEnd, atEnd]);
  return (
    <div ref={room} className={`virtual ${kind}`} role="table" aria-label={label} aria-rowcount={isPartial ? -1 : rows.length + 1} tabIndex={0}>
      <div role="rowgroup" className="virtual-head">
        <div role="row" aria-rowindex={1}>
          {columns.map((title) => (
            <span key={title} role="columnheader">
              {title}
            </span>
          ))}
        </div>
      </div>
      <div role="rowgroup" className="virtual-body" style={{ height: virtual.getTotalSize() }} onBlur={() => setFocused(null)}>
        {virtual.getVirtualItems().map(({ index, start, key }) => {
          const row = rows[index];
          if (row === undefined) return null;
          return (
            <div
              key={key}
              ref={isMeasured ? virtual.measureElement : undefined}
              data-index={index}
              role="row"
              aria-rowindex={index + 2}
              className="virtual-row"
              style={{ transform: `translateY(${start}px)`, [isMeasured ? "minHeight" : "height"]: rowPx }}
              onFocus={() => setFocused(index)}
            >
              {cells(row).map((cell, column) => (
                <span key={columns[column]} role="cell">
                  {cell}
                </span>
              ))}
            </div>
          );
        })}
      </div>
    </div>
  );
}
