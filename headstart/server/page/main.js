// The page itself: asks, shows what comes, and keeps the numbers up to date.

const CHART_MILLISECONDS = 150;
const STATE_MILLISECONDS = 5000;
const KEY = "headstart-api-key";
const THEME = "headstart-theme";

let messages = []; // the conversation as the server wants it
let answers = []; // what is shown of it, to be drawn again
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

function question(drafts, seed) {
  const system = $("system-text").value.trim();
  const asked = system ? [{ role: "system", content: system }, ...messages] : messages;
  const body = { model: "default", messages: asked, stream: true, headstart: { origins: true, statistics: true } };
  if (drafts !== "") body.headstart.speculate = drafts;
  if ($("decline").checked) body.headstart.learn = false;
  for (const [id, name] of [["max-tokens", "max_tokens"], ["temperature", "temperature"]]) {
    const value = $(id).value;
    if (value !== "") body[name] = Number(value);
  }
  if (seed !== "") body.seed = Number(seed);
  return body;
}

// Two answers are compared only if both are drawn with the same seed.
function seedOf(isCompared) {
  const given = $("seed").value;
  return given === "" && isCompared ? Math.floor(Math.random() * 2 ** 31) : given;
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
  const isCompared = $("compare").checked && speculate() !== "off";
  const message = addMessage("assistant", "Model"), seed = seedOf(isCompared);
  const done = [];
  running = new AbortController();
  setRunning(true);
  try {
    for (const drafts of isCompared ? ["off", speculate()] : [speculate()]) {
      const written = await answered(message, drafts, seed, isCompared, running.signal);
      done.push(written);
      if (["stopped", "failed"].includes(written.end)) break;
    }
  } finally { // whatever went wrong, the next question can be sent
    running = null;
    setRunning(false);
    message.closest("article").removeAttribute("aria-busy");
  }
  if (done.length === 2) compare(message, ...done);
  const { content } = done.at(-1);
  if (content) conversation.push({ role: "assistant", content });
  else takeBack(conversation, text);
}

// One answer, in a column of its own.
async function answered(message, drafts, seed, isCompared, signal) {
  const column = document.createElement("div");
  column.className = "column";
  if (isCompared) {
    const title = document.createElement("h3");
    title.textContent = drafts === "off" ? "without MTP" : `with MTP${drafts === "" ? "" : `, K = ${drafts}`}`;
    column.append(title);
    message.classList.add("compared");
  }
  message.append(column);
  const answer = new Answer(column);
  answers.push(answer);
  const tally = new Tally(performance.now());
  const charts = setInterval(() => { tally.sample(performance.now()); showLive(tally); }, CHART_MILLISECONDS);
  const written = { content: "", end: "stopped", statistics: null, drafts, speed: null };
  try {
    await receive(answer, tally, written, question(drafts, seed), signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      written.end = "failed";
      show(error instanceof TypeError ? "The server cannot be reached." : error.message);
    }
  }
  clearInterval(charts);
  finish(answer, tally, written);
  return written;
}

// A question without an answer is not part of the conversation; it can be asked again.
function takeBack(conversation, text) {
  conversation.pop();
  if (!$("text").value) $("text").value = text;
}

async function receive(answer, tally, written, body, signal) {
  const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
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
    keepingTheEnd(() => {
      if (reasoning) answer.think(origins.take(reasoning));
      if (content) answer.add(origins.take(content));
    });
    written.content += content ?? "";
    if (choice.finish_reason) written.end = choice.finish_reason;
  }
}

