// The way out of the console.
import { useState } from "react";
import { logOut } from "./console-api.ts";

/** Logs out and leaves the page; and why that failed. */
export function useLogOut(): [leave: () => void, failure: unknown] {
  const [failure, setFailure] = useState<unknown>(null);
  const leave = () => void logOut().then((to) => window.location.assign(to), setFailure);
  return [leave, failure];
}
