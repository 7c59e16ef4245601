// Every route of the API is called by some page, or its description says why it is not.
import { readFileSync } from "node:fs";
import ts from "typescript";
import { expect, it } from "vitest";

const DESCRIPTION = process.env["GPUAAS_API_DESCRIPTION"] ?? "../src/api/tests/snapshots/edge__api__tests__contract__openapi.snap";
const METHODS = ["get", "post", "put", "patch", "delete"];

/** The extension of a route's description that says why no page calls it. */
const WITHOUT_PAGE = "x-without-console";

/** A route, and the reason why no page calls it. */
type Described = [route: string, reason: string | undefined];

/** The routes of the description. */
function described(): Described[] {
  const text = readFileSync(DESCRIPTION, "utf8");
  const { paths } = JSON.parse(text.startsWith("---") ? text.slice(text.indexOf("\n---\n") + 5) : text) as {
    paths: Record<string, Record<string, Record<string, string>>>;
  };
  const routes = (path: string, operations: Record<string, Record<string, string>>): Described[] =>
    METHODS.flatMap((method) => {
      const operation = operations[method];
      return operation ? [[`${method.toUpperCase()} ${path}`, operation[WITHOUT_PAGE]]] : [];
    });
  return Object.entries(paths).flatMap(([path, operations]) => routes(path, operations));
}

/** The routes that the sources call: each call of the client, by the type of its path, which is a union where the path is made of parts. */
function called(): Set<string> {
  const { config } = ts.readConfigFile("tsconfig.json", (path) => ts.sys.readFile(path));
  const { options, fileNames } = ts.parseJsonConfigFileContent(config, ts.sys, ".");
  const program = ts.createProgram(fileNames, options);
  const checker = program.getTypeChecker();
  const found = new Set<string>();
  const visit = (at: ts.Node): void => {
    if (ts.isCallExpression(at) && ts.isPropertyAccessExpression(at.expression) && at.expression.expression.getText() === "api" && at.arguments[0]) {
      const type = checker.getTypeAtLocation(at.arguments[0]);
      for (const part of type.isUnion() ? type.types : [type]) {
        if (part.isStringLiteral()) found.add(`${at.expression.name.text} ${part.value}`);
      }
    }
    ts.forEachChild(at, visit);
  };
  program.getSourceFiles().filter(({ isDeclarationFile }) => !isDeclarationFile).forEach(visit);
  return found;
}

it("each route is called by a page, or its description has the reason why not", () => {
  const [all, inPages] = [described(), called()];
  expect(inPages.size).toBeGreaterThan(80);
  // Call these in a page, or give the #[utoipa::path] of their handlers: extensions(("x-without-console" = json!("…")))
  expect(all.filter(([route, reason]) => !inPages.has(route) && !reason).map(([route]) => route)).toEqual([]);
  // No route has both a page and a reason for having none.
  expect(all.filter(([route, reason]) => inPages.has(route) && reason).map(([route]) => route)).toEqual([]);
});
