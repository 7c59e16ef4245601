// Values: amounts, whole numbers, instants, command lines, refusals.
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { describe, expect, it } from "vitest";
import { parseLossless } from "../src/api/lossless-json.ts";
import { failureOf, secondsOf } from "../src/api/failure.ts";
import type { FieldSpec } from "../src/ui/action.tsx";
import { refusalText } from "../src/ui/refusal.ts";
import { changeText, money, moneyMicro, parseMoney, plainAmount } from "../src/format/money.ts";
import { duration, relativeTime } from "../src/format/time.ts";
import { gpuctl, mebibytes } from "../src/format/text.ts";
import { cellsOf } from "../src/pages/gpu-map.tsx";
import { onboardingSteps } from "../src/pages/node-onboarding.tsx";
import { approvalsByChange, consequencesOf } from "../src/pages/skus.tsx";
import { power } from "../src/pages/operations.tsx";
import { KINDS } from "../src/pages/supervision-tree.tsx";
import { nextOrder, sorted } from "../src/ui/order.ts";
import { labelChanges, labelsOf } from "../src/format/labels.ts";
import { newAllocation } from "../src/pages/rent.tsx";
import { forecast, perDay } from "../src/pages/spending.tsx";
import { byCause, merged, runbookOf } from "../src/pages/stuck-entities.tsx";
import { lastsSeconds } from "../src/pages/catalog.tsx";
import { boundsText, valueOf } from "../src/pages/policies.tsx";
import { entity, node, nodes } from "./fixtures.ts";

/** The rules of alerts, and their runbooks in the book. */
const ALERTS = "../../deploy/alerts";
const RUNBOOKS = "../../deploy/runbooks";

const digits = (text: string) => text.replace(/[^\d.-]/g, "");

describe("orders of a list", () => {
  it("compare numbers in texts as numbers, and have what has no value last", () => {
    const rows = ["rack-10", null, "rack-9"];
    expect(sorted(rows, (row) => row, false)).toEqual(["rack-9", "rack-10", null]);
    expect(sorted(rows, (row) => row, true)).toEqual(["rack-10", "rack-9", null]);
    expect(sorted([3n, 20n, 100n], (row) => row, true)).toEqual([100n, 20n, 3n]);
  });
  it("leave what is equal as it was, and the list that is given", () => {
    const rows = [{ id: "b", of: 1 }, { id: "a", of: 1 }, { id: "c", of: 0 }];
    expect(sorted(rows, ({ of }) => of, false).map(({ id }) => id)).toEqual(["c", "b", "a"]);
    expect(sorted(rows, ({ of }) => of, true).map(({ id }) => id)).toEqual(["b", "a", "c"]);
    expect(rows.map(({ id }) => id)).toEqual(["b", "a", "c"]);
  });
  it("are ascending, descending, and the list's own in turn", () => {
    expect(nextOrder(undefined, "since")).toBe("since");
    expect(nextOrder("since", "since")).toBe("-since");
    expect(nextOrder("-since", "since")).toBeUndefined();
    expect(nextOrder("-since", "state")).toBe("state");
  });
});

