// Elements from plain values. Text is always text: nothing that came from the mesh is ever read as HTML.
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("aria-") && typeof value === "boolean") element.setAttribute(name, String(value));
    if (value === null || value === undefined || typeof value === "boolean" && (!value || name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const s = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
export const byId = (id) => document.getElementById(id);

export function show(container, ...children) {
  container.replaceChildren(...children.flat(Infinity).filter(Boolean));
}

export const empty = (title, text) => h("div", { class: "empty" }, h("b", {}, title), text);

// Buttons of which one is chosen; arrow keys move between them. `choices`: [key, label].
export function tabs(container, choices, chosen, onChoose) {
  const buttons = choices.map(([key, label]) =>
    h("button", {
      type: "button", role: "tab", "aria-selected": key === chosen, tabindex: key === chosen ? 0 : -1, "data-key": key,
      onclick: () => onChoose(key),
    }, label));
  const had = container.contains(document.activeElement);
  show(container, buttons);
  if (had) container.querySelector('[aria-selected="true"]')?.focus();
  container.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = choices.findIndex(([key]) => key === chosen);
    onChoose(choices[(at + step + choices.length) % choices.length][0]);
    event.preventDefault();
  };
}

// One tip for all; elements with data-tip show it while they are pointed at or have the focus.
export function installTips(tip) {
  const at = (event) => event.target.closest?.("[data-tip]");
  const hide = () => { tip.hidden = true; };
  const place = (x, y) => {
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(x + 12, innerWidth - width - 6))}px`;
    tip.style.top = `${y + 16 + height > innerHeight ? Math.max(6, y - height - 10) : y + 16}px`;
  };
  const open = (element, x, y) => {
    tip.textContent = element.dataset.tip;
    tip.hidden = false;
    place(x, y);
  };
  document.addEventListener("pointermove", (event) => {
    const element = event.pointerType === "touch" ? null : at(event);
    if (element) open(element, event.clientX, event.clientY);
    else hide();
  });
  document.addEventListener("focusin", (event) => {
    const element = at(event);
    if (!element || !element.matches(":focus-visible")) return;
    const box = element.getBoundingClientRect();
    open(element, box.left + box.width / 2, box.bottom - 12);
  });
  for (const name of ["focusout", "pointerleave", "pointerdown", "scroll"]) document.addEventListener(name, hide, true);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
}
