// @ts-check
/**
 * The page's state as a pure function of what the server said.
 *
 * `reduce(state, event)` returns a new state and shares with the old one all that did not change, so that a view can
 * tell by identity. Conversations change through server frames only: nothing here is optimistic. The few events of the
 * page itself (`page.…`) say which session is shown, what the list was asked for, and how the connection stands.
 * Knows neither sockets nor the DOM.
 */

import { reduceSession, sessionFromSnapshot } from "./session.js";

/** @typedef {import("./protocol.js").Frame} Frame */
/** @typedef {import("./protocol.js").Params} Params */
/** @typedef {import("./protocol.js").Usage} Usage */

/**
 * @typedef {object} Message
 * @property {string} id
 * @property {string | null} parent
 * @property {"user" | "assistant"} role
 * @property {string} text           without what is being generated now: that is in `Session.live`
 * @property {string} status
 * @property {Usage | null} usage
 * @property {{reason: string, code?: string, detail?: string} | null} end
 */

/**
 * A message that is being generated. Kept beside the messages so that a token costs a small copy.
 * @typedef {object} Live
 * @property {string} text
 * @property {"waiting" | "queued" | "prompt" | "writing"} phase
 * @property {number | null} position            in the queue
 * @property {Usage | null} started
 */

/**
 * @typedef {object} Session
 * @property {string} id
 * @property {number} seq
 * @property {string} title
 * @property {string | null} system
 * @property {Params} params
 * @property {string | null} leaf
 * @property {ReadonlyMap<string, Message>} messages
 * @property {ReadonlyMap<string, readonly string[]>} children   by parent, "" for the roots
 * @property {ReadonlyMap<string, Live>} live
 * @property {boolean} stale      an event is missing: ask for a snapshot
 */

/** @typedef {{session: string, title: string, updated_at: any, messages: number}} Listed */

/**
 * @typedef {object} SessionList
 * @property {readonly Listed[]} rows
 * @property {string} query
 * @property {string | null} cursor
 * @property {boolean} loading
 * @property {boolean} loaded
 * @property {boolean} outdated      something changed since it was read
 */

/**
 * @typedef {object} State
 * @property {import("./connection.js").ConnectionState} connection
 * @property {Frame | null} welcome
 * @property {string | null} shown                       the session on screen; null: a new chat
 * @property {ReadonlyMap<string, Session>} sessions     those this page is subscribed to
 * @property {ReadonlyMap<string, Frame[]>} parts        snapshots that are not complete yet
 * @property {ReadonlySet<string>} missing               asked for, but not there (any more)
 * @property {SessionList} list
 * @property {ReadonlyMap<string, any>} degraded         component to since
 */

/** @type {State} */
export const INITIAL_STATE = {
  connection: { phase: "idle" },
  welcome: null,
  shown: null,
  sessions: new Map(),
  parts: new Map(),
  missing: new Set(),
  list: { rows: [], query: "", cursor: null, loading: false, loaded: false, outdated: false },
  degraded: new Map(),
};

/**
 * @template K, V
 * @param {ReadonlyMap<K, V>} map
 * @param {K} key
 * @param {V | undefined} value  undefined: taken out
 * @returns {ReadonlyMap<K, V>}
 */
function withEntry(map, key, value) {
  const copy = new Map(map);
  if (value === undefined) copy.delete(key);
  else copy.set(key, value);
  return copy;
}

/**
 * @template T
 * @param {ReadonlySet<T>} set
 * @param {T} item
 * @param {boolean} present
 * @returns {ReadonlySet<T>}
 */
function withMember(set, item, present) {
  if (set.has(item) === present) return set;
  const copy = new Set(set);
  if (present) copy.add(item);
  else copy.delete(item);
  return copy;
}

/**
 * @param {State} state
 * @param {Frame} frame
 * @returns {State}
 */