// Whoever reads the end sees what is added to it; whoever reads elsewhere stays there.
function keepingTheEnd(change) {
  const log = $("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function addMessage(role, name) {
  $("empty")?.remove();
  const message = document.createElement("article");
  message.className = `said ${role}`;
  const title = document.createElement("h2");
  title.textContent = name;
  const body = document.createElement("div");
  body.className = role === "user" ? "text" : "columns";
  message.append(title, body);
  $("log").append(message);
  $("log").scrollTop = $("log").scrollHeight;
  return body;
}

function finish(answer, tally, written) {
  const now = tally.times.at(-1)?.[0] ?? performance.now();
  const words = { stop: "", length: "cut at max tokens", stopped: "stopped", failed: "failed" }[written.end] ?? written.end;
  written.speed = written.statistics?.tokens_per_second ?? tally.speed(now);
  const said = [`${tally.tokens} tokens`, written.speed ? `${written.speed.toFixed(1)} tokens/s` : "", words].filter(Boolean).join(", ");
  keepingTheEnd(() => answer.finish(said));
  tally.sample(now);
  showLive(tally);
  if (written.statistics) showStatistics(written.statistics);
  addRow(tally, written, written.speed);
  $("said").textContent = `Answer: ${said}`;
}

// How much faster the second was, and whether it says the same.
function compare(message, plain, drafted) {
  const parting = partingOf(plain.content, drafted.content);
  const ratio = plain.speed && drafted.speed ? `${(drafted.speed / plain.speed).toFixed(2)} times as fast with MTP, ` : "";
  const verdict = document.createElement("p");
  verdict.className = "verdict";
  verdict.textContent = `${ratio}${parting === null ? "the same text" : `texts differ from character ${parting + 1}`}`;
  keepingTheEnd(() => message.after(verdict));
  $("said").textContent = verdict.textContent;
}

function setRunning(isRunning) {
  const isOnButton = [$("send"), $("stop")].includes(document.activeElement);
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  if (isRunning) $("log").lastElementChild.setAttribute("aria-busy", "true");
  // The button that was pressed is gone. Whoever is elsewhere stays there.
  if (isOnButton) (isRunning ? $("stop") : $("text")).focus();
}

function grow() {
  const text = $("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

function clear() {
  running?.abort();
  messages = [];
  answers = [];
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
    if (status === "ready" && isKnown && !$("learning").hidden) showLearning(await (await fetch("/metrics")).text());
    if (status !== "ready" || isKnown || !$("access").hidden) return;
    const models = await fetch("/v1/models", { headers: headers() });
    if (!models.ok) { show(await reasonOf(models)); return; }
    show(null);
    $("model").textContent = (await models.json()).data[0].id;
    document.title = `${$("model").textContent} - Headstart`;
    const metrics = await (await fetch("/metrics")).text();
    offer(metrics);
    showLearning(metrics);
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
  $("mtp").disabled = $("drafts").disabled = $("compare").disabled = !hasHead;
  if (!hasHead) $("mtp").checked = false;
}

function takeKey() {
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("access").hidden = true;
  $("model").textContent = "\u00a0";
  greet();
}

// As the system has it, unless somebody chose here.
function setTheme(theme) {
  if (theme) { document.documentElement.dataset.theme = theme; localStorage.setItem(THEME, theme); }
  const isDark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  $("theme").textContent = isDark ? "Light" : "Dark";
  $("theme").dataset.next = isDark ? "light" : "dark";
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
$("theme").addEventListener("click", () => setTheme($("theme").dataset.next));
$("mtp").addEventListener("change", () => { $("drafts").disabled = $("compare").disabled = !$("mtp").checked; });
$("tint").addEventListener("change", () => document.body.classList.toggle("tinted", $("tint").checked));
$("plain").addEventListener("change", () => {
  document.body.classList.toggle("as-plain", $("plain").checked);
  for (const answer of answers) answer.redraw();
});

document.body.classList.add("tinted");
$("key").value = sessionStorage.getItem(KEY) ?? "";
const beside = matchMedia("(min-width: 52rem)");  // there is room for the charts beside the chat
const showCharts = () => { $("measurements").open = beside.matches; };
beside.addEventListener("change", showCharts);
showCharts();
setTheme(localStorage.getItem(THEME));
showLive(new Tally(0));
drawBars($("drafts-chart"), [], 1, "Rounds by K: none yet");
greet();
setInterval(greet, STATE_MILLISECONDS);
$("text").focus();
