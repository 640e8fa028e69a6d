// What a server that was started with --learn says of itself: that it keeps what is asked, and how its head gets on.

// A value of Prometheus' text format, by name and labels; null where it is not there.
export function valueOf(metrics, name, labels = "") {
  const line = metrics.split("\n").find((own) => own.startsWith(`headstart:${name}{`) && own.includes(labels));
  const value = line === undefined ? NaN : Number(line.slice(line.lastIndexOf(" ")));
  return Number.isFinite(value) ? value : null;
}

export function showLearning(metrics) {
  const kept = valueOf(metrics, "learn_collected_texts_total");
  $("learning").hidden = kept === null;
  if (kept === null) return;
  const count = (name) => valueOf(metrics, `learn_${name}_total`) ?? 0;
  const length = (head) => valueOf(metrics, "learn_acceptance_length", `head="${head}",kind="other"`)
    ?? valueOf(metrics, "learn_acceptance_length", `kind="other",head="${head}"`);
  const [before, after] = [length("before"), length("after")];
  const lines = [
    `${kept} answers kept`,
    `${count("steps")} training steps, ${count("checks")} checks`,
    `${count("swaps")} heads swapped in, ${count("rollbacks")} taken back`,
  ];
  if (before && after) lines.push(`tokens per round on held-out answers: ${before.toFixed(2)} serving, ${after.toFixed(2)} learning`);
  $("learned").replaceChildren(...lines.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
}
