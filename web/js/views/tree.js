// @ts-check
/**
 * All branches of a chat at once: an outline in which a message that has several versions opens a level.
 *
 * A dialog; choosing a message selects the branch through it.
 */

import { activePath, childrenOf, textOf } from "../tree.js";
import { h, iconButton } from "./dom.js";

/** @typedef {import("../reducer.js").Session} Session */

/** More than a row shows, so that where it ends is the style sheet's to say. */
const PREVIEW_CHARS = 160;
/** A chat may have thousands of messages; an outline of more than this helps nobody. */
const MOST_ROWS = 2000;

/**
 * Rows from the roots down. Only a fork indents, so a long unbranched chat stays flat.
 * @param {Session} session
 * @returns {{id: string, depth: number, fork: boolean}[]}
 */
export function outline(session) {
  /** @type {{id: string, depth: number, fork: boolean}[]} */
  const rows = [];
  const pending = [...childrenOf(session, null)].reverse().map((id) => ({ id, depth: 0, fork: childrenOf(session, null).length > 1 }));
  while (pending.length > 0 && rows.length < MOST_ROWS) {
    const row = /** @type {{id: string, depth: number, fork: boolean}} */ (pending.pop());
    rows.push(row);
    const children = childrenOf(session, row.id);
    const fork = children.length > 1;
    pending.push(...[...children].reverse().map((id) => ({ id, depth: row.depth + (fork ? 1 : 0), fork })));
  }
  return rows;
}

/**
 * @param {Session} session
 * @param {(message: string) => void} select
 */
export function showTree(session, select) {
  const active = new Set(activePath(session).map((message) => message.id));
  const rows = outline(session).map(({ id, depth, fork }) => {
    const message = /** @type {import("../reducer.js").Message} */ (session.messages.get(id));
    const text = textOf(session, message).slice(0, PREVIEW_CHARS * 2).replace(/\s+/g, " ").trim().slice(0, PREVIEW_CHARS) || "(empty)";
    const choose = () => {
      dialog.close();
      select(id);
    };
    const button = h("button", { type: "button", class: `tree-row ${message.role}${active.has(id) ? " active" : ""}${fork ? " fork" : ""}`,
      "aria-current": active.has(id) ? "true" : null, onclick: choose },
    h("span", { class: "tree-role" }, message.role === "user" ? "You" : "Answer"), h("span", { class: "tree-text" }, text));
    button.style.marginInlineStart = `${Math.min(depth, 12) * 20}px`;
    return h("li", {}, button);
  });
  const dialog = h("dialog", { class: "dialog tree", "aria-labelledby": "tree-title" },
    h("div", { class: "settings-head" }, h("h2", { id: "tree-title" }, "Branches"), iconButton("close", "Close", () => dialog.close())),
    rows.length === 0 ? h("p", {}, "Nothing has been said yet.") : h("ol", { class: "tree-rows" }, ...rows));
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
  dialog.querySelector(".tree-row.active:last-of-type")?.scrollIntoView({ block: "nearest" });
}
