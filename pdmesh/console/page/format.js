// Figures for people.
export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 60_000) return `${(value / 60_000).toFixed(1)} min`;
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  if (value >= 100) return `${value.toFixed(0)} ms`;
  if (value >= 1) return `${value.toFixed(1)} ms`;
  if (value > 0) return `${Math.round(value * 1000)} µs`;
  return "0 ms";
}

// For the ends of classes and axes: 12.589 is 12.6, 1000 is 1 s.
export function edge(value) {
  const short = (number) => Number(number.toPrecision(3)).toString();
  if (value >= 1000) return `${short(value / 1000)} s`;
  return value < 1 ? `${short(value * 1000)} µs` : `${short(value)} ms`;
}

export function size(bytes) {
  if (bytes >= 1 << 30) return `${(bytes / (1 << 30)).toFixed(1)} GiB`;
  if (bytes >= 1 << 20) return `${(bytes / (1 << 20)).toFixed(1)} MiB`;
  if (bytes >= 1 << 10) return `${(bytes / (1 << 10)).toFixed(0)} KiB`;
  return `${bytes} B`;
}

export function count(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)} M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(0)} k`;
  return String(number);
}

export function perSecond(number) {
  if (number >= 100) return number.toFixed(0);
  return String(Number(number.toFixed(number >= 10 ? 1 : 2)));
}

export function percent(share) {
  return `${(100 * share).toFixed(share > 0.1 && share < 0.995 ? 0 : 1).replace(/\.0$/, "")} %`;
}

export function ago(seconds) {
  if (seconds < 1.5) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
