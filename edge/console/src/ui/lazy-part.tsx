// Parts of a page in files of their own, which a service of another release does not have.
import { lazy, useEffect, type ComponentType } from "react";
import { partIsMissing } from "../layout/other-release.ts";

/** As React's `lazy`, with what is drawn where the file is missing. A browser does not request it again before the page is loaded again. */
export function lazyPart<P extends object>(load: () => Promise<{ default: ComponentType<P> }>, Missing: ComponentType<P>): ComponentType<P> {
  return lazy(async () => {
    // It has no value where the file is missing: see `watchForOtherRelease`.
    const found = (await load()) as { default: ComponentType<P> } | undefined;
    return found ?? { default: Missing };
  });
}

/** For a dialog whose file is missing: it is closed, and the banner says why each time. */
export function ClosedDialog({ close }: { close: () => void }) {
  useEffect(() => {
    partIsMissing();
    close();
  }, []);
  return null;
}
