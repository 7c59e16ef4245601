// The budget of what a browser loads.
import { expect, it } from "vitest";
// @ts-expect-error: a script without types
import { BUDGET, firstView, overBudget } from "../scripts/compress-assets.mjs";

const manifest = {
  "index.html": { file: "assets/index.js", css: ["assets/index.css"], imports: ["_shared.js"], dynamicImports: ["src/pages/money.tsx"] },
  "_shared.js": { file: "assets/shared.js", imports: ["index.html"] },
  "src/pages/overview.tsx": { file: "assets/overview.js", imports: ["_shared.js"] },
  "src/pages/money.tsx": { file: "assets/money.js" },
};

it("counts what the first view imports, and not what it loads later", () => {
  expect(firstView(manifest, ["src/pages/overview.tsx"]).sort()).toEqual(["assets/index.css", "assets/index.js", "assets/overview.js", "assets/shared.js"]);
});

it("is refused where the first view or everything is larger", () => {
  const sizes = (index: number, money: number) => new Map([["assets/index.js", index], ["assets/money.js", money]]);
  const complaints = (of: Map<string, number>) => overBudget(of, manifest, ["src/pages/overview.tsx"]).complaints as string[];
  expect(complaints(sizes(BUDGET.firstView, 0))).toEqual([]);
  expect(complaints(sizes(BUDGET.firstView + 1, 0))).toHaveLength(1);
  expect(complaints(sizes(1, BUDGET.everything))).toHaveLength(1);
});
