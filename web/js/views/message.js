// @ts-check
/**
 * One message on the page: its text, how it stands, its receipt, and what can be done with it.
 *
 * Draws what it is given and keeps only whether it is being edited. A person's own text is shown as it was typed; an
 * answer is markdown. Every change goes through a handler.
 */

import { MarkdownView } from "../markdown/render.js";
import { copyButton, h, iconButton, isComposing, setAttribute } from "./dom.js";
import { receipt } from "./receipt.js";
import { ending, progress } from "./standing.js";

/** @typedef {import("../reducer.js").Message} Message */
/** @typedef {import("../reducer.js").Live} Live */

/**
 * @typedef {object} Props
 * @property {Message} message
 * @property {Live | null} live
 * @property {readonly string[]} siblings
 * @property {number} index       among the siblings
 * @property {boolean} childless
 */

/**
 * @typedef {object} Handlers
 * @property {(message: string) => void} select
 * @property {(message: string) => void} regenerate
 * @property {(message: string) => void} continue
 * @property {(message: string) => void} fork
 * @property {(message: string) => void} remove
 * @property {() => void} editing  a message is about to become a box to edit it in
 * @property {(message: string, text: string | null) => void} drafted  what it is to say instead, so far; null: it stays
 * @property {(message: string, text: string) => Promise<boolean>} edit   whether it was accepted
 */

export class MessageView {
  /**
   * @param {Message} message
   * @param {Handlers} handlers
   */
  constructor(message, handlers) {
    this._handlers = handlers;
    this._id = message.id;
    /** @type {Props | null} */
    this._props = null;
    /** @type {HTMLElement | null} */
    this._editor = null;
    this._markdown = message.role === "assistant" ? new MarkdownView() : null;
    this._body = this._markdown?.element ?? h("div", { class: "bubble" });
    this._state = h("p", { class: "message-state", hidden: true });
    this._receipt = h("div", { class: "receipt-slot" });
    this._nav = h("span", { class: "branch-nav", hidden: true, role: "group", "aria-label": "Versions of this message" });
    this._position = h("span", { class: "branch-position" });
    this._previous = iconButton("left", "Previous version", () => this._step(-1), { "data-action": "previous" });
    this._next = iconButton("right", "Next version", () => this._step(1), { "data-action": "next" });
    this._nav.append(this._previous, this._position, this._next);
    const act = (/** @type {"regenerate" | "continue" | "fork" | "remove"} */ name) => () => this._handlers[name](this._id);
    this._buttons = {
      edit: iconButton("edit", "Edit", () => this.startEdit(), { "data-action": "edit" }),
      regenerate: iconButton("retry", message.role === "user" ? "Answer this" : "Regenerate", act("regenerate"), { "data-action": "regenerate" }),
      continue: iconButton("forward", "Continue this answer", act("continue"), { "data-action": "continue" }),
      fork: iconButton("fork", "Fork to a new chat", act("fork"), { "data-action": "fork" }),
      remove: iconButton("trash", "Delete", act("remove"), { "data-action": "delete" }),
    };
    const own = message.role === "user";
    // The versions stand at the edge that the text is aligned to.
    const actions = h("div", { class: "actions" }, !own && this._nav, copyButton("Copy message", () => this._text()),
      own && this._buttons.edit, this._buttons.regenerate, !own && this._buttons.continue, this._buttons.fork, this._buttons.remove, own && this._nav);
    this.element = h("article", { class: `message ${message.role}`, "data-message": message.id, "aria-label": message.role === "user" ? "You" : "Answer" },
      this._body, this._state, this._receipt, actions);
  }

  _text() {
    return this._props?.live?.text ?? this._props?.message.text ?? "";
  }

  /**
   * @param {Props} props
   * @param {number} deadline
   * @returns {boolean} whether there is more to draw in the next frame
   */
  update(props, deadline) {
    const before = this._props;
    this._props = props;
    const { message, live } = props;
    const generating = live !== null;
    const more = this._markdown?.update(this._text(), !generating, deadline) ?? false;
    if (this._markdown === null && before?.message.text !== message.text) this._body.textContent = message.text;
    if (before?.message === message && before.live?.phase === live?.phase && before.live?.position === live?.position
      && before.siblings === props.siblings && before.childless === props.childless) return more;
    this.element.classList.toggle("generating", generating);
    this.element.classList.toggle("writing", live?.phase === "writing");
    setAttribute(this.element, "aria-busy", generating ? "true" : null);
    setAttribute(this.element, "data-status", message.status);
    const state = live === null ? ending(message) : progress(live);
    this._state.hidden = state === "";
    this._state.textContent = state;
    this._drawReceipt();
    this._nav.hidden = props.siblings.length < 2;
    this._position.textContent = `${props.index + 1}/${props.siblings.length}`;
    this._previous.disabled = props.index === 0;
    this._next.disabled = props.index === props.siblings.length - 1;
    this._buttons.continue.hidden = generating || !props.childless;
    this._buttons.regenerate.hidden = message.role === "user" && !props.childless;
    this._buttons.fork.hidden = generating;
    return more;
  }

  _drawReceipt() {
    const usage = this._props?.live === null ? this._props.message.usage : null;
    const shown = usage === null ? null : receipt(usage);
    if (shown === null) this._receipt.replaceChildren();
    else this._receipt.replaceChildren(shown);
  }

  /** @param {number} by */
  _step(by) {
    const target = this._props?.siblings[this._props.index + by];
    if (target !== undefined) this._handlers.select(target);
  }

  startEdit() {
    if (this._editor !== null) return;
    const text = h("textarea", { class: "edit-text", "aria-label": "Edit the message", rows: "3" });
    text.value = this._text();
    const close = () => {
      this._handlers.drafted(this._id, null);
      editor.replaceWith(this._body);
      this._editor = null;
      this._buttons.edit.focus();
    };
    const save = async () => {
      if (text.readOnly || text.value === "") return;
      text.readOnly = true;
      const accepted = await this._handlers.edit(this._id, text.value);
      text.readOnly = false;
      if (accepted) close();
    };
    text.addEventListener("input", () => this._handlers.drafted(this._id, text.value));
    text.addEventListener("keydown", (event) => {
      if (isComposing(event)) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        void save();
      }
    });
    const editor = h("div", { class: "editor" }, text, h("div", { class: "editor-buttons" },
      h("span", { class: "hint" }, "The old version stays, as a branch."),
      h("button", { type: "button", class: "button", onclick: close }, "Cancel"),
      h("button", { type: "button", class: "button primary", onclick: () => void save() }, "Send")));
    this._editor = editor;
    this._handlers.editing();
    this._body.replaceWith(editor);
    text.style.height = `${Math.min(400, text.scrollHeight + 4)}px`;
    text.focus();
    text.setSelectionRange(text.value.length, text.value.length);
  }
}
