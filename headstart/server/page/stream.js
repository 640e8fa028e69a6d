// Reading an answer: server-sent events, tokens with their origins, and what each round gave.

export async function* readEvents(body) {
  const decoder = new TextDecoder();
  let waiting = "";
  for await (const bytes of chunksOf(body)) {
    waiting += decoder.decode(bytes, { stream: true });
    const parts = waiting.split("\n\n");
    waiting = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
  throw new Error("the connection ended before the answer did.");
}

async function* chunksOf(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Tokens arrive with their step, text may come a little later (a marker of reasoning is left out,
// the beginning of one is held back). So tokens wait in a row, and text takes what it is made of.
export class Origins {
  constructor() { this.waiting = []; }

  add(origins, texts) {
    if (texts) texts.forEach((text, at) => this.waiting.push({ text, origin: origins[at] }));
  }

  take(text) {
    const known = this.waiting.map((token) => token.text).join("");
    const from = known.indexOf(text);
    if (from < 0) return [{ text, origin: null }];
    const pieces = [], left = [];
    let at = 0;
    for (const token of this.waiting) {
      const start = Math.max(at, from), stop = Math.min(at + token.text.length, from + text.length);
      if (stop > start) pieces.push({ text: known.slice(start, stop), origin: token.origin });
      const rest = Math.max(at, from + text.length);
      if (at + token.text.length > rest) left.push({ text: known.slice(rest, at + token.text.length), origin: token.origin });
      at += token.text.length;
    }
    this.waiting = left;
    return pieces;
  }
}

// What an answer has given so far. The first token comes from the prompt: it is no round.
export class Tally {
  constructor(now) {
    this.started = now;
    this.first = null;
    this.tokens = 0;
    this.accepted = 0;
    this.rounds = [];
    this.tried = [];
    this.right = [];
    this.times = [];
    this.speeds = [];
  }

  add(origins, now) {
    if (!origins.length) return;
    this.tokens += origins.length;
    this.times.push([now, origins.length]);
    if (this.first === null) { this.first = now; return; }
    const accepted = origins.filter((origin) => origin === "accepted" || origin === "copied").length;
    this.accepted += accepted;
    this.rounds.push(origins);
    for (let depth = 0; depth < accepted; depth++) this.count(depth, 1);
    if (origins.at(-1) === "recovered") this.count(accepted, 0);
  }

  count(depth, isRight) {
    while (this.tried.length <= depth) { this.tried.push(0); this.right.push(0); }
    this.tried[depth] += 1;
    this.right[depth] += isRight;
  }

  // Tokens per second since the first one, as the server counts them at the end.
  speed(now) {
    return this.tokens > 1 && now > this.first ? (1000 * (this.tokens - this.times[0][1])) / (now - this.first) : null;
  }

  // The same over the last second, kept for the chart.
  sample(now) {
    if (this.first === null) return;
    const from = Math.max(this.first, now - 1000);
    const recent = this.times.filter(([at]) => at > from).reduce((sum, [, count]) => sum + count, 0);
    if (now - from > 50) this.speeds.push((1000 * recent) / (now - from));
  }

  get length() {
    return this.rounds.length ? 1 + this.accepted / this.rounds.length : null;
  }
}

// Rounds by their number of drafts: those that drafted at least k, minus those that drafted more.
export function roundsByDrafts(statistics) {
  const atLeast = [statistics.rounds, ...statistics.draft_tokens_per_depth, 0];
  return atLeast.slice(0, -1).map((count, k) => count - atLeast[k + 1]);
}
