// @ts-check
/**
 * What a person can do, as requests; and what the page must ask for by itself.
 *
 * Owns the subscriptions (which sessions are open) and the reading of the list. Changes no state itself: it sends, and the
 * store follows what the server answers. A request that fails is told through `onProblem` unless its caller wants the
 * failure; then it throws.
 */

import { wellFormed } from "./protocol.js";

/** @typedef {import("./connection.js").Connection} Connection */
/** @typedef {import("./store.js").Store} Store */
/** @typedef {import("./protocol.js").Params} Params */
/** @typedef {import("./protocol.js").ProtocolError} ProtocolError */

/** Sessions kept subscribed beside the one on screen, so that going back to one is instant. */
const KEPT_OPEN = 6;

export class Actions {
  /**
   * @param {Connection} connection
   * @param {Store} store
   * @param {(what: string, error: Error, retry?: () => Promise<boolean>) => void} onProblem  `retry` tells whether it worked
   */
  constructor(connection, store, onProblem) {
    this._connection = connection;
    this._store = store;
    this._onProblem = onProblem;
    /** @type {Set<string>} asked for, and no snapshot yet */
    this._opening = new Set();
    /** @type {string[]} latest last */
    this._recent = [];
    /** @type {any} */
    this._listTimer = null;
    store.addEventListener("change", (event) => {
      const { before, after } = /** @type {CustomEvent} */ (event).detail;
      if (before.connection.phase !== "open" && after.connection.phase === "open") this._connected();
      this._keepTrue();
    });
  }

  /** @param {string | null} session */
  show(session) {
    this._store.dispatch({ type: "page.show", session });
    if (session === null) return;
    this._recent = [...this._recent.filter((id) => id !== session), session];
    if (!this._store.state.sessions.has(session)) this._open(session);
    this._closeOld();
  }

  /**
   * @param {{system?: string | null, params?: Params}} settings
   * @returns {Promise<string>} the id
   */
  async create(settings) {
    const { system, params } = settings;
    const ack = await this._connection.request("session.create", { ...(system ? { system } : {}), ...(params ? { params } : {}) });
    return ack.session;
  }

  /**
   * @param {string} session
   * @param {string | null} parent
   * @param {string} text
   */
  send(session, parent, text) {
    return this._connection.request("message.send", { session, parent, text: wellFormed(text) });
  }

  /**
   * @param {string} session
   * @param {string} message
   * @param {string} text
   */
  edit(session, message, text) {
    return this._connection.request("message.edit", { session, message, text: wellFormed(text) });
  }

  /** @param {string} session @param {{title?: string, system?: string | null, params?: Params}} fields */
  update(session, fields) {
    return this._connection.request("session.update", { session, ...fields });
  }

  /** @param {string} session @param {string} message */
  regenerate(session, message) {
    return this._try("Not regenerated.", "message.regenerate", { session, message });
  }

  /** @param {string} session @param {string} message */
  continue(session, message) {
    return this._try("Not continued.", "message.continue", { session, message });
  }

  /** @param {string} session @param {string} message */
  deleteMessage(session, message) {
    return this._try("Not deleted.", "message.delete", { session, message });
  }

  /** @param {string} session @param {string} message */
  select(session, message) {
    return this._try("Not switched.", "branch.select", { session, message });
  }

  /** @param {string} session @param {string} message */
  stop(session, message) {
    return this._try("Not stopped.", "generation.stop", { session, message });
  }

  /** @param {string} session */
  deleteSession(session) {
    return this._try("The chat was not deleted.", "session.delete", { session });
  }

  /** @param {string} session @param {string} title */
  rename(session, title) {
    return this._try("Not renamed.", "session.update", { session, title: wellFormed(title) });
  }

  /**
   * @param {string} session
   * @param {string} message
   * @returns {Promise<string | null>} the new session
   */
  async fork(session, message) {
    const ack = await this._try("Not forked.", "session.fork", { session, message });
    return ack?.session ?? null;
  }

  /** @param {string} session @param {string | null} parent @param {string} text */
  typing(session, parent, text) {
    this._connection.notify("typing", { session, parent, text: wellFormed(text) });
  }

  /**
   * Read the list from its start, or go on where it ended.
   * @param {string} query
   * @param {boolean} more
   */
  async list(query, more) {
    const cursor = more ? this._store.state.list.cursor : null;
    this._store.dispatch({ type: "page.list.asked", query });
    const limit = more ? 50 : Math.min(100, Math.max(50, this._store.state.list.rows.length));
    try {
      const ack = await this._connection.request("session.list", { limit, ...(query ? { query } : {}), ...(cursor ? { cursor } : {}) });
      this._store.dispatch({ type: "page.list.read", query, more, rows: ack.sessions, cursor: ack.cursor ?? null });
    } catch (error) {
      this._store.dispatch({ type: "page.list.failed" });
      // That there is no connection is said elsewhere.
      if (/** @type {ProtocolError} */ (error).code !== "closed") this._onProblem("Reading the chats failed.", /** @type {Error} */ (error));
    }
  }

  /** @param {string} session */
  _open(session) {
    // While the connection is away nothing is queued: `_connected` asks for what is on screen then.
    if (this._opening.has(session) || this._store.state.connection.phase !== "open") return;
    this._opening.add(session);
    this._connection.request("session.open", { session }).catch((/** @type {ProtocolError} */ error) => {
      this._opening.delete(session);
      if (error.code === "not_found") this._store.dispatch({ type: "page.missing", session });
      else if (error.code !== "closed") this._onProblem("The chat was not opened.", error);
    });
  }

  /** What was resumed goes on by itself; what was only asked for is asked for again. */
  _connected() {
    this._opening.clear();
    const { shown, sessions, missing } = this._store.state;
    if (shown !== null && !sessions.has(shown) && !missing.has(shown)) this._open(shown);
  }

  /** After each change: ask again for what has gaps, and for the list where it is out of date. */
  _keepTrue() {
    const { sessions, list, connection } = this._store.state;
    if (connection.phase !== "open") return;
    for (const id of this._opening) if (sessions.get(id)?.stale === false) this._opening.delete(id);
    for (const session of sessions.values()) if (session.stale) this._open(session.id);
    if (list.outdated && !list.loading && this._listTimer === null) {
      this._listTimer = setTimeout(() => {
        this._listTimer = null;
        void this.list(this._store.state.list.query, false);
      }, list.loaded ? 250 : 0);
    }
  }

  /** Sessions that are neither recent nor generating need no events. */
  _closeOld() {
    const { sessions } = this._store.state;
    const old = this._recent.slice(0, -KEPT_OPEN).filter((id) => sessions.has(id) && sessions.get(id)?.live.size === 0);
    for (const session of old) {
      this._recent = this._recent.filter((id) => id !== session);
      this._store.dispatch({ type: "page.closed", session });
      this._connection.request("session.close", { session }).catch(() => undefined);
    }
  }

  /**
   * @param {string} what
   * @param {string} type
   * @param {object} fields
   */
  async _try(what, type, fields) {
    try {
      return await this._connection.request(type, fields);
    } catch (error) {
      this._onProblem(what, /** @type {Error} */ (error), async () => (await this._try(what, type, fields)) !== null);
      return null;
    }
  }
}
