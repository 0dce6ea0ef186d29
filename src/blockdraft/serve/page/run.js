// Owns what one answer is made of: text, reasoning, tokens, steps, figures; chunks in, pieces to show out. Knows no page.

// A piece is {section: "content" | "reasoning", text, token}. Every token comes in at least one piece, of empty text
// where it has none of its own (inside a character, an end id, a marker between sections); token is null for text that
// no token accounts for.

export class Run {
  text = "";
  reasoning = "";
  tokens = [];
  steps = []; // {step, width, accepted, own, numProposals}, of the steps after the prefill
  finishReason = null;
  #aligner = new Aligner();
  #startedAt;
  #firstAt = null;
  #lastAt = null;
  #metrics = null;
  #numTokens = null;

  constructor(now) {
    this.#startedAt = now;
  }

  // What this chunk adds. now: milliseconds of a steady clock.
  add(chunk, now) {
    if (chunk.metrics) this.#metrics = chunk.metrics;
    if (chunk.usage) this.#numTokens = chunk.usage.completion_tokens;
    const choice = chunk.choices?.[0];
    if (!choice) return [];
    for (const token of choice.tokens ?? []) this.#count(token, now);
    const pieces = [];
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    for (const [section, text] of [["reasoning", reasoning], ["content", delta.content ?? ""]]) {
      if (text === "") continue;
      pieces.push(...this.#aligner.take(text).map((piece) => ({ section, ...piece })));
      if (section === "content") this.text += text;
      else this.reasoning += text;
    }
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    const section = pieces.at(-1)?.section ?? (this.text === "" && this.reasoning !== "" ? "reasoning" : "content");
    const rest = this.finishReason ? this.#aligner.rest() : this.#aligner.empties();
    pieces.push(...rest.map((piece) => ({ section, ...piece })));
    return pieces;
  }

  // Live figures; the server's own replace them once they have come. null: not known (yet).
  figures() {
    const counts = { first: 0, accepted: 0, bonus: 0 };
    for (const token of this.tokens) counts[token.kind] += 1;
    const numSteps = this.steps.length;
    // The server counts what a stop cut away as well: it was accepted, but never shown.
    const numAccepted = this.#metrics?.speculative_decoding?.num_accepted_draft_tokens ?? counts.accepted;
    const seconds = this.#firstAt === null ? 0 : (this.#lastAt - this.#firstAt) / 1000;
    return {
      counts,
      numSteps,
      numTokens: this.#numTokens ?? this.tokens.length,
      tokensPerStep: numSteps > 0 ? 1 + numAccepted / numSteps : null,
      tokensPerS: this.#metrics?.timing?.tokens_per_s ?? (seconds > 0 ? (this.tokens.length - 1) / seconds : null),
      firstTokenS: this.#firstAt === null ? null : (this.#firstAt - this.#startedAt) / 1000,
    };
  }

  // Why the draft was not used, or null.
  get noDraftReason() {
    return this.#metrics?.speculation?.reason ?? null;
  }

  // null for the first token's, which is the prefill.
  step(number) {
    return this.steps.find((step) => step.step === number) ?? null;
  }

  #count(token, now) {
    this.#firstAt ??= now;
    this.#lastAt = now;
    const entry = { ...token, text: token.text ?? "", index: this.tokens.length };
    this.tokens.push(entry);
    this.#aligner.push(entry);
    if (token.kind === "first") return;
    let step = this.steps.at(-1);
    if (step?.step !== token.step) {
      const width = token.width ?? null;
      step = { step: token.step, width, accepted: 0, own: 0, numProposals: Math.max((width ?? 1) - 1, 0) };
      this.steps.push(step);
    }
    if (token.kind === "accepted") step.accepted += 1;
    else step.own += 1;
  }
}

// Where two runs part: the index of the first token that differs, or null where they are the same to the last.
export function parting(one, other) {
  const length = Math.max(one.tokens.length, other.tokens.length);
  for (let i = 0; i < length; i++) {
    if (one.tokens[i]?.id !== other.tokens[i]?.id) return i;
  }
  return one.text === other.text && one.reasoning === other.reasoning ? null : Math.max(length - 1, 0);
}

// Gives each stretch of shown text to the tokens that wrote it. Sections cut markers and blanks out of the tokens' text,
// so what is shown is found again in it, at a token's begin if possible.
class Aligner {
  #pending = []; // {token, rest, isShown}, oldest first

  push(token) {
    this.#pending.push({ token, rest: token.text, isShown: false });
  }

  take(text) {
    const pieces = [];
    const at = this.#find(text);
    if (at < 0) return [{ text, token: null }];
    this.#advance(at, (entry) => {
      if (!entry.isShown) pieces.push({ text: "", token: entry.token });
      entry.isShown = true;
    });
    this.#advance(text.length, (entry, part) => {
      if (part !== "" || !entry.isShown) pieces.push({ text: part, token: entry.token });
      entry.isShown = true;
    });
    return pieces;
  }

  // Tokens without text, where nothing before them is still to be shown.
  empties() {
    return this.#pending.every(({ rest }) => rest === "") ? this.rest() : [];
  }

  rest() {
    const pieces = this.#pending.filter(({ isShown }) => !isShown).map(({ token }) => ({ text: "", token }));
    this.#pending = [];
    return pieces;
  }

  #find(text) {
    const joined = this.#pending.map(({ rest }) => rest).join("");
    let begin = 0;
    for (const { rest } of this.#pending) {
      if (joined.startsWith(text, begin)) return begin;
      begin += rest.length;
    }
    return joined.indexOf(text);
  }

  #advance(length, use) {
    let left = length;
    while (left > 0) {
      const entry = this.#pending[0];
      const part = entry.rest.slice(0, left);
      entry.rest = entry.rest.slice(part.length);
      left -= part.length;
      use(entry, part);
      if (entry.rest === "") this.#pending.shift();
    }
  }
}
