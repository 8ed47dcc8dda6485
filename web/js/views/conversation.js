// @ts-check
/**
 * The active path of the session on screen.
 *
 * Owns the message views, kept by id: an event redraws only the message it is about. Long paths start with their last
 * messages; earlier ones come on demand. Scrolling is `Follower`'s.
 */

import { activePath, childrenOf, siblingsOf } from "../tree.js";
import { announce, count, h } from "./dom.js";
import { MessageView } from "./message.js";

/** @typedef {import("../reducer.js").State} State */
/** @typedef {import("../reducer.js").Session} Session */
/** @typedef {import("../reducer.js").Message} Message */

const FIRST_SHOWN = 40;
const BUDGET_MS = 10;

const SUGGESTIONS = [
  "Explain how a B-tree splits a node",
  "Write a haiku about a patient database",
  "A Python function that merges sorted lists",
];

export class ConversationView {
  /**
   * @param {HTMLElement} root
   * @param {import("../scroll.js").Follower} follower
   * @param {import("./message.js").Handlers & {suggest: (text: string) => void}} handlers
   */
  constructor(root, follower, handlers) {
    this._root = root;
    this._follower = follower;
    this._handlers = handlers;
    /** @type {Map<string, MessageView>} */
    this._views = new Map();
    /** @type {string | null | undefined} */
    this._shown = undefined;
    this._numShown = FIRST_SHOWN;
    this._placeholder = h("div", { class: "placeholder" });
    this._earlier = h("button", { type: "button", class: "button quiet earlier", onclick: () => this._showEarlier() });
    this._list = h("div", { class: "messages" });
    this._root.append(this._placeholder, this._earlier, this._list);
    /** @type {Session | undefined} */
    this._drawn = undefined;
    this._unfinished = false;
    this._placeholderKind = "";
  }

  /**
   * @param {State} state
   * @returns {boolean} whether there is more to draw in the next frame
   */
  render(state) {
    const session = state.shown === null ? undefined : state.sessions.get(state.shown);
    if (state.shown !== this._shown) {
      this._shown = state.shown;
      this._numShown = FIRST_SHOWN;
      this._drawn = undefined;
      this._views.clear();
      this._list.replaceChildren();
      this._earlier.hidden = true;
      this._follower.follow();
    }
    this._drawPlaceholder(state, session);
    if (session === undefined || (session === this._drawn && !this._unfinished)) return false;
    this._announceEnds(this._drawn, session);
    this._unfinished = this._drawPath(session);
    this._drawn = session;
    return this._unfinished;
  }

  /** @param {Session} session */
  _drawPath(session) {
    const path = activePath(session);
    const shown = path.slice(-this._numShown);
    this._earlier.hidden = shown.length === path.length;
    this._earlier.textContent = `Show earlier messages (${count(path.length - shown.length)})`;
    const focused = this._focusedAction();
    const wanted = new Set(shown.map((message) => message.id));
    for (const [id, view] of this._views) {
      if (wanted.has(id)) continue;
      view.element.remove();
      this._views.delete(id);
    }
    shown.forEach((message, position) => {
      const view = this._views.get(message.id) ?? new MessageView(message, this._handlers);
      this._views.set(message.id, view);
      if (this._list.children[position] !== view.element) this._list.insertBefore(view.element, this._list.children[position] ?? null);
    });
    let more = false;
    const deadline = performance.now() + BUDGET_MS;
    // The last message is what the reader looks at, so it is drawn first.
    for (const message of shown.toReversed()) {
      const { siblings, index } = siblingsOf(session, message);
      const childless = childrenOf(session, message.id).length === 0;
      const live = session.live.get(message.id) ?? null;
      more = this._views.get(message.id)?.update({ message, live, siblings, index, childless }, deadline) || more;
    }
    if (focused !== null && !this._root.contains(document.activeElement)) this._refocus(focused);
    return more;
  }

  /** A switch between versions replaces the message under the finger; the focus goes to the same button of the new one. */
  _focusedAction() {
    const button = document.activeElement?.closest("[data-action]");
    const element = button?.closest(".message");
    if (!button || !element || element.parentElement !== this._list) return null;
    return { position: [...this._list.children].indexOf(element), action: button.getAttribute("data-action") };
  }

  /** @param {{position: number, action: string | null}} focused */
  _refocus({ position, action }) {
    const element = this._list.children[Math.min(position, this._list.children.length - 1)];
    const button = /** @type {HTMLButtonElement | null | undefined} */ (element?.querySelector(`[data-action="${action}"]`));
    const other = /** @type {HTMLButtonElement | null | undefined} */ (element?.querySelector(".actions button:not(:disabled)"));
    if (button && !button.disabled && !button.hidden) button.focus({ preventScroll: true });
    else other?.focus({ preventScroll: true });
  }

  _showEarlier() {
    const session = this._drawn;
    if (session === undefined) return;
    this._numShown += FIRST_SHOWN;
    this._follower.keepingPlace(() => {
      this._drawPath(session);
    });
    this._unfinished = true;
  }

  /**
   * @param {Session | undefined} before
   * @param {Session} after
   */
  _announceEnds(before, after) {
    if (before === undefined || before.id !== after.id) return;
    for (const id of after.live.keys()) if (!before.live.has(id)) announce("An answer is being written");
    for (const id of before.live.keys()) {
      const message = after.messages.get(id);
      if (message === undefined || after.live.has(id)) continue;
      announce(message.status === "done" ? `Answer: ${message.text.slice(0, 300)}` : `The answer is ${message.status}`);
    }
  }

  /**
   * @param {State} state
   * @param {Session | undefined} session
   */
  _drawPlaceholder(state, session) {
    const kind = placeholderKind(state, session);
    this._placeholder.hidden = kind === "none";
    this._root.classList.toggle("empty", kind !== "none");
    const key = `${kind} ${kind === "invite" ? state.welcome?.model : ""}`;
    if (key === this._placeholderKind) return;
    this._placeholderKind = key;
    this._placeholder.replaceChildren();
    if (kind === "missing") this._placeholder.append(h("h2", {}, "This chat is not here"), h("p", {}, "It was deleted, or the address belongs to someone else."));
    if (kind === "loading") this._placeholder.append(h("p", { class: "loading" }, "Loading…"));
    if (kind === "invite") {
      const model = typeof state.welcome?.model === "string" ? state.welcome.model : "the model";
      const suggestions = SUGGESTIONS.map((text) => h("button", { type: "button", class: "suggestion", onclick: () => this._handlers.suggest(text) }, text));
      this._placeholder.append(h("h2", {}, "What would you like to ask?"),
        h("p", {}, `You are talking to ${model}. Every answer can be regenerated, every question edited: the versions stay beside each other as branches.`),
        h("div", { class: "suggestions" }, ...suggestions));
    }
  }
}

/**
 * @param {State} state
 * @param {Session | undefined} session
 * @returns {"none" | "invite" | "loading" | "missing"}
 */
function placeholderKind(state, session) {
  if (state.shown === null) return "invite";
  if (session === undefined) return state.missing.has(state.shown) ? "missing" : "loading";
  return session.leaf === null ? "invite" : "none";
}
