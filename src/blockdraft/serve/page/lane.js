// Owns how one answer looks: its tokens, its strip of steps, its figures, its end. Text only ever enters as text.

const SVG = "http://www.w3.org/2000/svg";
const KINDS = ["accepted", "bonus", "first"];
const TITLES = { plain: "Plain", speculative: "Speculative" };
const STRIP_HEIGHT = 40;
const BAR_WIDTH = 7;
const BAR_STEP = 9;
const ENDS = { stop: "complete", length: "cut at max tokens", error: "broken off by the server" };

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export class Lane {
  // maxWidth: the widest block, which the strip's full height stands for.
  // note: what else tells this answer from others, or "".
  constructor(way, { maxWidth, note, tip, onCopy, onCurl }) {
    this.way = way;
    this.run = null;
    this.#unit = STRIP_HEIGHT / Math.max(maxWidth, 2);
    this.#tip = tip;
    this.#build(note, onCopy, onCurl);
    new StepReader(this);
  }

  element;
  answer;
  #unit;
  #tip;
  #state;
  #figures;
  #svg;
  #strip;
  #reasoning;
  #reasoningText;
  #foot;
  #groups = { content: null, reasoning: null };

  #build(note, onCopy, onCurl) {
    this.#state = element("span", { className: "lane-state" });
    this.#svg = document.createElementNS(SVG, "svg");
    this.#svg.setAttribute("height", STRIP_HEIGHT);
    this.#svg.setAttribute("width", 0);
    this.#svg.setAttribute("role", "img");
    this.#svg.setAttribute("aria-label", "Accepted per step: no step yet");
    this.#strip = element("div", { className: "strip", tabIndex: 0, role: "group", "aria-label": "Steps" }, this.#svg);
    this.#figures = element("dl", { className: "figures" });
    this.#reasoningText = element("div", { className: "text" });
    this.#reasoning = element(
      "details",
      { className: "reasoning", hidden: true },
      element("summary", { textContent: "Reasoning" }),
      this.#reasoningText,
    );
    this.answer = element("div", {
      className: "text answer",
      tabIndex: 0,
      role: "group",
      "aria-label": `Answer, ${TITLES[this.way].toLowerCase()}. Left and right arrow keys go through its steps.`,
    });
    const copy = element("button", { type: "button", className: "quiet", textContent: "Copy text" });
    const curl = element("button", { type: "button", className: "quiet", textContent: "Copy as curl" });
    copy.addEventListener("click", () => onCopy(this, copy));
    curl.addEventListener("click", () => onCurl(this, curl));
    this.#foot = element("div", { className: "lane-foot", hidden: true }, copy, curl);
    this.element = element(
      "section",
      { className: "lane", "aria-label": `${TITLES[this.way]} answer` },
      element(
        "div",
        { className: "dash" },
        element("div", { className: "lane-head" }, element("h3", {}, TITLES[this.way], element("small", { textContent: note })), this.#state),
        this.#strip,
        this.#figures,
      ),
      this.#reasoning,
      this.answer,
      this.#foot,
    );
    this.element.dataset.way = this.way;
  }

  begin(run) {
    this.run = run;
    this.element.setAttribute("aria-busy", "true");
    this.#say("writing…");
    this.#foot.hidden = false;
    this.#showFigures();
  }

  wait() {
    this.#say("waits for the other");
  }

  add(pieces) {
    for (const piece of pieces) this.#place(piece);
    this.#drawSteps();
    this.#showFigures();
  }

  // how: null for the server's own end, or words for another.
  end(how = null) {
    this.element.removeAttribute("aria-busy");
    const reason = this.way === "plain" ? null : this.run?.noDraftReason;
    this.#say(`${how ?? ENDS[this.run?.finishReason] ?? "ended"}${reason ? `; no draft: ${reason}` : ""}`);
    this.#showFigures();
    this.#svg.setAttribute("aria-label", this.#stripInWords());
  }

  // A refusal or a failure, and the way on.
  fail(message, ...buttons) {
    const box = element("div", { className: "problem" });
    box.append(element("p", { role: "alert", textContent: message }), ...buttons);
    this.element.insertBefore(box, this.#foot);
    this.end("failed");
    const isEmpty = this.run.tokens.length === 0;
    for (const part of [this.#strip, this.#figures, this.answer, this.#foot.firstElementChild]) part.hidden = isEmpty;
  }

  markParting(index) {
    for (const token of this.element.querySelectorAll(`.tok[data-index="${index}"]`)) token.classList.add("parts");
  }

  // Shows one step, and one token of it where given, beside what is pointed at. Returns the words.
  point(stepNumber, token, anchor) {
    this.unpoint();
    for (const part of this.element.querySelectorAll(`[data-step="${stepNumber}"]`)) part.classList.add("is-pointed");
    const words = this.describe(stepNumber, token);
    this.#tip.show(words, anchor);
    return words;
  }

  unpoint() {
    for (const part of this.element.querySelectorAll(".is-pointed")) part.classList.remove("is-pointed");
    this.#tip.hide();
  }

  describe(stepNumber, token) {
    const step = this.run.step(stepNumber);
    const lines = [];
    if (step === null) lines.push("Prefill: the prompt gave the first token");
    else if (step.numProposals === 0) lines.push(`Step ${step.step}: plain, the target’s own token`);
    else lines.push(`Step ${step.step}: width ${step.width}, ${step.accepted} of ${step.numProposals} accepted`);
    if (token) {
      const inStep = this.run.tokens.filter((other) => other.step === token.step);
      const place = `token ${inStep.indexOf(token) + 1} of ${inStep.length}`;
      lines.push(`${JSON.stringify(token.text)}: ${token.kind}, ${place}, id ${token.id}`);
    }
    return lines;
  }

  #say(words) {
    this.#state.textContent = words;
  }

  #place({ section, text, token }) {
    const host = section === "reasoning" ? this.#reasoningText : this.answer;
    if (section === "reasoning") this.#reasoning.hidden = false;
    if (token === null) {
      this.#groups[section] = null;
      host.append(element("span", { className: "tok", textContent: text }));
      return;
    }
    if (this.#groups[section]?.dataset.step !== String(token.step)) {
      this.#groups[section] = element("span", { className: "step" });
      this.#groups[section].dataset.step = token.step;
      host.append(this.#groups[section]);
    }
    const span = element("span", { className: "tok", textContent: text });
    span.dataset.kind = token.kind;
    span.dataset.index = token.index;
    this.#groups[section].append(span);
  }

  #drawSteps() {
    const steps = this.run.steps;
    if (steps.length === 0) return;
    const isAtEnd = this.#strip.scrollLeft + this.#strip.clientWidth >= this.#strip.scrollWidth - BAR_STEP * 2;
    const last = this.#svg.lastElementChild; // the step that was last may have grown
    const from = Math.max(this.#svg.childElementCount - 1, 0);
    last?.remove();
    for (let i = from; i < steps.length; i++) this.#svg.append(this.#bar(steps[i], i));
    this.#svg.setAttribute("width", steps.length * BAR_STEP);
    if (isAtEnd) this.#strip.scrollLeft = this.#strip.scrollWidth;
  }

  #bar(step, place) {
    const group = document.createElementNS(SVG, "g");
    group.dataset.step = step.step;
    const parts = [
      ["room", 0, STRIP_HEIGHT / this.#unit],
      ["ghost", 0, step.numProposals + 1],
      ["accepted", 0, step.accepted],
      ["own", step.accepted, step.own],
    ];
    for (const [name, from, count] of parts) {
      if (count === 0) continue;
      const rect = document.createElementNS(SVG, "rect");
      rect.setAttribute("class", name);
      rect.setAttribute("x", place * BAR_STEP + 1);
      rect.setAttribute("y", STRIP_HEIGHT - (from + count) * this.#unit);
      rect.setAttribute("width", BAR_WIDTH);
      rect.setAttribute("height", count * this.#unit);
      group.append(rect);
    }
    return group;
  }

  #showFigures() {
    if (!this.run) return;
    const figures = this.run.figures();
    const rows = [
      ["tokens/step", figures.tokensPerStep === null ? "–" : figures.tokensPerStep.toFixed(2), "per-step"],
      ["tokens/s", figures.tokensPerS === null ? "–" : figures.tokensPerS.toFixed(1), "per-second"],
      ["to first token", figures.firstTokenS === null ? "–" : `${figures.firstTokenS.toFixed(2)} s`, "first-token"],
      ["steps", String(figures.numSteps), "steps"],
    ];
    for (const kind of KINDS) rows.push([kind, String(figures.counts[kind]), kind]);
    if (this.#figures.childElementCount === 0) {
      for (const [name, , key] of rows) {
        const term = element("dt", { textContent: name });
        if (KINDS.includes(key)) term.prepend(swatch(key));
        this.#figures.append(element("div", { className: `figure ${key}` }, term, element("dd")));
      }
    }
    rows.forEach(([, value], i) => {
      const shown = this.#figures.children[i].lastElementChild;
      if (shown.textContent !== value) shown.textContent = value;
    });
  }

  #stripInWords() {
    const figures = this.run?.figures();
    if (!figures || figures.numSteps === 0) return "Accepted per step: no step";
    return `Accepted per step: ${this.run.steps.map(({ accepted }) => accepted).join(", ")}`;
  }
}

// Arrow keys, pointer and touch on an answer: which step, which token.
class StepReader {
  #lane;
  #at = -1;

  constructor(lane) {
    this.#lane = lane;
    lane.answer.addEventListener("keydown", (event) => this.#key(event));
    lane.answer.addEventListener("blur", () => this.#leave());
    lane.element.addEventListener("pointerover", (event) => this.#over(event));
    lane.element.addEventListener("click", (event) => this.#over(event));
    lane.element.addEventListener("pointerleave", () => lane.unpoint());
  }

  #over(event) {
    const bar = event.target.closest("g[data-step]");
    const span = event.target.closest(".tok[data-index]");
    const token = span && this.#lane.run.tokens[Number(span.dataset.index)];
    if (token) this.#lane.point(token.step, token, span);
    else if (bar) this.#lane.point(Number(bar.dataset.step), null, bar);
    else this.#lane.unpoint();
  }

  #key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    const { answer } = this.#lane;
    const groups = answer.querySelectorAll(".step");
    if (groups.length === 0) return;
    event.preventDefault();
    this.#at = Math.min(Math.max(this.#at + move, 0), groups.length - 1);
    const group = groups[this.#at];
    group.scrollIntoView({ block: "nearest" });
    const words = this.#lane.point(Number(group.dataset.step), null, group);
    answer.dispatchEvent(new CustomEvent("step", { bubbles: true, detail: `${words[0]}: ${group.textContent}` }));
  }

  #leave() {
    this.#at = -1;
    this.#lane.unpoint();
  }
}

function swatch(kind) {
  const made = element("span", { className: "swatch tok" });
  made.dataset.kind = kind;
  made.setAttribute("aria-hidden", "true");
  return made;
}
