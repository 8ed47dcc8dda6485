// @ts-check
/**
 * One client's connection to `chat.v1`: hello, heartbeat, requests with their answers, coming back after a drop.
 *
 * Owns the socket and the unanswered requests. A request is sent again, under the same id, on every new connection until
 * it has its answer; the server's idempotency makes that safe. Knows no session state: what to resume is asked of the
 * caller, and every frame that is not an answer is handed on as it came.
 *
 * Events: `state` (detail: ConnectionState) and `frame` (detail: Frame).
 */

import {
  byteLength, CLOSE_FRAME_TOO_LARGE, CLOSE_MEANINGS, FATAL_CLOSE_CODES, parseFrame, PROTOCOL, ProtocolError,
} from "./protocol.js";

/** @typedef {import("./protocol.js").Frame} Frame */

/**
 * @typedef {object} ConnectionState
 * @property {"idle" | "connecting" | "open" | "waiting" | "stopped"} phase  waiting: until the next attempt; stopped: only `start` goes on
 * @property {number} [retryInMs]
 * @property {number} [code]     of the last close
 * @property {string} [detail]   of the last close, for a person
 */

/**
 * @typedef {object} Clock
 * @property {(run: () => void, ms: number) => any} setTimeout
 * @property {(timer: any) => void} clearTimeout
 */

/**
 * @typedef {object} Options
 * @property {string} url
 * @property {(url: string, protocol: string) => WebSocket} makeSocket
 * @property {() => string | null} token
 * @property {() => {session: string, after: number}[]} resume  the last `seq` of each session to go on with
 * @property {Clock} clock
 * @property {() => number} random   in [0, 1)
 * @property {() => string} makeId
 */

const FIRST_RETRY_MS = 400;
const LONGEST_RETRY_MS = 15_000;
const CROWDED_RETRY_MS = 10_000;
const WELCOME_WITHIN_MS = 10_000;
/** The server pings every 20 s; a link that is silent for longer is dead even if the browser has not noticed. */
const SILENCE_MS = 35_000;
const DEFAULT_MAX_FRAME_BYTES = 1024 * 1024;

/** @typedef {{text: string, sent: boolean, resolve: (ack: Frame) => void, reject: (error: Error) => void}} Pending */

export class Connection extends EventTarget {
  /** @param {Options} options */
  constructor(options) {
    super();
    this._options = options;
    /** @type {Map<string, Pending>} */
    this._pending = new Map();
    /** @type {WebSocket | null} */
    this._socket = null;
    this._failures = 0;
    /** @type {any} */
    this._retryTimer = null;
    /** @type {any} */
    this._silenceTimer = null;
    this._maxFrameBytes = DEFAULT_MAX_FRAME_BYTES;
    /** @type {ConnectionState} */
    this.state = { phase: "idle" };
  }

  /** Requests that have no answer yet. */
  get numUnanswered() {
    return this._pending.size;
  }

  /** Connect now, whatever the state: the first time, after a fatal close, or instead of waiting on. */
  start() {
    if (this.state.phase === "connecting" || this.state.phase === "open") return;
    this._options.clock.clearTimeout(this._retryTimer);
    this._open();
  }

  /** Close for good; unanswered requests fail. */
  stop() {
    this._drop();
    this._options.clock.clearTimeout(this._retryTimer);
    this._setState({ phase: "stopped" });
    this._failAll(new ProtocolError({ code: "closed", detail: "The connection was closed before the server answered." }));
  }

  /**
   * Send a request; if the connection is away it goes out when it is back.
   * @param {string} type
   * @param {object} fields
   * @returns {Promise<Frame>} the ack; rejects with ProtocolError
   */
  request(type, fields) {
    const id = this._options.makeId();
    const text = JSON.stringify({ type, id, ...fields });
    const numBytes = byteLength(text);
    if (numBytes > this._maxFrameBytes) {
      const detail = `The message is ${numBytes.toLocaleString("en")} bytes; the server takes at most ${this._maxFrameBytes.toLocaleString("en")}.`;
      return Promise.reject(new ProtocolError({ code: "too_large", detail }));
    }
    if (this.state.phase === "stopped") {
      const detail = this.state.detail ?? "There is no connection to the server.";
      return Promise.reject(new ProtocolError({ code: "closed", detail, retryable: true }));
    }
    return new Promise((resolve, reject) => {
      const pending = { text, sent: false, resolve, reject };
      this._pending.set(id, pending);
      if (this.state.phase === "open") this._send(pending);
    });
  }

