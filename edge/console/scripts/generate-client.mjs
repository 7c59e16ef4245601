// Writes generated/schema.d.ts: the types of the API, out of its reviewed description.
// GPUAAS_API_DESCRIPTION is the path of the description, where it is not the reviewed one of this checkout.
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import openapi, { astToString } from "openapi-typescript";

const here = new URL("..", import.meta.url);
const source = process.env.GPUAAS_API_DESCRIPTION ?? new URL("../src/api/tests/snapshots/edge__api__tests__contract__openapi.snap", here);
const text = readFileSync(source, "utf8");
// A snapshot has a header between two lines of dashes.
const description = JSON.parse(text.startsWith("---") ? text.slice(text.indexOf("\n---\n") + 5) : text);
mkdirSync(new URL("generated", here), { recursive: true });
writeFileSync(new URL("generated/schema.d.ts", here), astToString(await openapi(description, { emptyObjectsUnknown: true })));
