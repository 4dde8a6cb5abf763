// One request's spans over time, and their summary.
import { h, show, empty } from "./dom.js";
import { ms, size } from "./format.js";
import { partsLegend, stack, verdict } from "./parts.js";
import { attributeText, rowsOf, shortName } from "./spans.js";

const INTERESTING = ["pdmesh.tokens", "pdmesh.cached_tokens", "pdmesh.kv.bytes", "pdmesh.kv.transport", "pdmesh.reason", "pdmesh.attempt", "error.type"];

function tipOf(row) {
  const { span } = row;
  const said = INTERESTING.filter((key) => key in span.attributes)
    .map((key) => `${key.replace(/^pdmesh\./, "")}: ${key === "pdmesh.kv.bytes" ? size(span.attributes[key]) : attributeText(span.attributes[key])}`);
  const chunks = row.ticks.filter((tick) => tick.name === "chunk").length;
  return [`${span.name} · ${span.instance || span.service}`, `${ms(row.end - row.start)}, from ${ms(Math.max(0, row.start))}`,
    ...said, chunks ? `${chunks} chunk${chunks === 1 ? "" : "s"}` : null, span.problem || null].filter(Boolean).join("\n");
}

function details(row) {
  const { span } = row;
  const list = (attributes) => h("dl", {}, Object.entries(attributes).sort().map(([key, value]) => [h("dt", {}, key), h("dd", {}, attributeText(value))]));
  return h("div", { class: "details" },
    h("div", {}, h("b", {}, span.name), ` on ${span.instance || span.service}: ${ms(row.end - row.start)}, from ${ms(Math.max(0, row.start))} to ${ms(row.end)}`),
    span.problem ? h("div", { class: "bad-text" }, span.problem) : null, list(span.attributes),
    row.ticks.slice(0, 40).map((tick) => [h("h3", {}, `${tick.name} at ${ms(tick.at)}`), list(tick.attributes)]));
}

function timeLabel(row, left, right) {
  const text = ms(row.end - row.start);
  if (left > 100) return h("span", { class: "wf-time", style: { right: "0" } }, `${text}, at ${ms(row.start)} →`);
  if (right < 78) return h("span", { class: "wf-time", style: { left: `${right}%` } }, text);
  if (left > 22) return h("span", { class: "wf-time", style: { right: `${100 - left}%` } }, text);
  return h("span", { class: `wf-time${row.isWrapper ? "" : " inside"}`, style: { right: `${Math.max(0, 100 - right)}%` } }, text);
}

function lane(row, domain, mark) {
  const at = (time) => 100 * time / domain;
  const left = Math.max(0, at(row.start)), right = Math.min(100, at(row.end));
  const bar = left <= 100 && h("span", {
    class: `wf-bar ${row.process}${row.isWrapper ? " wrap" : ""}${row.span.failed ? " failed" : ""}`,
    style: { left: `${left}%`, width: `${Math.max(0, right - left)}%` },
  });
  const inside = (time) => time >= 0 && time <= domain;
  return h("div", { class: "wf-lane" }, bar,
    row.ticks.filter((tick) => inside(tick.at)).map((tick) => h("span", { class: "wf-tick", style: { left: `${at(tick.at)}%` } })),
    row.steps.filter((step) => inside(step.at) && step.at >= row.start && step.at <= row.end).map((step) => h("span", { class: "wf-step decode", style: { left: `${at(step.at)}%` } })),
    mark && mark <= domain ? h("span", { class: "wf-mark", style: { left: `${at(mark)}%` } }) : null,
    timeLabel(row, left, right));
}

function rowElement(row, domain, mark, opened) {
  const toggle = () => (opened.has(row.span.span_id) ? opened.delete(row.span.span_id) : opened.add(row.span.span_id));
  const name = h("button", { class: "wf-name", type: "button", "aria-expanded": opened.has(row.span.span_id), "data-key": row.span.span_id, style: { "padding-left": `${row.depth * 11}px` } },
    h("span", { class: row.process }, "● "), shortName(row.span), h("small", {}, row.depth ? row.span.instance : ""));
  return { element: h("div", { class: `wf-row${opened.has(row.span.span_id) ? " open" : ""}`, "data-tip": tipOf(row), "data-span": row.span.name }, name, lane(row, domain, mark)), toggle };
}

function axisElement(domain, isNarrow) {
  return [h("div", { class: "wf-axis" }), h("div", { class: "wf-axis", "aria-hidden": "true" },
    (isNarrow ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]).map((share) => h("span", { style: { left: `${100 * share}%` } }, ms(domain * share))))];
}

function lanes(container, rows, request, view, opened) {
  const total = Math.max(...rows.map((row) => row.end), 0.001);
  const domain = view === "first" && request.ttft_ms ? Math.min(total, request.ttft_ms * 1.06) : total;
  const grid = h("div", { class: "wf", role: "group", "aria-label": "Spans over time" }, axisElement(domain, container.clientWidth < 560));
  for (const row of rows) {
    const { element, toggle } = rowElement(row, domain, request.ttft_ms, opened);
    element.addEventListener("click", () => {
      toggle();
      lanes(container, rows, request, view, opened);
      container.querySelector(`[data-key="${row.span.span_id}"]`)?.focus({ preventScroll: true });
    });
    grid.append(element);
    if (opened.has(row.span.span_id)) grid.append(details(row));
  }
  show(container, grid);
}

// Why attempts failed, each reason once.
const reasonsOf = (rows) => [...new Set(rows.filter((row) => row.span.name === "retry").map((row) => row.span.attributes["pdmesh.reason"]).filter(Boolean))];

export const startView = (request) => (request.ttft_ms && request.total_ms > 3 * request.ttft_ms ? "first" : "all");

// `trace`: what /api/traces gave; `view`: "all" or "first" (to the first token). `tools`: where the choice between them is placed.
export function drawWaterfall(container, tools, trace, request, view, opened = new Set()) {
  const rows = rowsOf(trace, request);
  if (!rows.length) {
    show(container, empty("The trace is not complete yet", "The request's own span comes last."));
    return;
  }
  const body = h("div", {});
  show(container, verdict(request, reasonsOf(rows)), stack(request, true), partsLegend(request), body);
  const choose = (chosen) => {
    show(tools, [["first", "To the first token"], ["all", "All of it"]].map(([key, label]) =>
      h("button", { type: "button", "aria-pressed": key === chosen, onclick: () => { choose(key); tools.querySelector('[aria-pressed="true"]')?.focus(); } }, label)));
    lanes(body, rows, request, chosen, opened);
  };
  if (request.ttft_ms) choose(view);
  else { show(tools); lanes(body, rows, request, "all", opened); }
}
