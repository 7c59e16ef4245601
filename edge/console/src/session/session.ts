// The session of this tab: whether it is open, and the wait for a new login where it has ended.

type Listener = () => void;

/** `unknown` before the first answer; `ended` while requests wait for a login. */
export type SessionState = "unknown" | "open" | "ended";

/** Tabs and the window of the login report by it that a login has succeeded, and that its user has logged out. */
const CHANNEL = "gpuaas-session";
/** The user has logged out of this browser: no tab goes on showing what was theirs. */
const LOGGED_OUT = { loggedOut: true };

export class Session {
  private state: SessionState = "unknown";
  private user: string | null = null;
  private readonly listeners = new Set<Listener>();
  private waiting: { promise: Promise<void>; resolve: () => void } | null = null;
  private readonly channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel(CHANNEL);

  constructor(private readonly whoIsThere: () => Promise<string | null>, private readonly reload: () => void) {
    this.channel?.addEventListener("message", ({ data }: MessageEvent<unknown>) => this.fromTab(data));
  }

  readonly current = (): SessionState => this.state;
  /** Whose session it is; null before the first answer. */
  readonly currentUser = (): string | null => this.user;
  readonly subscribe = (listener: Listener): (() => void) => {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  };

  /** An answer has named the user. Requests that wait go on where it is the same user: what one user typed is not sent as another. */
  opened(user: string): void {
    if (this.user !== null && user !== this.user) {
      this.reload();
      return;
    }
    const isFirst = this.user === null;
    this.user = user;
    const waiting = this.waiting;
    this.waiting = null;
    this.change("open");
    // A tab that shows another user's pages would send its forms as this one.
    if (isFirst) this.channel?.postMessage(user);
    waiting?.resolve();
  }

  /** Resolves after the next login of the same user. */
  restored(): Promise<void> {
    if (this.waiting === null) {
      let resolve = () => {};
      const promise = new Promise<void>((done) => (resolve = done));
      this.waiting = { promise, resolve };
      this.change("ended");
    }
    return this.waiting.promise;
  }

  /** Reports a login to all tabs; they find out whose. */
  announce(): void {
    this.channel?.postMessage(null);
  }

  /** Reports a logout to all tabs. */
  left(): void {
    this.channel?.postMessage(LOGGED_OUT);
  }

  /** Asks whether there is a session again; false where there is none yet. */
  async check(): Promise<boolean> {
    if (this.state === "ended") await this.ask();
    return this.current() !== "ended";
  }

  /** Another tab has a session of this user, or its user has logged out. To a tab with a session of the same user the first is no news. */
  private fromTab(message: unknown): void {
    if (this.state === "unknown") return;
    if (typeof message === "object" && message !== null) {
      // Without a user, the page is that of the login.
      if (this.user !== null) this.reload();
    } else if (this.state === "ended" || message !== this.user) void this.ask();
  }

  private async ask(): Promise<void> {
    const user = await this.whoIsThere();
    if (user !== null) this.opened(user);
  }

  private change(state: SessionState): void {
    this.state = state;
    this.listeners.forEach((listener) => listener());
  }
}

/** The longest address that the service returns to. */
const MOST_RETURN_TO = 1024;

/** Where a login begins, and to which page of the console it returns: without its filters, where they are too long. */
export function loginUrl(returnTo: string): string {
  // The service takes no backslash, which browsers read as a slash; in a query they leave it as it is.
  const address = returnTo.replaceAll("\\", "%5C");
  const to = address.length <= MOST_RETURN_TO ? address : address.replace(/[?#].*/, "");
  return `/console/login?${new URLSearchParams({ return_to: to }).toString()}`;
}

const LOGIN_WINDOW = "gpuaas-login";

/** Closes the small window of a login that has ended on another page than its last one: after a second attempt, which begins on the page of an error. */
export function closeLoginWindow(): void {
  if (window.name === LOGIN_WINDOW) window.close();
}

/** The page that the window of a login ends on. */
export const LOGGED_IN = "/console/logged-in";

/** Logs in in a small window, so that the page and what was typed in it stay as they are. False where the browser opens none. */
export function logInInWindow(): boolean {
  const opened = window.open(loginUrl(LOGGED_IN), LOGIN_WINDOW, "popup,width=520,height=680");
  opened?.focus();
  return opened !== null && !opened.closed;
}

/** A page that the browser kept while another one was open is as it was then, although its user may have logged out since: it is loaded again. */
export function loadAgainWhenRestored(reload: () => void): void {
  window.addEventListener("pageshow", ({ persisted }) => persisted && reload());
}
