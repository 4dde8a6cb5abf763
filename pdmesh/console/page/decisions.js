// Decisions: why requests were placed as they were, and why pools grew or shrank.
import { h, show, empty } from "./dom.js";
import { ago, ms, plural } from "./format.js";

const opened = new Set();

function candidates(decision) {
  if (!decision.candidates.length) return null;
  const rows = decision.candidates.map((each) => h("tr", { class: each.chosen ? "chosen" : "" },
    h("td", {}, each.chosen ? "✓" : ""), h("td", {}, each.prefill || "(decode itself)"), h("td", {}, each.decode), h("td", {}, each.ttft_ms ? ms(each.ttft_ms) : ""),
    h("td", {}, String(each.cached_tokens)), h("td", {}, each.cost === null ? "" : each.cost.toFixed(3)), h("td", {}, each.note)));
  const box = h("details", { "data-key": `d${decision.request_id}`, open: opened.has(decision.request_id) },
    h("summary", {}, `${plural(decision.candidates.length, "candidate")} among ${plural(decision.num_workers, "worker")}`),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["", "prefill", "decode", "TTFT", "cached", "cost", "note"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))));
  box.addEventListener("toggle", () => (box.open ? opened.add(decision.request_id) : opened.delete(decision.request_id)));
  return box;
}

function policyItem(decision, options) {
  const chosen = decision.candidates.find((each) => each.chosen);
  const request = options.requests.find((each) => each.request_id === decision.request_id);
  return h("li", {}, h("div", { class: "line" },
    h("b", {}, chosen ? (chosen.prefill ? `${chosen.prefill} → ${chosen.decode}` : `${chosen.decode} alone`) : "no worker"),
    h("span", { class: "tag" }, decision.policy), h("span", { class: "hint" }, `${decision.num_tokens} tokens`),
    request ? h("button", { type: "button", class: "tag", "data-key": `o${decision.request_id}`, style: { height: "auto", border: "0" }, onclick: () => options.onOpen(request) }, "its trace") : null,
    h("span", { class: "when" }, ago(options.nowS - decision.at_s))),
  h("div", { class: "why" }, decision.reason), candidates(decision));
}

function scalingItem(decision, options) {
  const isChange = decision.before !== decision.replicas;
  return h("li", {}, h("div", { class: "line" }, h("b", {}, `${decision.name} ${isChange ? `${decision.before} → ${decision.replicas}` : `stays at ${decision.replicas}`}`),
    decision.held ? h("span", { class: "tag" }, "held") : null, h("span", { class: "when" }, ago(options.nowS - decision.at_s))),
  h("div", { class: "why" }, decision.reason));
}

// `options`: nowS, requests (those whose traces are known), onOpen.
export function drawDecisions(container, kind, state, options) {
  const held = container.contains(document.activeElement) ? document.activeElement.closest("[data-key]")?.dataset.key : null;
  const list = kind === "policy" ? state.policy : state.autoscaler, scrolled = container.querySelector("ul")?.scrollTop ?? 0;
  if (!list.length) {
    show(container, kind === "policy"
      ? empty("No request was placed yet", "Each choice of workers appears here, with the candidates that were compared.")
      : empty("No autoscaler is at work on this machine", "pdmesh up --autoscale starts and drains workers as the objectives need, and says why."));
    return;
  }
  const shown = h("ul", { class: "decisions" }, list.map((each) => (kind === "policy" ? policyItem(each, options) : scalingItem(each, options))));
  show(container, shown);
  shown.scrollTop = scrolled;
  const again = held && shown.querySelector(`[data-key="${CSS.escape(held)}"]`);
  if (again) (again.querySelector("summary") ?? again).focus({ preventScroll: true });
}
