// Owns the conversation: what is sent when, which answers run, what becomes of them. Starts the page.

import { ApiError, CHAT_URL, readInfo, streamChat } from "./api.js";
import { Lane, element } from "./lane.js";
import { asCurl, newSeed, requestBody } from "./request.js";
import { Run, parting } from "./run.js";
import { Settings } from "./settings.js";
import { Speaker } from "./speak.js";
import { Tip } from "./tip.js";

const WAYS = { plain: ["plain"], speculative: ["speculative"], both: ["plain", "speculative"] };
const LOADING_MS = 1500; // until a server that loads is asked again
const NEAR_END = 80; // pixels from the page's end at which it keeps following the text

const page = Object.fromEntries(
  ["turns", "welcome", "composer", "prompt", "send", "stop", "retry", "clear", "status", "pair", "key", "key-form"].map(
    (id) => [id, document.getElementById(id)],
  ),
);
const settings = new Settings();
const speaker = new Speaker(document.getElementById("spoken"));
const tip = new Tip(document.getElementById("tip"));

let messages = []; // of the conversation so far, without the system prompt
let key = ""; // in memory only
let info = null;
let running = null; // the AbortController of the turn that runs

// ------------------------------------------------------------------------------------------------ the server

async function connect() {
  try {
    info = await readInfo(key);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    page.pair.textContent = error.status === 401 ? "The server asks for an API key." : error.message;
    if (error.status === 401) askForKey(key === "" ? null : error.message);
    else if (error.status === 503) setTimeout(connect, LOADING_MS);
    else page.pair.append(" ", actionButton("Try again", connect));
    return;
  }
  page["key-form"].hidden = true;
  const facts = [info.model, info.draft && `draft: ${info.draft}`, info.dtype, info.device];
  page.pair.textContent = facts.filter(Boolean).join(" · ");
  settings.adopt(info);
  const hasDraft = info.draft !== null;
  for (const radio of document.querySelectorAll("input[name=way]")) {
    radio.disabled = !hasDraft && radio.value !== "plain";
    if (!hasDraft) radio.checked = radio.value === "plain";
  }
}

function askForKey(reason) {
  settings.open();
  page["key-form"].hidden = false;
  document.getElementById("key-hint").textContent =
    reason === null ? "The server asks for one. It is kept until you leave this page." : reason;
  page.key.focus();
}

page["key-form"].addEventListener("submit", (event) => {
  event.preventDefault();
  key = page.key.value.trim();
  page.key.value = "";
  connect().then(() => page["key-form"].hidden && page.prompt.focus());
});

// ---------------------------------------------------------------------------------------------------- a turn

// isAgain: the last turn gives way to this one. What cannot be sent changes nothing and stays in the message field.
async function send(text, isAgain = false) {
  const asked = settings.read();
  if (asked === null || running !== null) return;
  if (info === null) await connect();
  if (info === null) {
    say(page.pair.textContent);
    return;
  }
  asked.model = info.model;
  if (page.prompt.value === text) page.prompt.value = "";
  if (isAgain) dropLastTurn();
  for (const button of page.turns.querySelectorAll(".problem button")) button.remove(); // they retry the last turn only
  if (asked.temperature !== 0 && asked.seed === null) asked.seed = newSeed();
  const ways = WAYS[document.querySelector("input[name=way]:checked").value];
  if (messages.at(-1)?.role === "user") messages.pop(); // a turn that got no answer is no part of the conversation
  messages.push({ role: "user", content: text });
  const turn = element("article", { className: "turn" }, userMessage(text));
  const lanes = ways.map((way) => newLane(way, requestBody(way, asked, [...messages])));
  turn.append(element("div", { className: `lanes lanes-${lanes.length}` }, ...lanes.map((lane) => lane.element)));
  page.turns.append(turn);
  page.welcome.hidden = true;
  follow();
  running = new AbortController();
  showRunning();
  try {
    await runTurn(turn, lanes, asked);
  } finally {
    running = null;
    showRunning();
  }
}

function dropLastTurn() {
  const turn = page.turns.lastElementChild;
  if (turn?.contains(document.activeElement)) page.send.focus();
  turn?.remove();
  if (messages.at(-1)?.role === "assistant") messages.pop();
}

function newLane(way, body) {
  const lane = new Lane(way, {
    maxWidth: info.max_width ?? 2,
    note: body.speculation.width ? `width ${body.speculation.width}` : "",
    tip,
    onCopy: (self, button) => copy(self.run?.text ?? "", button),
    onCurl: (self, button) => copy(asCurl(CHAT_URL, body, key !== ""), button),
  });
  lane.body = body;
  return lane;
}

// One after the other, so that neither slows the other down. The last answer goes into the conversation.
async function runTurn(turn, lanes, asked) {
  const conversation = messages; // clearing begins another one
  lanes.slice(1).forEach((lane) => lane.wait());
  say("Writing.");
  let isWhole = true;
  for (const lane of lanes) {
    isWhole = isWhole && (await runLane(lane, lane === lanes.at(-1)));
    if (!isWhole && lane.run === null) lane.end("not run");
  }
  const kept = lanes.findLast((lane) => lane.run !== null && lane.run.text !== "");
  if (kept) conversation.push({ role: "assistant", content: kept.run.text });
  turn.classList.toggle("unanswered", !kept);
  const isFollowing = isNearEnd();
  if (isWhole && lanes.length === 2) turn.append(verdict(...lanes, asked));
  if (isFollowing) follow();
}

