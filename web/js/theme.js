// @ts-check
/**
 * Light, dark, or as the system has it: one attribute on the root element, remembered in this browser.
 */

import { readTheme, writeTheme } from "./prefs.js";
import { icon } from "./views/dom.js";

/** @param {"auto" | "light" | "dark"} theme */
function apply(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

/** @param {HTMLElement} button that goes round the three */
export function installTheme(button) {
  let theme = readTheme();
  const draw = () => {
    apply(theme);
    const label = { auto: "Colours: as the system", light: "Colours: light", dark: "Colours: dark" }[theme];
    button.setAttribute("aria-label", label);
    button.title = label;
    button.replaceChildren(icon(theme === "auto" ? "auto" : theme === "light" ? "sun" : "moon"));
  };
  button.addEventListener("click", () => {
    theme = theme === "auto" ? "light" : theme === "light" ? "dark" : "auto";
    writeTheme(theme);
    draw();
  });
  draw();
}
