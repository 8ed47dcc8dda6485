// What a person types into the settings, and the outline of branches.
import assert from "node:assert/strict";
import { test } from "node:test";
import { INITIAL_STATE, reduce } from "../../../web/js/reducer.js";
import { PARAM_RANGES, readParam, wellFormed } from "../../../web/js/protocol.js";
import { readStop } from "../../../web/js/views/settings.js";
import { contextUse, ending, progress } from "../../../web/js/views/standing.js";
import { outline } from "../../../web/js/views/tree.js";

test("a number is taken inside its range only, ends included where they are allowed", () => {
  for (const [name, range] of PARAM_RANGES) {
    assert.deepEqual(readParam(name, String(range.high)), { value: range.high });
    assert.equal("problem" in readParam(name, String(range.low)), range.aboveLow === true, name);
    for (const bad of [String(range.high + 1), String(range.low - 1), "x", "1e999", "NaN"]) assert.ok("problem" in readParam(name, bad), `${name} ${bad}`);
    assert.equal("problem" in readParam(name, "0.5") && range.whole, range.whole);
    assert.deepEqual(readParam(name, "  "), { value: null });
  }
});

test("stop strings are one a line, with escapes, at most eight", () => {
  assert.deepEqual(readStop("END\n\\n\\nUser:\na\\\\b\n\n"), { value: ["END", "\n\nUser:", "a\\b"] });
  assert.deepEqual(readStop(""), { value: null });
  assert.ok("problem" in readStop("a\n".repeat(9)));
  assert.ok("problem" in readStop("a".repeat(257)));
});

test("lone surrogates do not travel, pairs do", () => {
  assert.equal(wellFormed("a\uD83Db\uDE00c😀"), "a\uFFFDb\uFFFDc😀");
});

test("a queue, a prompt and each kind of ending are said in words; text and a plain end need none", () => {
  const live = { text: "", phase: "waiting", position: null, started: null };
  assert.match(progress(live), /Waiting/);
  assert.match(progress({ ...live, phase: "queued", position: 3 }), /queue, position 3/);
  assert.match(progress({ ...live, phase: "prompt", started: { prompt_tokens: 1200, computed_tokens: 7 } }), /7 new tokens of 1,200/);
  assert.equal(progress({ ...live, phase: "writing" }), "");
  const message = (status, end) => ending({ status, end });
  assert.equal(message("done", { reason: "stop" }), "");
  assert.match(message("done", { reason: "length" }), /continued/);
  assert.match(message("stopped", null), /^Stopped\.$/);
  assert.match(message("stopped", { reason: "orphaned" }), /no page/);
  assert.match(message("interrupted", null), /kept/);
  assert.match(message("failed", { reason: "error", detail: "out of blocks" }), /out of blocks/);
});

test("only a fork indents the outline", () => {
  const message = (id, parent) => ({ message: id, parent, role: "user", text: id, status: "done" });
  const messages = [message("a", null), message("b", "a"), message("c", "b"), message("d", "b"), message("e", "c")];
  const state = reduce(INITIAL_STATE, { type: "snapshot", session: "s", seq: 1, title: "", leaf: "e", messages, part: 0, last: true });
  assert.deepEqual(outline(state.sessions.get("s")).map(({ id, depth }) => [id, depth]), [["a", 0], ["b", 0], ["c", 1], ["e", 1], ["d", 1]]);
});

test("how full the context is names a limit only when one is known", () => {
  assert.equal(contextUse(261, 512), "261 of 512 tokens of context");
  assert.equal(contextUse(261, null), "261 tokens of context");
});
