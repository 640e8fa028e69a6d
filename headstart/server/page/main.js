// The page itself: asks, shows what comes, and keeps the numbers up to date.

const $ = (id) => document.getElementById(id);
const CHART_MILLISECONDS = 150;
const STATE_MILLISECONDS = 5000;
const KEY = "headstart-api-key";

let messages = []; // the conversation as the server wants it
let running = null; // the AbortController of the answer that is coming

function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function show(problem) {
  $("problem").textContent = problem ?? "";
  $("problem").hidden = !problem;
}

// Why a response is not an answer, in the server's words where it has some.
async function reasonOf(response) {
  if (response.status === 401) {
    $("access").hidden = false;
    $("key").focus();
  }
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server said ${response.status} ${response.statusText}`;
}

function speculate() {
  if (!$("mtp").checked) return "off";
  const value = $("drafts").value;
  return value === "" || value === "auto" ? value : Number(value);
}

function question() {
  const body = { model: "default", messages, stream: true, headstart: { origins: true, statistics: true } };
  const drafts = speculate();
  if (drafts !== "") body.headstart.speculate = drafts;
  for (const [id, name] of [["max-tokens", "max_tokens"], ["temperature", "temperature"], ["seed", "seed"]]) {
    const value = $(id).value;
    if (value !== "") body[name] = Number(value);
  }
  return body;
}

async function send() {
  const text = $("text").value.trim();
  if (!text || running) return;
  show(null);
  const conversation = messages; // `clear` begins another one
  conversation.push({ role: "user", content: text });
  addMessage("user", "You").append(text);
  $("text").value = "";
  grow();
  const answer = addMessage("assistant", "Model");
  running = new AbortController();
  setRunning(true);
  const tally = new Tally(performance.now());
  const charts = setInterval(() => { tally.sample(performance.now()); showLive(tally); }, CHART_MILLISECONDS);
  const written = { content: "", end: "stopped", statistics: null, drafts: speculate() };
  try {
    await receive(answer, tally, written, running.signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      written.end = "failed";
      show(error instanceof TypeError ? "The server cannot be reached." : error.message);
    }
  }
  clearInterval(charts);
  running = null;
  setRunning(false);
  finish(answer, tally, written);
  if (written.content) conversation.push({ role: "assistant", content: written.content });
  else takeBack(conversation, text);
}

// A question without an answer is not part of the conversation; it can be asked again.
function takeBack(conversation, text) {
  conversation.pop();
  if (!$("text").value) $("text").value = text;
}

async function receive(answer, tally, written, signal) {
  const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(question()), signal });
  if (!response.ok) throw new Error(await reasonOf(response));
  const origins = new Origins();
  for await (const event of readEvents(response.body)) {
    if (event.error) throw new Error(event.error.message);
    if (event.headstart?.statistics) written.statistics = event.headstart.statistics;
    const choice = event.choices[0];
    if (!choice) continue;
    if (choice.headstart) {
      tally.add(choice.headstart.origins, performance.now());
      origins.add(choice.headstart.origins, choice.headstart.token_texts);
    }
    const { content, reasoning_content: reasoning } = choice.delta;
    if (reasoning) append(thoughts(answer), origins.take(reasoning));
    if (content) {
      append(answer.querySelector(".text"), origins.take(content));
      written.content += content;
    }
    if (choice.finish_reason) written.end = choice.finish_reason;
  }
}

function addMessage(role, name) {
  $("empty")?.remove();
  const message = document.createElement("article");
  message.className = `said ${role}`;
  const title = document.createElement("h2");
  title.textContent = name;
  const text = document.createElement("div");
  text.className = "text";
  message.append(title, text);
  $("log").append(message);
  $("log").scrollTop = $("log").scrollHeight;
  return role === "user" ? text : message;
}

// Reasoning is shown above the answer, and can be folded.
function thoughts(answer) {
  const known = answer.querySelector("details");
  if (known) return known.querySelector("div");
  const details = document.createElement("details");
  details.open = true;
  const title = document.createElement("summary");
  title.textContent = "Reasoning";
  const text = document.createElement("div");
  details.append(title, text);
  answer.querySelector(".text").before(details);
  return text;
}

function append(place, pieces) {
  const log = $("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  for (const { text, origin } of pieces) {
    const token = document.createElement("span");
    token.textContent = text;
    if (origin) { token.className = `token ${origin}`; token.title = origin; }
    place.append(token);
  }
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function finish(answer, tally, written) {
  const now = tally.times.at(-1)?.[0] ?? performance.now();
  const words = { stop: "", length: "cut at max tokens", stopped: "stopped", failed: "failed" }[written.end] ?? written.end;
  const speed = written.statistics?.tokens_per_second ?? tally.speed(now);
  const end = document.createElement("p");
  end.className = "end";
  end.textContent = [`${tally.tokens} tokens`, speed ? `${speed.toFixed(1)} tokens/s` : "", words].filter(Boolean).join(", ");
  answer.append(end);
  answer.removeAttribute("aria-busy");
  tally.sample(now);
  showLive(tally);
  if (written.statistics) showStatistics(tally, written.statistics);
  addRow(tally, written, speed);
  $("said").textContent = `Answer: ${end.textContent}`;
}

function setRunning(isRunning) {
  const isOnButton = [$("send"), $("stop")].includes(document.activeElement);
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  if (isRunning) $("log").lastElementChild.setAttribute("aria-busy", "true");
  // The button that was pressed is gone. Whoever is elsewhere stays there.
  if (isOnButton) (isRunning ? $("stop") : $("text")).focus();
}

function showLive(tally) {
  const speed = tally.speed(tally.times.at(-1)?.[0] ?? 0);
  $("speed").textContent = speed ? speed.toFixed(1) : "–";
  $("length").textContent = tally.length ? tally.length.toFixed(2) : "–";
  drawLine($("speed-chart"), tally.speeds, `Tokens per second: ${speed ? speed.toFixed(1) : "none yet"}`);
  drawRounds($("round-chart"), tally.rounds, `${tally.rounds.length} rounds`);
  const bars = tally.tried.map((tried, at) => {
    const rate = tally.right[at] / tried;
    return { name: `depth ${at + 1}`, value: rate, shown: rate.toFixed(2) };
  });
  drawBars($("depth-chart"), bars, 1, `Acceptance by depth: ${bars.map((bar) => bar.shown).join(", ") || "no drafts"}`);
}

function showStatistics(tally, statistics) {
  $("speed").textContent = statistics.tokens_per_second?.toFixed(1) ?? "–";
  $("length").textContent = statistics.rounds ? statistics.acceptance_length.toFixed(2) : "–";
  $("chosen").textContent = statistics.rounds ? statistics.chosen_k : "–";
  const counts = roundsByDrafts(statistics);
  const bars = counts.map((count, k) => ({ name: `K=${k}`, value: count, shown: String(count) }));
  drawBars($("drafts-chart"), bars, Math.max(...counts), `Rounds by K: ${bars.map((bar) => `${bar.name} ${bar.shown}`).join(", ")}`);
}

function addRow(tally, written, speed) {
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

function grow() {
  const text = $("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

function clear() {
  running?.abort();
  messages = [];
  $("log").replaceChildren();
  show(null);
  $("text").focus();
}

// Is the server ready, what is the model called, can it draft, and may K be left to it?
async function greet() {
  try {
    const { status } = await (await fetch("/health")).json();
    $("state").dataset.state = status;
    $("state").textContent = status;
    const isKnown = $("model").textContent.trim() !== "";
    if (status !== "ready" || isKnown || !$("access").hidden) return;
    const models = await fetch("/v1/models", { headers: headers() });
    if (!models.ok) { show(await reasonOf(models)); return; }
    show(null);
    $("model").textContent = (await models.json()).data[0].id;
    document.title = `${$("model").textContent} - Headstart`;
    offer(await (await fetch("/metrics")).text());
  } catch {
    $("state").dataset.state = "away";
    $("state").textContent = "not reachable";
  }
}

function offer(metrics) {
  const auto = [...$("drafts").options].find((option) => option.value === "auto");
  auto.disabled = !metrics.includes("headstart:round_cost_seconds{");
  auto.textContent = auto.disabled ? "auto (start the server with it)" : "auto";
  if (!auto.disabled) $("drafts").value = "auto";
  const hasHead = metrics.includes("headstart:spec_decode_num_drafts_total{");
  $("mtp").disabled = $("drafts").disabled = !hasHead;
  if (!hasHead) $("mtp").checked = false;
}

function takeKey() {
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("access").hidden = true;
  $("model").textContent = "\u00a0";
  greet();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("text").addEventListener("input", grow);
$("key").addEventListener("keydown", (event) => {
  if (event.key === "Enter") { event.preventDefault(); takeKey(); }
});
$("use-key").addEventListener("click", takeKey);
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("clear").addEventListener("click", clear);
$("mtp").addEventListener("change", () => { $("drafts").disabled = !$("mtp").checked; });
$("tint").addEventListener("change", () => document.body.classList.toggle("tinted", $("tint").checked));

document.body.classList.add("tinted");
$("key").value = sessionStorage.getItem(KEY) ?? "";
$("measurements").open = matchMedia("(min-width: 52rem)").matches;
showLive(new Tally(0));
drawBars($("drafts-chart"), [], 1, "Rounds by K: none yet");
greet();
setInterval(greet, STATE_MILLISECONDS);
$("text").focus();