describe("amounts", () => {
  it("have all digits at any size", () => {
    expect(digits(money(123_456_789_012_345, "EUR"))).toBe("1234567890123.45");
    expect(digits(money(9_007_199_254_740_993n, "EUR"))).toBe("90071992547409.93");
    expect(digits(money(-5, "EUR"))).toBe("-0.05");
    expect(digits(money(500, "JPY"))).toBe("500");
    expect(digits(money(1, "KWD"))).toBe("0.001");
    expect(money(0, null)).toBe("0");
  });
  it("of millionths show what a minor unit has not", () => {
    expect(digits(moneyMicro(8_333_333, "EUR"))).toBe("0.083333");
    expect(digits(moneyMicro(9_007_199_254_740_993_000_000n, "EUR"))).toBe("90071992547409.93");
  });
  it("of a posting are its change, or what was written off", () => {
    expect(changeText({ kind: "usage", change_micro: -4_000_000, amount_micro: 4_000_000 }, "EUR")).toBe(moneyMicro(-4_000_000, "EUR"));
    expect(changeText({ kind: "write_off", change_micro: 0, amount_micro: 4_000_000 }, "EUR")).toBe(`${moneyMicro(4_000_000, "EUR")} written off`);
  });

  it("that were typed are whole minor units or refused", () => {
    expect(parseMoney("20.00", "EUR")).toEqual({ minor: 2000 });
    expect(parseMoney(" 20.5 ", "EUR")).toEqual({ minor: 2050 });
    expect(parseMoney("0.29", "EUR")).toEqual({ minor: 29 });
    expect(parseMoney("500", "JPY")).toEqual({ minor: 500 });
    for (const wrong of ["", "0", "0.00", "-5", "1e3", "20,00", "1.234", "0x10", "9".repeat(20), "NaN"]) {
      expect(parseMoney(wrong, "EUR"), wrong).toHaveProperty("problem");
    }
    expect(parseMoney("5.5", "JPY")).toHaveProperty("problem");
    expect(plainAmount(2050, "EUR")).toBe("20.50");
  });
});

describe("whole numbers of answers", () => {
  it("beyond the exact range are BigInt, and strings stay as they are", () => {
    const read = parseLossless('{"a":9007199254740993,"b":-9223372036854775808,"c":"9007199254740993","d":12,"e":"\\"9007199254740993","f":1.2345678901234567,"g":[9007199254740993]}');
    expect(read).toEqual({ a: 9007199254740993n, b: -9223372036854775808n, c: "9007199254740993", d: 12, e: '"9007199254740993', f: 1.2345678901234567, g: [9007199254740993n] });
  });
});

describe("instants", () => {
  it("have the unit that reads best", () => {
    const now = Date.parse("2026-11-26T12:00:00Z");
    expect(relativeTime("2026-11-26T12:05:00Z", now)).toContain("5");
    expect(duration(0.4)).toBe("0 s");
    expect(duration(3600 * 25)).toBe("1 d 1 h");
    expect(duration(61)).toBe("1 min 1 s");
  });
  it("of Retry-After are seconds or a date, and bounded", () => {
    const now = Date.parse("2026-11-26T12:00:00Z");
    expect(secondsOf("7")).toBe(7);
    expect(secondsOf("Thu, 26 Nov 2026 12:00:30 GMT", now)).toBe(30);
    expect(secondsOf("999999")).toBe(600);
    expect(secondsOf("Thu, 26 Nov 2020 12:00:30 GMT", now)).toBe(0);
    expect(secondsOf("Thursday, 26-Nov-26 12:00:30 GMT", now)).toBe(30);
    expect(secondsOf("Thu Nov 26 12:00:30 2026", now)).toBe(30);
    expect(secondsOf("99999999999999999999999")).toBe(600);
    for (const neither of ["soon", "soon enough", "-5", "5.3", "", "2026-11-26T12:00:30Z", null]) expect(secondsOf(neither, now)).toBeNull();
  });
});

