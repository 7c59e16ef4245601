// The session of this tab: whether it is open, and the wait for a new login where it has ended.

type Listener = () => void;

/** `unknown` before the first answer; `ended` while requests wait for a login. */
export type SessionState = "unknown" | "open" | "ended";

/** Tabs and the window of the login report by it that a login has succeeded. */
const CHANNEL = "gpuaas-session";

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

  /** Asks whether there is a session again. */
  async check(): Promise<void> {
    if (this.state === "ended") await this.ask();
  }

  /** Another tab has a session of this user. To a tab with one of the same user that is no news. */
  private fromTab(user: unknown): void {
    if (this.state !== "unknown" && (this.state === "ended" || user !== this.user)) void this.ask();
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

/** Where a login begins, and to which page of the console it returns. */
export function loginUrl(returnTo: string): string {
  return `/console/login?${new URLSearchParams({ return_to: returnTo }).toString()}`;
}

/** The page that the window of a login ends on. */
export const LOGGED_IN = "/console/logged-in";

/** Logs in in a small window, so that the page and what was typed in it stay as they are. */
export function logInInWindow(): void {
  const opened = window.open(loginUrl(LOGGED_IN), "gpuaas-login", "popup,width=520,height=680");
  opened?.focus();
}