// Whether the answer came to the server's own end.
async function runLane(lane, isSpoken) {
  const run = new Run(performance.now());
  lane.begin(run);
  try {
    for await (const chunk of streamChat(lane.body, { key, signal: running.signal })) {
      const isFollowing = isNearEnd();
      const pieces = run.add(chunk, performance.now());
      lane.add(pieces);
      if (isSpoken) speaker.add(pieces.filter(({ section }) => section === "content").map(({ text }) => text).join(""));
      if (isFollowing) follow();
    }
  } catch (error) {
    if (isSpoken) speaker.end();
    if (error.name === "AbortError") {
      lane.end("stopped");
      say(`Stopped after ${run.tokens.length} tokens.`);
    } else {
      failLane(lane, error);
    }
    return false;
  }
  if (isSpoken) speaker.end();
  lane.end();
  say(inWords(run));
  return run.finishReason !== "error";
}

function failLane(lane, error) {
  if (!(error instanceof ApiError)) {
    lane.fail("This page made an error; its console says which.");
    throw error;
  }
  const status = error.status >= 400 ? `${error.status}: ` : "";
  lane.fail(`${status}${error.message}`, retryButton(error.retryAfterS));
  if (error.status === 401) askForKey(error.message);
}

function inWords(run) {
  const figures = run.figures();
  const perStep = figures.tokensPerStep === null ? "" : `, ${figures.tokensPerStep.toFixed(2)} tokens a step`;
  return `Done: ${figures.numTokens} tokens in ${figures.numSteps} steps${perStep}.`;
}

function verdict(plain, speculative, asked) {
  const at = parting(plain.run, speculative.run);
  const [one, other] = [plain.run.figures(), speculative.run.figures()];
  const isGreedy = asked.temperature === 0;
  const box = element("div", { className: "verdict" });
  box.dataset.identical = String(at === null);
  let claim;
  let reason;
  if (at === null) {
    claim = "Identical";
    reason = `${other.numTokens} tokens, the same text both ways, in ${other.numSteps} steps instead of ${one.numSteps}.`;
  } else {
    claim = `Different from token ${at + 1} on`;
    reason = isGreedy
      ? `Greedy texts part only where two tokens are equal up to rounding (${info.dtype}); float64 is the judge.`
      : "Two samples of one distribution. At temperature 0 the texts are the same, up to rounding.";
    for (const lane of [plain, speculative]) lane.markParting(at);
  }
  const ratio = one.tokensPerS && other.tokensPerS ? `${(other.tokensPerS / one.tokensPerS).toFixed(2)}× the speed` : "";
  box.append(element("strong", { textContent: claim }), element("p", { textContent: reason }));
  if (ratio) box.append(element("span", { className: "ratio", textContent: ratio }));
  say(`${claim}. ${reason} ${ratio}`);
  return box;
}

// -------------------------------------------------------------------------------------------------- controls

function retry() {
  const last = messages.findLast(({ role }) => role === "user");
  if (last) send(last.content, true);
}

function retryButton(waitS) {
  const button = actionButton("Retry", retry);
  let left = Math.ceil(waitS ?? 0);
  const tick = () => {
    button.disabled = left > 0;
    button.textContent = left > 0 ? `Retry in ${left} s` : "Retry";
    if (left-- > 0) setTimeout(tick, 1000);
  };
  tick();
  return button;
}

function clear() {
  running?.abort();
  messages = [];
  page.turns.replaceChildren();
  document.getElementById("spoken").replaceChildren();
  page.welcome.hidden = false;
  showRunning();
  say("Conversation cleared.");
  page.prompt.focus();
}

function showRunning() {
  const isRunning = running !== null && !running.signal.aborted;
  const hadFocus = [page.send, page.stop, page.retry].includes(document.activeElement); // they hide or go numb
  page.send.hidden = isRunning;
  page.stop.hidden = !isRunning;
  page.retry.disabled = isRunning || messages.length === 0;
  page.clear.disabled = messages.length === 0;
  if (hadFocus) (isRunning ? page.stop : page.send).focus();
}

function actionButton(words, action) {
  const button = element("button", { type: "button", textContent: words });
  button.addEventListener("click", action);
  return button;
}

function userMessage(text) {
  return element("p", { className: "user" }, element("span", { className: "unseen", textContent: "You: " }), text);
}

async function copy(text, button) {
  const words = button.dataset.words ?? button.textContent;
  button.dataset.words = words;
  const isDone = await copied(text);
  button.textContent = isDone ? "Copied" : "Copying failed";
  say(button.textContent);
  setTimeout(() => {
    button.textContent = words;
  }, 1500);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // No clipboard without https or localhost: the old way still works there.
    const field = element("textarea", { className: "unseen", value: text });
    document.body.append(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    return isDone;
  }
}

function say(words) {
  page.status.textContent = words;
}

function isNearEnd() {
  return window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - NEAR_END;
}

function follow() {
  window.scrollTo({ top: document.documentElement.scrollHeight });
}

function submit() {
  if (page.prompt.value.trim() !== "") send(page.prompt.value);
}

page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
page.prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  tip.hide();
  running?.abort();
});
document.addEventListener("step", (event) => say(event.detail));
page.stop.addEventListener("click", () => running?.abort());
page.retry.addEventListener("click", retry);
page.clear.addEventListener("click", clear);
for (const button of document.querySelectorAll("[data-example]")) {
  button.addEventListener("click", () => {
    page.send.focus();
    send(button.textContent);
  });
}

connect();