describe("refusals", () => {
  it("with a date in Retry-After are waited for by the service's clock", async () => {
    const headers = { Date: "Thu, 26 Nov 2020 12:00:00 GMT", "Retry-After": "Thu, 26 Nov 2020 12:00:25 GMT" };
    expect((await failureOf(new Response("", { status: 503, headers }))).retryAfter).toBe(25);
  });

  it("of a proxy are distinguished from those of the API", async () => {
    const own = await failureOf(Response.json({ code: "rate_limited", message: "Slow down.", correlation_id: "c1", details: {} }, { status: 429, headers: { "Retry-After": "3" } }));
    expect([own.code, own.message, own.correlationId, own.retryAfter, own.isTemporary]).toEqual(["rate_limited", "Slow down.", "c1", 3, true]);
    const foreign = await failureOf(new Response("<html>Bad Gateway</html>", { status: 502 }));
    expect([foreign.code, foreign.correlationId, foreign.isTemporary]).toEqual(["unreadable", null, true]);
    expect(foreign.message).not.toContain("<html>");
  });

  const fields: FieldSpec[] = [
    { name: "port", label: "SSH port" },
    { name: "gpus", sentAs: "gpu_count", label: "GPUs" },
    { name: "scope", label: "Scope" },
    { name: "sku", sentAs: "selector.sku", label: "Nodes of this SKU alone" },
  ];
  const read = async (message: string, details: Record<string, unknown>) => {
    const failure = await failureOf(Response.json({ code: "invalid_request", message, correlation_id: "c1", details: { service: "api", ...details } }, { status: 400 }));
    return refusalText(failure, fields);
  };

  it.each([
    ["Field `port` cannot be read: invalid type, expected u16 (line 1, column 99).", { field: "port", line: 1, column: 99 }, "“SSH port” cannot be read: invalid type, expected u16."],
    ["Field `gpu_count` cannot be read: expected a whole number from 1 to 64 (line 1, column 15).", { field: "gpu_count", line: 1, column: 15 }, "“GPUs” cannot be read: expected a whole number from 1 to 64."],
    ["`port` is refused: it is closed.", { field: "port" }, "“SSH port” is refused: it is closed."],
    ["There is one of this name already.", { field: "port" }, "“SSH port”: There is one of this name already."],
    ["Field `scope.user_id` cannot be read: too long (line 2, column 7).", { field: "scope.user_id", line: 2, column: 7 }, "“Scope” cannot be read: too long."],
    ["Field `selector.sku` cannot be read: too long (line 1, column 3).", { field: "selector.sku", line: 1, column: 3 }, "“Nodes of this SKU alone” cannot be read: too long."],
    ["The body is not valid JSON at line 1, column 7.", { line: 1, column: 7 }, "The body is not valid JSON."],
    ["Field `other` cannot be read: too long (line 1, column 3).", { field: "other", line: 1, column: 3 }, "Field `other` cannot be read: too long."],
    // No place in a request: it is the text's own.
    ["In (line 1, column 2) of your file.", {}, "In (line 1, column 2) of your file."],
  ])("of a form name the field by its label, and no place in the request: %s", async (message, details, shown) => {
    expect(await read(message, details)).toBe(shown);
  });
});

describe("command lines", () => {
  it("quote what a shell would read otherwise", () => {
    expect(gpuctl("nodes", "retire", "a1", ["--reason", "it's $(rm -rf /)"])).toBe("gpuctl nodes retire a1 --reason 'it'\\''s $(rm -rf /)'");
    expect(gpuctl("nodes", "retire", ["--reason", "--yes"])).toBe("gpuctl nodes retire --reason=--yes");
    expect(gpuctl("x", ["--name", ""], ["--label", undefined])).toBe("gpuctl x");
    expect(gpuctl("policy", "set", "k", ["-5"], ["--reason", "r"])).toBe("gpuctl policy set k --reason r -- -5");
    expect(gpuctl("roles", "bind", ["-ann"], ["admin"], ["--reason", "r"])).toBe("gpuctl roles bind --reason r -- -ann admin");
  });
});

describe("a rental", () => {
  it("sends only what was chosen", () => {
    expect(newAllocation({ sku: "h100-8", gpus: "2", region: "", name: " ", key: "", queue: "" })).toEqual({ sku: "h100-8", gpu_count: 2 });
    expect(newAllocation({ sku: "h100-8", gpus: "2", name: " a ", queue: "5", labels: "team=vision, env=dev" })).toEqual({
      sku: "h100-8", gpu_count: 2, name: "a", queue_seconds: 300, labels: { team: "vision", env: "dev" },
    });
    expect(labelsOf("a=b=c,,x")).toEqual([["a", "b=c"], ["x", ""]]);
  });
  it("lasts as long as what is available", () => {
    expect(lastsSeconds(1000, 250)).toBe(14_400);
    expect(lastsSeconds(-5, 250)).toBe(0);
    expect(lastsSeconds(1000, 0)).toBeNull();
    expect(lastsSeconds(9_007_199_254_740_993n, 1_000_000_000)).toBe(32_425_917_317);
  });
});

