// The scanner's promises: the cut of the stream does not matter, kinds never flip, finished blocks never change.
import assert from "node:assert/strict";
import { test } from "node:test";
import { BlockScanner } from "../../../web/js/markdown/blocks.js";
import { blockToHtml, isCostly } from "../../../web/js/markdown/html.js";

/** A small seeded generator (mulberry32), so that a failure can be repeated. */
function generator(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

const LINES = [
  "A plain line of prose.", "another **bold** line with `code`", "", "", "   ", "# Heading", "###", "#hashtag", "## Two ##", "- item", "- [ ] task", "* star", "*emphasis* at the start",
  "**bold** at the start", "+ plus", "-", "*", "**", "1. first", "2) second", "10", "10.5 is a number", "3.", "---", "***", "- - -", "===", "> quote", ">", "lazy line",
  "```python", "```", "``", "````", "~~~", "~~~ text", "``` inline ``` fence", "x = 1  # no heading", "    indented", "  two spaces", "\ttab", "| a | b |", "|---|:-:|", "|---|",
  "| 1 | 2 |", "|", "[ref]: http://example.org", "<div onclick=x>", "<!-- c -->", "\\# escaped", "日本語の文。", "👩‍👩‍👧 joined", "a | b", "--- | ---",
];

function document(random) {
  const count = 1 + Math.floor(random() * 14);
  const lines = Array.from({ length: count }, () => LINES[Math.floor(random() * LINES.length)]);
  return lines.join("\n") + (random() < 0.5 ? "\n" : "");
}

function* cuts(text, random, longest) {
  for (let end = 0; end < text.length; ) {
    end = Math.min(text.length, end + 1 + Math.floor(random() * longest));
    yield text.slice(0, end);
  }
}

const copyOf = (blocks) => blocks.map((block) => ({ ...block }));
const whole = (text) => {
  const scanner = new BlockScanner();
  scanner.update(text, true);
  return copyOf(scanner.blocks);
};

test("a streamed text gives the blocks of the whole text, whatever the pieces", () => {
  for (let seed = 1; seed <= 1500; seed += 1) {
    const random = generator(seed);
    const text = document(random);
    const scanner = new BlockScanner();
    for (const prefix of cuts(text, random, 1 + (seed % 7))) scanner.update(prefix, false);
    scanner.update(text, true);
    assert.deepEqual(copyOf(scanner.blocks), whole(text), `seed ${seed}: ${JSON.stringify(text)}`);
  }
});

test("no block flips its kind, goes away, loses text, or changes after it is done", () => {
  for (let seed = 1; seed <= 1500; seed += 1) {
    const random = generator(seed);
    const text = document(random);
    const scanner = new BlockScanner();
    let before = [];
    for (const [prefix, final] of [...[...cuts(text, random, 3)].map((prefix) => [prefix, false]), [text, true]]) {
      scanner.update(prefix, final);
      const after = copyOf(scanner.blocks);
      const where = `seed ${seed} at ${JSON.stringify(prefix)} of ${JSON.stringify(text)}`;
      assert.ok(after.length >= before.length, `blocks went away: ${where}`);
      before.forEach((block, index) => {
        assert.equal(after[index].kind, block.kind, `kind flipped: ${where}`);
        assert.equal(after[index].info, block.info, `language changed: ${where}`);
        assert.ok(after[index].source.startsWith(block.source), `shown text changed: ${where}`);
        if (block.done) assert.deepEqual(after[index], block, `a finished block changed: ${where}`);
      });
      assert.ok(after.slice(0, -1).every((block) => block.done), `two open blocks: ${where}`);
      before = after;
    }
    assert.ok(before.every((block) => block.done), "nothing is open at the end");
  }
});

test("kinds are told as markdown has them", () => {
  const text = "# Title\nprose\ngoes on\n\n- a\n  - b\n\n  still a\n- c\n\n1. one\n2. two\n\n> said\n> twice\n\n```js\nlet x;\n\n# no\n```\n| a | b |\n|---|---|\n| 1 | 2 |\n\n---\n    four\n\n    spaces\nend";
  assert.deepEqual(whole(text).map((block) => block.kind), ["heading", "paragraph", "list", "quote", "code", "table", "rule", "code", "paragraph"]);
  const codes = whole(text).filter((block) => block.kind === "code");
  assert.deepEqual(codes.map(({ source, info }) => [source, info]), [["let x;\n\n# no\n", "js"], ["four\n\nspaces\n", ""]]);
});

test("a table stays hidden until its second line is certain, and prose with a bar does not", () => {
  const scanner = new BlockScanner();
  scanner.update("| a | b |\n|--", false);
  assert.deepEqual(scanner.blocks, []);
  scanner.update("| a | b |\n|---|---|\n| 1", false);
  assert.deepEqual(scanner.blocks.map((block) => block.kind), ["table"]);
  const prose = new BlockScanner();
  prose.update("a | b", false);
  assert.deepEqual(prose.blocks.map((block) => block.kind), ["paragraph"]);
});

test("an unclosed fence is code to the end, and its language is known before it is shown", () => {
  const scanner = new BlockScanner();
  scanner.update("```pyth", false);
  assert.deepEqual(scanner.blocks, []);
  scanner.update("```python\nprint(1)\n``", false);
  assert.deepEqual(copyOf(scanner.blocks), [{ kind: "code", source: "print(1)\n", info: "python", continued: false, done: false }]);
});

test("very long prose is cut into blocks of a bounded size, the same ones however it came", () => {
  for (const text of ["word ".repeat(20_000), "x".repeat(50_000), "a line\n".repeat(9_000), "- item of a list\n".repeat(4_000), "👩‍👩‍👧".repeat(6_000)]) {
    const blocks = whole(text);
    const scanner = new BlockScanner();
    for (let end = 997; end < text.length; end += 997) scanner.update(text.slice(0, end), false);
    scanner.update(text, true);
    assert.deepEqual(copyOf(scanner.blocks), blocks);
    assert.ok(Math.max(...blocks.map((block) => block.source.length)) < 20_000);
    assert.equal(blocks.map((block) => block.source).join(""), text);
    assert.ok(blocks.slice(1).every((block) => block.continued));
    assert.ok(blocks.every((block) => block.source.isWellFormed?.() ?? true), "no pair is split");
  }
});

test("a text that does not go on what was given is refused", () => {
  const scanner = new BlockScanner();
  scanner.update("abc", false);
  assert.throws(() => scanner.update("xyz", false), RangeError);
  scanner.update("abcd", true);
  assert.throws(() => scanner.update("abcde", true), RangeError);
});

test("a long table goes on under the same head", () => {
  const head = "| a | b |\n|---|---|\n";
  const rows = "| 1 | 2 |\n".repeat(2000);
  const blocks = whole(head + rows);
  assert.ok(blocks.length > 3);
  assert.ok(blocks.every((block) => block.kind === "table" && block.source.startsWith(head)));
  assert.equal(blocks.map((block) => block.source.slice(head.length)).join(""), rows);
});

test("what would take too long to turn into HTML is told beforehand", () => {
  for (const costly of ["> ".repeat(3000), `- a\n${" ".repeat(200)}- b`, "- x\n" + "  y\n".repeat(20_000)]) assert.ok(isCostly(costly));
  for (const plain of ["- a\n  - b\n    - c", "> > > quoted", "word ".repeat(800), "| a | b |"]) assert.ok(!isCostly(plain));
});

test("raw HTML comes out as text, and an image as a link", () => {
  for (const source of ["<script>alert(1)</script>", "a <img src=x onerror=alert(1)> b", "<div>\n<svg onload=1>\n</div>", "<!-- x -->", "<a href='javascript:1'>x</a>"]) {
    assert.doesNotMatch(blockToHtml(source), /<(?!\/?(?:p|br)>)/, source);
  }
  assert.equal(blockToHtml("![a \"b\"](http://example.org/i.png)").trim(), "<p><a href=\"http://example.org/i.png\">a &#34;b&#34;</a></p>");
});

test("nothing reaches back: underlines and link definitions are plain text", () => {
  assert.match(blockToHtml("Title\n===\n"), /^<p>/);
  assert.match(blockToHtml("[a]: http://example.org\n"), /^<p>\[a\]/);
});
