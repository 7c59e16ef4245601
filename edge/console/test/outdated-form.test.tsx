// What a form shows, and has changed when the form is sent: a price, and what others have changed meanwhile.
import { beforeEach, describe, expect, it } from "vitest";
import { act, fireEvent, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { answers } from "./answers.ts";
import { node, sku, uuid } from "./fixtures.ts";
import { refusal } from "./mock-api.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

/** What the service asks for a GPU and hour, in minor units; null: it does not say. */
let price: number | null = 250;

beforeEach(() => {
  price = 250;
  mock.overrides.push(async ({ url }) => {
    const at = new URL(url);
    if (at.pathname !== "/api/v1/billing/estimate") return null;
    if (price === null) return refusal(503, "service_unavailable", "Not at the moment.");
    const estimate = (await mock.read(at).json()) as object;
    return Response.json({ ...estimate, amount_minor_per_gpu_hour: price, minor_per_hour: price * Number(at.searchParams.get("gpu_count")) });
  });
});

/** The form with the price of its opening on screen. */
async function openForm(address = "/rent?sku=h100-8") {
  const view = openConsole(address);
  const cost = within(await screen.findByRole("complementary", { name: "What it costs" }));
  await cost.findByText("Per hour");
  return { ...view, cost };
}

const rentals = () => mock.sent.filter(({ path }) => path === "/api/v1/allocations");
const press = async (name: string) => userEvent.click(await screen.findByRole("button", { name }));
const isRented = () => screen.findByRole("heading", { level: 1, name: /Allocation/ });
/** The notice of a change, with the digits of both prices: the new one, and the old one. */
const notice = (now: string, before: string) => waitFor(() => expect(screen.getByRole("alert").textContent).toMatch(new RegExp(`it is \\D*${now} per GPU and hour, and was \\D*${before}\\.`)));

describe("a price", () => {
  it("that changed while the form was open is shown beside that of its opening, and nothing is sent before it is confirmed", async () => {
    await openForm();
    price = 300;
    await press("Rent");
    await notice("3.00", "2.50");
    expect(rentals()).toEqual([]);
    // Nothing was sent whose answer a reload would wait for.
    expect(Object.keys(sessionStorage).filter((name) => name.includes("key"))).toEqual([]);
    await press("Rent at the new price");
    await isRented();
    expect(rentals()).toHaveLength(1);
  });

  it("that changes again is confirmed again", async () => {
    await openForm();
    price = 300;
    await press("Rent");
    await notice("3.00", "2.50");
    price = 400;
    await press("Rent at the new price");
    await notice("4.00", "2.50");
    expect(rentals()).toEqual([]);
    // That of the opening needs no notice of a change, but was not on screen when the button was pressed.
    price = 250;
    await press("Rent at the new price");
    expect(await screen.findByText("The price has changed. Look at it, and send again.")).toBeTruthy();
    expect(rentals()).toEqual([]);
    await press("Send again");
    await isRented();
    expect(rentals()).toHaveLength(1);
  });

  it("that is read again while the form is open is shown before anything is sent", async () => {
    const { queries } = await openForm();
    price = 300;
    await act(() => queries.refetchQueries({ queryKey: ["estimate"] }));
    await notice("3.00", "2.50");
    await press("Rent at the new price");
    await isRented();
    expect(rentals()).toHaveLength(1);
  });

  it("of a SKU is no change of that of another one", async () => {
    const other = { ...sku, id: "0199e3f4-5c1b-7a00-8000-000000000011", name: "l4-1", price: { currency: "EUR", amount_minor_per_gpu_hour: 40 } };
    mock.overrides.unshift(({ url }) => (new URL(url).pathname === "/api/v1/skus" ? Response.json({ items: [sku, other], next_page: null }) : null));
    const { cost } = await openForm();
    price = 300;
    await press("Rent");
    await notice("3.00", "2.50");
    price = 40;
    await userEvent.selectOptions(screen.getByLabelText("SKU"), "l4-1");
    await waitFor(() => expect(cost.getByText("Per hour").parentElement?.textContent).toMatch(/0\.40/));
    expect(screen.queryByRole("alert")).toBeNull();
    await press("Rent");
    await isRented();
    expect(rentals().map(({ body }) => (body as { sku: string }).sku)).toEqual(["l4-1"]);
  });

  it("that cannot be read keeps no rental back", async () => {
    await openForm();
    price = null;
    await press("Rent");
    await isRented();
    expect(rentals()).toHaveLength(1);
  });
});

describe("a form about what others have changed meanwhile", () => {
  let amount = 250;
  /** The form that changes a SKU, whose price another administrator has changed since. */
  async function openChanged() {
    mock.role = "admin";
    amount = 250;
    mock.overrides.unshift(async ({ url, method }) => {
      const at = new URL(url);
      if (method !== "GET" || at.pathname !== "/api/v1/admin/skus") return null;
      const { items } = (await mock.read(at).json()) as { items: object[] };
      return Response.json({ items: items.map((item) => ({ ...item, price: { currency: "EUR", amount_minor_per_gpu_hour: amount } })), next_page: null });
    });
    const { queries } = openConsole("/skus");
    await press("Change…");
    const dialog = within(await screen.findByRole("dialog"));
    await userEvent.clear(dialog.getByLabelText("Regions"));
    await userEvent.type(dialog.getByLabelText("Regions"), "eu-west-1");
    amount = 300;
    await act(() => queries.refetchQueries({ queryKey: ["skus"] }));
    expect((await dialog.findByRole("alert")).textContent).toContain("Price per GPU and hour: it is 3.00, and was 2.50.");
    const send = dialog.getByRole("button", { name: "Change" }) as HTMLButtonElement;
    expect(send.disabled).toBe(true);
    fireEvent.submit(send.form as HTMLFormElement);
    expect(mock.sent).toEqual([]);
    const change = async (to: number) => {
      amount = to;
      await act(() => queries.refetchQueries({ queryKey: ["skus"] }));
    };
    return { dialog, send, change };
  }
  const bodies = () => mock.sent.map(({ body }) => body as { price: { amount_minor_per_gpu_hour: number }; allowed_regions: string[] });

  it("shows both values, and goes on with the new ones where they are taken", async () => {
    const { dialog, send } = await openChanged();
    await userEvent.click(dialog.getByRole("button", { name: "Take the new values" }));
    expect((dialog.getByLabelText("Price per GPU and hour") as HTMLInputElement).value).toBe("3.00");
    expect(dialog.queryByRole("alert")).toBeNull();
    await userEvent.click(send);
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect(bodies().map(({ price, allowed_regions }) => [price.amount_minor_per_gpu_hour, allowed_regions])).toEqual([[300, ["eu-west-1"]]]);
  });

  it("goes on as it is where that is chosen, and asks again after another change", async () => {
    const { dialog, send, change } = await openChanged();
    await userEvent.click(dialog.getByRole("button", { name: "Keep what the form has" }));
    expect(send.disabled).toBe(false);
    await change(400);
    expect((await dialog.findByRole("alert")).textContent).toContain("it is 4.00, and was 3.00.");
    // What the form has is what has become of it: there is nothing to decide.
    await change(250);
    await waitFor(() => expect(dialog.queryByRole("alert")).toBeNull());
    await change(400);
    await userEvent.click(await dialog.findByRole("button", { name: "Keep what the form has" }));
    await userEvent.click(send);
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect(bodies().map(({ price }) => price.amount_minor_per_gpu_hour)).toEqual([250]);
  });

  it("shows both values, too, where it is opened again after Escape, and sends nothing before that is decided", async () => {
    mock.role = "admin";
    let host = "gpu-1.example.net";
    answers(`/api/v1/admin/nodes/${uuid(51)}`, () => Response.json(node(1, { host })));
    const { queries } = openConsole(`/nodes/${uuid(51)}`);
    const escape = async () => {
      await userEvent.keyboard("{Escape}");
      await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    };
    const changeHost = async (to: string) => {
      host = to;
      await act(() => queries.refetchQueries({ queryKey: ["node"] }));
    };
    const reopened = async () => {
      await press("Edit…");
      return within(await screen.findByRole("dialog"));
    };
    await userEvent.type((await reopened()).getByLabelText(/^Name/), "b");
    await escape();
    await changeHost("gpu-9.example.net");
    let dialog = await reopened();
    const notice = await dialog.findByText(/This has changed since you opened the form/);
    expect(notice.parentElement?.textContent).toContain("Host: it is gpu-9.example.net, and was gpu-1.example.net.");
    expect(dialog.getByRole<HTMLButtonElement>("button", { name: "Edit" }).disabled).toBe(true);
    // What was decided holds for the next opening.
    await userEvent.click(dialog.getByRole("button", { name: "Keep what the form has" }));
    await escape();
    dialog = await reopened();
    expect(dialog.getByLabelText<HTMLInputElement>(/^Host/).value).toBe("gpu-1.example.net");
    expect(dialog.queryByText(/This has changed/)).toBeNull();
    await escape();
    await changeHost("gpu-8.example.net");
    dialog = await reopened();
    await userEvent.click(await dialog.findByRole("button", { name: "Take the new values" }));
    await userEvent.click(dialog.getByRole("button", { name: "Edit" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect(mock.sent.map(({ body }) => body)).toMatchObject([{ host: "gpu-8.example.net", name: "rack-1b" }]);
    expect(Object.keys(sessionStorage).filter((key) => key.startsWith("gpuaas-draft"))).toEqual(["gpuaas-drafts-of"]);
  });

  /** The form of a SKU at the third version, which the service has at the fourth: it refuses what is based on an earlier one. */
  async function openStale(current: object) {
    mock.role = "admin";
    let isChanged = false;
    const versions: (string | null)[] = [];
    mock.overrides.unshift(async (request) => {
      const at = new URL(request.url);
      if (request.method === "PATCH") {
        const version = request.headers.get("If-Match");
        versions.push(version);
        isChanged = true;
        return version === '"4"' ? null : refusal(409, "state_conflict", "The SKU has changed since the version in If-Match; read it again and repeat your change on it.", {}, { field: "If-Match", current_generation: 4 });
      }
      if (at.pathname !== "/api/v1/admin/skus" || !isChanged) return null;
      const { items } = (await mock.read(at).json()) as { items: object[] };
      return Response.json({ items: items.map((item) => ({ ...item, generation: 4, ...current })), next_page: null });
    });
    openConsole("/skus");
    await press("Change…");
    const dialog = within(await screen.findByRole("dialog"));
    await userEvent.clear(dialog.getByLabelText("Regions"));
    await userEvent.type(dialog.getByLabelText("Regions"), "us-1");
    await userEvent.click(dialog.getByRole("button", { name: "Change" }));
    await dialog.findByText(/The SKU has changed/);
    return { dialog, versions };
  }

  it("is refused by the service where the page did not know of it, and shows both values then", async () => {
    const { dialog, versions } = await openStale({ price: { currency: "EUR", amount_minor_per_gpu_hour: 300 } });
    const notices = () => dialog.queryAllByRole("alert").map(({ textContent }) => textContent);
    await waitFor(() => expect(notices().join(" ")).toContain("Price per GPU and hour: it is 3.00, and was 2.50."));
    expect(dialog.queryByRole("button", { name: "Continue" })).toBeNull();
    const send = dialog.getByRole("button", { name: "Send again" }) as HTMLButtonElement;
    expect(send.disabled).toBe(true);
    await userEvent.click(dialog.getByRole("button", { name: "Keep what the form has" }));
    await userEvent.click(dialog.getByRole("button", { name: "Change" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect(versions).toEqual(['"3"', '"4"']);
    expect(bodies().at(-1)).toMatchObject({ price: { amount_minor_per_gpu_hour: 250 }, allowed_regions: ["us-1"] });
  });

  it("goes on by one button where nothing that the form has differs", async () => {
    const { dialog, versions } = await openStale({ allowed_regions: ["us-1"] });
    await userEvent.click(await dialog.findByRole("button", { name: "Continue" }));
    await userEvent.click(dialog.getByRole("button", { name: "Change" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect(versions).toEqual(['"3"', '"4"']);
  });
});
