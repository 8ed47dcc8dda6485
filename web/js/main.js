// @ts-check
/**
 * Puts the page together: connection, store, actions, views, and the address bar.
 *
 * Data goes round one way: frames into the store, the store's state into the views (once a frame of the screen), a
 * person's doings through `Actions` back to the server. This is the only module that knows all of them.
 */

import { Actions } from "./actions.js";
import { Connection } from "./connection.js";
import { makeId } from "./ids.js";
import { installKeys } from "./keys.js";
import { readToken, writeDraft, writeToken } from "./prefs.js";
import { CLOSE_NOT_AUTHENTICATED } from "./protocol.js";
import { Follower } from "./scroll.js";
import { Store } from "./store.js";
import { installTheme } from "./theme.js";
import { exportSession } from "./transfer.js";
import { activePath, subtreeOf } from "./tree.js";
import { TypingHints } from "./typing.js";
import { Banner } from "./views/banner.js";
import { Composer } from "./views/composer.js";
import { ConversationView } from "./views/conversation.js";
import { askToken, confirm } from "./views/dialogs.js";
import { announce, count, icon, iconButton, isComposing } from "./views/dom.js";
import { Drawer } from "./views/drawer.js";
import { installImporter } from "./views/importer.js";
import { Notices } from "./views/notices.js";
import { SettingsView } from "./views/settings.js";
import { Sidebar, titleOr } from "./views/sidebar.js";
import { showTree } from "./views/tree.js";

/** @param {string} id @returns {any} */
const byId = (id) => document.getElementById(id);

const store = new Store();
const notices = new Notices(byId("notices"));
const clock = {
  setTimeout: (/** @type {() => void} */ run, /** @type {number} */ ms) => setTimeout(run, ms),
  clearTimeout: (/** @type {any} */ timer) => clearTimeout(timer),
  now: () => performance.now(),
};
const connection = new Connection({
  url: `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/ws`,
  makeSocket: (url, protocol) => new WebSocket(url, protocol),
  token: readToken,
  resume: () => [...store.state.sessions.values()].map((session) => ({ session: session.id, after: session.seq })),
  clock,
  random: Math.random,
  makeId,
});
const actions = new Actions(connection, store, (what, error, retry) => notices.problem(what, error, retry));
const hints = new TypingHints(({ session, parent, text }) => actions.typing(session, parent, text), clock);
const follower = new Follower(byId("scroller"), byId("conversation"));

const shownSession = () => (store.state.shown === null ? undefined : store.state.sessions.get(store.state.shown));

// ---- where we are ----

/** @param {string | null} session */
const addressOf = (session) => (session === null ? "#/" : `#/c/${encodeURIComponent(session)}`);

/**
 * @param {string} hash
 * @returns {string | null}
 */
function sessionOf(hash) {
  const found = /^#\/c\/(.+)$/.exec(hash)?.[1];
  if (found === undefined) return null;
  try {
    return decodeURIComponent(found);
  } catch {
    return found; // nobody's id, which the server will say
  }
}

/** Show what the address says, at once: between the two nothing can be written into one chat and sent to the other. */
function readAddress() {
  const session = sessionOf(location.hash);
  if (session !== store.state.shown) {
    notices.clear();
    hints.movedOn();
    actions.show(session);
    draw();
  }
  drawer.close();
}

/** @param {string | null} session */
function go(session) {
  location.hash = addressOf(session);
  readAddress(); // the browser tells of a new address later, when this has nothing left to do
}

// ---- what a person does ----

const conversation = new ConversationView(byId("conversation"), follower, {
  select: (message) => withShown((session) => actions.select(session, message)),
  regenerate: (message) => withShown((session) => {
    follower.follow();
    return actions.regenerate(session, message);
  }),
  continue: (message) => withShown((session) => actions.continue(session, message)),
  fork: (message) => withShown(async (session) => {
    const forked = await actions.fork(session, message);
    if (forked === null) return;
    go(forked);
    announce("Forked to a new chat");
  }),
  remove: (message) => withShown((session) => removeMessage(session, message)),
  editing: () => follower.stay(),
  drafted: (message, text) => {
    const session = shownSession();
    if (text === null) hints.movedOn();
    else if (session !== undefined) hints.typed(session.id, session.messages.get(message)?.parent ?? null, text);
  },
  edit: async (message, text) => {
    const { shown } = store.state;
    hints.sent();
    const sent = shown !== null && (await accepted("The edit was not sent.", actions.edit(shown, message, text)));
    if (sent) follower.follow();
    return sent;
  },
  suggest: (text) => composer.fill(text),
});

