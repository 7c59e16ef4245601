// A link to a page that needs a permission.
import type { ReactNode } from "react";
import { Link } from "@tanstack/react-router";
import { useMay, type Permission } from "../session/me.ts";

interface GuardedLinkProps {
  needs: Permission;
  to: string;
  params: Readonly<Record<string, string>>;
  children: ReactNode;
}

/** The link; for callers without the permission its text alone. */
export function GuardedLink({ needs, to, params, children }: GuardedLinkProps) {
  const may = useMay();
  return may(needs) ? (
    <Link to={to} params={params as never}>
      {children}
    </Link>
  ) : (
    <>{children}</>
  );
}
