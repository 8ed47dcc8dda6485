// When the server is told of a draft, and when it is told to forget it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { TypingHints } from "../../../web/js/typing.js";

class FakeClock {
  time = 0;
  timers = new Map();
  next = 1;

  now = () => this.time;

  setTimeout = (run, ms) => {
    this.timers.set(this.next, { run, at: this.time + ms });
    return this.next++;
  };

  clearTimeout = (timer) => {
    this.timers.delete(timer);
  };

  advance(ms) {
    this.time += ms;
    for (const [id, { run, at }] of [...this.timers]) {
      if (at > this.time) continue;
      this.timers.delete(id);
      run();
    }
  }
}

function setUp() {
  const clock = new FakeClock();
  const sent = [];
  return { clock, sent, hints: new TypingHints((draft) => sent.push(draft), clock) };
}

const draft = (text, session = "s", parent = "p") => ({ session, parent, text });

test("a burst of keys is told once, when it pauses, with what it has become", () => {
  const { clock, sent, hints } = setUp();
  for (const text of ["W", "Wh", "Why"]) {
    hints.typed("s", "p", text);
    clock.advance(100);
  }
  assert.deepEqual(sent, []);
  clock.advance(300);
  assert.deepEqual(sent, [draft("Why")]);
  clock.advance(10_000);
  assert.equal(sent.length, 1);
});

test("whoever writes on and on is told of now and then all the same", () => {
  const { clock, sent, hints } = setUp();
  for (let i = 1; i <= 100; i++) {
    hints.typed("s", "p", "x".repeat(i));
    clock.advance(100);
  }
  assert.ok(sent.length >= 5 && sent.length <= 8, `${sent.length} hints in 10 s of typing`);
  assert.ok(sent.every((each, i) => i === 0 || each.text.length > sent[i - 1].text.length));
});

test("the same draft is not told twice", () => {
  const { clock, sent, hints } = setUp();
  hints.typed("s", "p", "Why");
  clock.advance(500);
  hints.typed("s", "p", "Why?");
  hints.typed("s", "p", "Why");
  clock.advance(500);
  assert.deepEqual(sent, [draft("Why")]);
  hints.typed("s", "q", "Why");
  clock.advance(500);
  assert.deepEqual(sent.at(-1), draft("Why", "s", "q"), "after another message it is another draft");
});

test("an emptied box takes back what was told, at once and once", () => {
  const { clock, sent, hints } = setUp();
  hints.typed("s", "p", "Why");
  clock.advance(500);
  hints.typed("s", "p", "");
  hints.typed("s", "p", "");
  assert.deepEqual(sent, [draft("Why"), draft("")]);
  clock.advance(500);
  assert.equal(sent.length, 2);
});

test("what was never told is not taken back", () => {
  const { clock, sent, hints } = setUp();
  hints.typed("s", "p", "W");
  hints.movedOn();
  clock.advance(5000);
  assert.deepEqual(sent, []);
});

test("a draft that was sent is neither told nor taken back", () => {
  const { clock, sent, hints } = setUp();
  hints.typed("s", "p", "Why");
  clock.advance(500);
  hints.typed("s", "p", "Why?");
  hints.sent();
  hints.movedOn();
  clock.advance(5000);
  assert.deepEqual(sent, [draft("Why")]);
});

test("typing in another chat takes back the draft of the one before", () => {
  const { clock, sent, hints } = setUp();
  hints.typed("s", "p", "Why");
  clock.advance(500);
  hints.typed("t", null, "How");
  assert.deepEqual(sent, [draft("Why"), draft("")]);
  clock.advance(500);
  assert.deepEqual(sent.at(-1), draft("How", "t", null));
});

test("of a very long draft the beginning is told", () => {
  const { clock, sent, hints } = setUp();
  hints.typed("s", "p", "x".repeat(100_000));
  clock.advance(500);
  assert.equal(sent[0].text.length, 16_384);
});