const composer = new Composer(byId("composer"), {
  send,
  stop: stopAnswer,
  answer: () => withShown((session) => {
    const leaf = store.state.sessions.get(session)?.leaf;
    return leaf ? actions.regenerate(session, leaf) : undefined;
  }),
  typing: (text) => {
    const session = shownSession();
    if (session !== undefined) hints.typed(session.id, session.leaf, text);
  },
});

/** @param {(session: string) => unknown} act */
function withShown(act) {
  if (store.state.shown !== null) void act(store.state.shown);
}

/**
 * @param {string} what
 * @param {Promise<any>} request
 * @param {() => Promise<boolean>} [again]
 * @returns {Promise<boolean>}
 */
async function accepted(what, request, again) {
  try {
    await request;
    notices.worked(what);
    return true;
  } catch (error) {
    notices.problem(what, /** @type {Error} */ (error), again);
    return false;
  }
}

/**
 * @param {string | null} session  null: a new one
 * @param {string} text
 * @returns {Promise<string | null>}
 */
async function send(session, text) {
  notices.clear();
  hints.sent();
  const again = () => composer.sendAgain(session, text);
  if (session === null) {
    try {
      session = await actions.create(settings.pending);
    } catch (error) {
      notices.problem("The chat was not created.", /** @type {Error} */ (error), again);
      return null;
    }
    // From here on the text is the new chat's draft, should the sending fail.
    writeDraft(null, "");
    writeDraft(session, text);
    settings.pending = { system: "", params: {} };
    if (store.state.shown === null) go(session);
  }
  follower.follow();
  const parent = store.state.sessions.get(session)?.leaf ?? null;
  return (await accepted("Not sent.", actions.send(session, parent, text), again)) ? session : null;
}

function stopAnswer() {
  const session = shownSession();
  if (session === undefined) return false;
  const path = activePath(session);
  const running = path.findLast((message) => session.live.has(message.id));
  if (running !== undefined) void actions.stop(session.id, running.id);
  return running !== undefined;
}

/** @param {string} session @param {string} message */
async function removeMessage(session, message) {
  const tree = store.state.sessions.get(session);
  if (tree === undefined) return;
  const numBelow = subtreeOf(tree, message).length - 1;
  const text = numBelow === 0 ? "It cannot be brought back."
    : `${numBelow === 1 ? "The message" : `All ${count(numBelow)} messages`} below it, on every branch, will be deleted too. This cannot be undone.`;
  const action = numBelow === 0 ? "Delete" : `Delete ${count(numBelow + 1)} messages`;
  if (await confirm({ title: "Delete this message?", text, action })) await actions.deleteMessage(session, message);
}

// ---- the list ----

const sidebar = new Sidebar(byId("sessions"), {
  renamed: (session, title) => void actions.rename(session, title),
  remove: async (session, title) => {
    const text = `“${titleOr(title)}” and everything in it will be deleted. This cannot be undone.`;
    if (!(await confirm({ title: "Delete this chat?", text, action: "Delete" }))) return;
    const deleted = (await actions.deleteSession(session)) !== null;
    if (deleted && session === store.state.shown) go(null);
  },
  more: () => void actions.list(store.state.list.query, true),
});

/** @type {any} */
let searchTimer = null;
byId("search").addEventListener("input", () => {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(() => void actions.list(byId("search").value.trim(), false), 150);
});

byId("search").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  if (event.key !== "Escape" || isComposing(event) || byId("search").value === "") return;
  event.preventDefault();
  byId("search").value = "";
  void actions.list("", false);
});

const drawer = new Drawer({ openButton: byId("open-sidebar"), closeButton: byId("close-sidebar"), scrim: byId("scrim"), main: byId("main") });
byId("new-chat").append(icon("plus"), "New chat");
byId("new-chat").addEventListener("click", () => {
  go(null);
  composer.text.focus();
});

