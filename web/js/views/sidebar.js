// @ts-check
/**
 * The list of chats: search, open, rename, delete.
 *
 * Draws `state.list`; owns only which row is being renamed. Rows are kept by id, so the focus stays where it is while the
 * list moves.
 */

import { h, iconButton, isComposing, setAttribute } from "./dom.js";

/** @typedef {import("../reducer.js").State} State */
/** @typedef {import("../reducer.js").Listed} Listed */

/**
 * @typedef {object} Handlers
 * @property {(session: string, title: string) => void} renamed  a new title was given
 * @property {(session: string, title: string) => void} remove
 * @property {() => void} more
 */

/** @param {string | undefined} title */
export const titleOr = (title) => (title === undefined || title.trim() === "" ? "Untitled chat" : title);

class Row {
  /**
   * @param {string} session
   * @param {Sidebar} sidebar
   */
  constructor(session, sidebar) {
    this.session = session;
    this.title = "";
    this.link = h("a", { class: "session-link", href: `#/c/${encodeURIComponent(session)}` });
    this.dot = h("span", { class: "session-dot", hidden: true, role: "img", "aria-label": "answer in progress" });
    const buttons = h("span", { class: "session-buttons" },
      iconButton("edit", "Rename", () => sidebar.startRename(this)),
      iconButton("trash", "Delete", () => sidebar.handlers.remove(this.session, this.title)));
    this.element = h("li", { class: "session" }, this.link, this.dot, buttons);
  }

  /**
   * @param {string} title
   * @param {boolean} current
   * @param {boolean} generating
   */
  update(title, current, generating) {
    if (title !== this.title || this.link.textContent === "") {
      this.title = title;
      this.link.textContent = titleOr(title);
      this.link.title = titleOr(title);
    }
    setAttribute(this.link, "aria-current", current ? "page" : null);
    this.element.classList.toggle("current", current);
    this.dot.hidden = !generating;
  }
}

export class Sidebar {
  /**
   * @param {HTMLElement} root
   * @param {Handlers} handlers
   */
  constructor(root, handlers) {
    this.handlers = handlers;
    /** @type {Map<string, Row>} */
    this._rows = new Map();
    this._list = h("ul", { class: "session-list" });
    this._note = h("p", { class: "sessions-note", hidden: true });
    this._more = h("button", { type: "button", class: "button quiet more", hidden: true, onclick: () => handlers.more() }, "Show more");
    root.append(this._list, this._note, this._more);
  }

  /** @param {State} state */
  render(state) {
    const { list, sessions, shown } = state;
    const wanted = new Set(list.rows.map((row) => row.session));
    for (const [id, row] of this._rows) {
      if (wanted.has(id)) continue;
      row.element.remove();
      this._rows.delete(id);
    }
    list.rows.forEach((listed, index) => {
      const row = this._rows.get(listed.session) ?? new Row(listed.session, this);
      this._rows.set(listed.session, row);
      const session = sessions.get(listed.session);
      row.update(session?.title ?? listed.title, listed.session === shown, (session?.live.size ?? 0) > 0);
      if (this._list.children[index] !== row.element) this._list.insertBefore(row.element, this._list.children[index] ?? null);
    });
    this._more.hidden = list.cursor === null;
    this._note.hidden = list.rows.length > 0;
    if (!list.loaded) this._note.textContent = state.connection.phase === "stopped" ? "" : "Loading…";
    else this._note.textContent = list.query === "" ? "Your chats will be listed here." : `Nothing found for “${list.query}”.`;
  }

  /** @param {Row} row */
  startRename(row) {
    const input = h("input", { class: "rename", "aria-label": "New title", value: row.title, spellcheck: "false" });
    let over = false;
    const finish = (/** @type {boolean} */ keep) => {
      if (over) return;
      over = true;
      input.replaceWith(row.link);
      row.element.classList.remove("renaming");
      if (keep && input.value !== row.title && input.value.trim() !== "") this.handlers.renamed(row.session, input.value);
    };
    input.addEventListener("keydown", (event) => {
      if (isComposing(event)) return;
      if (event.key === "Enter" || event.key === "Escape") {
        event.preventDefault();
        event.stopPropagation();
        finish(event.key === "Enter");
        row.link.focus();
      }
    });
    input.addEventListener("blur", () => finish(true));
    row.link.replaceWith(input);
    row.element.classList.add("renaming");
    input.focus();
    input.select();
  }
}

