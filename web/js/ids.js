// @ts-check
/**
 * Ids of requests: unique among all clients of all time, or nearly.
 */

/** `crypto.randomUUID` exists on secure origins only, and a server may be reached by plain HTTP. */
export function makeId() {
  if (typeof crypto.randomUUID === "function") return crypto.randomUUID();
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
