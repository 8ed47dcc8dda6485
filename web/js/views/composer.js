// @ts-check
/**
 * Where a person writes: text, send or stop, drafts.
 *
 * The text leaves the box only when the server has acknowledged it; whatever fails, it is still there. Each session has
 * its own draft. Enter sends, Shift+Enter breaks the line, and Enter that ends a composition (Japanese, Chinese, Korean
 * input) does neither.
 */

import { readDraft, writeDraft } from "../prefs.js";
import { contextTokens } from "../reducer.js";
import { activePath } from "../tree.js";
import { h, icon, isComposing, setAttribute } from "./dom.js";
import { contextUse } from "./standing.js";

/** @typedef {import("../reducer.js").State} State */

/**
 * @typedef {object} Handlers
 * @property {(session: string | null, text: string) => Promise<string | null>} send
 *   to that session, null: to a new one; the session it was accepted in, null: it was not
 * @property {() => void} stop
 * @property {() => void} answer                             the last message is a question without an answer
 * @property {(text: string) => void} typing                 the text has changed
 */

const DRAFT_AFTER_MS = 300;

export class Composer {
  /**
   * @param {HTMLElement} form
   * @param {Handlers} handlers
   */
  constructor(form, handlers) {
    this._form = form;
    this._handlers = handlers;
    /** @type {string | null | undefined} the session whose draft is in the box; undefined: nothing was drawn yet */
    this._session = undefined;
    this._sending = false;
    this._mode = "send";
    /** @type {any} */
    this._draftTimer = null;
    this.text = h("textarea", { id: "composer-text", rows: "1", placeholder: "Write a message", "aria-describedby": "composer-hint", enterkeyhint: "send" });
    this._button = h("button", { type: "button", class: "send", onclick: () => this._press() });
    this._hint = h("span", { class: "hint", id: "composer-hint" });
    this._gauge = h("span", { class: "gauge" });
    form.append(h("label", { class: "visually-hidden", for: "composer-text" }, "Message"),
      h("div", { class: "composer-box" }, this.text, this._button), h("div", { class: "composer-foot" }, this._hint, this._gauge));
    form.addEventListener("submit", (event) => event.preventDefault());
    this.text.addEventListener("keydown", (event) => this._key(event));
    this.text.addEventListener("input", () => this._changed());
    addEventListener("pagehide", () => this._keepDraft());
  }

  /** @param {State} state */
  render(state) {
    if (state.shown !== this._session) this._switchTo(state.shown);
    const session = state.shown === null ? undefined : state.sessions.get(state.shown);
    const path = session === undefined ? [] : activePath(session);
    const leaf = path.at(-1);
    const generating = leaf !== undefined && (session?.live.has(leaf.id) ?? false);
    const waiting = state.shown !== null && session === undefined;
    if (generating) this._mode = "stop";
    else if (leaf?.role === "user") this._mode = "answer";
    else this._mode = waiting ? "wait" : "send";
    this._drawButton();
    this._drawHint(state.connection.phase);
    const used = path.findLast((message) => message.usage?.prompt_tokens !== undefined)?.usage;
    this._drawGauge(used ? (used.prompt_tokens ?? 0) + (used.completion_tokens ?? 0) : null, contextTokens(state.welcome));
  }

  /**
   * Put a text into the box, ready to be sent.
   * @param {string} text
   */
  fill(text) {
    this.text.value = text;
    this._changed();
    this.text.focus();
  }

  /**
   * Send what is in the box, if that is still this text for this session.
   * @param {string | null} session
   * @param {string} text
   * @returns {Promise<boolean>} whether it was accepted
   */
  async sendAgain(session, text) {
    const isThere = this._session === session && this.text.value === text;
    return this._mode === "send" && isThere && (await this._send());
  }

  _drawButton() {
    const label = { stop: "Stop (Esc)", answer: "Answer the last message", wait: "Send", send: this._sending ? "Sending" : "Send (Enter)" }[this._mode] ?? "";
    const name = this._mode === "stop" ? "stop" : this._mode === "answer" ? "retry" : "send";
    const disabled = this._mode === "wait" || this._sending || (this._mode === "send" && this.text.value.trim() === "");
    const key = `${label} ${disabled}`;
    if (this._button.dataset.key === key) return;
    this._button.dataset.key = key;
    this._button.replaceChildren(icon(name));
    this._button.classList.toggle("stopping", this._mode === "stop");
    setAttribute(this._button, "aria-label", label);
    setAttribute(this._button, "title", label);
    this._button.disabled = disabled;
  }

  /** @param {string} phase of the connection */
  _drawHint(phase) {
    let hint = "Enter sends, Shift+Enter starts a new line";
    if (this._sending) hint = phase === "open" ? "Sending…" : "Will be sent when the connection is back";
    else if (this._mode === "answer") hint = "The last message has no answer yet: ask for one first";
    else if (this._mode === "stop") hint = "Esc stops the answer";
    if (this._hint.textContent !== hint) this._hint.textContent = hint;
  }

  /**
   * @param {number | null} used
   * @param {number | null} limit
   */
  _drawGauge(used, limit) {
    const text = used === null ? "" : contextUse(used, limit);
    if (this._gauge.textContent !== text) this._gauge.textContent = text;
    this._gauge.classList.toggle("full", used !== null && limit !== null && used > 0.9 * limit);
  }

  /** @param {string | null} session */
  _switchTo(session) {
    if (this._session !== undefined) this._keepDraft();
    this._session = session;
    this.text.value = readDraft(session);
    this._fit();
    if (matchMedia("(hover: hover)").matches) this.text.focus({ preventScroll: true });
  }

  _keepDraft() {
    clearTimeout(this._draftTimer);
    if (this._session !== undefined && !this._sending) writeDraft(this._session, this.text.value);
  }

  _changed() {
    this._fit();
    this._drawButton();
    clearTimeout(this._draftTimer);
    this._draftTimer = setTimeout(() => this._keepDraft(), DRAFT_AFTER_MS);
    this._handlers.typing(this.text.value);
  }

  /** As high as its text. The form is held still while that is measured, or the conversation above would be scrolled. */
  _fit() {
    this._form.style.height = `${this._form.offsetHeight}px`;
    this.text.style.height = "auto";
    this.text.style.height = `${this.text.scrollHeight}px`;
    this._form.style.height = "";
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
    event.preventDefault();
    if (this._mode === "send") void this._send();
  }

  _press() {
    if (this._mode === "stop") this._handlers.stop();
    else if (this._mode === "answer") this._handlers.answer();
    else if (this._mode === "send") void this._send();
  }

  /** @returns {Promise<boolean>} whether it was accepted */
  async _send() {
    const text = this.text.value;
    const session = this._session;
    if (this._sending || session === undefined || text.trim() === "") return false;
    this._keepDraft();
    this._sending = true;
    this.text.readOnly = true;
    this._drawButton();
    const accepted = await this._handlers.send(session, text);
    this._sending = false;
    this.text.readOnly = false;
    if (accepted !== null) {
      writeDraft(session, "");
      writeDraft(accepted, "");
      // Another chat may be shown by now, whose draft is its own, even if it reads the same.
      const isShown = this._session === session || this._session === accepted;
      if (isShown && this.text.value === text) this.text.value = "";
      this._keepDraft();
    }
    this._changed();
    this.text.focus({ preventScroll: true });
    return accepted !== null;
  }
}
