// Owns what a screen reader hears of a growing text: whole sentences, never single tokens.

const SENTENCE_END = /[.!?:;…。！？]["'”’)\]]*\s|\n/g;
const MAX_WAITING = 240; // characters without a sentence's end: then up to the last blank
const MAX_KEPT = 40; // sentences that stay in the page; the whole answer can be read where it is shown

export class Speaker {
  #region;
  #waiting = "";

  constructor(region) {
    this.#region = region;
  }

  add(text) {
    this.#waiting += text;
    let cut = 0;
    for (const match of this.#waiting.matchAll(SENTENCE_END)) cut = match.index + match[0].length;
    if (cut === 0 && this.#waiting.length > MAX_WAITING) cut = this.#waiting.lastIndexOf(" ") + 1;
    if (cut === 0) return;
    this.#say(this.#waiting.slice(0, cut));
    this.#waiting = this.#waiting.slice(cut);
  }

  end() {
    this.#say(this.#waiting);
    this.#waiting = "";
  }

  #say(text) {
    if (text.trim() === "") return;
    const line = document.createElement("p");
    line.textContent = text.trim();
    this.#region.append(line);
    while (this.#region.childElementCount > MAX_KEPT) this.#region.firstElementChild.remove();
  }
}
