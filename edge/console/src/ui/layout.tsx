// The head of a page, and its cards.
import type { ReactNode } from "react";
import { usePageTitle } from "./page-title.ts";
import { Plain } from "./text.tsx";

/** The head of a page. Its title, which may be a name that people gave, is that of the browser's tab, too. */
export function Head({ title, children, age }: { title: string; children?: ReactNode; age?: ReactNode }) {
  usePageTitle(title);
  return (
    <header className="page-head">
      <h1 tabIndex={-1}>
        <Plain>{title}</Plain>
      </h1>
      {age}
      <div className="actions">{children}</div>
    </header>
  );
}

export function Card({ title, children, actions }: { title: string; children: ReactNode; actions?: ReactNode }) {
  return (
    <section className="card" aria-label={title}>
      <div className="card-head">
        <h2>{title}</h2>
        {actions}
      </div>
      {children}
    </section>
  );
}

/** Terms with their values. */
export function Facts({ of }: { of: (readonly [term: string, value: ReactNode] | null | false)[] }) {
  return (
    <dl className="facts">
      {of.map((fact) =>
        fact ? (
          <div key={fact[0]}>
            <dt>{fact[0]}</dt>
            <dd>{fact[1]}</dd>
          </div>
        ) : null,
      )}
    </dl>
  );
}
