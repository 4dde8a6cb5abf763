// The prompt box: the answer as it comes, its figures, and its own waterfall once the trace is there.
import { byId, h, show } from "./dom.js";
import { fetchTrace } from "./api.js";
import { ms } from "./format.js";
import { drawWaterfall, startView } from "./waterfall.js";

let running = null;

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    text += value;
    const whole = text.split("\n");
    text = whole.pop();
    for (const line of whole) if (line) yield JSON.parse(line);
  }
}

async function ask(model, signal) {
  const response = await fetch("/api/generate", {
    method: "POST", signal, headers: { "content-type": "application/json" },
    body: JSON.stringify({ prompt: byId("prompt").value, model, max_tokens: Number(byId("max-tokens").value), temperature: Number(byId("temperature").value) }),
  });
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error ?? `the console answered ${response.status}`);
  return response.body;
}

async function follow(body, answer) {
  let traceId = "", done = null;
  for await (const line of lines(body)) {
    if (line.trace_id) traceId = line.trace_id;
    else if (line.text) answer.append(line.text);
    else if (line.done) done = line.done;
    else if (line.error) throw Object.assign(new Error(line.error), { traceId });
    answer.scrollTop = answer.scrollHeight;
  }
  return { traceId, done };
}

// Spans of several processes arrive one after another: shown when the request's own has arrived, and again after a while.
async function showTrace(container, traceId, note) {
  const tools = h("div", { class: "tabs" }), body = h("div", {}), opened = new Set();
  show(container, h("div", { class: "head" }, h("p", { class: "hint" }, note), tools), body);
  let view = null, num = -1;
  for (let attempt = 0; attempt < 24 && container.contains(body); attempt += 1) {
    const trace = await fetchTrace(traceId, true).catch(() => null), request = trace?.requests[0];
    if (request && trace.spans.length !== num) {
      num = trace.spans.length;
      view ??= startView(request);
      drawWaterfall(body, tools, trace, request, view, opened);
      attempt = Math.max(attempt, 14);
    }
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
  if (num < 0 && container.contains(body)) show(body, h("p", { class: "hint" }, "No trace has come. Do the routers and workers send theirs to this console (--otlp-endpoint)?"));
}

async function run(model) {
  const answer = byId("answer"), trace = byId("answer-trace");
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").hidden = answer.hidden = false;
  answer.className = "answer waiting";
  show(answer);
  show(trace);
  try {
    const { traceId, done } = await follow(await ask(model, running.signal), answer);
    const note = done ? `${done.output_tokens} tokens, first after ${ms(done.ttft_ms)}, all after ${ms(done.total_ms)}` : "";
    showTrace(trace, traceId, note);
  } catch (error) {
    const text = error.name === "AbortError" ? "stopped" : error.message;
    answer.append(h("span", { class: "bad-text" }, `${answer.textContent ? "\n" : ""}${text}`));
    if (error.traceId) showTrace(trace, error.traceId, "What became of it");
  } finally {
    answer.classList.remove("waiting");
    byId("send").disabled = false;
    byId("stop").hidden = true;
    running = null;
  }
}

export function installPrompt(modelOf) {
  const form = byId("prompt-form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    if (byId("prompt").value.trim()) run(modelOf());
    else byId("prompt").focus();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
}
