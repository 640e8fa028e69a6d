// The numbers beside the conversation: of the answer that is coming, and of those before.

const $ = (id) => document.getElementById(id);

export function showLive(tally) {
  const speed = tally.speed(tally.times.at(-1)?.[0] ?? 0);
  $("speed").textContent = speed ? speed.toFixed(1) : "–";
  $("length").textContent = tally.length ? tally.length.toFixed(2) : "–";
  drawLine($("speed-chart"), tally.speeds, `Tokens per second: ${speed ? speed.toFixed(1) : "none yet"}`);
  drawRounds($("round-chart"), tally.rounds, `${tally.rounds.length} rounds`);
  const bars = tally.tried.map((tried, at) => {
    const rate = tally.right[at] / tried;
    return { name: String(at + 1), value: rate, shown: rate.toFixed(2) };
  });
  drawBars($("depth-chart"), bars, 1, `Acceptance by depth: ${bars.map((bar) => bar.shown).join(", ") || "no drafts"}`);
  // An origin that some servers have is explained where it occurs.
  for (const item of document.querySelectorAll(".legend [data-origin]")) {
    item.hidden &&= !tally.rounds.some((origins) => origins.includes(item.dataset.origin));
  }
}

export function showStatistics(statistics) {
  $("speed").textContent = statistics.tokens_per_second?.toFixed(1) ?? "–";
  $("length").textContent = statistics.rounds ? statistics.acceptance_length.toFixed(2) : "–";
  $("chosen").textContent = statistics.rounds ? statistics.chosen_k : "–";
  const counts = roundsByDrafts(statistics);
  const bars = counts.map((count, k) => ({ name: String(k), value: count, shown: String(count) }));
  drawBars($("drafts-chart"), bars, Math.max(...counts), `Rounds by K: ${bars.map((bar) => `K=${bar.name} ${bar.shown}`).join(", ")}`);
}

export function addRow(tally, written, speed) {
  if (!tally.tokens) return;
  const first = written.statistics?.time_to_first_token_seconds;
  const cells = [
    written.drafts === "" ? "server's" : String(written.drafts), String(tally.tokens), speed ? speed.toFixed(1) : "–",
    first ? (1000 * first).toFixed(0) : (tally.first - tally.started).toFixed(0), tally.length ? tally.length.toFixed(2) : "–",
  ];
  const row = document.createElement("tr");
  for (const text of cells) row.insertCell().textContent = text;
  $("answers").tBodies[0].prepend(row);
}
