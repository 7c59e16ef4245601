// The title of the browser's tab: what the page shows, and whose page it is.
import { useLayoutEffect } from "react";

const SITE = "gpuaas";

/** The title while the component is on screen. A page that does not name itself has the site's alone, and never that of the page before. */
export function usePageTitle(title: string): void {
  useLayoutEffect(() => {
    document.title = `${title} · ${SITE}`;
    return () => {
      document.title = SITE;
    };
  }, [title]);
}
