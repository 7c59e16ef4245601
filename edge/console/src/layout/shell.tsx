// What surrounds every page: navigation, banners, the caller, and the keyboard.
import { Suspense, useEffect, useRef, useState } from "react";
import { Link, Outlet, useNavigate, useRouterState } from "@tanstack/react-router";
import { nameOf, useMay, useMe } from "../session/me.ts";
import { useLogOut } from "../session/use-log-out.ts";
import { ClosedDialog, lazyPart } from "../ui/lazy-part.tsx";
import { ActionDialogs } from "../ui/opened-action.tsx";
import { focusPage } from "../ui/focus.ts";
import { Problem } from "../ui/problem.tsx";
import { Banners } from "./banners.tsx";
import type { Search } from "../router.tsx";
import { placesFor } from "./navigation.ts";
import { useShortcuts, useSingleKeys } from "./shortcuts.ts";
import { useTheme } from "./theme.ts";

const Palette = lazyPart(() => import("./palette.tsx"), ClosedDialog);

export function Shell() {
  const groups = placesFor(useMay());
  const places = groups.flatMap((group) => group.places);
  const [dialog, setDialog] = useState<"palette" | "shortcuts" | null>(null);
  const [menuOpen, setMenuOpen] = useState(false);
  const navigate = useNavigate();
  const open = (to: string, search: Search = {}) => {
    setDialog(null);
    void navigate({ to, search: search as never });
  };
  const [singleKeys] = useSingleKeys();
  useShortcuts({ places, open, openList: () => setDialog("shortcuts"), openPalette: () => setDialog("palette") });
  const main = useFocusOnNavigation(() => setMenuOpen(false));
  return (
    <div className="shell">
      <a className="skip" href="#main">
        To the content
      </a>
      <header className="bar">
        <button type="button" className="menu-button quiet" aria-expanded={menuOpen} aria-controls="navigation" onClick={() => setMenuOpen(!menuOpen)}>
          Menu
        </button>
        <Link to="/" className="brand">
          GPU console
        </Link>
        <button type="button" className="quiet find" onClick={() => setDialog("palette")} aria-keyshortcuts="Control+K">
          Find <kbd>Ctrl K</kbd>
        </button>
        <Caller />
      </header>
      <nav id="navigation" className="navigation" aria-label="Console" data-open={menuOpen || undefined}>
        {groups.map((group) => (
          <section key={group.title} aria-label={group.title}>
            <h2>{group.title}</h2>
            <ul>
              {group.places.map((place) => (
                <li key={place.to}>
                  <Link to={place.to} activeOptions={{ exact: place.to === "/" }} aria-keyshortcuts={singleKeys ? `g ${place.key}` : undefined}>
                    {place.title}
                  </Link>
                </li>
              ))}
            </ul>
          </section>
        ))}
        <button type="button" className="quiet shortcuts-button" onClick={() => setDialog("shortcuts")}>
          Keyboard shortcuts {singleKeys && <kbd>?</kbd>}
        </button>
      </nav>
      <main id="main" ref={main} tabIndex={-1}>
        <Banners />
        <ActionDialogs>
          <Outlet />
        </ActionDialogs>
      </main>
      {dialog && (
        <Suspense fallback={null}>
          <Palette kind={dialog} places={places} open={open} close={() => setDialog(null)} />
        </Suspense>
      )}
    </div>
  );
}

/** Another page: its heading has the focus, so that the keyboard and a screen reader go on there. */
function useFocusOnNavigation(navigated: () => void) {
  const main = useRef<HTMLElement>(null);
  const path = useRouterState({ select: (state) => state.resolvedLocation?.pathname });
  const before = useRef(path);
  useEffect(() => {
    if (before.current !== undefined && before.current !== path) {
      navigated();
      focusPage();
    }
    before.current = path;
  }, [path]);
  return main;
}

function Caller() {
  const me = useMe();
  const [theme, nextTheme] = useTheme();
  const [logOut, failure] = useLogOut();
  return (
    <div className="caller">
      <bdi className="caller-name" title={me.user_id}>
        {nameOf(me)}
      </bdi>
      <button type="button" className="quiet" onClick={nextTheme} title="Change the colours">
        Colours: {{ device: "auto", light: "light", dark: "dark" }[theme]}
      </button>
      <button type="button" className="quiet" onClick={logOut}>
        Log out
      </button>
      {failure !== null && <Problem error={failure} />}
    </div>
  );
}
