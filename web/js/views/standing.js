// @ts-check
/**
 * How things stand, in words: what a message waits for or why it ended as it did, and how full the context is.
 *
 * Pure functions.
 */

import { count } from "./dom.js";

/** @typedef {import("../reducer.js").Message} Message */
/** @typedef {import("../reducer.js").Live} Live */

/**
 * @param {Message} message
 * @returns {string} "" where nothing needs to be said
 */
export function ending(message) {
  const reason = message.end?.reason;
  switch (message.status) {
    case "stopped":
      return reason === "orphaned" ? "Stopped, because no page was open any more." : "Stopped.";
    case "interrupted":
      return "Interrupted: the server went away while this was being written. What had come is kept.";
    case "failed":
      return `Failed: ${message.end?.detail ?? "the server gave up on this answer."}`;
    default:
      return reason === "length" ? "Cut at the longest answer allowed. It can be continued." : "";
  }
}

/**
 * @param {Live} live
 * @returns {string} "" once there is text to look at
 */
export function progress(live) {
  switch (live.phase) {
    case "queued":
      return live.position === null ? "In the queue…" : `In the queue, position ${count(live.position)}…`;
    case "prompt":
      return `Reading ${count(live.started?.computed_tokens ?? 0)} new tokens of ${count(live.started?.prompt_tokens ?? 0)}…`;
    case "waiting":
      return "Waiting for the model…";
    default:
      return "";
  }
}

/**
 * @param {number} used          tokens
 * @param {number | null} limit  tokens; null while nobody knows
 * @returns {string}
 */
export function contextUse(used, limit) {
  return limit === null ? `${count(used)} tokens of context` : `${count(used)} of ${count(limit)} tokens of context`;
}
