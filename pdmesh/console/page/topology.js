// Routers, prefill and decode workers, and what flows between them. Columns on a wide screen, rows on a narrow one.
import { h, s, show, empty } from "./dom.js";
import { perSecond, plural, size } from "./format.js";

const NODE_H = 50, GAP = 12, MAX_GAP = 64, TITLE_H = 24, FULL_H = 280, WIDE = 520, MAX_NODES = 24, MAX_IDLE = 48;
const TITLES = { router: "Routers", prefill: "Prefill", decode: "Decode", both: "Prefill and decode" };
let built = { signature: "", nodes: new Map(), flows: new Map() };

function routerNode(router) {
  return {
    id: `r:${router.id || router.address}`, kind: "router", name: router.id || router.address,
    state: router.problem ? "lost" : "alive", share: router.max_inflight ? router.inflight / router.max_inflight : 0,
    line: router.problem ? "does not answer" : `${router.inflight} in flight · ${router.queued} queued`,
    tip: `${router.id ? `${router.id}\n` : ""}${router.address}\n${router.problem || `${router.inflight} of ${router.max_inflight} requests in flight, ${router.queued} of ${router.max_queued} queued`}`,
  };
}

function workerNode(worker) {
  const kind = worker.roles.length > 1 ? "both" : worker.roles[0] === "prefill" ? "prefill" : "decode";
  const leftOut = worker.breakers.filter((breaker) => breaker.left_out);
  return {
    id: worker.id, kind, name: worker.id, state: worker.state, share: worker.max_seqs ? worker.running / worker.max_seqs : 0,
    line: worker.state === "lost" ? "lost" : leftOut.length ? "left out" : `${worker.running} running · ${worker.waiting} waiting`,
    tip: [
      `${worker.id} · ${worker.roles.join(" and ")} · ${worker.state}`, `${worker.address} · ${worker.model}`, engineLine(worker),
      `${worker.running} running, ${worker.waiting} waiting, ${worker.reserved} reserved, at most ${worker.max_seqs}`,
      ...leftOut.map((breaker) => `left out as ${breaker.role}: ${breaker.reason}`),
    ].filter(Boolean).join("\n"),
  };
}

const engineLine = ({ engine, reproducible }) =>
  engine && `engine ${engine} · ${reproducible ? "reproducible tokens" : "a repeat may draw other tokens"}`;

function layers(state) {
  const nodes = [...state.routers.map(routerNode), ...state.workers.map(workerNode)];
  return [["router"], ["prefill"], ["decode", "both"]]
    .map((kinds) => nodes.filter((node) => kinds.includes(node.kind)))
    .filter((layer) => layer.length)
    .map((layer) => ({ title: title(layer), nodes: layer.slice(0, MAX_NODES), more: Math.max(0, layer.length - MAX_NODES) }));
}

const title = (layer) => TITLES[layer.every((node) => node.kind === layer[0].kind) ? layer[0].kind : "decode"];

// Sets x, y, w of each node; returns the height of it all.
function place(columns, width) {
  if (width < WIDE) return placeRows(columns, width);
  const w = Math.min(200, (width - 60 * (columns.length - 1)) / columns.length);
  const tallest = Math.max(...columns.map((column) => column.nodes.length));
  const gap = tallest > 1 ? Math.max(GAP, Math.min(MAX_GAP, (FULL_H - TITLE_H - tallest * NODE_H) / (tallest - 1))) : GAP;
  const height = Math.max(FULL_H, TITLE_H + tallest * (NODE_H + gap) - gap);
  columns.forEach((column, index) => {
    const x = columns.length === 1 ? 0 : index * (width - w) / (columns.length - 1);
    const free = height - TITLE_H - column.nodes.length * (NODE_H + gap) + gap;
    column.x = x; column.y = 14;
    column.nodes.forEach((node, at) => Object.assign(node, { x, y: TITLE_H + free / 2 + at * (NODE_H + gap), w, down: false }));
  });
  return height;
}

function placeRows(columns, width) {
  let y = 0;
  for (const column of columns) {
    const each = Math.min(column.nodes.length, 2), w = (width - GAP * (each - 1)) / each;
    column.x = 0; column.y = y + 14;
    column.nodes.forEach((node, at) => Object.assign(node, {
      x: (at % each) * (w + GAP), y: y + TITLE_H + Math.floor(at / each) * (NODE_H + GAP), w, down: true,
    }));
    y += TITLE_H + Math.ceil(column.nodes.length / each) * (NODE_H + GAP) + 18;
  }
  return y - 18 - GAP;
}

// The flows between nodes, per second, and the possible ones.
function edges(state, nodes) {
  const found = new Map();
  const add = (from, to, kind, flow) => {
    if (!nodes.has(from) || !nodes.has(to) || from === to) return;
    const key = `${from}|${to}`, edge = found.get(key) ?? { key, from, to, kind, perS: 0, bytesPerS: 0 };
    if (flow) { edge.perS += flow.per_s; edge.bytesPerS += kind === "prefill" ? flow.kv_bytes_per_s : 0; edge.kind = kind; }
    found.set(key, edge);
  };
  for (const flow of state.flows) {
    if (!flow.prefill) add(`r:${flow.router}`, flow.decode, "router", flow);
    else { add(`r:${flow.router}`, flow.prefill, "router", flow); add(flow.prefill, flow.decode, "prefill", flow); }
  }
  const of = (kind) => [...nodes.values()].filter((node) => node.kind === kind && node.state !== "lost");
  const [routers, prefills] = [of("router"), of("prefill")], decodes = [...of("decode"), ...of("both")];
  const possible = [...routers.flatMap((a) => (prefills.length ? prefills : decodes).map((b) => [a, b, "router"])),
    ...prefills.flatMap((a) => decodes.map((b) => [a, b, "prefill"]))];
  if (possible.length <= MAX_IDLE) for (const [a, b, kind] of possible) add(a.id, b.id, kind, null);
  return found;
}

