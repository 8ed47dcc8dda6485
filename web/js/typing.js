// @ts-check
/**
 * Telling the server what is being written, so that it can get ahead of it.
 *
 * Owns when a hint goes out: once writing pauses, and while it goes on, now and then; never the same twice. Whoever moves
 * on (empties the box, opens another chat) takes the hint back with an empty text. A message that was sent ends its draft
 * by itself. Knows neither the page nor the socket.
 */

/** @typedef {import("./connection.js").Clock} Clock */
/** @typedef {{session: string, parent: string | null, text: string}} Draft */

/** A hint waits for a pause of so long, ... */
const PAUSE_MS = 400;
/** ... but while somebody writes on and on, for no longer than this. */
const LONGEST_MS = 1500;
/** As much of a draft as the server reads. */
const MAX_CHARS = 16_384;

export class TypingHints {
  /**
   * @param {(draft: Draft) => void} send
   * @param {Clock & {now: () => number}} clock  milliseconds
   */
  constructor(send, clock) {
    this._send = send;
    this._clock = clock;
    /** @type {Draft | null} what the server was told last and still holds */
    this._told = null;
    /** @type {Draft | null} what it is to be told next */
    this._next = null;
    this._waitingSince = 0;
    /** @type {any} */
    this._timer = null;
  }

  /**
   * The draft of a message after `parent` is now `text`.
   * @param {string} session
   * @param {string | null} parent
   * @param {string} text
   */
  typed(session, parent, text) {
    if (this._told !== null && this._told.session !== session) this.movedOn();
    if (text === "") return this.movedOn();
    const now = this._clock.now();
    if (this._next === null) this._waitingSince = now;
    this._next = { session, parent, text: text.slice(0, MAX_CHARS) };
    this._clock.clearTimeout(this._timer);
    const wait = Math.max(0, Math.min(PAUSE_MS, this._waitingSince + LONGEST_MS - now));
    this._timer = this._clock.setTimeout(() => this._tell(), wait);
  }

  /** The draft was given up, or left behind: nothing is to be done for it any more. */
  movedOn() {
    const told = this._told;
    this.sent();
    if (told !== null) this._send({ ...told, text: "" });
  }

  /** The draft has become a message. */
  sent() {
    this._clock.clearTimeout(this._timer);
    this._next = this._told = null;
  }

  _tell() {
    const { _next: next, _told: told } = this;
    this._next = null;
    if (next === null || (told !== null && told.session === next.session && told.parent === next.parent && told.text === next.text)) return;
    this._told = next;
    this._send(next);
  }
}
