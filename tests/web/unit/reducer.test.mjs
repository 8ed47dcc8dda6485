// The page's state follows the server's frames, and nothing else.
import assert from "node:assert/strict";
import { test } from "node:test";
import { INITIAL_STATE, contextTokens, reduce } from "../../../web/js/reducer.js";
import { Store } from "../../../web/js/store.js";
import { activePath, siblingsOf, subtreeOf, textOf } from "../../../web/js/tree.js";

const snapshot = (fields = {}) => ({ type: "snapshot", session: "s", seq: 0, version: 1, title: "t", system: null, params: {}, leaf: null, messages: [], part: 0, last: true, ...fields });
const added = (seq, message, parent, role, text, status = "done") => ({ type: "message.added", session: "s", seq, message, parent, role, text, status });
const delta = (seq, message, text, from_seq) => ({ type: "generation.delta", session: "s", seq, message, text, ...(from_seq ? { from_seq } : {}) });
const end = (seq, message, fields = {}) => ({ type: "generation.end", session: "s", seq, message, reason: "stop", status: "done", usage: { prompt_tokens: 9 }, seed: 1, ...fields });
const selected = (seq, leaf) => ({ type: "branch.selected", session: "s", seq, leaf });
const run = (...events) => events.reduce(reduce, INITIAL_STATE);
const session = (state) => state.sessions.get("s");

const TURN = [snapshot(), added(1, "u", null, "user", "hi"), added(2, "a", "u", "assistant", "", "generating"), selected(3, "a"),
  { type: "generation.queued", session: "s", seq: 4, message: "a", position: 2 },
  { type: "generation.started", session: "s", seq: 5, message: "a", prompt_tokens: 9, cached_tokens: 4, swapped_in_tokens: 2, computed_tokens: 3 },
  delta(6, "a", "Hel"), delta(7, "a", "lo"), end(8, "a")];

test("a turn goes through queue, prompt and text to a finished message", () => {
  const phases = TURN.map((_, i) => session(run(...TURN.slice(0, i + 1)))?.live.get("a")?.phase);
  assert.deepEqual(phases, [undefined, undefined, "waiting", "waiting", "queued", "prompt", "writing", "writing", undefined]);
  const done = session(run(...TURN));
  assert.equal(done.messages.get("a").text, "Hello");
  assert.equal(done.messages.get("a").status, "done");
  assert.deepEqual(done.messages.get("a").usage, { prompt_tokens: 9 });
  assert.deepEqual(activePath(done).map((message) => message.id), ["u", "a"]);
});

test("an event that is already in is skipped, so a replay from anywhere changes nothing", () => {
  const once = run(...TURN);
  for (let from = 1; from < TURN.length; from += 1) {
    assert.equal(TURN.slice(from).reduce(reduce, once), once);
  }
});

test("a client that loses its link at any frame ends with the same state", () => {
  const straight = session(run(...TURN));
  for (let cut = 1; cut < TURN.length; cut += 1) {
    const before = run(...TURN.slice(0, cut));
    const after = session(before).seq;
    const replay = TURN.slice(1).filter((event) => event.seq > after);
    assert.deepEqual(session(replay.reduce(reduce, before)), straight);
  }
});

test("one delta frame may cover many events", () => {
  const merged = [...TURN.slice(0, 6), delta(7, "a", "Hello", 6), end(8, "a")];
  assert.deepEqual(session(run(...merged)), session(run(...TURN)));
});

test("a gap makes the session stale and nothing is applied until a snapshot comes", () => {
  const gapped = run(...TURN.slice(0, 6), delta(7, "a", "lo"));
  assert.equal(session(gapped).stale, true);
  assert.equal(textOf(session(gapped), session(gapped).messages.get("a")), "");
  const still = reduce(gapped, end(8, "a"));
  assert.equal(session(still).stale, true);
  const fresh = reduce(still, snapshot({ seq: 8 }));
  assert.equal(session(fresh).stale, false);
});

test("a snapshot counts only when all of its parts are there, in order", () => {
  const message = (id, parent, role) => ({ message: id, parent, role, text: id, status: "done" });
  const first = snapshot({ seq: 4, leaf: "b", messages: [message("a", null, "user")], part: 0, last: false });
  const second = snapshot({ seq: 4, leaf: "b", messages: [message("b", "a", "assistant")], part: 1, last: true });
  assert.equal(session(run(first)), undefined);
  assert.deepEqual([...session(run(first, second)).messages.keys()], ["a", "b"]);
  assert.equal(session(run(second)), undefined);
  assert.equal(session(run(first, { type: "welcome" }, second)), undefined);
});

test("a message cut into pieces is put together, whether it is finished or being generated", () => {
  const piece = (id, text, fields = {}) => ({ message: id, parent: null, role: "assistant", text, status: "done", ...fields });
  const frames = [
    snapshot({ seq: 4, messages: [piece("a", "one "), piece("a", "two ", { append: true })], part: 0, last: false }),
    snapshot({ seq: 4, messages: [piece("a", "three", { append: true }), piece("b", "Hel", { status: "generating" })], part: 1, last: false }),
    snapshot({ seq: 4, messages: [piece("b", "lo", { status: "generating", append: true })], part: 2, last: true }),
  ];
  for (const events of [frames, [...frames, ...frames]]) {
    const state = session(run(...events, delta(5, "b", "!")));
    assert.equal(state.messages.get("a").text, "one two three");
    assert.equal(textOf(state, state.messages.get("b")), "Hello!");
    assert.deepEqual(state.children.get(""), ["a", "b"]);
  }
});

