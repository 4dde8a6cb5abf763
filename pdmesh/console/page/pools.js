// KV pools, prefix caches and speculation of the workers.
import { h, show, empty } from "./dom.js";
import { count, percent, plural } from "./format.js";

function hits(worker) {
  const all = worker.hit_tokens + worker.prefilled_tokens;
  if (!all && !worker.roles.includes("prefill")) return null;
  return all ? `${percent(worker.hit_tokens / all)} of ${count(all)} prompt tokens came from the cache` : "no prompt yet";
}

function moved(worker) {
  const ways = [[worker.fetched_tokens, "fetched from other workers"], [worker.restored_tokens, "restored from tiers"]];
  const parts = ways.filter(([tokens]) => tokens).map(([tokens, how]) => `${count(tokens)} tokens ${how}`);
  return parts.length ? `${parts.join(", ")}: ${saved(worker.saved_s)}` : null;
}

function saved(seconds) {
  // By the worker's own latency model: where that was wrong, or a tier slow, bringing KV has cost time.
  return seconds < 0 ? `${(-seconds).toFixed(1)} s slower than computing` : `${seconds.toFixed(1)} s of computing saved`;
}

function notes(worker) {
  const guess = worker.speculation;
  return [
    worker.blocks.cached ? `${count(worker.blocks.cached)} blocks hold a reusable prefix` : null, hits(worker), moved(worker),
    guess && guess.verified ? `${guess.tokens_per_step.toFixed(2)} tokens a step, ${percent(guess.kept / guess.verified)} of guesses kept` : null,
    worker.preemptions ? `${count(worker.preemptions)} preempted` : null,
    worker.handoff_failures ? `${plural(worker.handoff_failures, "failed hand-off")}` : null,
  ].filter(Boolean).join(" · ");
}

function pool(worker) {
  const { total, free, cached } = worker.blocks, used = Math.max(0, total - free), idle = Math.min(cached, free);
  const share = (blocks) => ({ width: `${total ? 100 * blocks / total : 0}%` });
  const kind = worker.roles.length > 1 ? "both" : worker.roles[0];
  return h("div", { class: "pool" },
    h("div", { class: "pool-head" }, h("b", { class: kind }, worker.id), h("span", {}, total ? `${count(used)} of ${count(total)} blocks held` : "no pool reported")),
    h("div", { class: "pool-bar", role: "meter", "aria-label": `KV pool of ${worker.id}`, "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": used,
      "data-tip": `${worker.id}\n${used} held by requests\n${cached} hold a reusable prefix\n${free} free (${idle} of them cached)` },
    h("i", { class: kind, style: share(used) }), h("i", { class: "cached", style: share(idle) })),
    h("div", { class: "pool-note" }, notes(worker)));
}

export function drawPools(container, legend, workers) {
  if (!workers.length) {
    show(container, empty("No worker is known", "Workers appear here as soon as a router sees them."));
    show(legend);
    return;
  }
  show(container, h("div", { class: "pools" }, workers.map(pool)));
  show(legend, h("span", {}, h("i", { class: "swatch decode" }), "held"), h("span", {}, h("i", { class: "swatch", style: { background: "var(--cached)" } }), "free, but cached"));
}
