// @ts-check
/**
 * One line that says honestly how the connection stands, and what the server cannot do just now.
 */

import { h } from "./dom.js";

/** @typedef {import("../reducer.js").State} State */

/** A drop shorter than this is nobody's business. */
const QUIET_MS = 700;

export class Banner {
  /**
   * @param {HTMLElement} root
   * @param {{retry: () => void}} handlers
   */
  constructor(root, handlers) {
    this._root = root;
    this._handlers = handlers;
    this._key = "";
    this._awaySince = performance.now();
    /** @type {any} */
    this._timer = null;
  }

  /** @param {State} state */
  render(state) {
    const { phase, detail, code } = state.connection;
    clearTimeout(this._timer);
    if (phase === "open") this._awaySince = Number.NaN;
    else if (Number.isNaN(this._awaySince)) this._awaySince = performance.now();
    const away = performance.now() - this._awaySince;
    if (phase === "connecting" || phase === "waiting") {
      if (away < QUIET_MS) {
        this._timer = setTimeout(() => this.render(state), QUIET_MS - away);
        return this._draw("", "", "");
      }
      const text = state.welcome === null && code === undefined ? "Connecting…" : `${detail ?? "The connection was lost."} Reconnecting…`;
      return this._draw("away", text, phase === "waiting" ? "Try now" : "");
    }
    if (phase === "stopped") return this._draw("stopped", detail ?? "Not connected.", code === 4001 ? "Enter a token" : "Try again");
    if (state.degraded.size > 0) return this._draw("degraded", `The server is running without its ${[...state.degraded.keys()].join(" and ")}. Answers appear when it is back.`, "");
    return this._draw("", "", "");
  }

  /**
   * @param {string} kind
   * @param {string} text
   * @param {string} action
   */
  _draw(kind, text, action) {
    const key = `${kind}|${text}|${action}`;
    if (key === this._key) return;
    this._key = key;
    this._root.hidden = text === "";
    this._root.dataset.kind = kind;
    this._root.replaceChildren(h("span", {}, text), ...(action === "" ? [] : [h("button", { type: "button", class: "button quiet", onclick: () => this._handlers.retry() }, action)]));
  }
}
