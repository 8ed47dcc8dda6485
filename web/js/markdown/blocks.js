// @ts-check
/**
 * Cuts a growing markdown text into top-level blocks, once and for good.
 *
 * The theory: a block's kind is decided by its first line alone and is never revised. What a streamed line could still
 * become is held back until it is certain ("-" may be a list, a rule or a word), so no block flips its kind on the way; a
 * finished block never changes; and however the text was cut into pieces, the blocks come out the same. To make that
 * possible, the few constructs of markdown that reach back are off: underlined headings and link definitions. Very long
 * paragraphs, lists, quotes and tables are cut into several blocks, so that the open one stays cheap to draw again.
 *
 * Knows no HTML and no DOM. Inline markup is `html.js`'s.
 */

/** @typedef {"paragraph" | "heading" | "rule" | "code" | "list" | "quote" | "table"} Kind */

/**
 * @typedef {object} Block
 * @property {Kind} kind
 * @property {string} source      markdown of the block; for code its content
 * @property {string} info        language of a code block
 * @property {boolean} continued  goes on a block that was cut for its length
 * @property {boolean} done
 */

/** @typedef {{mark: string, length: number, indent: number}} Fence */

const CUT_CHARS = 4096;

const BLANK = /^[ \t]*$/;
const HEADING = /^ {0,3}#{1,6}(?:[ \t]|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const BULLET = /^ {0,3}[-*+](?:[ \t]|$)/;
const ORDERED = /^ {0,3}\d{1,9}[.)](?:[ \t]|$)/;
const INTERRUPTING_ITEM = /^ {0,3}(?:[-*+]|1[.)])[ \t]+\S/;
const QUOTE = /^ {0,3}>/;
const ROW = /^ {0,3}\|/;
const DELIMITER_ROW = /^ {0,3}\|[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const DELIMITER_ROW_BEGUN = /^ {0,3}(?:\|[-:| \t]*)?$/;
const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*?)[ \t]*$/;