describe("what is shown together", () => {
  it("spending is summed by the day in UTC, exactly", () => {
    const now = Date.parse("2026-11-26T12:00:00Z");
    const days = perDay(
      [
        { at: "2026-11-26T00:00:00Z", change_micro: -1 },
        { at: "2026-11-25T23:59:59Z", change_micro: -2 },
        { at: "2026-11-25T00:00:00Z", change_micro: -9_007_199_254_740_993n as unknown as number },
        { at: "2020-01-01T00:00:00Z", change_micro: -100 },
      ],
      now,
      3,
    );
    expect(days.map(({ micro }) => micro)).toEqual([0n, 9_007_199_254_740_995n, 1n]);
  });
  it("stuck entities are grouped by their cause, each once", () => {
    const parked = { ...entity, id: "b", status: "parked" as const, last_error: "boom", waits_for: null };
    const groups = byCause(merged([entity, { ...entity, id: "c" }], [parked, entity]));
    expect(groups.map(({ cause, entities }) => [cause, entities.length])).toEqual([["allocation: agent has not confirmed the clean-up", 2], ["allocation: boom", 1]]);
  });
  it("stuck entities have the runbooks of the alerts about them", () => {
    const rules = readdirSync(ALERTS)
      .filter((name) => name.endsWith(".yaml"))
      .flatMap((name) => readFileSync(`${ALERTS}/${name}`, "utf8").split("- alert: ").slice(1))
      .map((rule) => ({ expr: rule, runbook: /runbook_id: (\S+)/.exec(rule)?.[1] }));
    const about = (expr: string) => rules.filter((rule) => rule.expr.includes(expr)).map(({ runbook }) => runbook);
    const rest = about('entities_overdue{kind!=');
    expect([rest, about("entities_parked")]).toEqual([[runbookOf(entity)], [runbookOf({ ...entity, status: "parked" })]]);
    for (const kind of KINDS) {
      const own = about(`entities_overdue{kind="${kind}"}`);
      expect(own.length > 0 ? own : rest).toEqual([runbookOf({ kind, status: "awake" })]);
    }
    const shown = new Set(KINDS.flatMap((kind) => (["awake", "parked"] as const).map((status) => runbookOf({ kind, status }))));
    for (const runbook of shown) expect(existsSync(`${RUNBOOKS}/${runbook}.md`)).toBe(true);
  });
  it("policies have their type and bounds", () => {
    expect([valueOf({ type: "int" }, "7"), valueOf({ type: "bool" }, "false"), valueOf({ type: "string" }, "7")]).toEqual([7, false, "7"]);
    expect([boundsText({ min: 0, max: 9 }), boundsText({ min: 1 }), boundsText({ enum: ["a", "b"] }), boundsText({})]).toEqual(["0 to 9", "at least 1", "one of a, b", "any"]);
  });
  it("sizes read in the larger unit", () => {
    expect([mebibytes(512), mebibytes(81_920)]).toEqual(["512 MiB", "80 GiB"]);
  });
});

describe("labels", () => {
  it("that are gone are removed, and those that are the same are not sent", () => {
    expect(labelChanges({ team: "vision", env: "dev" }, "env=prod, cost=a=b")).toEqual({ team: null, env: "prod", cost: "a=b" });
    expect(labelChanges({ team: "vision" }, "team=vision")).toEqual({});
  });
});

describe("a forecast", () => {
  it("is what was spent this month, and the current cost until its end", () => {
    const now = Date.parse("2026-11-26T12:00:00Z");
    const day = (text: string, micro: bigint) => ({ day: Date.parse(`${text}T00:00:00Z`), micro });
    const found = forecast([day("2026-10-31", 900n), day("2026-11-24", 70n), day("2026-11-25", 70n), day("2026-11-26", 5n)], 100, now);
    // 4.5 days of 24 hours are left.
    expect(found).toEqual({ monthToDate: 145n, month: 145n + 108n * 100_000_000n, averagePerDay: (900n + 70n + 70n) / 3n, perDay: 2_400_000_000n });
  });
});

