// @ts-check
/**
 * What this browser remembers: drafts, the access token, light or dark.
 *
 * Storage may be full or forbidden; then things are remembered for the life of the page only, and nothing fails.
 */

/** @type {Map<string, string>} */
const memory = new Map();
const PREFIX = "chatserve.";

/**
 * @param {Storage | undefined} storage
 * @param {string} key
 */
function read(storage, key) {
  try {
    return storage?.getItem(PREFIX + key) ?? memory.get(key) ?? null;
  } catch {
    return memory.get(key) ?? null;
  }
}

/**
 * @param {Storage | undefined} storage
 * @param {string} key
 * @param {string | null} value
 */
function write(storage, key, value) {
  if (value === null) memory.delete(key);
  else memory.set(key, value);
  try {
    if (value === null) storage?.removeItem(PREFIX + key);
    else storage?.setItem(PREFIX + key, value);
  } catch {
    // A full or forbidden storage: memory has it.
  }
}

/** @param {string | null} session null: the new chat */
export const readDraft = (session) => read(globalThis.localStorage, `draft.${session ?? "new"}`) ?? "";

/**
 * @param {string | null} session
 * @param {string} text
 */
export const writeDraft = (session, text) => write(globalThis.localStorage, `draft.${session ?? "new"}`, text === "" ? null : text);

export const readToken = () => read(globalThis.sessionStorage, "token") ?? read(globalThis.localStorage, "token");

/**
 * @param {string} token
 * @param {boolean} remember  beyond this tab
 */
export function writeToken(token, remember) {
  write(globalThis.localStorage, "token", remember ? token : null);
  write(globalThis.sessionStorage, "token", token);
}

/** @returns {"auto" | "light" | "dark"} */
export function readTheme() {
  const theme = read(globalThis.localStorage, "theme");
  return theme === "light" || theme === "dark" ? theme : "auto";
}

/** @param {"auto" | "light" | "dark"} theme */
export const writeTheme = (theme) => write(globalThis.localStorage, "theme", theme === "auto" ? null : theme);
