// The connection against a fake socket and a fake clock: hello, answers, coming back, giving up.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Connection } from "../../../web/js/connection.js";

class FakeSocket {
  sent = [];
  closed = false;
  onopen = null;
  onmessage = null;
  onclose = null;

  send(text) {
    assert.equal(this.closed, false, "nothing is sent on a closed socket");
    this.sent.push(JSON.parse(text));
  }

  close() {
    this.closed = true;
  }

  receive(frame) {
    this.onmessage?.({ data: typeof frame === "string" ? frame : JSON.stringify(frame) });
  }

  open() {
    this.onopen?.();
  }

  welcome(limits = {}) {
    this.open();
    this.receive({ type: "welcome", protocol: "chat.v1", limits });
  }

  lose(code = 1006) {
    this.closed = true;
    this.onclose?.({ code });
  }
}

class FakeClock {
  now = 0;
  timers = new Map();
  next = 1;

  setTimeout(run, ms) {
    this.timers.set(this.next, { run, at: this.now + ms });
    return this.next++;
  }

  clearTimeout(timer) {
    this.timers.delete(timer);
  }

  advance(ms) {
    const until = this.now + ms;
    for (;;) {
      const due = [...this.timers].filter(([, timer]) => timer.at <= until).sort((a, b) => a[1].at - b[1].at)[0];
      if (due === undefined) break;
      this.timers.delete(due[0]);
      this.now = due[1].at;
      due[1].run();
    }
    this.now = until;
  }
}

function setUp(options = {}) {
  const sockets = [];
  const clock = new FakeClock();
  const states = [];
  const frames = [];
  let ids = 0;
  const connection = new Connection({
    url: "ws://here/ws",
    makeSocket: () => {
      sockets.push(new FakeSocket());
      return sockets.at(-1);
    },
    token: () => null,
    resume: () => [],
    clock,
    random: () => 0.5,
    makeId: () => `id-${(ids += 1)}`,
    ...options,
  });
  connection.addEventListener("state", (event) => states.push(event.detail));
  connection.addEventListener("frame", (event) => frames.push(event.detail));
  return { connection, sockets, clock, states, frames, last: () => sockets.at(-1) };
}

test("the first frame is a hello with the token and what to resume", () => {
  const { connection, last } = setUp({ token: () => "secret", resume: () => [{ session: "s", after: 7 }] });
  connection.start();
  last().open();
  assert.deepEqual(last().sent, [{ type: "hello", protocol: "chat.v1", token: "secret", resume: [{ session: "s", after: 7 }] }]);
});

test("it is open when the server has said welcome, not before", () => {
  const { connection, last } = setUp();
  connection.start();
  last().open();
  assert.equal(connection.state.phase, "connecting");
  last().receive({ type: "welcome" });
  assert.equal(connection.state.phase, "open");
});

test("each request gets its own answer, and an error is an exception with its code", async () => {
  const { connection, last } = setUp();
  connection.start();
  last().welcome();
  const first = connection.request("session.create", {});
  const second = connection.request("session.open", { session: "x" });
  last().receive({ type: "error", id: "id-2", code: "not_found", detail: "no such session", retryable: false });
  last().receive({ type: "ack", id: "id-1", session: "s" });
  assert.equal((await first).session, "s");
  await assert.rejects(second, { code: "not_found", message: "no such session" });
  assert.equal(connection.numUnanswered, 0);
});

test("what has no answer is sent again, in order and under the same ids, until it has one", async () => {
  const { connection, sockets, clock, last } = setUp();
  connection.start();
  last().welcome();
  const answers = [connection.request("a", {}), connection.request("b", {})];
  last().receive({ type: "ack", id: "id-1" });
  last().lose();
  answers.push(connection.request("c", {}));
  for (let drop = 0; drop < 3; drop += 1) {
    clock.advance(connection.state.retryInMs);
    last().welcome();
    assert.deepEqual(last().sent.slice(1).map((frame) => [frame.type, frame.id]), [["b", "id-2"], ["c", "id-3"]]);
    last().lose();
  }
  clock.advance(connection.state.retryInMs);
  last().welcome();
  last().receive({ type: "ack", id: "id-2" });
  last().receive({ type: "ack", id: "id-3" });
  await Promise.all(answers);
  assert.equal(sockets.length, 5);
});