describe("nodes", () => {
  it("have their GPUs by what each does", () => {
    const of = (change: object) => cellsOf({ ...node(1, change) }).map(({ use }) => use).join(" ");
    expect(of({ inventory: null, gpus_total: 2 })).toBe("missing missing");
    expect(of({})).toBe("held held free free free free free free");
    // No allocation gets a GPU of a node that is out of service.
    for (const state of ["offline", "quarantined", "draining"]) expect(of({ state })).toBe("held held withheld withheld withheld withheld withheld withheld");
    const gpus = node(1).inventory?.gpus.slice(0, 4).map((gpu, index) => ({ ...gpu, is_free: index === 2 })) ?? [];
    const inventory = { ...node(1).inventory, gpus } as never;
    const resets = [{ gpu_uuid: gpus[2]?.uuid ?? "", phase: "resetting", begun_at: "" }];
    const finding = { ...nodes[0]?.health.findings[0], gpu_uuid: gpus[0]?.uuid };
    expect(of({ inventory, gpus_total: 5, gpu_resets: resets, health: { findings: [finding] } })).toBe("faulty held resetting withheld missing");
    expect(of({ inventory, gpus_total: 4, health: { findings: [{ ...finding, cleared_at: "2026-11-26T00:00:00Z" }] } })).toBe("held held free withheld");
  });
  it("have the steps of their onboarding, ticked off as they are done", () => {
    const done = (change: object) => onboardingSteps(node(2, change)).map(({ isDone }) => (isDone ? "x" : "-")).join("");
    const nothing = { agent: null, inventory: null, hardware: [] };
    expect(done({ ...nothing, state: "registered" })).toBe("x----");
    expect(done({ ...nothing, state: "bootstrap-issued" })).toBe("xx---");
    expect(done({ state: "enrolling", inventory: null })).toBe("xxx--");
    expect(done({ state: "enrolling" })).toBe("xxx--");
    expect(done({ state: "active", hardware: [] })).toBe("xxxxx");
  });
});

describe("approvals", () => {
  it("name for each change who has approved it in which role, and which role has not", () => {
    const given = { actor: "user:eve", at: "", change: "deprecate" as const, reason: "r", role: "inventory_owner" as const };
    expect(approvalsByChange([given]).map(({ change, roles }) => [change, ...roles.map(({ role, approval }) => `${role} ${approval?.actor ?? "–"}`)])).toEqual([
      ["deprecate", "platform_operations –", "inventory_owner user:eve"],
    ]);
  });
});

describe("numbers with a fraction", () => {
  it("are read as they are, however many digits follow the point", () => {
    for (const text of ["0.30000000000000004", "1.9234567890000001", "-12.345678901234567", "1.2345678901234567e-7", "9007199254740993.5"]) {
      expect(parseLossless(`{"a":${text},"b":9007199254740993}`), text).toEqual({ a: Number(text), b: 9_007_199_254_740_993n });
    }
  });
});

describe("an approval", () => {
  const first = { actor: "user:eve", at: "2026-11-26T00:00:00Z", change: "deprecate", reason: "r", role: "inventory_owner", expires_at: "2026-11-27T00:00:00Z" } as const;
  it("says whether it waits, takes effect, or takes the place of another", () => {
    const { expires_at: _, ...carriedOut } = first;
    expect(consequencesOf("deprecate", "platform_operations", [])).toContain("when the other role has approved it too");
    expect(consequencesOf("deprecate", "platform_operations", [carriedOut])).toContain("when the other role has approved it too");
    expect(consequencesOf("deprecate", "platform_operations", [first])).toContain("Yours takes effect at once");
    expect(consequencesOf("deprecate", "inventory_owner", [first])).toContain("changes nothing");
    expect(consequencesOf("deactivate", "platform_operations", [first])).toContain("takes the place of that one");
  });
});

describe("what operators see", () => {
  it("has small powers in watts, and every kind of entity", () => {
    expect([0, 312.4, 999, 1000, 12_340].map(power)).toEqual(["0 W", "312 W", "999 W", "1 kW", "12.3 kW"]);
    expect(KINDS).toContain("browser_session");
  });
});
