// @ts-check
/**
 * Keys that work anywhere on the page: Esc stops the answer, Ctrl+K or Cmd+K searches.
 *
 * What has its own Esc (a dialog, an edit, a rename) keeps it from coming here.
 */

import { isComposing } from "./views/dom.js";

/**
 * @param {{stop: () => boolean, search: () => void, closeSidebar: () => boolean}} handlers
 */
export function installKeys(handlers) {
  addEventListener("keydown", (event) => {
    if (isComposing(event) || event.defaultPrevented || document.querySelector("dialog[open]") !== null) return;
    if (event.key === "Escape") {
      if (handlers.closeSidebar() || handlers.stop()) event.preventDefault();
    } else if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) {
      event.preventDefault();
      handlers.search();
    }
  });
}
