// @ts-check
/**
 * Notices: what went wrong, with its detail, until it is dismissed, overtaken or tried again.
 *
 * Owns its list; an error of the same kind replaces the one before, so that nothing piles up. Each is an alert, which
 * screen readers say by themselves. What may work a moment later is tried again by itself after a countdown, each time
 * later than the last; whoever does not want that dismisses it.
 */

import { h, iconButton } from "./dom.js";

/** What to say instead of the server's words, where those are more about the server than about what to do. @type {Record<string, string>} */
const ADVICE = {
  store_unavailable: "The server cannot reach its store just now.",
  engine_unavailable: "The model is starting or restarting.",
  busy: "An answer is being written there. Stop it first, or wait for its end.",
};
const FIRST_RETRY_S = 2;
const LONGEST_RETRY_S = 30;

/** @param {string} text */
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?…]$/.test(text) ? "" : "."}`;

/** @typedef {Error & {code?: string, retryable?: boolean, fields?: {retry_after_s?: number}}} Problem */

export class Notices {
  /** @param {HTMLElement} root */
  constructor(root) {
    this._root = root;
    /** @type {Map<Element, () => void>} what ends the countdown of a notice */
    this._countdowns = new Map();
    /** @type {Map<string, number>} how often what failed has been tried again */
    this._attempts = new Map();
  }

  /**
   * @param {string} what     what failed
   * @param {Problem} error
   * @param {() => Promise<boolean>} [retry]  does it again and tells whether it worked; it tells of its own failure
   */
  problem(what, error, retry) {
    const code = error.code ?? "";
    const detail = ADVICE[code] ?? sentence(error.message);
    const notice = this.show(what, detail, code);
    if (error.retryable && retry !== undefined) this._count(notice, what, error.fields?.retry_after_s ?? 0, retry);
  }

  /**
   * @param {string} title
   * @param {string} detail
   * @param {string} kind  one notice of a kind at a time
   * @returns {HTMLElement}
   */
  show(title, detail, kind) {
    this.clear(kind);
    const notice = h("div", { class: "notice", "data-kind": kind },
      h("div", { class: "notice-text", role: "alert" }, h("strong", {}, title), " ", h("span", {}, detail)),
      iconButton("close", "Dismiss", () => {
        this.worked(title);
        this._remove(notice);
      }));
    this._root.append(notice);
    for (const old of [...this._root.children].slice(0, -3)) this._remove(old);
    return notice;
  }

  /** @param {string} [kind] */
  clear(kind) {
    for (const notice of [...this._root.children]) {
      if (kind === undefined || notice.getAttribute("data-kind") === kind) this._remove(notice);
    }
  }

  /** @param {string} what  succeeded: the next time that it fails is a first time again */
  worked(what) {
    this._attempts.delete(what);
  }

  /** @param {Element} notice */
  _remove(notice) {
    this._countdowns.get(notice)?.();
    this._countdowns.delete(notice);
    notice.remove();
  }

  /**
   * @param {HTMLElement} notice
   * @param {string} what
   * @param {number} afterS  the server's wish
   * @param {() => Promise<boolean>} retry
   */
  _count(notice, what, afterS, retry) {
    const attempts = this._attempts.get(what) ?? 0;
    this._attempts.set(what, attempts + 1);
    let left = Math.ceil(Math.max(afterS, Math.min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** attempts)));
    const again = async () => {
      this._remove(notice);
      if (await retry()) this.worked(what);
    };
    // The number is no part of the alert, or it would be said every second.
    const button = h("button", { type: "button", class: "button quiet", onclick: () => void again() }, `Trying again in ${left} s`);
    notice.lastElementChild?.before(button);
    const timer = setInterval(() => {
      left -= 1;
      if (left <= 0) void again();
      else button.textContent = `Trying again in ${left} s`;
    }, 1000);
    this._countdowns.set(notice, () => clearInterval(timer));
  }
}
