// What the page asks the console for.
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

// Calls onState with each state, onConnection with "live" or "away". Browsers connect again by themselves, unless refused.
export function follow(onState, onConnection) {
  const source = new EventSource("/api/events");
  source.onopen = () => onConnection("live");
  source.onmessage = (event) => onState(JSON.parse(event.data));
  source.onerror = () => {
    onConnection("away");
    if (source.readyState === EventSource.CLOSED) setTimeout(() => follow(onState, onConnection), 3000);
  };
}
