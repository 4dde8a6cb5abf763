// Wires the page: the state comes as events, and each part draws itself from it.
import { fetchRequests, fetchTrace, follow } from "./api.js";
import { byId, empty, h, installTips, show, tabs } from "./dom.js";
import { drawDecisions } from "./decisions.js";
import { drawFigures, drawNotices } from "./figures.js";
import { edge, plural, size } from "./format.js";
import { drawHistogram } from "./histogram.js";
import { drawPools } from "./pools.js";
import { installPrompt } from "./prompt.js";
import { drawRequests } from "./requests.js";
import { installTheme } from "./theme.js";
import { drawTopology } from "./topology.js";
import { drawWaterfall, startView } from "./waterfall.js";

const page = { state: null, model: "", list: "recent", bar: null, found: null, open: null, decisions: "policy", isHeld: false, isLate: false, isAway: false };

const modelNow = () => page.state?.models.find((model) => model.name === page.model);

function pickModel(state) {
  const served = [...new Set([...state.models.map((model) => model.name), ...Object.keys(state.objectives), ...state.workers.map((worker) => worker.model)])].filter(Boolean);
  if (!served.includes(page.model)) {
    const busiest = [...state.models].filter((model) => model.name).sort((a, b) => b.num_requests - a.num_requests)[0];
    page.model = busiest?.name ?? served[0] ?? "";
  }
  const select = byId("model");
  select.hidden = !served.length;
  if ([...select.options].map((option) => option.value).join() !== served.join()) show(select, served.map((name) => h("option", { value: name }, name)));
  select.value = page.model;
  for (const model of state.models) model.objective = state.objectives[model.name] ?? null;
}

function drawHistograms() {
  const model = modelNow(), objective = page.state.objectives[page.model];
  for (const [metric, name] of [["ttft_ms", "ttft"], ["tpot_ms", "tpot"]]) {
    drawHistogram(byId(name), byId(`legend-${name}`), model?.[metric], {
      objective: objective?.[metric] || null, quantile: objective?.quantile, isTpot: name === "tpot",
      label: name === "ttft" ? "Distribution of the time to the first token" : "Distribution of the time per further token",
      chosen: page.bar?.metric === metric ? page.bar : null,
      onChoose: (each) => chooseBar({ metric, model: page.model, from_ms: each.from_ms, to_ms: each.to_ms }),
    });
  }
}

// A click on a bar that is red in part shows the late requests.
const isLate = (request, metric) => request[`objective_${metric}`] && request[metric] > request[`objective_${metric}`];

async function chooseBar(bar) {
  page.bar = bar;
  page.list = "bar";
  page.found = null;
  draw();
  byId("requests").scrollIntoView({ block: "nearest", behavior: "smooth" });
  await findInBar();
}

async function findInBar() {
  const bar = page.bar;
  if (!bar) return;
  const found = await fetchRequests(bar.model, bar.metric, bar).catch(() => ({ total: 0, requests: [] }));
  if (page.bar !== bar) return;
  page.found = found;
  drawList();
  const shown = found.requests.find((request) => isLate(request, bar.metric)) ?? found.requests[0];
  if (shown) openTrace(shown);
}

function drawList() {
  const choices = [["recent", "Recent"], ["slowest", "Slowest"]];
  if (page.bar) choices.push(["bar", `${page.bar.metric === "ttft_ms" ? "TTFT" : "TPOT"} ${edge(page.bar.from_ms)} – ${edge(page.bar.to_ms)}`]);
  tabs(byId("request-tabs"), choices, page.list, (chosen) => {
    page.list = chosen;
    if (chosen !== "bar") page.bar = null;
    draw();
  });
  const requests = page.list === "bar" ? page.found?.requests ?? [] : page.state[page.list];
  const isLooking = page.list === "bar" && !page.found;
  drawRequests(byId("requests"), requests, {
    nowS: page.state.at_s, chosen: page.open, onOpen: openTrace,
    note: page.list === "bar" && page.found ? `${plural(page.found.total, "request")} in this bar` : "",
    title: isLooking ? "Looking" : "No request yet", text: isLooking ? "" : "Type a prompt into “Try it”: it appears here, with its trace.",
  });
}

async function openTrace(request) {
  page.open = request;
  drawList();
  const container = byId("trace");
  try {
    const trace = await fetchTrace(request.trace_id);
    if (page.open !== request) return;
    drawWaterfall(container, byId("trace-tools"), trace, request, startView(request));
  } catch (error) {
    show(byId("trace-tools"));
    show(container, empty("This trace cannot be shown", error.message));
  }
  const card = byId("trace-card"), box = card.getBoundingClientRect();
  if (box.top > innerHeight - 200 || box.bottom < 120) card.scrollIntoView({ block: "start", behavior: "smooth" });
}

function drawDecisionPart() {
  tabs(byId("decision-tabs"), [["policy", "Policy"], ["autoscaler", "Autoscaler"]], page.decisions, (chosen) => { page.decisions = chosen; drawDecisionPart(); });
  const known = new Map([...page.state.recent, ...page.state.slowest].map((request) => [request.span_id, request]));
  drawDecisions(byId("decisions"), page.decisions, page.state, { nowS: page.state.at_s, requests: [...known.values()], onOpen: openTrace });
}

function drawWindow({ window: kept }) {
  byId("window").textContent = `${plural(kept.num_requests, "request")} and ${plural(kept.num_traces, "trace")} of at most ${kept.max_traces}, `
    + `none older than ${Math.round(kept.max_age_s / 60)} min, ${size(kept.num_bytes)}. ` + (kept.forwards_to ? `${kept.forwards_to} gets all of it, too.` : "All of it stays on this machine.");
}

function draw() {
  const { state } = page;
  if (!state) return;
  pickModel(state);
  drawNotices(byId("notices"), state, page.isAway);
  drawFigures(byId("figures"), state, modelNow());
  drawTopology(byId("topology"), byId("legend-topology"), state);
  drawHistograms();
  drawList();
  drawPools(byId("kv"), byId("legend-kv"), state.workers);
  drawDecisionPart();
  drawWindow(state);
}

// Nothing is redrawn while the pointer is down: a click would miss its target.
function holdWhilePressed() {
  const release = () => {
    page.isHeld = false;
    if (page.isLate) setTimeout(() => { page.isLate = false; draw(); }, 0);
  };
  addEventListener("pointerdown", () => { page.isHeld = true; });
  for (const name of ["pointerup", "pointercancel", "blur"]) addEventListener(name, release);
}

function connection(state) {
  const pill = byId("connection");
  pill.className = `pill ${{ live: "good", away: "bad" }[state] ?? ""}`;
  pill.textContent = { live: "live", away: "reconnecting", paused: "paused" }[state];
  page.isAway = state === "away";
  document.body.classList.toggle("away", page.isAway);
  if (page.state) drawNotices(byId("notices"), page.state, page.isAway);
}

function start() {
  installTheme(byId("theme"));
  installTips(byId("tip"));
  installPrompt(() => page.model);
  holdWhilePressed();
  show(byId("trace"), empty("No trace is open", "Choose a request, or a bar of a histogram above: this shows where its time went."));
  byId("model").addEventListener("change", (event) => { page.model = event.target.value; page.bar = null; page.list = "recent"; draw(); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
  follow((state) => {
    page.state = state;
    if (page.isHeld) page.isLate = true;
    else draw();
  }, connection);
}

start();
