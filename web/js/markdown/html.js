// @ts-check
/**
 * One block of markdown as HTML, with raw HTML off.
 *
 * A pure function; the result still goes through DOMPurify before it reaches the page (`render.js`). Images become
 * links: the page loads nothing from elsewhere.
 */

import { Marked } from "../../vendor/marked/marked.esm.js";

const off = () => undefined;

const marked = new Marked({
  gfm: true,
  breaks: true,
  tokenizer: {
    html: off, // block HTML
    tag: off, // inline HTML
    lheading: off, // these two change blocks that are already drawn
    def: off,
  },
  renderer: {
    /** @param {{href: string, text: string}} image */
    image({ href, text }) {
      const link = escapeHtml(href);
      return `<a href="${link}">${escapeHtml(text === "" ? href : text)}</a>`;
    },
  },
});

/** @param {string} text */
function escapeHtml(text) {
  return text.replace(/[&<>"']/g, (found) => `&#${found.charCodeAt(0)};`);
}

const MOST_CHARS = 32_768;
const DEEP = /^(?: {60}|(?:[ \t]*>){24})/m;

/**
 * Whether a block would take longer than a frame or two to turn into HTML: nests without end, or a list that is one huge
 * item. Such a block is shown as the text it is.
 * @param {string} source
 */
export function isCostly(source) {
  return source.length > MOST_CHARS || DEEP.test(source);
}

/**
 * @param {string} source
 * @returns {string}
 */
export function blockToHtml(source) {
  return /** @type {string} */ (marked.parse(source, { async: false }));
}