function takeSnapshotPart(state, frame) {
  const id = frame.session;
  const parts = frame.part === 0 ? [frame] : [...(state.parts.get(id) ?? []), frame];
  const inOrder = parts.every((part, index) => part.part === index && part.seq === frame.seq);
  if (!inOrder) return { ...state, parts: withEntry(state.parts, id, undefined) };
  if (!frame.last) return { ...state, parts: withEntry(state.parts, id, parts) };
  return {
    ...state,
    parts: withEntry(state.parts, id, undefined),
    sessions: withEntry(state.sessions, id, sessionFromSnapshot(parts)),
    missing: withMember(state.missing, id, false),
  };
}

/**
 * @param {State} state
 * @param {string} id
 * @returns {State}
 */
function forget(state, id) {
  return {
    ...state,
    sessions: withEntry(state.sessions, id, undefined),
    parts: withEntry(state.parts, id, undefined),
    list: { ...state.list, rows: state.list.rows.filter((row) => row.session !== id) },
  };
}

/**
 * @param {State} state
 * @param {Frame} frame
 * @returns {State}
 */
function takeSessionsChanged(state, frame) {
  if (frame.deleted) return { ...forget(state, frame.session), missing: withMember(state.missing, frame.session, true) };
  const rows = state.list.rows.map((row) =>
    row.session === frame.session && typeof frame.title === "string" ? { ...row, title: frame.title } : row);
  return { ...state, list: { ...state.list, rows, outdated: true } };
}

/**
 * @param {Frame | null} welcome
 * @returns {number | null} the longest prompt and answer together; null while the model is still loading
 */
export function contextTokens(welcome) {
  return welcome?.context_tokens || null;
}

/**
 * A server that has just started does not know the context of its model yet: what it was before holds until a later welcome says.
 * @param {Frame} welcome
 * @param {Frame | null} before  the last one
 * @returns {Frame}
 */
function withContext(welcome, before) {
  const known = before?.model === welcome.model ? contextTokens(before) : null;
  return contextTokens(welcome) !== null || known === null ? welcome : { ...welcome, context_tokens: known };
}

/**
 * @param {State} state
 * @param {Frame} event  a server frame or one of the page's own
 * @returns {State}
 */
export function reduce(state, event) {
  switch (event.type) {
    case "welcome":
      return { ...state, welcome: withContext(event, state.welcome), degraded: new Map(), parts: new Map(), list: { ...state.list, outdated: true, loading: false } };
    case "snapshot":
      return takeSnapshotPart(state, event);
    case "sessions.changed":
      return takeSessionsChanged(state, event);
    case "session.deleted":
      return { ...forget(state, event.session), missing: withMember(state.missing, event.session, true) };
    case "degraded":
      return { ...state, degraded: withEntry(state.degraded, event.component, event.since ?? true) };
    case "recovered":
      return { ...state, degraded: withEntry(state.degraded, event.component, undefined) };
    case "error":
      if (event.code !== "not_found" || typeof event.session !== "string") return state;
      return { ...forget(state, event.session), missing: withMember(state.missing, event.session, true) };
    case "page.connection":
      return { ...state, connection: event.connection };
    case "page.show":
      return { ...state, shown: event.session };
    case "page.missing":
      return { ...state, missing: withMember(state.missing, event.session, true) };
    case "page.closed":
      return { ...state, sessions: withEntry(state.sessions, event.session, undefined) };
    case "page.list.asked":
      return { ...state, list: { ...state.list, query: event.query, loading: true, outdated: false } };
    case "page.list.failed":
      return { ...state, list: { ...state.list, loading: false } };
    case "page.list.read": {
      if (event.query !== state.list.query) return state;
      const rows = event.more ? [...state.list.rows, ...event.rows] : event.rows;
      return { ...state, list: { ...state.list, rows: distinct(rows), cursor: event.cursor ?? null, loading: false, loaded: true } };
    }
    default: {
      const session = typeof event.session === "string" ? state.sessions.get(event.session) : undefined;
      if (session === undefined || typeof event.seq !== "number") return state;
      const next = reduceSession(session, event);
      return next === session ? state : { ...state, sessions: withEntry(state.sessions, session.id, next) };
    }
  }
}

/**
 * A list that moved between two pages may name a session twice.
 * @param {readonly Listed[]} rows
 */
function distinct(rows) {
  const seen = new Set();
  return rows.filter((row) => !seen.has(row.session) && seen.add(row.session));
}
