// @ts-check
/**
 * The words of `chat.v1` that the page uses: frame shapes, close codes, ranges of parameters.
 *
 * Owns no state and no I/O; knows nothing of the store or the views.
 */

export const PROTOCOL = "chat.v1";

/** @typedef {{[field: string]: any, type: string}} Frame */
/** @typedef {{token?: string, resume?: {session: string, after: number}[]}} HelloFields */

/**
 * @typedef {object} Params
 * @property {number} [max_tokens]
 * @property {number} [temperature]
 * @property {number} [top_p]
 * @property {number} [top_k]
 * @property {number} [min_p]
 * @property {number} [repetition_penalty]
 * @property {number} [presence_penalty]
 * @property {number} [frequency_penalty]
 * @property {string[]} [stop]
 * @property {number} [seed]
 */

/**
 * @typedef {object} Usage
 * @property {number} [prompt_tokens]
 * @property {number} [cached_tokens]
 * @property {number} [swapped_in_tokens]
 * @property {number} [computed_tokens]
 * @property {number} [completion_tokens]
 * @property {number} [ttft_ms]
 * @property {number} [tokens_per_s]
 */

/** Close codes after which a client does not come back by itself. */
export const FATAL_CLOSE_CODES = new Set([4000, 4001, 4003]);
export const CLOSE_FRAME_TOO_LARGE = 1009;
export const CLOSE_NOT_AUTHENTICATED = 4001;

/** What each close code means to a person. */
export const CLOSE_MEANINGS = new Map([
  [1001, "The server is restarting."],
  [1009, "The server refused a message as too large."],
  [4000, "This page and the server do not speak the same protocol version. Reload the page."],
  [4001, "The server asks for an access token."],
  [4003, "The server does not accept this page's address. Open it under the address the server prints."],
  [4008, "This connection fell behind and was closed."],
  [4029, "Too many connections are open."],
]);

/** An `error` frame, or a local failure to send, as an exception. */
export class ProtocolError extends Error {
  /** @param {{code: string, detail: string, retryable?: boolean, [field: string]: any}} frame */
  constructor(frame) {
    super(frame.detail);
    this.name = "ProtocolError";
    this.code = frame.code;
    this.detail = frame.detail;
    this.retryable = frame.retryable === true;
    this.fields = frame;
  }
}

/**
 * The text of one websocket message as a frame, or null where it is none (the page ignores such).
 * @param {unknown} data
 * @returns {Frame | null}
 */
export function parseFrame(data) {
  if (typeof data !== "string") return null;
  try {
    const frame = JSON.parse(data);
    return frame !== null && typeof frame === "object" && typeof frame.type === "string" ? frame : null;
  } catch {
    return null;
  }
}

/**
 * @param {string} text
 * @returns {number} bytes of UTF-8
 */
export function byteLength(text) {
  return new TextEncoder().encode(text).length;
}

/**
 * Lone surrogates cannot travel as UTF-8 and the server refuses them.
 * @param {string} text
 */
export function wellFormed(text) {
  return text.replace(/[\uD800-\uDBFF](?![\uDC00-\uDFFF])|(?<![\uD800-\uDBFF])[\uDC00-\uDFFF]/g, "\uFFFD");
}

/**
 * @typedef {object} Range
 * @property {string} label
 * @property {string} hint
 * @property {number} low
 * @property {number} high
 * @property {boolean} whole
 * @property {boolean} [aboveLow]   the low end itself is not allowed
 * @property {number} step
 * @property {string} fallback      what holds where nothing is set
 */

/** The numbers a session may set, in the order of the panel. @type {Map<string, Range>} */
export const PARAM_RANGES = new Map([
  ["temperature", { label: "Temperature", hint: "0 is greedy", low: 0, high: 2, whole: false, step: 0.05, fallback: "0.7" }],
  ["top_p", { label: "Top-p", hint: "probability mass kept", low: 0, high: 1, whole: false, aboveLow: true, step: 0.01, fallback: "0.95" }],
  ["top_k", { label: "Top-k", hint: "0 is off", low: 0, high: 1_000_000, whole: true, step: 1, fallback: "0" }],
  ["min_p", { label: "Min-p", hint: "0 is off", low: 0, high: 1, whole: false, step: 0.01, fallback: "0" }],
  ["repetition_penalty", { label: "Repetition", hint: "penalty; 1 is off", low: 0, high: 2, whole: false, aboveLow: true, step: 0.05, fallback: "1" }],
  ["presence_penalty", { label: "Presence", hint: "penalty; 0 is off", low: -2, high: 2, whole: false, step: 0.1, fallback: "0" }],
  ["frequency_penalty", { label: "Frequency", hint: "penalty; 0 is off", low: -2, high: 2, whole: false, step: 0.1, fallback: "0" }],
  ["max_tokens", { label: "Longest answer", hint: "in tokens", low: 1, high: 1_000_000, whole: true, step: 1, fallback: "what fits" }],
  // The server takes seeds up to 2^63 − 1; a number of JavaScript is exact up to 2^53 − 1.
  ["seed", { label: "Seed", hint: "same seed, same draw", low: 0, high: Number.MAX_SAFE_INTEGER, whole: true, step: 1, fallback: "random" }],
]);

export const MAX_STOP_STRINGS = 8;
export const MAX_STOP_CHARS = 256;

/**
 * Read what a person typed into a number field.
 * @param {string} name a key of PARAM_RANGES
 * @param {string} typed
 * @returns {{value: number | null} | {problem: string}} null: not set
 */
export function readParam(name, typed) {
  const range = PARAM_RANGES.get(name);
  if (range === undefined) throw new TypeError(`no parameter ${name}`);
  const text = typed.trim();
  if (text === "") return { value: null };
  const value = Number(text);
  const inside = Number.isFinite(value) && (range.aboveLow ? value > range.low : value >= range.low) && value <= range.high;
  if (inside && (!range.whole || Number.isInteger(value))) return { value };
  const kind = range.whole ? "a whole number" : "a number";
  const low = range.aboveLow ? `above ${range.low}` : `from ${range.low.toLocaleString("en")}`;
  return { problem: `${range.label} must be ${kind} ${low} to ${range.high.toLocaleString("en")}` };
}
