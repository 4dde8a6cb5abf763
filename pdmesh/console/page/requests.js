// Requests as a list: the latest, the slowest, or those of one bar.
import { h, show, empty } from "./dom.js";
import { ago, ms } from "./format.js";
import { stack } from "./parts.js";

const route = (request) => {
  const decode = request.decode_worker || "no worker";
  return request.mode === "remote" && request.prefill_worker ? `${request.prefill_worker} → ${decode}` : `${decode}${request.mode === "local" ? " alone" : ""}`;
};

function tags(request) {
  return [
    request.error && h("span", { class: "tag bad" }, request.error.toLowerCase()),
    request.met === false && !request.error && h("span", { class: "tag bad" }, "missed"),
    request.parts.retry > 0 && h("span", { class: "tag" }, "retried"),
  ];
}

function item(request, nowS, chosen, onOpen) {
  const isChosen = chosen && chosen.trace_id === request.trace_id && chosen.span_id === request.span_id;
  const tenant = request.tenant ? ` · ${request.tenant}` : "";
  return h("li", {}, h("button", {
    type: "button", "aria-current": isChosen ? "true" : "false", "data-key": request.span_id, "data-trace": request.trace_id,
    "aria-label": `Request ${request.request_id}, first token after ${ms(request.ttft_ms)}. Show its trace`, onclick: () => onOpen(request),
  },
  h("span", { class: "what" }, route(request), tags(request)), h("span", { class: "time" }, ms(request.ttft_ms)),
  h("span", { class: "sub" }, `${request.input_tokens} in${request.cached_tokens ? ` (${request.cached_tokens} cached)` : ""}, ${request.output_tokens} out${tenant} · ${ago(nowS - request.start_s - request.total_ms / 1000)}`),
  h("span", { class: "sub right" }, request.tpot_ms === null ? "" : `${ms(request.tpot_ms)} per token`),
  stack(request)));
}

// `options`: nowS, chosen request or null, onOpen, title and text of the empty list, note above it.
export function drawRequests(container, requests, options) {
  const held = container.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const scrolled = container.querySelector("ol")?.scrollTop ?? 0;
  if (!requests.length) {
    show(container, empty(options.title, options.text));
    return;
  }
  const list = h("ol", { class: "requests" }, requests.map((request) => item(request, options.nowS, options.chosen, options.onOpen)));
  show(container, options.note ? h("p", { class: "note-line" }, options.note) : null, list);
  list.scrollTop = scrolled;
  if (held) list.querySelector(`[data-key="${held}"]`)?.focus({ preventScroll: true });
}
