// Talks to a router with the real openai client for Node: node client.mjs BASE_URL BODY
// and prints what it saw, as fetch.js does. The package is found beside the working directory.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [base, text] = process.argv.slice(2);
const { default: OpenAI } = await import(pathToFileURL(createRequire(process.cwd() + "/").resolve("openai")).href);
const client = new (OpenAI.OpenAI ?? OpenAI)({ baseURL: base + "/v1", apiKey: "none", maxRetries: 0 });
const body = JSON.parse(text);

const whole = await client.chat.completions.create(body);
const seen = { whole: whole.choices[0].message.content, text: "", events: 0, order: [] };
const note = (what) => seen.order.at(-1) !== what && seen.order.push(what);
for await (const chunk of await client.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } })) {
  for (const c of chunk.choices) {
    if (c.delta.role) note("role");
    if (c.delta.content) note("text");
    seen.text += c.delta.content ?? "";
    seen.events++;
    if (c.finish_reason) note("finish"), (seen.finish = c.finish_reason);
  }
  if (chunk.usage) note("usage"), (seen.usage = chunk.usage);
}
note("done"); // the client knows no [DONE] of its own: its loop has ended
let refused;
await client.chat.completions.create({ ...body, temperature: 9000 }).catch((e) => (refused = e));
if (!(refused instanceof OpenAI.BadRequestError) || refused.code !== "invalid_request" || refused.param !== "temperature") throw new Error("a temperature of 9000: " + refused);
console.log(JSON.stringify(seen));