test("a snapshot in mid-answer goes on where its text ends", () => {
  const state = run(snapshot({ seq: 5, leaf: "a", messages: [{ message: "a", parent: null, role: "assistant", text: "Hel", status: "generating" }] }), delta(6, "a", "lo"), end(7, "a"));
  assert.equal(session(state).messages.get("a").text, "Hello");
});

test("a continued message keeps its text and adds to it", () => {
  const state = run(...TURN, { type: "message.updated", session: "s", seq: 9, message: "a", status: "generating" }, delta(10, "a", " there"), end(11, "a", { reason: "length" }));
  assert.equal(session(state).messages.get("a").text, "Hello there");
  assert.equal(session(state).messages.get("a").end.reason, "length");
});

test("how a generation failed is kept with its text", () => {
  const state = run(...TURN.slice(0, 8), end(8, "a", { reason: "error", status: "failed", usage: {}, code: "engine_unavailable", detail: "it died" }));
  const message = session(state).messages.get("a");
  assert.equal(message.text, "Hello");
  assert.equal(message.status, "failed");
  assert.deepEqual(message.end, { reason: "error", code: "engine_unavailable", detail: "it died" });
});

test("siblings stand in creation order, and deleting a message takes its subtree", () => {
  const state = run(...TURN, added(9, "b", "u", "assistant", "other"), selected(10, "b"), added(11, "c", "b", "user", "next"));
  assert.deepEqual(siblingsOf(session(state), session(state).messages.get("b")), { siblings: ["a", "b"], index: 1 });
  assert.deepEqual(subtreeOf(session(state), "u"), ["u", "a", "b", "c"]);
  const after = session(reduce(state, { type: "message.deleted", session: "s", seq: 12, message: "b", deleted: 2 }));
  assert.deepEqual([...after.messages.keys()], ["u", "a"]);
  assert.deepEqual(after.children.get("u"), ["a"]);
});

test("two answers of one session may be written at once", () => {
  const state = run(snapshot(), added(1, "u", null, "user", "hi"), added(2, "a", "u", "assistant", "", "generating"), added(3, "b", "u", "assistant", "", "generating"),
    delta(4, "a", "x"), delta(5, "b", "y"), end(6, "a"), delta(7, "b", "z"));
  assert.equal(session(state).messages.get("a").text, "x");
  assert.equal(session(state).live.get("b").text, "yz");
  assert.equal(session(state).live.has("a"), false);
});

test("settings, titles and an unknown event each count their number", () => {
  const state = run(snapshot(), { type: "session.updated", session: "s", seq: 1, title: "new" }, { type: "session.updated", session: "s", seq: 2, params: { top_k: 3 } },
    { type: "from.the.future", session: "s", seq: 3 }, { type: "session.updated", session: "s", seq: 4, system: null });
  assert.deepEqual([session(state).title, session(state).params, session(state).system, session(state).seq], ["new", { top_k: 3 }, null, 4]);
});

test("what was deleted or belongs to someone else is missing, and leaves the list", () => {
  const listed = run({ type: "page.list.asked", query: "" }, { type: "page.list.read", query: "", more: false, cursor: null, rows: [{ session: "s", title: "t" }, { session: "o", title: "p" }] }, snapshot());
  for (const event of [{ type: "session.deleted", session: "s", seq: 1 }, { type: "sessions.changed", session: "s", deleted: true }, { type: "error", session: "s", code: "not_found" }]) {
    const state = reduce(listed, event);
    assert.equal(session(state), undefined);
    assert.equal(state.missing.has("s"), true);
    assert.deepEqual(state.list.rows.map((row) => row.session), ["o"]);
  }
});

test("a list that was read for an old query is dropped", () => {
  const asked = run({ type: "page.list.asked", query: "a" }, { type: "page.list.asked", query: "ab" });
  assert.equal(reduce(asked, { type: "page.list.read", query: "a", more: false, rows: [{ session: "s" }], cursor: null }), asked);
});

test("a changed title shows at once and makes the list outdated", () => {
  const listed = run({ type: "page.list.asked", query: "" }, { type: "page.list.read", query: "", more: false, cursor: null, rows: [{ session: "s", title: "t" }] });
  const state = reduce(listed, { type: "sessions.changed", session: "s", title: "new" });
  assert.equal(state.list.rows[0].title, "new");
  assert.equal(state.list.outdated, true);
});

test("states are values: an old one is never changed, and what did not change is shared", () => {
  const states = TURN.reduce((all, event) => [...all, reduce(all.at(-1), event)], [INITIAL_STATE]);
  const again = TURN.reduce((all, event) => [...all, reduce(all.at(-1), event)], [INITIAL_STATE]);
  assert.deepEqual(states, again);
  const [before, after] = states.slice(7, 9);
  assert.equal(session(before).messages, session(after).messages, "a token copies no messages");
});

test("the store says when the state is a new one, and only then", () => {
  const store = new Store();
  let changes = 0;
  store.addEventListener("change", () => (changes += 1));
  TURN.forEach((event) => store.dispatch(event));
  const before = changes;
  TURN.slice(1).forEach((event) => store.dispatch(event));
  assert.equal(before, TURN.length);
  assert.equal(changes, before);
});

test("a server whose model is still loading does not take away the context that was known, nor make one up", () => {
  const welcome = (model, context_tokens) => ({ type: "welcome", model, context_tokens });
  const known = (...frames) => contextTokens(run(...frames).welcome);
  assert.equal(known(), null);
  assert.equal(known(welcome("m", 0)), null);
  assert.equal(known(welcome("m", 8192), welcome("m", 0)), 8192);
  assert.equal(known(welcome("m", 8192), welcome("m", 0), welcome("m", 0)), 8192);
  assert.equal(known(welcome("m", 8192), welcome("m", 0), welcome("m", 4096)), 4096);
  assert.equal(known(welcome("m", 8192), welcome("other", 0)), null);
});
