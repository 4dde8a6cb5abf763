// The parts of the time to the first token: their names, colours, and the causes that make each of them long.
import { h } from "./dom.js";
import { edge, ms, percent } from "./format.js";

export const PARTS = [
  ["route", "router", 1, "route", "Validation, tokenization and the choice of workers took it: a long text, or a busy router."],
  ["admission_queue", "router", 0.6, "admission", "It waited for a place: more requests came than the mesh, or its tenant, may have at a time. More workers, other bounds, or a lower rate."],
  ["reserve", "decode", 1, "reserve", "The decode worker took long to reserve blocks: look at how full its KV pool is."],
  ["prefill_queue", "prefill", 0.55, "prefill queue", "Other prompts were ahead of it on that worker: another one, or fewer long prompts at a time, would shorten this."],
  ["prefill_compute", "prefill", 1, "prefill compute", "Computing the prompt took it: shorter or more often repeated prompts (prefix cache), or faster prefill workers."],
  ["first_token_return", "router", 0.85, "first token return", "The first token took long on its way back: a busy router, or a slow network."],
  ["retry", "client", 1, "retry", "An attempt failed and was made again elsewhere: the span says why."],
];

export const partsOf = (request) => PARTS
  .map(([key, process, shade, name, advice]) => ({ key, process, shade, name, advice, value: request.parts[key] ?? 0 }))
  .filter((part) => part.value > 0);

const tint = (part) => part.shade < 1 ? { opacity: String(part.shade) } : {};

export function stack(request, isTall = false) {
  const parts = partsOf(request), total = parts.reduce((sum, part) => sum + part.value, 0);
  if (!total) return null;
  return h("span", { class: `stack${isTall ? " tall" : ""}`, "aria-hidden": "true" }, parts.map((part) =>
    h("i", { class: part.process, style: { "flex-grow": String(part.value / total), "flex-basis": "0", ...tint(part) }, "data-tip": `${part.name} ${ms(part.value)}, ${percent(part.value / total)}` })));
}

export function partsLegend(request) {
  return h("div", { class: "parts-legend" }, partsOf(request).filter((part) => part.value >= 0.0005).map((part) =>
    h("span", {}, h("i", { class: `swatch ${part.process}`, style: tint(part) }), `${part.name} `, h("b", {}, ms(part.value)))));
}

const where = (part, request) => ({
  prefill: request.prefill_worker ? ` on ${request.prefill_worker}` : ` on ${request.decode_worker}`,
  decode: request.decode_worker ? ` on ${request.decode_worker}` : "",
}[part.process] ?? "");

// Sentences: how long the first token took, which part dominates, what that means.
export function verdict(request, reasons = []) {
  const lines = [];
  const top = partsOf(request).sort((a, b) => b.value - a.value)[0];
  if (request.error && request.error !== "CANCELLED") lines.push(h("p", { class: "verdict bad-text" }, h("b", {}, `It failed: ${request.error}`)));
  if (request.error === "CANCELLED") lines.push(h("p", { class: "verdict" }, "The client left before the end."));
  if (request.ttft_ms !== null && top) {
    lines.push(h("p", { class: "verdict" }, "First token after ", h("b", {}, ms(request.ttft_ms)), `; ${percent(top.value / request.ttft_ms)} of it was `,
      h("b", { class: top.process }, top.name), `${where(top, request)} (${ms(top.value)}).`, objective(request.ttft_ms, request.objective_ttft_ms)));
    const isLate = request.objective_ttft_ms && request.ttft_ms > request.objective_ttft_ms;
    if (reasons.length) lines.push(h("p", { class: "advice" }, `An attempt failed and was made again: ${reasons.join("; ")}.`));
    else if (isLate || (!request.objective_ttft_ms && top.value > 0.5 * request.ttft_ms)) lines.push(h("p", { class: "advice" }, top.advice));
  }
  if (request.tpot_ms !== null) {
    lines.push(h("p", { class: "verdict" }, "Then ", h("b", {}, ms(request.tpot_ms)), " per token.", objective(request.tpot_ms, request.objective_tpot_ms)));
    if (request.parts.kv_exposed > 2 * request.tpot_ms) lines.push(h("p", { class: "advice" }, `The KV came ${ms(request.parts.kv_exposed)} after the first token: the second one had to wait for it (kv.exposed).`));
  }
  return lines;
}

function objective(value, bound) {
  if (!bound) return null;
  return value > bound ? h("span", { class: "bad-text" }, ` ${ms(value - bound)} over the objective of ${edge(bound)}.`) : ` The objective is ${edge(bound)}.`;
}
