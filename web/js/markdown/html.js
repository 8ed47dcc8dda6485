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

/**
 * @param {string} source
 * @returns {string}
 */
export function blockToHtml(source) {
  return /** @type {string} */ (marked.parse(source, { async: false }));
}