installImporter(byId("import"), {
  token: readToken,
  imported: ([first]) => first !== undefined && go(first),
  failed: (error) => notices.problem("The import failed.", error),
});
installTheme(byId("theme"));

// ---- the head ----

const settings = new SettingsView(byId("settings"), {
  update: (session, fields) => actions.update(session, fields),
  close: () => toggleSettings(),
});

function toggleSettings() {
  const panel = byId("settings");
  panel.hidden = !panel.hidden;
  settingsButton.setAttribute("aria-expanded", String(!panel.hidden));
  if (panel.hidden) settingsButton.focus();
  else panel.querySelector("textarea")?.focus();
}

byId("settings").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  if (event.key !== "Escape" || isComposing(event)) return;
  event.preventDefault();
  toggleSettings();
});

const settingsButton = iconButton("sliders", "Chat settings", toggleSettings, { "aria-expanded": "false", "aria-controls": "settings" });
const treeButton = iconButton("tree", "All branches", () => {
  const session = shownSession();
  if (session !== undefined) void showTree(session, (message) => void actions.select(session.id, message));
});
const exportButton = iconButton("download", "Export this chat", () => {
  const session = shownSession();
  if (session === undefined) return;
  exportSession(session.id, session.title, readToken()).catch((error) => notices.problem("The export failed.", error));
});
byId("head-actions").append(treeButton, exportButton, settingsButton);

byId("jump").append(icon("down"), "Latest");
byId("jump").addEventListener("click", () => follower.follow());
follower.addEventListener("change", () => {
  byId("jump").hidden = follower.following;
});

// ---- drawing ----

const banner = new Banner(byId("banner"), { retry: () => (store.state.connection.code === CLOSE_NOT_AUTHENTICATED ? void authenticate() : connection.start()) });
let scheduled = false;

function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    draw();
  });
}

function draw() {
  const { state } = store;
  const session = shownSession();
  const title = state.shown === null ? "New chat" : session === undefined ? "" : titleOr(session.title);
  if (byId("title").textContent !== title) byId("title").textContent = title;
  const tabTitle = state.shown === null || title === "" ? "ChatServe" : `${title} · ChatServe`;
  if (document.title !== tabTitle) document.title = tabTitle;
  treeButton.hidden = exportButton.hidden = session === undefined;
  const model = typeof state.welcome?.model === "string" ? state.welcome.model : "";
  if (byId("model").textContent !== model) byId("model").textContent = byId("model").title = model;
  sidebar.render(state);
  banner.render(state);
  composer.render(state);
  settings.render(state);
  if (conversation.render(state)) schedule();
}

// ---- the connection ----

async function authenticate() {
  const answer = await askToken(readToken() !== null);
  if (answer === null) return;
  writeToken(answer.token, answer.remember);
  connection.start();
}

store.addEventListener("change", schedule);
connection.addEventListener("frame", (event) => {
  const { detail } = /** @type {CustomEvent} */ (event);
  store.dispatch(detail);
  // While the answer was being written, nothing could be done for what is to follow it.
  const session = shownSession();
  if (detail.type === "generation.end" && detail.session === session?.id && detail.message === session?.leaf && composer.text.value !== "") {
    hints.sent();
    hints.typed(session.id, session.leaf, composer.text.value);
  }
});
connection.addEventListener("state", (event) => {
  const { detail } = /** @type {CustomEvent} */ (event);
  store.dispatch({ type: "page.connection", connection: detail });
  if (detail.phase === "stopped" && detail.code === CLOSE_NOT_AUTHENTICATED) void authenticate();
});
const hurry = () => connection.state.phase === "waiting" && document.visibilityState === "visible" && connection.start();
addEventListener("online", hurry);
document.addEventListener("visibilitychange", hurry);
addEventListener("hashchange", readAddress);
installKeys({
  stop: stopAnswer,
  search: () => {
    if (matchMedia("(max-width: 760px)").matches) drawer.open();
    byId("search").focus();
    byId("search").select();
  },
  closeSidebar: () => drawer.dismiss(),
});
readAddress();
draw();
connection.start();
