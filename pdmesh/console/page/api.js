// Requests of the page to the console.
async function get(path) {
  const response = await fetch(path, { headers: { accept: "application/json" } });
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error ?? `the console answered ${response.status}`);
  return response.json();
}

// `soon`: it may still come; without spans until then.
export const fetchTrace = (id, soon = false) => get(`/api/traces/${encodeURIComponent(id)}${soon ? "?soon=1" : ""}`);

export function fetchRequests(model, metric, bar) {
  const query = new URLSearchParams({ model, metric, from_ms: bar.from_ms, to_ms: bar.to_ms });
  return get(`/api/requests?${query}`);
}

// A hanging console or a network that drops packets closes no connection, so the console sends something every few seconds.
const SILENCE_MS = 12_000;

// Calls onState with each state, onConnection with "live", "away" or "paused". Browsers connect again by themselves, unless
// rejected. A hidden page closes its connection: a browser has six for all pages of one server, and the seventh page would
// never load.
export function follow(onState, onConnection) {
  let source = null, again = 0, silence = 0;
  const stop = () => {
    clearTimeout(again);
    clearTimeout(silence);
    source?.close();
    source = null;
  };
  const begin = () => {
    stop();
    source = new EventSource("/api/events");
    const heard = () => {
      onConnection("live");
      clearTimeout(silence);
      silence = setTimeout(() => { begin(); onConnection("away"); }, SILENCE_MS);
    };
    source.onopen = heard;
    source.addEventListener("alive", heard);
    source.onmessage = (event) => { heard(); onState(JSON.parse(event.data)); };
    source.onerror = () => {
      onConnection("away");
      if (source?.readyState === EventSource.CLOSED) again = setTimeout(begin, 3000);
    };
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) begin();
    else { stop(); onConnection("paused"); }
  });
  if (!document.hidden) begin();
}
