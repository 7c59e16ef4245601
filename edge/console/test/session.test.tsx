// The session: what a form sends survives its end, and is sent once and as the same user.
import { describe, expect, it, vi } from "vitest";
import { screen, waitFor } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { session } from "../src/api/client.ts";
import { loadAgainWhenRestored, Session } from "../src/session/session.ts";
import { sku } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { refusal } from "./mock-api.ts";

async function rentForm() {
  openConsole("/rent?sku=h100-8");
  const name = await screen.findByLabelText(/^Name/);
  await userEvent.type(name, "my-run");
  return screen.findByRole("button", { name: "Rent" });
}

const rentals = () => mock.sent.filter(({ path }) => path === "/api/v1/allocations");

describe("a session that ends while a form is filled", () => {
  it("keeps the form and sends it once after the login, under the same key", async () => {
    const rent = await rentForm();
    mock.hasSession = false;
    await userEvent.click(rent);
    expect(await screen.findByText(/Your session has ended/)).toBeTruthy();
    expect((screen.getByLabelText(/^Name/) as HTMLInputElement).value).toBe("my-run");
    expect(rentals()).toHaveLength(1);
    mock.hasSession = true;
    await session.check();
    await waitFor(() => expect(rentals()).toHaveLength(2));
    await screen.findByRole("heading", { level: 1, name: /Allocation/ });
    const [refused, accepted] = rentals();
    expect(refused?.key).toBe(accepted?.key);
    expect(accepted?.body).toMatchObject({ sku: "h100-8", gpu_count: 1, name: "my-run" });
    expect(screen.queryByText(/Your session has ended/)).toBeNull();
  });

  it("makes no request while it waits for the login", async () => {
    const rent = await rentForm();
    mock.hasSession = false;
    await userEvent.click(rent);
    await screen.findByText(/Your session has ended/);
    const before = mock.sent.length;
    await session.check();
    expect(mock.sent).toHaveLength(before);
    expect(session.current()).toBe("ended");
    mock.hasSession = true;
    await session.check();
    await waitFor(() => expect(rentals()).toHaveLength(2));
  });

  it("offers the login in another tab where the browser blocks its window", async () => {
    const rent = await rentForm();
    mock.hasSession = false;
    await userEvent.click(rent);
    const open = vi.spyOn(window, "open").mockReturnValue(null);
    await userEvent.click(await screen.findByRole("button", { name: "Log in" }));
    const link = await screen.findByRole("link", { name: "Log in in another tab" });
    expect(link.getAttribute("href")).toBe("/console/login?return_to=%2Fconsole%2Flogged-in");
    expect(link.getAttribute("target")).toBe("_blank");
    open.mockReturnValue({ focus() {}, closed: false } as unknown as Window);
    await userEvent.click(screen.getByRole("button", { name: "Log in" }));
    expect(screen.queryByRole("link", { name: "Log in in another tab" })).toBeNull();
    mock.hasSession = true;
    await session.check();
    await screen.findByRole("heading", { level: 1, name: /Allocation/ });
  });

  it("says that there is no login yet where one is claimed", async () => {
    const rent = await rentForm();
    mock.hasSession = false;
    await userEvent.click(rent);
    const claim = await screen.findByRole("button", { name: "I have logged in" });
    await userEvent.click(claim);
    await screen.findByText("The service sees no login in this browser yet.");
    mock.hasSession = true;
    await userEvent.click(claim);
    await screen.findByRole("heading", { level: 1, name: /Allocation/ });
    expect(new Set(rentals().map(({ key }) => key)).size).toBe(1);
  });

  it("goes on only for the same user", async () => {
    let user: string | null = null;
    const reload = vi.fn();
    const own = new Session(() => Promise.resolve(user), reload);
    own.opened("ann");
    const restored = vi.fn();
    void own.restored().then(restored);
    user = "eve";
    await own.check();
    expect(reload).toHaveBeenCalledOnce();
    expect(restored).not.toHaveBeenCalled();
    expect(own.current()).toBe("ended");
    user = "ann";
    await own.check();
    await waitFor(() => expect(restored).toHaveBeenCalledOnce());
  });
});