function path(a, b) {
  if (a.down && a.y !== b.y) {
    const [x1, y1, x2, y2] = [a.x + a.w / 2, a.y + NODE_H, b.x + b.w / 2, b.y], mid = (y1 + y2) / 2;
    return `M${x1} ${y1}C${x1} ${mid} ${x2} ${mid} ${x2} ${y2}`;
  }
  if (a.x === b.x) {
    const x = a.x + a.w, bulge = x + 40;
    return `M${x} ${a.y + NODE_H / 2}C${bulge} ${a.y} ${bulge} ${b.y + NODE_H} ${x} ${b.y + NODE_H / 2}`;
  }
  const [x1, y1, x2, y2] = [a.x + a.w, a.y + NODE_H / 2, b.x, b.y + NODE_H / 2], mid = (x1 + x2) / 2;
  return `M${x1} ${y1}C${mid} ${y1} ${mid} ${y2} ${x2} ${y2}`;
}

const flowWidth = (perS) => Math.min(14, 2 + 3 * Math.sqrt(perS));

function drawFlow(group, edge) {
  const isLive = edge.perS > 0;
  const [under, pulse] = group.children;
  under.setAttribute("class", `flow ${isLive ? `live ${edge.kind}` : "idle"}`);
  pulse.setAttribute("class", isLive ? `flow pulse ${edge.kind}` : "flow");
  under.style.strokeWidth = isLive ? `${flowWidth(edge.perS)}px` : "";
  pulse.style.strokeWidth = `${Math.max(2, flowWidth(edge.perS) * 0.35)}px`;
  const bytes = edge.bytesPerS ? `, ${size(edge.bytesPerS)}/s of KV` : "";
  group.dataset.tip = `${edge.from.replace(/^r:/, "")} → ${edge.to}\n${isLive ? `${perSecond(edge.perS)} requests/s${bytes}` : "nothing in the last 10 s"}`;
}

function newFlow(edge, nodes) {
  const d = path(nodes.get(edge.from), nodes.get(edge.to));
  return s("g", {}, s("path", { d, class: "flow" }), s("path", { d, class: "flow" }));
}

function newNode(node) {
  return s("g", { class: "node", transform: `translate(${node.x} ${node.y})`, tabindex: 0, role: "img" },
    s("rect", { class: "box", width: node.w, height: NODE_H, rx: 10 }),
    s("rect", { class: "edge-mark", x: 0, y: 12, width: 3, height: NODE_H - 24, rx: 1.5 }),
    s("text", { class: "name", x: 13, y: 19 }), s("text", { class: "dim", x: 13, y: 34 }),
    s("rect", { class: "track", x: 13, y: NODE_H - 9, width: node.w - 26, height: 3, rx: 1.5 }),
    s("rect", { class: "fill", x: 13, y: NODE_H - 9, width: 0, height: 3, rx: 1.5 }));
}

function drawNode(group, node) {
  const [, , name, line, , bar] = group.children;
  const most = Math.floor((node.w - 20) / 7.4);
  group.setAttribute("class", `node ${node.kind} ${node.state}`);
  group.setAttribute("aria-label", node.tip);
  group.dataset.tip = node.tip;
  name.textContent = node.name.length > most ? `${node.name.slice(0, most - 1)}…` : node.name;
  line.textContent = node.w < 120 ? node.line.split(" · ")[0] : node.line;
  bar.setAttribute("width", String((node.w - 26) * Math.min(1, node.share)));
}

export function drawTopology(container, legend, state) {
  const columns = layers(state);
  if (!state.workers.length && state.routers.every((router) => router.problem)) {
    show(container, empty("No router answers yet", "Start a mesh with pdmesh up, or name its routers with --routers."));
    built.signature = "";
    return;
  }
  const width = Math.max(280, container.clientWidth), height = place(columns, width);
  const nodes = new Map(columns.flatMap((column) => column.nodes.map((node) => [node.id, node])));
  const found = edges(state, nodes);
  const signature = JSON.stringify([width, [...nodes.values()].map((node) => [node.id, node.kind, node.x, node.y]), [...found.keys()].sort()]);
  if (signature !== built.signature) {
    built = { signature, nodes: new Map(), flows: new Map() };
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "Routers and workers" });
    for (const edge of found.values()) { const group = newFlow(edge, nodes); built.flows.set(edge.key, group); svg.append(group); }
    for (const column of columns) {
      svg.append(s("text", { class: "dim column-title", x: column.x, y: column.y }, column.more ? `${column.title} (${column.more} more)` : column.title));
    }
    for (const node of nodes.values()) { const group = newNode(node); built.nodes.set(node.id, group); svg.append(group); }
    show(container, svg);
  }
  for (const edge of found.values()) drawFlow(built.flows.get(edge.key), edge);
  for (const node of nodes.values()) drawNode(built.nodes.get(node.id), node);
  const perS = state.flows.reduce((sum, flow) => sum + flow.per_s, 0);
  show(legend, h("span", {}, perS ? `${perSecond(perS)} requests/s flow, the last 10 s` : `${plural(state.workers.length, "worker")}, nothing flows now`));
}
