// The palette (Ctrl+K) and the list of shortcuts.
import { useEffect, useState } from "react";
import { DialogFrame } from "../ui/dialog.tsx";
import type { Search } from "../router.tsx";
import type { Place } from "./navigation.ts";
import { useSingleKeys } from "./shortcuts.ts";

interface PaletteProps {
  kind: "palette" | "shortcuts";
  places: readonly Place[];
  open: (to: string, search?: Search) => void;
  close: () => void;
}

export default function Palette({ kind, places, open, close }: PaletteProps) {
  const title = kind === "palette" ? "Open a page" : "Keyboard shortcuts";
  return (
    <DialogFrame title={title} close={close} isDismissable>
      {kind === "palette" ? <Search places={places} open={open} /> : <Shortcuts places={places} />}
      <div className="buttons">
        <button type="button" onClick={close}>
          Close
        </button>
      </div>
    </DialogFrame>
  );
}

/** The page of requests, which not every caller may open. */
const REQUESTS = "/requests";
const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i;

/** A page, or what is at an address of it. */
interface Match {
  to: string;
  title: string;
  search?: Search;
}

/** The places whose title contains what was typed; what has an id: an allocation, or the request of a correlation id. */
export function found(places: readonly Place[], typed: string): Match[] {
  const wanted = typed.trim().toLowerCase();
  const pages = places.filter(({ title }) => title.toLowerCase().includes(wanted));
  if (!UUID.test(wanted)) return pages;
  const traces = places.some(({ to }) => to === REQUESTS);
  return [{ to: `/allocations/${wanted}`, title: `Allocation ${wanted}` }, ...(traces ? [{ to: REQUESTS, title: `Request ${wanted}`, search: { correlation_id: wanted } }] : [])];
}

function Search({ places, open }: { places: readonly Place[]; open: PaletteProps["open"] }) {
  const [typed, setTyped] = useState("");
  const [at, setAt] = useState(0);
  const matches = found(places, typed);
  const chosen = Math.min(at, Math.max(matches.length - 1, 0));
  // The focus stays in the field, so that the browser does not scroll the list by itself.
  useEffect(() => document.getElementById(`palette-${chosen}`)?.scrollIntoView({ block: "nearest" }), [chosen]);
  const pressed = (event: React.KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      setAt((chosen + step + matches.length) % Math.max(matches.length, 1));
    }
    const match = matches[chosen];
    if (event.key === "Enter" && match) open(match.to, match.search);
  };
  return (
    <>
      <input
        className="search"
        type="search"
        role="combobox"
        aria-label="Name of a page, or an allocation's id"
        aria-expanded="true"
        aria-controls="palette-list"
        aria-activedescendant={matches.length > 0 ? `palette-${chosen}` : undefined}
        placeholder="Name of a page, or an allocation's id"
        value={typed}
        autoFocus
        onChange={(event) => {
          setTyped(event.target.value);
          setAt(0);
        }}
        onKeyDown={pressed}
      />
      <ul id="palette-list" role="listbox" aria-label="Pages" className="palette">
        {matches.map((match, index) => (
          <li key={match.to} id={`palette-${index}`} role="option" aria-selected={index === chosen} onClick={() => open(match.to, match.search)}>
            {match.title}
          </li>
        ))}
      </ul>
      {matches.length === 0 && <p className="soft">No page has this name.</p>}
    </>
  );
}

function Shortcuts({ places }: { places: readonly Place[] }) {
  const [areOn, setOn] = useSingleKeys();
  return (
    <>
      <label className="check">
        <input type="checkbox" checked={areOn} onChange={(event) => setOn(event.target.checked)} />
        Shortcuts of single keys
      </label>
      <p className="help">Switch them off where you speak to your computer, or press keys by accident. This browser remembers it.</p>
      <dl className="shortcuts">
        <div>
          <dt>Open a page by its name</dt>
          <dd>
            <kbd>Ctrl</kbd> <kbd>K</kbd>
          </dd>
        </div>
        {areOn && <SingleKeys places={places} />}
      </dl>
    </>
  );
}

function SingleKeys({ places }: { places: readonly Place[] }) {
  return (
    <>
      <div>
        <dt>This list</dt>
        <dd>
          <kbd>?</kbd>
        </dd>
      </div>
      {places.map((place) => (
        <div key={place.to}>
          <dt>{place.title}</dt>
          <dd>
            <kbd>g</kbd> <kbd>{place.key}</kbd>
          </dd>
        </div>
      ))}
    </>
  );
}