  /**
   * Send a frame that has no answer, or nothing while the connection is away.
   * @param {string} type
   * @param {object} fields
   */
  notify(type, fields) {
    if (this.state.phase === "open") this._socket?.send(JSON.stringify({ type, ...fields }));
  }

  _open() {
    this._setState({ phase: "connecting", code: this.state.code, detail: this.state.detail });
    const socket = this._options.makeSocket(this._options.url, PROTOCOL);
    this._socket = socket;
    socket.onopen = () => {
      const token = this._options.token();
      const resume = this._options.resume();
      const hello = { type: "hello", protocol: PROTOCOL, ...(token ? { token } : {}), ...(resume.length > 0 ? { resume } : {}) };
      socket.send(JSON.stringify(hello));
    };
    socket.onmessage = (event) => this._receive(event.data);
    socket.onclose = (event) => this._lost(event.code);
    this._expectWithin(WELCOME_WITHIN_MS);
  }

  /** @param {unknown} data */
  _receive(data) {
    this._expectWithin(this.state.phase === "open" ? SILENCE_MS : WELCOME_WITHIN_MS);
    const frame = parseFrame(data);
    if (frame === null) return;
    const pending = (frame.type === "ack" || frame.type === "error") && typeof frame.id === "string" ? this._pending.get(frame.id) : undefined;
    if (pending !== undefined) {
      this._pending.delete(frame.id);
      if (frame.type === "ack") pending.resolve(frame);
      else pending.reject(new ProtocolError(/** @type {any} */ (frame)));
    } else if (frame.type === "ping") {
      this._socket?.send('{"type":"pong"}');
    } else if (frame.type === "welcome") {
      this._welcomed(frame);
    } else if (frame.type !== "ack" && frame.type !== "pong") {
      this.dispatchEvent(new CustomEvent("frame", { detail: frame }));
    }
  }

  /** @param {Frame} welcome */
  _welcomed(welcome) {
    this._failures = 0;
    this._maxFrameBytes = welcome.limits?.max_frame_bytes ?? DEFAULT_MAX_FRAME_BYTES;
    this._expectWithin(SILENCE_MS);
    this.dispatchEvent(new CustomEvent("frame", { detail: welcome }));
    this._setState({ phase: "open" });
    for (const pending of [...this._pending.values()]) this._send(pending);
  }

  /** @param {Pending} pending */
  _send(pending) {
    pending.sent = true;
    this._socket?.send(pending.text);
  }

  /** @param {number} ms */
  _expectWithin(ms) {
    const { clock } = this._options;
    clock.clearTimeout(this._silenceTimer);
    this._silenceTimer = clock.setTimeout(() => this._lost(1006), ms);
  }

  /** Forget the socket without waiting for its own close, which a dead link may never deliver. */
  _drop() {
    const socket = this._socket;
    this._socket = null;
    this._options.clock.clearTimeout(this._silenceTimer);
    if (socket === null) return;
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close();
  }

  /** @param {number} code */
  _lost(code) {
    this._drop();
    const detail = CLOSE_MEANINGS.get(code) ?? "The connection to the server was lost.";
    if (FATAL_CLOSE_CODES.has(code)) {
      this._setState({ phase: "stopped", code, detail });
      this._failAll(new ProtocolError({ code: "closed", detail }));
      return;
    }
    if (code === CLOSE_FRAME_TOO_LARGE) {
      // Sending the same frame again would close every connection to come.
      this._failSent(new ProtocolError({ code: "too_large", detail }));
    }
    const ceiling = Math.min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2 ** Math.min(this._failures, 10));
    const jittered = ceiling * (0.5 + this._options.random() / 2);
    const retryInMs = Math.round(code === 4029 ? jittered + CROWDED_RETRY_MS : jittered);
    this._failures += 1;
    this._retryTimer = this._options.clock.setTimeout(() => this._open(), retryInMs);
    this._setState({ phase: "waiting", retryInMs, code, detail });
  }

  /** @param {ProtocolError} error */
  _failAll(error) {
    const failed = [...this._pending.values()];
    this._pending.clear();
    for (const pending of failed) pending.reject(error);
  }

  /** @param {ProtocolError} error */
  _failSent(error) {
    for (const [id, pending] of [...this._pending]) {
      if (!pending.sent) continue;
      this._pending.delete(id);
      pending.reject(error);
    }
  }

  /** @param {ConnectionState} state */
  _setState(state) {
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: state }));
  }
}