/** What a line without its end may still turn into something else. */
const UNDECIDED = [
  BLANK,
  /^ {0,3}([-*_+])[ \t]*(?:\1[ \t]*)*$/,
  /^ {0,3}\d{1,9}[.)]?[ \t]*$/,
  /^ {0,3}#{1,6}[ \t]*$/,
  /^ {0,3}(?:`{1,2}|`{3,}[^`]*|~{1,2}|~{3,}.*)$/,
];

/** @param {string} line */
const indentOf = (line) => /** @type {RegExpExecArray} */ (/^ */.exec(line.replace(/^\t/, "    ")))[0].length;

/** @param {string} row */
const cellsOf = (row) => row.trim().replace(/^\||\|$/g, "").replace(/\\\|/g, "").split("|").length;

/** @param {string} table @returns {string} its first two lines, which a part that goes on repeats */
const headOf = (table) => /** @type {RegExpExecArray} */ (/^.*\n.*\n/.exec(table))[0];

export class BlockScanner {
  constructor() {
    /** @type {Block[]} finished ones, then at most one open, then at most one that shows an unfinished line */
    this.blocks = [];
    this._text = "";
    this._position = 0;
    /** @type {Block | null} */
    this._open = null;
    /** @type {Fence | null} null in an indented code block */
    this._fence = null;
    this._blankLines = "";
    /** @type {{open: Block | null, fence: Fence | null, blank: string, source: string, count: number} | null} what the preview changed */
    this._saved = null;
    this._final = false;
  }

  /**
   * @param {string} text   all of the text so far: it must begin with what was given before
   * @param {boolean} final nothing follows; nothing is held back
   */
  update(text, final) {
    if (this._final || !text.startsWith(this._text)) throw new RangeError("a finished or shorter text cannot grow: start a new scanner");
    this._text = text;
    this._final = final;
    this._dropPreview();
    while (this._takeLine());
    if (final) this._close();
    else this._preview();
  }

  /** Consume one line if it is complete and its meaning certain. */
  _takeLine() {
    const start = this._position;
    if (start >= this._text.length) return false;
    const end = this._text.indexOf("\n", start);
    const complete = end !== -1 || this._final;
    const line = end === -1 ? this._text.slice(start) : this._text.slice(start, end);
    const length = line.length > CUT_CHARS ? this._cutLength(line, complete) : line.length;
    if (length === line.length) {
      if (!complete) return false;
      const meaning = this._meaning(line, end);
      if (meaning === "undecided") return false;
      this._position = end === -1 ? this._text.length : end + 1;
      this._apply(meaning, end === -1 ? line : `${line}\n`);
      return true;
    }
    this._position = start + length;
    this._apply("paragraph", line.slice(0, length));
    this._close();
    this._begin("paragraph", "").continued = true;
    return true;
  }

  /**
   * A long line of prose is cut at a space; any other line is taken whole.
   * @param {string} line
   * @param {boolean} complete
   */
  _cutLength(line, complete) {
    if (this._meaning(line, -1) !== "paragraph" || (!complete && UNDECIDED.some((pattern) => pattern.test(line)))) return line.length;
    const space = line.lastIndexOf(" ", CUT_CHARS);
    if (space > 0) return space + 1;
    const splitsPair = /[\uD800-\uDBFF]/.test(line.charAt(CUT_CHARS - 1));
    return splitsPair ? CUT_CHARS - 1 : CUT_CHARS;
  }

  /**
   * What a line is, given the block that is open.
   * @param {string} line
   * @param {number} end  where it ends in the text; -1: it is the last one
   * @returns {Kind | "blank" | "more" | "close-fence" | "undecided"} more: goes on the open block
   */
  _meaning(line, end) {
    const open = this._open?.kind;
    if (this._fence !== null) return this._closesFence(line) ? "close-fence" : "more";
    if (BLANK.test(line)) return "blank";
    const afterBlank = this._blankLines !== "";
    if (open === "code" && indentOf(line) >= 4) return "more";
    if (open === "list" && indentOf(line) >= 2) return "more";
    if (FENCE.test(line)) return "code";
    if (HEADING.test(line)) return "heading";
    if (RULE.test(line)) return "rule";
    const inParagraph = (open === "paragraph" || open === "quote" || open === "list") && !afterBlank;
    if (open === "list" && (BULLET.test(line) || ORDERED.test(line))) return "list";
    if (inParagraph ? INTERRUPTING_ITEM.test(line) : BULLET.test(line) || ORDERED.test(line)) return "list";
    if (QUOTE.test(line)) return "quote";
    if (ROW.test(line)) {
      if (open === "table" && !afterBlank) return "more";
      const table = this._beginsTable(line, end);
      if (table !== false) return table === true ? "table" : "undecided";
    }
    if (inParagraph) return open === "paragraph" ? "paragraph" : "more";
    return indentOf(line) >= 4 ? "code" : "paragraph";
  }

  /**
   * @param {string} line
   * @param {number} end
   * @returns {boolean | null} null: the next line will tell
   */
  _beginsTable(line, end) {
    if (end === -1) return this._final ? false : null;
    const nextEnd = this._text.indexOf("\n", end + 1);
    const next = nextEnd === -1 ? this._text.slice(end + 1) : this._text.slice(end + 1, nextEnd);
    if (nextEnd === -1 && !this._final) return DELIMITER_ROW_BEGUN.test(next) ? null : false;
    return DELIMITER_ROW.test(next) && cellsOf(next) === cellsOf(line);
  }

  /** @param {string} line */
  _closesFence(line) {
    const fence = /** @type {Fence} */ (this._fence);
    const found = /^ {0,3}(`{3,}|~{3,})[ \t]*$/.exec(line)?.[1];
    return found !== undefined && found.charAt(0) === fence.mark && found.length >= fence.length;
  }

  /**
   * @param {Kind | "blank" | "more" | "close-fence"} meaning
   * @param {string} line  with its end
   */
  _apply(meaning, line) {
    const open = this._open;
    switch (meaning) {
      case "blank":
        if (open?.kind === "list" || open?.kind === "code") this._blankLines += line;
        else this._close();
        return;
      case "close-fence":
        this._close();
        return;
      case "more":
        if (open?.kind === "table" && open.source.length > CUT_CHARS) this._begin("table", headOf(open.source) + line, true);
        else this._extend(line);
        return;
      case "paragraph":
      case "list":
      case "quote":
        // A line of the same kind goes on, unless the block has grown too long.
        if (open?.kind === meaning && open.source.length <= CUT_CHARS) this._extend(line);
        else this._begin(meaning, line, open?.kind === meaning);
        return;
      case "code":
        this._beginCode(line);
        return;
      case "table":
        this._begin("table", line);
        return;
      case "heading":
      case "rule":
        this._begin(meaning, line);
        this._close();
    }
  }

  /** @param {string} line */
  _extend(line) {
    const open = /** @type {Block} */ (this._open);
    open.source += this._fence === null && open.kind === "code" ? this._dedented(this._blankLines) + this._dedented(line) : this._blankLines + this._unfenced(line);
    this._blankLines = "";
  }

  /** @param {string} lines of an indented code block */
  _dedented(lines) {
    return lines.replace(/^(?: {1,4}|\t)/gm, "");
  }

  /** @param {string} line */
  _unfenced(line) {
    const indent = this._fence?.indent ?? 0;
    return indent === 0 ? line : line.replace(new RegExp(`^ {1,${indent}}`), "");
  }

  /**
   * @param {Kind} kind
   * @param {string} source
   * @param {boolean} [continued]
   */
  _begin(kind, source, continued = false) {
    this._close();
    const block = { kind, source, info: "", continued, done: false };
    this.blocks.push(block);
    this._open = block;
    return block;
  }

  /** @param {string} line */
  _beginCode(line) {
    const fence = FENCE.exec(line.replace(/\n$/, ""));
    if (fence === null) {
      this._begin("code", this._dedented(line));
      return;
    }
    const [indent = "", marks = "", info = ""] = fence.slice(1);
    this._begin("code", "").info = info.split(/[\s{,]/, 1)[0] ?? "";
    this._fence = { mark: marks.charAt(0), length: marks.length, indent: indent.length };
  }

  _close() {
    if (this._open !== null) this._open.done = true;
    this._open = null;
    this._fence = null;
    this._blankLines = "";
  }

  /** Show as much of the unfinished line as is certain, without consuming it. */
  _preview() {
    const line = this._text.slice(this._position);
    if (line === "" || line.includes("\n")) return;
    if (this._fence !== null ? /^ {0,3}[`~]*[ \t]*$/.test(line) : UNDECIDED.some((pattern) => pattern.test(line))) return;
    const meaning = this._meaning(line, -1);
    if (meaning === "undecided" || meaning === "blank" || meaning === "close-fence") return;
    const { _open: open, _fence: fence, _blankLines: blank } = this;
    this._saved = { open, fence, blank, source: open?.source ?? "", count: this.blocks.length };
    this._apply(meaning, line);
    // A line of its own kind, such as a heading, is finished by its end only.
    for (const block of this.blocks.slice(this._saved.count)) block.done = false;
  }

  _dropPreview() {
    if (this._saved === null) return;
    const { open, fence, blank, source, count } = this._saved;
    this.blocks.length = count;
    this._open = open;
    this._fence = fence;
    this._blankLines = blank;
    if (open !== null) {
      open.source = source;
      open.done = false;
    }
    this._saved = null;
  }
}
