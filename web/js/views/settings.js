// @ts-check
/**
 * The panel of one chat's settings: its system prompt and how tokens are drawn.
 *
 * A change is checked here against the protocol's ranges, sent when a field is left, and shown as the server has it. For a
 * chat that does not exist yet the settings wait in `pending` and travel with its creation.
 */

import { MAX_STOP_CHARS, MAX_STOP_STRINGS, PARAM_RANGES, readParam } from "../protocol.js";
import { announce, h, iconButton } from "./dom.js";

/** @typedef {import("../protocol.js").Params} Params */
/** @typedef {import("../reducer.js").State} State */
/** @typedef {{system: string, params: Params}} Settings */

/**
 * @typedef {object} Handlers
 * @property {(session: string, fields: {system?: string | null, params?: Params}) => Promise<any>} update
 * @property {() => void} close
 */

/** One stop string a line; a line break in one is written \n. @param {string[] | undefined} stop */
const stopToText = (stop) => (stop ?? []).map((text) => text.replace(/\\/g, "\\\\").replace(/\n/g, "\\n").replace(/\t/g, "\\t")).join("\n");

/** @param {string} line */
const unescape = (line) => line.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t" })[/** @type {"n" | "t"} */ (letter)] ?? "\\");

/**
 * @param {string} typed
 * @returns {{value: string[] | null} | {problem: string}}
 */
export function readStop(typed) {
  const stop = typed.split("\n").filter((line) => line !== "").map(unescape);
  if (stop.length > MAX_STOP_STRINGS) return { problem: `At most ${MAX_STOP_STRINGS} stop strings, not ${stop.length}` };
  if (stop.some((text) => text.length > MAX_STOP_CHARS)) return { problem: `A stop string has at most ${MAX_STOP_CHARS} characters` };
  return { value: stop.length === 0 ? null : stop };
}

export class SettingsView {
  /**
   * @param {HTMLElement} root
   * @param {Handlers} handlers
   */
  constructor(root, handlers) {
    this._root = root;
    this._handlers = handlers;
    /** @type {Settings} for the chat that is about to be made */
    this.pending = { system: "", params: {} };
    /** @type {string | null | undefined} */
    this._session = undefined;
    /** @type {Settings} as last shown */
    this._settings = this.pending;
    /** @type {Params} as last sent: the next change builds on it, for the server may not have told yet that it has it */
    this._sent = this.pending.params;
    this._numSaving = 0;
    this._status = h("p", { class: "settings-status", role: "status" });
    this._system = h("textarea", { id: "system", rows: "6", placeholder: "You are a helpful assistant…", onchange: () => this._save({ system: this._system.value }) });
    /** @type {Map<string, {input: HTMLInputElement | HTMLTextAreaElement, problem: HTMLElement}>} */
    this._fields = new Map();
    const numbers = [...PARAM_RANGES].map(([name, range]) => this._field(name, range.label, range.hint,
      h("input", { id: `param-${name}`, type: "number", step: range.whole ? "1" : "any", min: range.low, max: range.high, placeholder: range.fallback, inputmode: range.whole ? "numeric" : "decimal" })));
    const stop = this._field("stop", "Stop strings", "one a line, up to 8; \\n is a line break", h("textarea", { id: "param-stop", rows: "2", spellcheck: "false" }));
    stop.classList.add("wide");
    root.append(
      h("div", { class: "settings-head" }, h("h2", {}, "Chat settings"), iconButton("close", "Close the settings", () => handlers.close())),
      h("div", { class: "settings-body" },
        h("label", { for: "system" }, "System prompt"), this._system,
        h("h3", {}, "Sampling"), h("div", { class: "params" }, ...numbers, stop), this._status));
  }

  /**
   * @param {string} name
   * @param {string} label
   * @param {string} hint
   * @param {HTMLInputElement | HTMLTextAreaElement} input
   */
  _field(name, label, hint, input) {
    const problem = h("span", { class: "field-problem", id: `problem-${name}` });
    input.setAttribute("aria-describedby", `hint-${name} problem-${name}`);
    input.addEventListener("change", () => this._changeParam(name));
    this._fields.set(name, { input, problem });
    return h("div", { class: "field" }, h("label", { for: input.id }, label), input, h("span", { class: "hint", id: `hint-${name}` }, hint), problem);
  }

  /** @param {State} state */
  render(state) {
    const session = state.shown === null ? undefined : state.sessions.get(state.shown);
    if (state.shown !== null && session === undefined) return;
    const settings = session === undefined ? this.pending : { system: session.system ?? "", params: session.params };
    if (state.shown === this._session && settings.system === this._settings.system && settings.params === this._settings.params) return;
    const switched = state.shown !== this._session;
    this._session = state.shown;
    this._settings = settings;
    if (this._numSaving === 0 || switched) this._sent = settings.params;
    if (switched) this._status.textContent = "";
    const put = (/** @type {HTMLInputElement | HTMLTextAreaElement} */ input, /** @type {string} */ value) => {
      // What is being typed here is not overwritten by what another tab saved.
      if (switched || document.activeElement !== input) input.value = value;
    };
    put(this._system, settings.system);
    for (const [name, { input, problem }] of this._fields) {
      const value = /** @type {any} */ (settings.params)[name];
      put(input, name === "stop" ? stopToText(value) : value === undefined || value === null ? "" : String(value));
      if (switched) setProblem(input, problem, "");
    }
  }

  /** @param {string} name */
  _changeParam(name) {
    const { input, problem } = /** @type {{input: HTMLInputElement, problem: HTMLElement}} */ (this._fields.get(name));
    const typed = input.validity.badInput ? "not a number" : input.value;
    const read = name === "stop" ? readStop(typed) : readParam(name, typed);
    if ("problem" in read) {
      setProblem(input, problem, read.problem);
      announce(read.problem);
      return;
    }
    setProblem(input, problem, "");
    /** @type {Record<string, any>} */
    const params = { ...this._sent };
    if (read.value === null) delete params[name];
    else params[name] = read.value;
    this._sent = params;
    void this._save({ params });
  }

  /** @param {{system?: string, params?: Params}} change */
  async _save(change) {
    const session = this._session ?? null;
    if (session === null) {
      this.pending = { ...this.pending, ...change };
      this._settings = this.pending;
      this._status.textContent = "Kept for the new chat";
      return;
    }
    this._status.textContent = "Saving…";
    this._numSaving += 1;
    try {
      await this._handlers.update(session, change);
      this._status.textContent = "Saved";
    } catch (error) {
      this._status.textContent = `Not saved: ${/** @type {Error} */ (error).message}`;
      if (session === this._session) this._sent = this._settings.params;
    } finally {
      this._numSaving -= 1;
    }
  }
}

/**
 * @param {HTMLElement} input
 * @param {HTMLElement} problem
 * @param {string} text
 */
function setProblem(input, problem, text) {
  problem.textContent = text;
  if (text === "") input.removeAttribute("aria-invalid");
  else input.setAttribute("aria-invalid", "true");
}
