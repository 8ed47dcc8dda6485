// @ts-check
/**
 * One conversation as a pure function of its snapshot and its events.
 *
 * Owns the rule of `seq`: what is already in is skipped, a gap marks the session stale and nothing more is applied until
 * a snapshot comes. Never invents, reorders or drops a message.
 */

import { subtreeOf } from "./tree.js";

/** @typedef {import("./protocol.js").Frame} Frame */
/** @typedef {import("./reducer.js").Session} Session */
/** @typedef {import("./reducer.js").Message} Message */
/** @typedef {import("./reducer.js").Live} Live */

/**
 * @param {Frame} fields
 * @returns {Message}
 */
function messageFrom(fields) {
  return {
    id: fields.message,
    parent: fields.parent ?? null,
    role: fields.role,
    text: fields.text,
    status: fields.status,
    usage: fields.usage ?? null,
    end: null,
  };
}

/**
 * @param {string} text
 * @param {Live["phase"]} phase
 * @returns {Live}
 */
function liveWith(text, phase) {
  return { text, phase, position: null, started: null };
}

/**
 * @param {Frame[]} parts  all frames of one snapshot, in order
 * @returns {Session}
 */
export function sessionFromSnapshot(parts) {
  const head = /** @type {Frame} */ (parts[0]);
  /** @type {Map<string, Message>} */
  const messages = new Map();
  /** @type {Map<string, string[]>} */
  const children = new Map();
  /** @type {Map<string, Live>} */
  const live = new Map();
  for (const fields of parts.flatMap((part) => part.messages)) {
    const message = messageFrom(fields);
    const begun = fields.append === true ? messages.get(message.id) : undefined;
    if (begun !== undefined) {
      begun.text += message.text; // a later piece of a message too long for one frame
      continue;
    }
    messages.set(message.id, message);
    const key = message.parent ?? "";
    const siblings = children.get(key);
    if (siblings === undefined) children.set(key, [message.id]);
    else siblings.push(message.id);
  }
  for (const { id, text, status } of messages.values()) {
    if (status === "generating") live.set(id, liveWith(text, text === "" ? "waiting" : "writing"));
  }
  return {
    id: head.session, seq: head.seq, title: head.title, system: head.system ?? null, params: head.params ?? {},
    leaf: head.leaf ?? null, messages, children, live, stale: false,
  };
}

/**
 * @param {Session} session
 * @param {Frame} event  numbered
 * @returns {Session}
 */
export function reduceSession(session, event) {
  const first = event.from_seq ?? event.seq;
  if (event.seq <= session.seq || session.stale) return session;
  if (first !== session.seq + 1) return { ...session, stale: true };
  return { ...apply(session, event), seq: event.seq };
}

/**
 * @param {Session} session
 * @param {Frame} event
 * @returns {Session}
 */
function apply(session, event) {
  switch (event.type) {
    case "message.added":
      return addMessage(session, messageFrom(event));
    case "message.updated":
      return setStatus(session, event);
    case "message.deleted":
      return deleteSubtree(session, event.message);
    case "branch.selected":
      return { ...session, leaf: event.leaf ?? null };
    case "session.updated":
      return {
        ...session,
        title: event.title ?? session.title,
        system: event.system === undefined ? session.system : event.system,
        params: event.params ?? session.params,
      };
    case "generation.queued":
      return withLive(session, event.message, (live) => ({ ...live, phase: "queued", position: event.position }));
    case "generation.started": {
      const { prompt_tokens, cached_tokens, swapped_in_tokens, computed_tokens } = event;
      const started = { prompt_tokens, cached_tokens, swapped_in_tokens, computed_tokens };
      return withLive(session, event.message, (live) => ({ ...live, phase: "prompt", position: null, started }));
    }
    case "generation.delta":
      return withLive(session, event.message, (live) => ({ ...live, phase: "writing", position: null, text: live.text + event.text }));
    case "generation.end":
      return endGeneration(session, event);
    default:
      return session; // a newer server's event: its number counts, its meaning is not ours
  }
}

/**
 * @param {Session} session
 * @param {Message} message
 * @returns {Session}
 */
function addMessage(session, message) {
  const messages = new Map(session.messages).set(message.id, message);
  const key = message.parent ?? "";
  const children = new Map(session.children).set(key, [...(session.children.get(key) ?? []), message.id]);
  const added = { ...session, messages, children };
  return message.status === "generating" ? withLive(added, message.id, (live) => live) : added;
}

/**
 * @param {Session} session
 * @param {Frame} event
 * @returns {Session}
 */
function setStatus(session, event) {
  const message = session.messages.get(event.message);
  if (message === undefined) return session;
  if (event.status !== "generating") return settle(session, { ...message, status: event.status });
  const messages = new Map(session.messages).set(message.id, { ...message, status: event.status, end: null });
  return withLive({ ...session, messages }, message.id, (live) => live);
}

/**
 * @param {Session} session
 * @param {Frame} event
 * @returns {Session}
 */
function endGeneration(session, event) {
  const message = session.messages.get(event.message);
  if (message === undefined) return session;
  const end = { reason: event.reason, code: event.code, detail: event.detail };
  return settle(session, { ...message, status: event.status, usage: event.usage ?? message.usage, end });
}

/**
 * Move what was generated into the message.
 * @param {Session} session
 * @param {Message} message  with its new fields
 * @returns {Session}
 */
function settle(session, message) {
  const live = session.live.get(message.id);
  const messages = new Map(session.messages).set(message.id, { ...message, text: live?.text ?? message.text });
  if (live === undefined) return { ...session, messages };
  const others = new Map(session.live);
  others.delete(message.id);
  return { ...session, messages, live: others };
}

/**
 * @param {Session} session
 * @param {string} root
 * @returns {Session}
 */
function deleteSubtree(session, root) {
  const message = session.messages.get(root);
  if (message === undefined) return session;
  const messages = new Map(session.messages);
  const children = new Map(session.children);
  const live = new Map(session.live);
  for (const id of subtreeOf(session, root)) {
    messages.delete(id);
    children.delete(id);
    live.delete(id);
  }
  const key = message.parent ?? "";
  const siblings = (children.get(key) ?? []).filter((id) => id !== root);
  if (siblings.length > 0) children.set(key, siblings);
  else children.delete(key);
  return { ...session, messages, children, live };
}

/**
 * @param {Session} session
 * @param {string} id
 * @param {(live: Live) => Live} change
 * @returns {Session}
 */
function withLive(session, id, change) {
  const message = session.messages.get(id);
  if (message === undefined) return session;
  const live = session.live.get(id) ?? liveWith(message.text, "waiting");
  return { ...session, live: new Map(session.live).set(id, change(live)) };
}
