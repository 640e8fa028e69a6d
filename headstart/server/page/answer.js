// One answer on the page: its text as it comes, tinted by origin, as markdown or plain.

const DRAW_MILLISECONDS = 16; // a frame: text that comes faster is drawn together

export class Answer {
  // `column` is the element that holds reasoning, text and what is said in the end.
  constructor(column) {
    this.column = column;
    this.place = document.createElement("div");
    this.place.className = "text";
    column.append(this.place);
    this.source = "";
    this.pieces = []; // {text, origin, from}
    this.drawn = []; // blocks with their elements
    this.timer = null;
  }

  add(pieces) {
    for (const piece of pieces) {
      this.pieces.push({ ...piece, from: this.source.length });
      this.source += piece.text;
    }
    this.timer ??= setTimeout(() => this.draw(), DRAW_MILLISECONDS);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    if (document.body.classList.contains("as-plain")) this.drawPlain();
    else this.drawBlocks();
  }

  redraw() {
    this.drawn = [];
    this.place.replaceChildren();
    this.draw();
  }

  drawPlain() {
    const paragraph = document.createElement("p");
    this.write(paragraph, 0, this.source.length);
    this.place.replaceChildren(paragraph);
  }

  // A block that is as it was stays; the last one may have grown.
  drawBlocks() {
    const blocks = blocksOf(this.source);
    let same = 0;
    while (same < this.drawn.length - 1 && isSame(this.drawn[same], blocks[same])) same++;
    for (const { element } of this.drawn.slice(same)) element.remove();
    const drawn = blocks.slice(same).map((block) => ({ ...block, element: elementOf(block, (...place) => this.write(...place)) }));
    this.place.append(...drawn.map((block) => block.element));
    this.drawn = [...this.drawn.slice(0, same), ...drawn];
  }

  // Characters `from` to `to` of the answer, each with the tint of its token.
  write(place, from, to) {
    if (to <= from) return;
    for (let at = this.firstAt(from); at < this.pieces.length && this.pieces[at].from < to; at++) {
      const { text, origin, from: start } = this.pieces[at];
      const shown = text.slice(Math.max(from - start, 0), to - start);
      if (shown) place.append(tokenOf(shown, origin));
    }
  }

  // The first piece that reaches beyond a place, by halving.
  firstAt(place) {
    let low = 0, high = this.pieces.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.pieces[middle].from + this.pieces[middle].text.length > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // Reasoning is shown above the answer, and can be folded.
  think(pieces) {
    let details = this.column.querySelector("details");
    if (!details) {
      details = document.createElement("details");
      details.open = true;
      const title = document.createElement("summary");
      title.textContent = "Reasoning";
      details.append(title, document.createElement("div"));
      this.place.before(details);
    }
    details.lastElementChild.append(...pieces.map(({ text, origin }) => tokenOf(text, origin)));
  }

  finish(words) {
    const end = document.createElement("p");
    end.className = "end";
    end.textContent = words;
    try { this.draw(); } finally { this.column.append(end); }
  }
}

function isSame(drawn, block) {
  return block && drawn.kind === block.kind && drawn.from === block.from && drawn.to === block.to;
}

function tokenOf(text, origin) {
  const token = document.createElement("span");
  token.textContent = text;
  if (origin) { token.className = `token ${origin}`; token.title = origin; }
  return token;
}

// Where two texts part, in characters; null where they are the same.
export function partingOf(one, other) {
  if (one === other) return null;
  let at = 0;
  while (at < one.length && one[at] === other[at]) at++;
  return at;
}
