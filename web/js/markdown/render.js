// @ts-check
/**
 * A message's markdown on the page, drawn as it grows.
 *
 * Owns one element. Finished blocks are drawn once; only the open block is drawn again; code is appended to. A call stops
 * at its deadline and says whether it has more to do, so a long text, or many, are drawn over several frames.
 */

import DOMPurify from "../../vendor/dompurify/purify.es.js";
import { h } from "../views/dom.js";
import { BlockScanner } from "./blocks.js";
import { CodeBlock } from "./code.js";
import { blockToHtml, isCostly } from "./html.js";

/** A block that took long to draw is drawn again less often: at most this share of the time goes into it. */
const OPEN_BLOCK_SHARE = 0.2;

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "strong", "em", "del", "code", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr",
    "table", "thead", "tbody", "tr", "th", "td", "a", "input",
  ],
  ALLOWED_ATTR: ["href", "title", "align", "start", "class", "type", "checked", "disabled"],
  // Values of these are no addresses; without this they would have to look like one.
  ADD_URI_SAFE_ATTR: ["align", "start", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

/** @typedef {import("./blocks.js").Block} Block */
/** @typedef {{element: HTMLElement, code: CodeBlock | null, source: string, done: boolean}} Drawn */

export class MarkdownView {
  constructor() {
    this.element = h("div", { class: "markdown" });
    this._scanner = new BlockScanner();
    this._text = "";
    this._final = false;
    /** @type {Drawn[]} */
    this._drawn = [];
    this._firstOpen = 0;
    this._notBefore = 0;
  }

  _reset() {
    this._scanner = new BlockScanner();
    this._text = "";
    this._final = false;
    this._drawn = [];
    this._firstOpen = 0;
    this.element.replaceChildren();
  }

  /**
   * @param {string} text  all of it so far
   * @param {boolean} final
   * @param {number} deadline  on the clock of `performance.now`
   * @returns {boolean} whether there is more to draw: call again in the next frame
   */
  update(text, final, deadline) {
    if (text !== this._text || final !== this._final) {
      if (this._final || !text.startsWith(this._text)) this._reset();
      this._text = text;
      this._final = final;
      this._scanner.update(text, final);
    }
    const { blocks } = this._scanner;
    while (this._drawn.length > blocks.length) this._drawn.pop()?.element.remove();
    for (let i = this._firstOpen; i < blocks.length; i += 1) {
      if (performance.now() > deadline) return true;
      const block = /** @type {Block} */ (blocks[i]);
      if (!this._draw(i, block)) return true;
      if (block.done && i === this._firstOpen) this._firstOpen += 1;
    }
    return false;
  }

  /**
   * @param {number} index
   * @param {Block} block
   * @returns {boolean} false: put off
   */
  _draw(index, block) {
    let drawn = this._drawn[index];
    if (drawn === undefined) {
      const code = block.kind === "code" ? new CodeBlock(block.info) : null;
      const element = code?.element ?? h("div", { class: `block ${block.kind}${block.continued ? " continued" : ""}` });
      drawn = { element, code, source: "", done: false };
      this._drawn.push(drawn);
      this.element.append(element);
    }
    if (drawn.source === block.source && drawn.done === block.done) return true;
    if (drawn.code !== null) {
      drawn.code.update(block.source);
      if (block.done) drawn.code.finish();
    } else if (drawn.source !== block.source) {
      const begun = performance.now();
      if (!block.done && begun < this._notBefore) return false;
      drawn.element.replaceChildren(isCostly(block.source) ? h("div", { class: "plain" }, block.source) : toFragment(block.source));
      const spent = performance.now() - begun;
      this._notBefore = begun + spent / OPEN_BLOCK_SHARE;
    }
    if (block.done && drawn.code === null) drawn.element.querySelectorAll("pre > code").forEach(decorate);
    drawn.source = block.source;
    drawn.done = block.done;
    return true;
  }
}

/**
 * @param {string} source
 * @returns {DocumentFragment}
 */
function toFragment(source) {
  const fragment = /** @type {DocumentFragment} */ (/** @type {unknown} */ (DOMPurify.sanitize(blockToHtml(source), ALLOWED)));
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div", { class: "table-scroll", tabindex: "0", role: "group", "aria-label": "table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

/**
 * Code inside a list or a quote gets the same dress as code outside.
 * @param {Element} code
 */
function decorate(code) {
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const block = new CodeBlock(language);
  block.update(code.textContent ?? "");
  block.finish();
  code.parentElement?.replaceWith(block.element);
}
