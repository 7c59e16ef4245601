// Monthly statements: their sums, lines and files.
import { useQuery } from "@tanstack/react-query";
import type { Schemas } from "../api/client.ts";
import { changeText, money } from "../format/money.ts";
import { count, readable } from "../format/text.ts";
import { Loaded } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { Table } from "../ui/table.tsx";
import { Id, Plain } from "../ui/text.tsx";
import { useAddress } from "../ui/use-address.ts";

type Statement = Schemas["MonthlyStatement"];

interface StatementsProps {
  rows: readonly Schemas["MonthlyStatementSummary"][];
  read: (month: string) => Promise<Statement>;
  /** The address of a file. */
  fileOf: (month: string, kind: "pdf" | "csv") => string;
}

export function StatementTable({ rows, read, fileOf }: StatementsProps) {
  const [address, set] = useAddress();
  // The month of an address that has no statement here opens nothing.
  const opened = rows.find(({ month }) => month === address["month"]);
  const open = (month: string | undefined) => set({ month }, { inPlace: true });
  return (
    <>
      <Table
        label="Monthly statements"
        rows={rows}
        keyOf={(statement) => statement.month}
        none={<p>The first statement appears with the first posting.</p>}
        columns={[
          { title: "Month", short: true, cell: (statement) => statement.month },
          { title: "State", cell: (statement) => <State of={statement.is_final ? "final" : "in progress"} /> },
          { title: "Closing", number: true, cell: (statement) => money(statement.closing_minor, statement.currency) },
          {
            title: "Lines",
            cell: ({ month }) => (
              <button type="button" className="quiet" aria-expanded={opened?.month === month} aria-label={`${opened?.month === month ? "Hide" : "Show"} the lines of ${month}`} onClick={() => open(opened?.month === month ? undefined : month)}>
                {opened?.month === month ? "Hide" : "Show"}
              </button>
            ),
          },
          {
            title: "Files",
            cell: ({ month }) => (
              <span className="row-actions">
                {(["pdf", "csv"] as const).map((kind) => (
                  <a key={kind} href={fileOf(month, kind)} download aria-label={`${kind.toUpperCase()} of ${month}`}>
                    {kind.toUpperCase()}
                  </a>
                ))}
              </span>
            ),
          },
        ]}
      />
      {opened && <Lines key={opened.month} month={opened.month} isFinal={opened.is_final} address={fileOf(opened.month, "csv")} read={read} />}
    </>
  );
}

interface LinesProps extends Pick<StatementsProps, "read"> {
  month: string;
  /** Nothing is posted to the month any more. */
  isFinal: boolean;
  address: string;
}

function Lines({ month, isFinal, address, read }: LinesProps) {
  const statement = useQuery({ queryKey: [isFinal ? "final-statement" : "statement", address], queryFn: () => read(month), staleTime: 60_000 });
  return (
    <Loaded query={statement}>
      {({ lines, currency }) => (
        <Table
          label={`Lines of ${month}`}
          rows={lines.map((line, index) => ({ ...line, index }))}
          keyOf={(line) => String(line.index)}
          none={<p>The month has no line.</p>}
          columns={[
            { title: "Kind", cell: (line) => readable(line.kind) },
            { title: "For", cell: (line) => (line.allocation_id ? <Id>{line.allocation_id}</Id> : "") },
            { title: "SKU", cell: (line) => (line.sku ? <Plain>{line.sku}</Plain> : "") },
            { title: "GPUs", number: true, cell: (line) => (line.gpu_count == null ? "" : count(line.gpu_count)) },
            { title: "Change", number: true, cell: (line) => changeText(line, currency) },
          ]}
        />
      )}
    </Loaded>
  );
}
