// @ts-check
/**
 * The receipt under an answer: where its prompt's tokens came from, how soon the first token came, how fast the rest.
 *
 * A pure function of `usage`; a field that is not there is left out, never guessed.
 */

import { count, h } from "./dom.js";

/** @typedef {import("../protocol.js").Usage} Usage */

/** @param {number} ms */
const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`);

/** @param {number} rate */
const perSecond = (rate) => (rate >= 100 ? count(Math.round(rate)) : rate.toFixed(1));

const SOURCES = /** @type {const} */ ([
  ["cached_tokens", "cached", "tokens of the prompt whose keys and values were in the cache"],
  ["swapped_in_tokens", "swapped in", "tokens brought back from host memory"],
  ["computed_tokens", "computed", "tokens of the prompt that had to be computed"],
]);

/**
 * @param {Usage} usage
 * @returns {HTMLElement | null}
 */
export function receipt(usage) {
  if (usage.prompt_tokens === undefined) return null;
  const bar = h("span", { class: "receipt-bar", "aria-hidden": "true" });
  const parts = SOURCES.map(([field, label, title]) => {
    const tokens = usage[field] ?? 0;
    const kind = label.replace(" ", "-");
    if (tokens > 0) {
      const piece = h("span", { class: `piece ${kind}` });
      piece.style.flexGrow = String(tokens);
      bar.append(piece);
    }
    return h("span", { class: `fact ${kind}`, title }, h("i", { class: "swatch", "aria-hidden": "true" }), h("b", {}, count(tokens)), ` ${label}`);
  });
  const facts = [
    usage.completion_tokens !== undefined && fact(count(usage.completion_tokens), "out", "tokens of the answer"),
    usage.ttft_ms !== undefined && fact(duration(usage.ttft_ms), "first token", "from the request to the first token"),
    usage.tokens_per_s !== undefined && fact(perSecond(usage.tokens_per_s), "tokens/s", "speed after the first token"),
  ];
  return h("div", { class: "receipt", role: "group", "aria-label": `Receipt: prompt of ${count(usage.prompt_tokens)} tokens` }, bar, ...parts, ...facts);
}

/**
 * @param {string} value
 * @param {string} label
 * @param {string} title
 */
function fact(value, label, title) {
  return h("span", { class: "fact", title }, h("b", {}, value), ` ${label}`);
}
