// Markdown of answers as elements. Text only ever becomes text: nothing is parsed as HTML, links
// lead to http(s) alone, and pictures are not loaded. Every run of text keeps the place in the
// answer that it came from, so that its tokens can be tinted.

const FENCE = /^ {0,3}(```+|~~~+)[ \t]*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(?=\S)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^( {0,8})([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const ROW = /^ {0,3}\|.*\|[ \t]*$/;
const DIVIDER = /^ {0,3}\|(?:[ \t]*:?-+:?[ \t]*\|)+[ \t]*$/;

const DEEPEST = 32; // quotes and lists inside each other; beyond that, marks are text

// The answer's lines as {text, from}: `from` is where a line begins in the whole answer.
function linesOf(source) {
  let from = 0;
  return source.split("\n").map((text) => {
    const line = { text, from };
    from += text.length + 1;
    return line;
  });
}

// The line without its first `count` characters.
function cut(line, count) { return { text: line.text.slice(count), from: line.from + count }; }

// Blocks: {kind, from, to, ...}. A block's last line may still be growing.
export function blocksOf(source) { return parse(linesOf(source), 0); }

function parse(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const [block, next] = blockAt(lines, at, depth);
    if (block) {
      const last = lines[next - 1];
      blocks.push({ ...block, from: lines[at].from, to: last.from + last.text.length });
    }
    at = next;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const { text } = lines[at];
  if (!text.trim()) return [null, at + 1];
  const fence = FENCE.exec(text);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(text);
  if (heading) return [{ kind: "heading", level: heading[1].length, lines: [cut(lines[at], heading[0].length)] }, at + 1];
  if (RULE.test(text)) return [{ kind: "rule" }, at + 1];
  if (depth < DEEPEST && QUOTE.test(text)) {
    const next = run(lines, at, (line) => QUOTE.test(line.text));
    const inner = lines.slice(at, next).map((line) => cut(line, QUOTE.exec(line.text)[0].length));
    return [{ kind: "quote", blocks: parse(inner, depth + 1) }, next];
  }
  if (depth < DEEPEST && ITEM.test(text)) return listed(lines, at, depth);
  if (ROW.test(text) && DIVIDER.test(lines[at + 1]?.text ?? "")) {
    const next = run(lines, at, (line) => ROW.test(line.text));
    const rows = lines.slice(at, next).filter((_, index) => index !== 1);
    return [{ kind: "table", rows: rows.map(cellsOf) }, next];
  }
  const next = run(lines, at, (line, index) => line.text.trim() && (index === at || !isOther(line.text)));
  return [{ kind: "paragraph", lines: lines.slice(at, next) }, next];
}

function run(lines, at, belongs) {
  let next = at;
  while (next < lines.length && belongs(lines[next], next)) next++;
  return next;
}

function isOther(text) {
  return FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || ITEM.test(text);
}

// Code up to the closing fence, or to the end of what has come.
function fenced(lines, at, fence) {
  const close = new RegExp(`^ {0,3}${fence[1][0] === "`" ? "`" : "~"}{${fence[1].length},}[ \\t]*$`);
  const end = run(lines, at + 1, (line) => !close.test(line.text));
  return [{ kind: "code", language: fence[2], lines: lines.slice(at + 1, end) }, Math.min(end + 1, lines.length)];
}

// Items of one list; lines that are indented deeper belong to the item above them.
function listed(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at].text);
  const isOrdered = /\d/.test(mark), items = [];
  let next = at;
  while (next < lines.length) {
    const found = ITEM.exec(lines[next].text);
    if (!found || found[1].length > indent.length + 1 || /\d/.test(found[2]) !== isOrdered) break;
    const deep = (line) => line.text.startsWith(" ".repeat(indent.length + 2));
    const end = run(lines, next + 1, (line, index) => deep(line) || (!line.text.trim() && lines[index + 1] && deep(lines[index + 1])));
    const rest = lines.slice(next + 1, end).map((line) => cut(line, Math.min(found[0].length, line.text.search(/\S|$/))));
    items.push(parse([cut(lines[next], found[0].length), ...rest], depth + 1));
    next = end;
    // One empty line may stand between two items.
    if (lines[next] && !lines[next].text.trim() && ITEM.test(lines[next + 1]?.text ?? "")) next++;
  }
  return [{ kind: "list", isOrdered, start: parseInt(mark, 10), items }, next];
}

function cellsOf(line) {
  const cells = [];
  let from = line.text.indexOf("|") + 1;
  for (let at = from; at < line.text.length; at++) {
    if (line.text[at] !== "|" || line.text[at - 1] === "\\") continue;
    const cell = line.text.slice(from, at);
    cells.push([{ text: cell.trim(), from: line.from + from + cell.search(/\S|$/) }]);
    from = at + 1;
  }
  return cells;
}

// What stands inside a line, as nested {name, from, to, begin, end, spans}: places of the whole,
// marks included, and of what is between them. One walk over the line: what closes a mark is looked
// for once, and a mark that nothing closes is not looked for again. Code binds before the rest, and a
// mark encloses none of its own kind, so that depth is bounded too.
const MARK = /`+|\*+|_+|~+|!?\[/g;
const LINK = /!?\[([^\[\]\n]*)\]\((https?:\/\/[^\s()<>]+)\)/y;
const NAMES = { 1: "em", 2: "strong" };
const isWord = (char) => /[\p{L}\p{N}_]/u.test(char);
const isBlank = (char) => !char.trim();

export function spansOf(text) {
  const [codes, bare] = codesOf(text);
  return spansBetween(bare, codes, 0, text.length);
}

// Code by where it begins, and the text with backticks in place of code: no mark is found in there.
function codesOf(text) {
  const runs = [...text.matchAll(/`+/g)].map((m) => ({ at: m.index, size: m[0].length }));
  const last = new Map(runs.map((run, number) => [run.size, number])), codes = new Map();
  let bare = "", from = 0;
  for (let number = 0; number < runs.length; number++) {
    const { at, size } = runs[number];
    if (last.get(size) === number) continue;
    let close = number + 1;
    while (runs[close].size !== size) close++;
    const end = runs[close].at, to = end + size;
    codes.set(at, { name: "code", from: at, to, begin: at + size, end, spans: [] });
    bare += text.slice(from, at) + "`".repeat(to - at);
    from = to;
    number = close;
  }
  return [codes, bare + text.slice(from)];
}

function spansBetween(text, codes, from, to) {
  const found = [], open = new Set(); // kinds that nothing closes any more
  const walk = new RegExp(MARK);
  walk.lastIndex = from;
  for (let mark; (mark = walk.exec(text)) && mark.index < to;) {
    const span = codes.get(mark.index) ?? linkAt(text, mark, to) ?? emphasis(text, mark[0], mark.index, from, to, open);
    if (!span) continue;
    if (span.name !== "code") span.spans = spansBetween(text, codes, span.begin, span.end);
    found.push(span);
    walk.lastIndex = span.to;
  }
  return found;
}

function linkAt(text, mark, to) {
  if (!mark[0].endsWith("[")) return null;
  LINK.lastIndex = mark.index;
  const match = LINK.exec(text);
  if (!match || LINK.lastIndex > to) return null;
  const begin = mark.index + mark[0].length;
  return { name: "a", from: mark.index, to: LINK.lastIndex, begin, end: begin + match[1].length, href: match[2] };
}

// Bold, italic, bold italic or struck out. A longer row of marks is text.
function emphasis(text, marks, at, from, to, open) {
  const [char] = marks, size = Math.min(marks.length, 2), kind = char.repeat(size);
  const name = char === "~" ? { 2: "del" }[marks.length] : marks.length <= 3 && NAMES[size];
  const begin = at + size, inWord = char === "_" && at > from && isWord(text[at - 1]);
  if (!name || "`[!".includes(char) || inWord || at + marks.length >= to || isBlank(text[at + marks.length]) || open.has(kind)) return null;
  const row = new RegExp(`\\${char}+`, "g");
  row.lastIndex = at + marks.length;
  for (let close; (close = row.exec(text)) && close.index < to;) {
    const after = Math.min(close.index + close[0].length, to), count = after - close.index;
    const closes = char === "~" ? count === 2 : count === size || count === 3;
    const ends = !isBlank(text[close.index - 1]) && !(char === "_" && after < to && isWord(text[after]));
    if (closes && ends) return { name, from: at, to: after, begin, end: after - size };
  }
  open.add(kind);
  return null;
}

function inline(place, line, write) { writeSpans(place, spansOf(line.text), 0, line.text.length, line.from, write); }

function writeSpans(place, spans, from, to, offset, write) {
  for (const span of spans) {
    write(place, offset + from, offset + span.from);
    const element = document.createElement(span.name);
    if (span.href) link(element, span.href);
    writeSpans(element, span.spans, span.begin, span.end, offset, write);
    place.append(element);
    from = span.to;
  }
  write(place, offset + from, offset + to);
}

function link(element, address) {
  element.href = address;
  element.rel = "noopener noreferrer nofollow";
  element.target = "_blank";
  element.title = address;
}

// `write(place, from, to)` puts that part of the answer there.
export function elementOf(block, write) {
  const make = { code: codeOf, list: listOf, quote: quoteOf, table: tableOf }[block.kind];
  if (make) return make(block, write);
  if (block.kind === "rule") return document.createElement("hr");
  const element = document.createElement(block.kind === "heading" ? `h${Math.min(block.level + 2, 6)}` : "p");
  writeLines(element, block.lines, write);
  return element;
}

function writeLines(element, lines, write) {
  lines.forEach((line, at) => {
    if (at) element.append("\n");
    inline(element, line, write);
  });
}

function codeOf({ language, lines }, write) {
  const figure = document.createElement("div"), head = document.createElement("div");
  figure.className = "code";
  head.className = "code-head";
  const name = document.createElement("span"), copy = document.createElement("button");
  name.textContent = language || "code";
  copy.type = "button";
  copy.textContent = "Copy";
  copy.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(lines.map((line) => line.text).join("\n"));
    copy.textContent = navigator.clipboard ? "Copied" : "Not allowed";
  });
  head.append(name, copy);
  const code = document.createElement("code"), pre = document.createElement("pre");
  pre.tabIndex = 0;
  pre.append(code);
  if (lines.length) {
    const last = lines.at(-1);
    write(code, lines[0].from, last.from + last.text.length);
  }
  figure.append(head, pre);
  return figure;
}

function listOf({ isOrdered, start, items }, write) {
  const list = document.createElement(isOrdered ? "ol" : "ul");
  if (isOrdered && start !== 1) list.start = start;
  for (const blocks of items) {
    const item = document.createElement("li");
    item.append(...blocks.map((block) => elementOf(block, write)));
    list.append(item);
  }
  return list;
}

function quoteOf({ blocks }, write) {
  const quote = document.createElement("blockquote");
  quote.append(...blocks.map((block) => elementOf(block, write)));
  return quote;
}

function tableOf({ rows }, write) {
  const table = document.createElement("table"), around = document.createElement("div");
  around.className = "scroll";
  rows.forEach((cells, at) => {
    const row = table.insertRow();
    for (const lines of cells) {
      const cell = document.createElement(at ? "td" : "th");
      writeLines(cell, lines, write);
      row.append(cell);
    }
  });
  around.append(table);
  return around;
}
