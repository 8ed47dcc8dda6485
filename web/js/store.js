// @ts-check
/**
 * Holds the page's state and says when it changed.
 *
 * Owns the one mutable reference to the state; decides nothing (that is the reducer's) and draws nothing.
 * Event: `change` (detail: {before, after}), synchronously, only where the state is a new one.
 */

import { INITIAL_STATE, reduce } from "./reducer.js";

/** @typedef {import("./reducer.js").State} State */

export class Store extends EventTarget {
  constructor() {
    super();
    /** @type {State} */
    this.state = INITIAL_STATE;
  }

  /** @param {import("./protocol.js").Frame} event */
  dispatch(event) {
    const before = this.state;
    const after = reduce(before, event);
    if (after === before) return;
    this.state = after;
    this.dispatchEvent(new CustomEvent("change", { detail: { before, after } }));
  }
}
