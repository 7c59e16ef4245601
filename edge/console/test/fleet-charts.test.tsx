// The fleet over time: sums by hour, gaps in place of zeros, and the same as a table.
import { describe, expect, it } from "vitest";
import { screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { meanUse, sumsOf, useByGroup } from "../src/pages/fleet-charts.tsx";
import { fleetHistory } from "./fixtures.ts";
import { refusal } from "./mock-api.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

const [measured, unmeasured, quiet, running] = fleetHistory.hours.map(sumsOf);

describe("an hour of the fleet", () => {
  it("has the sums of its GPUs, its rentals and its revenue", () => {
    expect(measured).toEqual({ at: Date.parse("2026-11-29T08:00:00Z"), total: 32, held: 12, free: 12, unavailable: 8, begun: 3, p50: 31.5, p95: 90, revenue: new Map([["EUR", 2_500_000_000n]]) });
  });

  it("has no number for what was not measured, and zero for what did not happen", () => {
    expect([unmeasured?.total, unmeasured?.held, unmeasured?.begun]).toEqual([null, null, 0]);
    expect([quiet?.begun, quiet?.p50, quiet?.revenue?.get("EUR")]).toEqual([0, null, undefined]);
    expect([running?.total, running?.begun, running?.revenue]).toEqual([32, null, null]);
  });

  it("without a measurement changes no average", () => {
    expect(meanUse([measured, unmeasured, quiet].flatMap((hour) => hour ?? []))).toBe(37.5);
    expect(meanUse([unmeasured].flatMap((hour) => hour ?? []))).toBeNull();
  });

  it("counts for its SKU and region, the most used first", () => {
    expect(useByGroup(fleetHistory.hours).map(({ region, use, total }) => [region, Math.round(use), total])).toEqual([["eu-west-1", 67, 16], ["eu-north-1", 8, 16]]);
  });
});

describe("the fleet over time", () => {
  const asked: URLSearchParams[] = [];
  async function open(address: string) {
    mock.role = "admin";
    asked.length = 0;
    mock.overrides.push(({ url }) => {
      const at = new URL(url);
      if (at.pathname === "/api/v1/admin/fleet-history") asked.push(at.searchParams);
      return null;
    });
    const view = openConsole(address);
    return { ...view, card: within(await screen.findByRole("region", { name: "Over time" })) };
  }

  it("is drawn with what each chart shows, and names its gaps", async () => {
    const { card } = await open("/operations");
    for (const name of [
      "GPUs by hour, 38 % held on average",
      "Rentals by hour, 3 in all",
      "Waiting times by hour, at most 1 min 30 s at the 95th percentile",
      /^Revenue in EUR by hour, .*45\.00.* in all$/,
    ]) {
      expect(await card.findByRole("img", { name })).toBeTruthy();
    }
    expect(card.getByText("In one hour the GPUs were not counted: the lines have a gap there.")).toBeTruthy();
  });

  it("is a table, too, the newest hour first", async () => {
    const { card } = await open("/operations");
    await userEvent.click(await card.findByText("Each hour as a table"));
    const rows = within(card.getByRole("group", { name: "The fleet by hour" })).getAllByRole("row").slice(1);
    const column = (title: string) => rows.map((row) => row.querySelector(`[data-title="${title}"]`)?.textContent);
    expect(column("Held")).toEqual(["12", "12", "not measured", "12"]);
    expect(column("Rentals")).toEqual(["not measured", "0", "0", "3"]);
    expect(column("Median wait")).toEqual(["–", "–", "–", "31 s"]);
    expect(column("Revenue in EUR").map((text) => text?.replace(/[^\d.a-z ]/g, "").trim())).toEqual(["not measured", "0.00", "20.00", "25.00"]);
  });

  it("is that of the SKU, the region and the range in the address", async () => {
    const { card, router } = await open("/operations?sku=h100-8&range=24%20hours");
    await card.findByRole("img", { name: /^GPUs by hour/ });
    const hours = () => (Date.now() - Date.parse(asked.at(-1)?.get("from") ?? "")) / 3_600_000;
    expect([asked.at(-1)?.get("sku"), asked.at(-1)?.get("region"), Math.round(hours())]).toEqual(["h100-8", null, 24]);
    await userEvent.selectOptions(card.getByLabelText("Range"), "31 days");
    await waitFor(() => expect(Math.round(hours())).toBe(743));
    expect(router.state.location.search).toMatchObject({ sku: "h100-8", range: "31 days" });
  });

  it("says what to ask for where it is too much for one answer", async () => {
    mock.overrides.unshift(({ url }) =>
      new URL(url).pathname === "/api/v1/admin/fleet-history" ? refusal(400, "invalid_request", "These hours have more than 10000 rows of GPUs; ask for fewer hours, or name a `sku` or a `region`.", {}, { field: "from" }) : null,
    );
    const { card } = await open("/operations?range=31%20days");
    expect(await card.findByText(/ask for fewer hours/)).toBeTruthy();
    expect(card.getByLabelText("SKU")).toBeTruthy();
  });
});
