// @ts-check
/**
 * A block of code on the page: language, copy button, and text that is only ever appended to.
 *
 * Text goes into parts of a few kilobytes that are laid out apart, so that a token at the end of a long block costs the
 * last part only. Colours come when the block is finished and the page is idle, and only where the block is short enough
 * to be coloured within a frame or two. Colouring changes no height.
 */

import { copyButton, h } from "../views/dom.js";

const PART_CHARS = 4096;
const COLOURED_CHARS = 24_000;

/** @type {Promise<any> | null} */
let highlighter = null;
const loadHighlighter = () => (highlighter ??= import("../../vendor/highlight/highlight.min.js").then((module) => module.default));

/** @param {() => void} run */
const whenIdle = (run) => (typeof requestIdleCallback === "function" ? requestIdleCallback(run, { timeout: 1000 }) : setTimeout(run, 50));

/** @typedef {string | {scope?: string, children: ScopeNode[]}} ScopeNode */

/**
 * highlight.js's tree as elements; no HTML text in between.
 * @param {ScopeNode} node
 * @returns {Node}
 */
function scopeToNode(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const [first, ...rest] = (node.scope ?? "").split(".");
  const known = first !== undefined && first !== "" && !first.startsWith("language:");
  const parent = known ? h("span", { class: ["hljs-" + first, ...rest.map((name, i) => name + "_".repeat(i + 1))].join(" ") }) : document.createDocumentFragment();
  parent.append(...node.children.map(scopeToNode));
  return parent;
}

export class CodeBlock {
  /** @param {string} language as written after the fence */
  constructor(language) {
    this._language = language.toLowerCase();
    this._text = "";
    this._partLength = 0;
    /** @type {Text | null} */
    this._lastPart = null;
    this._code = h("code", {});
    this.element = h("div", { class: "code" },
      h("div", { class: "code-head" }, h("span", { class: "code-language" }, language || "text"), copyButton("Copy code", () => this._text)),
      h("pre", { tabindex: "0", "aria-label": language ? `${language} code` : "code" }, this._code));
  }

  /** @param {string} text all of it so far; it begins with what was given before */
  update(text) {
    let rest = text.slice(this._text.length);
    this._text = text;
    while (rest !== "") {
      if (this._lastPart === null) {
        this._lastPart = document.createTextNode("");
        this._partLength = 0;
        this._code.append(h("span", { class: "code-part" }, this._lastPart));
      }
      const newline = this._partLength + rest.length > PART_CHARS ? rest.indexOf("\n", Math.max(0, PART_CHARS - this._partLength)) : -1;
      const piece = newline === -1 ? rest : rest.slice(0, newline + 1);
      this._lastPart.appendData(piece);
      this._partLength += piece.length;
      rest = rest.slice(piece.length);
      if (newline !== -1) this._lastPart = null;
    }
  }

  finish() {
    if (this._language === "" || this._text.length > COLOURED_CHARS) return;
    void loadHighlighter().then((hljs) => whenIdle(() => this._colour(hljs)));
  }

  /** @param {any} hljs */
  _colour(hljs) {
    if (hljs.getLanguage(this._language) === undefined) return;
    const tree = hljs.highlight(this._text, { language: this._language, ignoreIllegals: true })._emitter?.rootNode;
    if (tree !== undefined) this._code.replaceChildren(scopeToNode(tree));
  }
}
