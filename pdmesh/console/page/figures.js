// The row of figures at the top, and current problems.
import { h, show } from "./dom.js";
import { ms, percent, perSecond, plural } from "./format.js";

function figure(name, value, note, kind = "") {
  return h("dl", { class: `figure ${kind}`, "data-tip": note || null }, h("dt", {}, name), h("dd", {}, value), h("div", { class: "note" }, note || " "));
}

function kept(model) {
  if (!model || !model.num_judged) return figure("Objectives kept", "–", model ? "none is set" : "no request yet");
  const share = model.num_met / model.num_judged;
  const bound = model.objective?.quantile ?? 0.99;
  return figure("Objectives kept", percent(share), `${model.num_met} of ${plural(model.num_judged, "request")}`, share < bound ? "bad" : "good");
}

export function drawFigures(container, state, model) {
  const inflight = state.routers.reduce((sum, router) => sum + router.inflight, 0);
  const queued = state.routers.reduce((sum, router) => sum + router.queued, 0);
  const errors = model?.num_errors ?? 0;
  const pair = (distribution) => (distribution?.count ? [ms(distribution.p50), `p90 ${ms(distribution.p90)} · p99 ${ms(distribution.p99)}`] : ["–", "no request yet"]);
  show(container,
    figure("Requests", [perSecond(state.rates.requests_per_s), h("small", {}, " /s")], errors ? `${plural(errors, "error")} in the window` : "no errors in the window"),
    figure("In flight", String(inflight), queued ? `${queued} queued` : "no queue", ""),
    figure("TTFT, median", ...pair(model?.ttft_ms)),
    figure("TPOT, median", ...pair(model?.tpot_ms)),
    kept(model),
    figure("Output", [perSecond(state.rates.output_tokens_per_s), h("small", {}, " tokens/s")], plural(state.workers.filter((worker) => worker.state === "alive").length, "worker") + " alive"));
}

export function drawNotices(container, state, isAway) {
  const notices = [
    ...(isAway ? [`The console does not answer. What stands here was true at ${new Date(1000 * state.at_s).toLocaleTimeString()}.`] : []),
    ...state.routers.filter((router) => router.problem).map((router) => `Router ${router.address} does not answer: ${router.problem}`),
    ...state.routers.filter((router) => !router.problem && !router.registry_connected).map((router) => `Router ${router.id} has no connection to the registry; it goes on with the workers it knows.`),
    ...state.workers.filter((worker) => worker.state === "lost").map((worker) => `Worker ${worker.id} is lost.`),
    ...state.workers.flatMap((worker) => worker.breakers.filter((breaker) => breaker.left_out).map((breaker) => `Worker ${worker.id} is left out as ${breaker.role}: ${breaker.reason}`)),
  ];
  const shown = notices.slice(0, 4);
  if (container.textContent !== shown.join("")) show(container, shown.map((text) => h("div", { class: "notice" }, text)));
}
