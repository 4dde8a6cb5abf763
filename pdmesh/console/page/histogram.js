// The histogram of latencies, on a logarithmic axis, with the objective; a click on a bar requests its requests.
import { h, s, show, empty } from "./dom.js";
import { edge, ms, percent, plural } from "./format.js";

const HEIGHT = 172, TOP = 20, BOTTOM = 22, LEAST_CLASSES = 8, FAR = 30;

// The logarithmic axis: the classes, and the objective if it is not too far away.
function axis(classes, objective, width) {
  let low = Math.log10(classes[0].from_ms), high = Math.log10(classes.at(-1).to_ms);
  const step = (high - low) / classes.length, missing = LEAST_CLASSES - classes.length;
  if (missing > 0) { low -= missing / 2 * step; high += missing / 2 * step; }
  if (objective && objective < 10 ** high * FAR) high = Math.max(high, Math.log10(objective) + step);
  if (objective && objective > 10 ** low / FAR) low = Math.min(low, Math.log10(objective) - step);
  return { low, high, x: (value) => (Math.log10(value) - low) / (high - low) * width };
}

function ticks({ low, high, x }, width) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    for (const digit of high - low > 2.2 ? [1] : [1, 2, 5]) {
      const value = digit * 10 ** power, at = x(value);
      if (at >= 0 && at <= width && (!found.length || at - found.at(-1).at > 46)) found.push({ at, value });
    }
  }
  return found;
}

function column(each, scale, most, options) {
  const left = scale.x(each.from_ms), right = scale.x(each.to_ms), room = HEIGHT - TOP - BOTTOM;
  const pad = Math.min(1.5, (right - left) * 0.12), w = Math.max(1, right - left - 2 * pad);
  const tall = Math.max(each.count ? 3 : 0, each.count / most * room), missed = tall * each.missed / Math.max(1, each.count);
  const base = HEIGHT - BOTTOM;
  const label = `${plural(each.count, "request")} from ${edge(each.from_ms)} to ${edge(each.to_ms)}` + (each.missed ? `, ${each.missed} over the objective` : "");
  const isChosen = options.chosen && Math.abs(options.chosen.from_ms / each.from_ms - 1) < 1e-9;
  const choose = () => options.onChoose(each);
  return s("g", {
    class: `column${isChosen ? " chosen" : ""}`, role: "button", tabindex: 0, "aria-label": `${label}. Show them`, "data-tip": `${label}\nClick to list them`,
    "data-key": each.from_ms, onclick: choose,
    onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } },
  },
  s("rect", { class: "hit", x: left, y: TOP - 6, width: right - left, height: room + 6, rx: 4 }),
  s("rect", { class: "bar", x: left + pad, y: base - tall + missed, width: w, height: tall - missed, rx: missed ? 0 : Math.min(3, w / 3) }),
  s("rect", { class: "bar missed", x: left + pad, y: base - tall, width: w, height: missed, rx: Math.min(3, w / 3) }));
}

function objectiveLine(objective, scale, width) {
  const at = scale.x(objective), isInside = at >= 0 && at <= width, x = Math.max(0, Math.min(width, at));
  const text = `objective ${edge(objective)}`;
  const anchor = x > width - 110 ? "end" : "start";
  const shown = isInside ? text : at < 0 ? `← ${text}` : `${text} →`;
  return [isInside && s("line", { class: "objective", x1: x, x2: x, y1: TOP - 4, y2: HEIGHT - BOTTOM }),
    s("text", { class: "objective-label", x: anchor === "end" ? x - 6 : x + 6, y: TOP - 8, "text-anchor": anchor }, shown)];
}

// `options`: objective (ms or null), quantile promised, chosen class or null, onChoose(class).
export function drawHistogram(container, legend, distribution, options) {
  const held = container.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  if (!distribution || !distribution.count) {
    const text = options.isTpot ? "A request needs two tokens for it." : "Type a prompt into “Try it”, or send load with pdmesh loadtest.";
    show(container, empty("No request yet", text));
    show(legend);
    return;
  }
  const width = Math.max(240, container.clientWidth), { classes } = distribution;
  const scale = axis(classes, options.objective, width), most = Math.max(...classes.map((each) => each.count));
  const base = HEIGHT - BOTTOM;
  const svg = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "group", "aria-label": options.label },
    s("line", { class: "axis", x1: 0, x2: width, y1: base, y2: base }),
    ticks(scale, width).map(({ at, value }) => [
      s("line", { class: "axis", x1: at, x2: at, y1: base, y2: base + 4 }),
      s("text", { class: "dim", x: at, y: base + 17, "text-anchor": at < 20 ? "start" : at > width - 20 ? "end" : "middle" }, edge(value)),
    ]),
    classes.filter((each) => each.count).map((each) => column(each, scale, most, options)),
    options.objective ? objectiveLine(options.objective, scale, width) : null);
  const missed = classes.reduce((sum, each) => sum + each.missed, 0);
  show(container, svg, h("div", { class: "marks" },
    ["p50", "p90", "p99"].map((name) => h("span", {}, `${name} `, h("b", {}, ms(distribution[name])))),
    h("span", {}, plural(distribution.count, "request")),
    missed ? h("span", { class: "bad-text" }, `${percent(missed / distribution.count)} over their objective`) : null));
  show(legend, h("span", {}, options.objective
    ? `promised: ${edge(options.objective)} for ${percent(options.quantile)}` : "no objective is set"));
  if (held) container.querySelector(`[data-key="${held}"]`)?.focus();
}
