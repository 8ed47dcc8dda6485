// @ts-check
/**
 * Notices: what went wrong, with its detail, until it is dismissed or overtaken.
 *
 * Owns its list; an error of the same kind replaces the one before, so that nothing piles up. Each is an alert, which
 * screen readers say by themselves.
 */

import { h, iconButton } from "./dom.js";

/** What to say instead of the server's words, where those are more about the server than about what to do. @type {Record<string, string>} */
const ADVICE = {
  overloaded: "The server is busy. Try again in a moment.",
  rate_limited: "That was too fast for this server. Try again in a moment.",
  store_unavailable: "The server cannot reach its store just now. Try again in a moment.",
  engine_unavailable: "The model is starting or restarting. Try again in a moment.",
  busy: "An answer is being written there. Stop it first, or wait for its end.",
};

/** @param {string} text */
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?…]$/.test(text) ? "" : "."}`;

export class Notices {
  /** @param {HTMLElement} root */
  constructor(root) {
    this._root = root;
  }

  /**
   * @param {string} what     what failed
   * @param {Error & {code?: string}} error
   */
  problem(what, error) {
    const code = error.code ?? "";
    this.show(what, ADVICE[code] ?? sentence(error.message), code);
  }

  /**
   * @param {string} title
   * @param {string} detail
   * @param {string} kind  one notice of a kind at a time
   */
  show(title, detail, kind) {
    this.clear(kind);
    const dismiss = () => notice.remove();
    const notice = h("div", { class: "notice", role: "alert", "data-kind": kind },
      h("div", { class: "notice-text" }, h("strong", {}, title), " ", h("span", {}, detail)),
      iconButton("close", "Dismiss", dismiss));
    this._root.append(notice);
    while (this._root.children.length > 3) this._root.firstElementChild?.remove();
  }

  /** @param {string} [kind] */
  clear(kind) {
    for (const notice of [...this._root.children]) {
      if (kind === undefined || notice.getAttribute("data-kind") === kind) notice.remove();
    }
  }
}
