// @ts-check
/**
 * Questions about one session's message tree, answered from its value alone.
 *
 * Owns nothing; changes nothing.
 */

/** @typedef {import("./reducer.js").Session} Session */
/** @typedef {import("./reducer.js").Message} Message */

/**
 * @param {Session} session
 * @returns {Message[]} from the root to the active leaf
 */
export function activePath(session) {
  /** @type {Message[]} */
  const path = [];
  for (let id = session.leaf; id !== null; ) {
    const message = session.messages.get(id);
    if (message === undefined) break;
    path.push(message);
    id = message.parent;
  }
  return path.reverse();
}

/**
 * @param {Session} session
 * @param {string | null} parent
 * @returns {readonly string[]} in creation order
 */
export function childrenOf(session, parent) {
  return session.children.get(parent ?? "") ?? [];
}

/**
 * @param {Session} session
 * @param {Message} message
 * @returns {{siblings: readonly string[], index: number}}
 */
export function siblingsOf(session, message) {
  const siblings = childrenOf(session, message.parent);
  return { siblings, index: siblings.indexOf(message.id) };
}

/**
 * @param {Session} session
 * @param {string} root
 * @returns {string[]} the message and everything below it
 */
export function subtreeOf(session, root) {
  const found = [root];
  for (let i = 0; i < found.length; i += 1) found.push(...childrenOf(session, /** @type {string} */ (found[i])));
  return found;
}

/**
 * @param {Session} session
 * @param {Message} message
 * @returns {string} its text so far
 */
export function textOf(session, message) {
  return session.live.get(message.id)?.text ?? message.text;
}
