/* async (base, body) => what was seen. What a page does: fetch, and read the body as it comes. */
(async (base, body) => {
  const post = (b) => fetch(base + "/v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(b) });
  const whole = await (await post(body)).json();
  const seen = { whole: whole.choices[0].message.content, text: "", events: 0, order: [], reads: 0 };
  const note = (what) => seen.order.at(-1) !== what && seen.order.push(what);
  const response = await post({ ...body, stream: true, stream_options: { include_usage: true } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) break;
    seen.reads++;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") { note("done"); continue; }
      const chunk = JSON.parse(line.slice(6));
      for (const c of chunk.choices) {
        if (c.delta.role) note("role");
        if (c.delta.content) note("text");
        seen.text += c.delta.content ?? "";
        seen.events++;
        if (c.finish_reason) note("finish"), (seen.finish = c.finish_reason);
      }
      if (chunk.usage) note("usage"), (seen.usage = chunk.usage);
    }
  }
  return seen;
})