describe("a tab", () => {
  it("whose browser logs in as another user is reloaded, and one of the same user is not", async () => {
    const elsewhere = new BroadcastChannel("gpuaas-session");
    const reload = vi.fn();
    const whoIsThere = vi.fn(() => Promise.resolve("eve"));
    const own = new Session(whoIsThere, reload);
    own.opened("ann");
    elsewhere.postMessage("ann");
    elsewhere.postMessage("eve");
    await waitFor(() => expect(reload).toHaveBeenCalledOnce());
    expect(whoIsThere).toHaveBeenCalledOnce();
    elsewhere.close();
  });
  it("shows nothing of its user any more once they have logged out in another one", async () => {
    const [reload, ofNobody] = [vi.fn(), vi.fn()];
    const own = new Session(() => Promise.resolve(null), reload);
    own.opened("ann");
    const atLogin = new Session(() => Promise.resolve(null), ofNobody);
    void atLogin.restored();
    new Session(() => Promise.resolve(null), () => {}).left();
    await waitFor(() => expect(reload).toHaveBeenCalledOnce());
    expect(ofNobody).not.toHaveBeenCalled();
  });
  it("that the browser has kept behind another page is loaded again", () => {
    const reload = vi.fn();
    loadAgainWhenRestored(reload);
    window.dispatchEvent(new PageTransitionEvent("pageshow", { persisted: false }));
    expect(reload).not.toHaveBeenCalled();
    window.dispatchEvent(new PageTransitionEvent("pageshow", { persisted: true }));
    expect(reload).toHaveBeenCalledOnce();
  });
  it("shows a user nothing that another one has typed in it, and sends nothing under their key", async () => {
    sessionStorage.setItem("gpuaas-drafts-of", "another-user");
    sessionStorage.setItem("gpuaas-draft:rent:h100-8", JSON.stringify({ name: "theirs" }));
    sessionStorage.setItem("gpuaas-key:rent:h100-8", "their-key");
    openConsole("/rent?sku=h100-8");
    expect((await screen.findByLabelText<HTMLInputElement>(/^Name/)).value).toBe("");
    await userEvent.click(screen.getByRole("button", { name: "Rent" }));
    await screen.findByRole("heading", { level: 1, name: /Allocation/ });
    expect(rentals()[0]?.key).not.toBe("their-key");
  });
  it("reports its user to the other tabs when it is opened", async () => {
    const elsewhere = new BroadcastChannel("gpuaas-session");
    const received = vi.fn();
    elsewhere.addEventListener("message", ({ data }: MessageEvent<unknown>) => received(data));
    new Session(() => Promise.resolve(null), () => {}).opened("a-user-of-this-test");
    await waitFor(() => expect(received).toHaveBeenCalledWith("a-user-of-this-test"));
    elsewhere.close();
  });
});

