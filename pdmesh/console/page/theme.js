// Light, dark, or as the system has it; remembered in this browser.
import { h, show } from "./dom.js";

const KEY = "pdmesh-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const SHOWN = { auto: ["◐", "Auto"], light: ["☀", "Light"], dark: ["☾", "Dark"] };

function remembered() {
  try {
    const found = localStorage.getItem(KEY);
    return found in NEXT ? found : "auto";
  } catch {
    return "auto";
  }
}

function apply(button, theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const [sign, word] = SHOWN[theme];
  show(button, h("span", { "aria-hidden": true }, sign), h("span", { class: "word" }, ` ${word}`));
  button.setAttribute("aria-label", `Colours: ${theme}. Change to ${NEXT[theme]}`);
}

export function installTheme(button) {
  let theme = remembered();
  apply(button, theme);
  button.addEventListener("click", () => {
    theme = NEXT[theme];
    apply(button, theme);
    try {
      localStorage.setItem(KEY, theme);
    } catch { /* a private window: it lasts as long as the page */ }
  });
}
