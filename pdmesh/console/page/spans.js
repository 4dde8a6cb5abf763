// Spans of a trace as rows: depth first below one request, by their beginnings; times in milliseconds since its beginning.
const MS = 1_000_000n;

function millis(nanoseconds, from) {
  const since = BigInt(nanoseconds) - from;
  return Number(since / MS) + Number(since % MS) / 1e6;
}

// By the kind of work: a decode worker that computes a prompt itself does prefill work.
function processOf(span) {
  if (span.name === "retry") return "client";
  if (span.service === "pdmesh-router") return "router";
  if (span.service !== "pdmesh-worker") return "client";
  return /^(prefill|kv)/.test(span.name) ? "prefill" : "decode";
}

export function rowsOf(trace, request) {
  const root = trace.spans.find((span) => span.span_id === request.span_id);
  if (!root) return [];
  const from = BigInt(root.start_ns), children = new Map();
  for (const span of trace.spans) {
    if (span.span_id === root.span_id) continue;
    if (!children.has(span.parent_id)) children.set(span.parent_id, []);
    children.get(span.parent_id).push(span);
  }
  const rows = [], seen = new Set();
  const visit = (span, depth) => {
    if (seen.has(span.span_id)) return;
    seen.add(span.span_id);
    const below = (children.get(span.span_id) ?? []).sort((a, b) => (BigInt(a.start_ns) < BigInt(b.start_ns) ? -1 : 1));
    rows.push({
      span, depth, process: processOf(span), isWrapper: below.length > 0,
      start: millis(span.start_ns, from), end: millis(span.end_ns, from),
      ticks: span.events.map((event) => ({ at: millis(event.at_ns, from), ...event })),
      steps: span.name === "decode" ? trace.steps.map((step) => ({ at: millis(step.start_ns, from), step })) : [], // of other attempts, too: lanes show those within
    });
    for (const child of below) visit(child, depth + 1);
  };
  visit(root, 0);
  return rows;
}

// For a person: "prefill.compute" stays, "generate model" is "generate".
export const shortName = (span) => (span.name.startsWith("generate ") ? "generate" : span.name);

export function attributeText(value) {
  if (Array.isArray(value)) return value.join(", ");
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(6)));
  return String(value);
}