describe("a form", () => {
  it("is sent once, however often its button is pressed", async () => {
    const rent = await rentForm();
    rent.click();
    rent.click();
    await screen.findByRole("heading", { level: 1, name: /Allocation/ });
    expect(rentals()).toHaveLength(1);
  });

  it("is sent again under the same key after an answer that was lost", async () => {
    const rent = await rentForm();
    let lost = true;
    mock.overrides.push(({ method }) => {
      const answer = method === "POST" && lost ? Response.error() : null;
      if (method === "POST") lost = false;
      return answer;
    });
    await userEvent.click(rent);
    await screen.findByText(/No answer arrived/);
    await userEvent.type(screen.getByLabelText(/^Name/), "-2");
    await userEvent.click(await screen.findByRole("button", { name: "Send again" }));
    await screen.findByRole("heading", { level: 1, name: /Allocation/ });
    const keys = rentals().map(({ key }) => key);
    expect(keys).toHaveLength(2);
    expect(new Set(keys).size).toBe(1);
  });

  it("that was refused gets a new key once it is changed", async () => {
    const rent = await rentForm();
    let refused = true;
    mock.overrides.push(({ method }) => (method === "POST" && refused ? refusal(409, "insufficient_capacity", "No node has that many free GPUs.") : null));
    await userEvent.click(rent);
    await screen.findByText(/No node has that many free GPUs/);
    expect(screen.getByText("0199e3f4-cafe")).toBeTruthy();
    refused = false;
    await userEvent.type(screen.getByLabelText(/^Name/), "-2");
    await userEvent.click(screen.getByRole("button", { name: "Rent" }));
    await screen.findByRole("heading", { level: 1, name: /Allocation/ });
    expect(new Set(rentals().map(({ key }) => key)).size).toBe(2);
  });

  it("that was refused is another request when it is sent again as it is", async () => {
    const rent = await rentForm();
    let refused = true;
    mock.overrides.push(({ method }) => (method === "POST" && refused ? refusal(409, "insufficient_capacity", "No node has that many free GPUs.") : null));
    await userEvent.click(rent);
    await screen.findByText(/No node has that many free GPUs/);
    // GPUs are free again. Under the first key the API would answer with its refusal for a day.
    refused = false;
    await userEvent.click(screen.getByRole("button", { name: "Send again" }));
    await screen.findByRole("heading", { level: 1, name: /Allocation/ });
    expect(new Set(rentals().map(({ key }) => key)).size).toBe(2);
  });

  it("that was refused after an answer was lost keeps its key until it is changed", async () => {
    const rent = await rentForm();
    const answers = [() => Response.error(), () => refusal(409, "state_conflict", "This was carried out before."), () => refusal(409, "state_conflict", "This was carried out before.")];
    mock.overrides.push(({ method }) => (method === "POST" ? (answers.shift()?.() ?? null) : null));
    await userEvent.click(rent);
    await screen.findByText(/No answer arrived/);
    await userEvent.click(await screen.findByRole("button", { name: "Send again" }));
    await screen.findByText(/carried out before/);
    await userEvent.click(await screen.findByRole("button", { name: "Send again" }));
    await waitFor(() => expect(rentals()).toHaveLength(3));
    expect(new Set(rentals().map(({ key }) => key)).size).toBe(1);
    await screen.findByText(/carried out before/);
    await userEvent.type(screen.getByLabelText(/^Name/), "-2");
    await userEvent.click(screen.getByRole("button", { name: "Rent" }));
    await screen.findByRole("heading", { level: 1, name: /Allocation/ });
    expect(new Set(rentals().map(({ key }) => key)).size).toBe(2);
  });

  it("that was changed after an answer that was lost is another request where the person decides so", async () => {
    const rent = await rentForm();
    const answers = [() => Response.error(), () => refusal(422, "idempotency_key_reused", "The key was used for another request.")];
    mock.overrides.push(({ method }) => (method === "POST" ? (answers.shift()?.() ?? null) : null));
    await userEvent.click(rent);
    await screen.findByText(/No answer arrived/);
    await userEvent.type(screen.getByLabelText(/^Name/), "-2");
    await userEvent.click(await screen.findByRole("button", { name: "Send again" }));
    await screen.findByText(/has arrived, and nothing was sent since/);
    await userEvent.click(screen.getByRole("button", { name: "Send it as another request" }));
    expect(rentals()).toHaveLength(2);
    await userEvent.click(screen.getByRole("button", { name: "Rent" }));
    await screen.findByRole("heading", { level: 1, name: /Allocation/ });
    const keys = rentals().map(({ key }) => key);
    expect(keys[0]).toBe(keys[1]);
    expect(keys[2]).not.toBe(keys[0]);
    expect(rentals()[2]?.body).toMatchObject({ name: "my-run-2" });
  });

  it("of another SKU begins with that SKU, and not with what was typed for the first", async () => {
    mock.overrides.push(({ url }) => (url.includes("/api/v1/skus") ? Response.json({ items: [sku, { ...sku, id: "0199e3f4-5c1b-7a00-8000-000000000011", name: "a100-4" }], next_page: null }) : null));
    const first = openConsole("/rent?sku=h100-8");
    await userEvent.type(await screen.findByLabelText(/^Name/), "kept");
    first.unmount();
    openConsole("/rent?sku=a100-4");
    expect(((await screen.findByLabelText("SKU")) as HTMLSelectElement).value).toBe("a100-4");
    expect((screen.getByLabelText(/^Name/) as HTMLInputElement).value).toBe("");
  });

  it("sends no region that the chosen SKU has not, and shows a choice that is not offered", async () => {
    sessionStorage.setItem("gpuaas-draft:rent:h100-8", JSON.stringify({ key: "revoked-key" }));
    mock.overrides.push(({ url }) =>
      url.includes("/api/v1/skus") ? Response.json({ items: [sku, { ...sku, id: "0199e3f4-5c1b-7a00-8000-000000000011", name: "a100-4", allowed_regions: ["us-1"] }], next_page: null }) : null,
    );
    openConsole("/rent?sku=h100-8");
    await userEvent.selectOptions(await screen.findByLabelText(/^Region/), "eu-north-1");
    const key = screen.getByLabelText(/^SSH key/) as HTMLSelectElement;
    expect(key.selectedOptions[0]?.textContent).toBe("revoked-key, not offered");
    await userEvent.selectOptions(screen.getByLabelText("SKU"), "a100-4");
    expect((screen.getByLabelText(/^Region/) as HTMLSelectElement).value).toBe("");
    await userEvent.click(screen.getByRole("button", { name: "Rent" }));
    await screen.findByRole("heading", { level: 1, name: /Allocation/ });
    expect(rentals()[0]?.body).toEqual({ sku: "a100-4", gpu_count: 1, ssh_key_ids: ["revoked-key"] });
  });

  it("is there again after the tab was reloaded", async () => {
    const first = openConsole("/rent?sku=h100-8");
    await userEvent.type(await screen.findByLabelText(/^Name/), "kept");
    first.unmount();
    openConsole("/rent?sku=h100-8");
    expect(((await screen.findByLabelText(/^Name/)) as HTMLInputElement).value).toBe("kept");
  });
});

describe("a logout", () => {
  it("ends the session, and leaves nothing that was typed", async () => {
    await rentForm();
    expect(sessionStorage.getItem("gpuaas-draft:rent:h100-8")).toContain("my-run");
    expect(sessionStorage.getItem("gpuaas-draft-began:rent:h100-8")).not.toBeNull();
    const left: string[] = [];
    vi.spyOn(console, "error").mockImplementation((line) => void left.push(String(line)));
    await userEvent.click(screen.getByRole("button", { name: "Log out" }));
    await waitFor(() => expect(sessionStorage.length).toBe(0));
    expect(mock.sent.map(({ method, path, body }) => [method, path, body])).toEqual([["POST", "/console/logout", null]]);
  });
  it("of a session that has ended before asks for no login", async () => {
    await rentForm();
    vi.spyOn(console, "error").mockImplementation(() => {});
    mock.hasSession = false;
    await userEvent.click(screen.getByRole("button", { name: "Log out" }));
    await waitFor(() => expect(sessionStorage.length).toBe(0));
    expect(mock.sent.map(({ path }) => path)).toEqual(["/console/logout"]);
    expect(session.current()).toBe("open");
    expect(screen.queryByText(/Your session has ended/)).toBeNull();
  });
});
