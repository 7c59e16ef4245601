// The runbook of what is wrong, by its id in the book.

export function Runbook({ id }: { id: string | null | undefined }) {
  return id ? <code>{id}</code> : <span className="soft">–</span>;
}