test("the wait doubles up to a ceiling, has jitter, and starts anew after a welcome", () => {
  for (const random of [0, 0.999]) {
    const { connection, clock, states, last } = setUp({ random: () => random });
    connection.start();
    for (let i = 0; i < 9; i += 1) {
      last().lose();
      clock.advance(states.at(-1).retryInMs);
    }
    const waits = states.filter((state) => state.phase === "waiting").map((state) => state.retryInMs);
    const factor = 0.5 + random / 2;
    assert.deepEqual(waits, [400, 800, 1600, 3200, 6400, 12_800, 15_000, 15_000, 15_000].map((ms) => Math.round(ms * factor)));
    last().welcome();
    last().lose(1001);
    assert.equal(states.at(-1).retryInMs, Math.round(400 * factor));
  }
});

test("4000, 4001 and 4003 end it: no new attempt, and what waits fails at once", async () => {
  for (const code of [4000, 4001, 4003]) {
    const { connection, sockets, clock, last } = setUp();
    connection.start();
    const waiting = connection.request("session.list", {});
    last().open();
    last().lose(code);
    await assert.rejects(waiting, { code: "closed" });
    await assert.rejects(connection.request("session.list", {}), { code: "closed" });
    clock.advance(3_600_000);
    assert.equal(sockets.length, 1);
    assert.equal(connection.state.phase, "stopped");
    assert.equal(connection.state.code, code);
    connection.start();
    assert.equal(sockets.length, 2, "a person may still try again");
  }
});

test("every other close is followed by a new attempt, later when it is crowded", () => {
  for (const code of [1001, 1006, 1011, 1012, 4008, 4029]) {
    const { connection, sockets, clock, states, last } = setUp();
    connection.start();
    last().welcome();
    last().lose(code);
    assert.equal(states.at(-1).retryInMs >= 10_000, code === 4029);
    clock.advance(connection.state.retryInMs);
    assert.equal(sockets.length, 2);
  }
});

test("a ping is answered, and a link that has gone silent is given up without waiting for its close", () => {
  const { connection, sockets, clock, last } = setUp();
  connection.start();
  last().welcome();
  clock.advance(30_000);
  last().receive({ type: "ping" });
  assert.deepEqual(last().sent.at(-1), { type: "pong" });
  clock.advance(30_000);
  assert.equal(connection.state.phase, "open");
  clock.advance(6_000);
  assert.equal(sockets[0].closed, true);
  assert.equal(sockets.length, 2);
});

test("a late frame of a socket that was given up changes nothing", () => {
  const { connection, sockets, clock, frames, last } = setUp();
  connection.start();
  last().welcome();
  clock.advance(36_000);
  const before = frames.length;
  sockets[0].receive({ type: "sessions.changed", session: "s" });
  sockets[0].lose();
  assert.equal(frames.length, before);
  assert.equal(connection.state.phase, "connecting");
});

test("a frame over the server's limit is refused here, before it closes the socket", async () => {
  const { connection, last } = setUp();
  connection.start();
  last().welcome({ max_frame_bytes: 1000 });
  await assert.rejects(connection.request("message.send", { text: "é".repeat(500) }), { code: "too_large" });
  assert.equal(last().sent.length, 1);
});

test("after 1009 nothing that was sent is sent again", async () => {
  const { connection, clock, last } = setUp();
  connection.start();
  last().welcome();
  const large = connection.request("message.send", { text: "large" });
  last().lose(1009);
  await assert.rejects(large, { code: "too_large" });
  clock.advance(5_000);
  last().welcome();
  assert.deepEqual(last().sent.map((frame) => frame.type), ["hello"]);
});

test("hints are dropped while the connection is away; junk and stray answers are ignored", () => {
  const { connection, frames, last } = setUp();
  connection.notify("typing", { session: "s" });
  connection.start();
  connection.notify("typing", { session: "s" });
  last().welcome();
  connection.notify("typing", { session: "s" });
  assert.deepEqual(last().sent.map((frame) => frame.type), ["hello", "typing"]);
  const before = frames.length;
  for (const junk of ["not json", "[]", "null", '{"no":"type"}', '{"type":"ack","id":"stranger"}']) last().receive(junk);
  assert.equal(frames.length, before);
});
