// Owns the small box beside what is pointed at. It repeats what the status line tells a screen reader.

const GAP = 8;

export class Tip {
  #box;

  constructor(box) {
    this.#box = box;
    document.addEventListener("pointerdown", () => this.hide());
  }

  // lines: texts; anchor: the element they belong to.
  show(lines, anchor) {
    this.#box.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
    this.#box.hidden = false;
    const at = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
    const size = this.#box.getBoundingClientRect();
    const above = at.top - size.height - GAP;
    const left = Math.min(Math.max(at.left, GAP), document.documentElement.clientWidth - size.width - GAP);
    this.#box.style.left = `${Math.max(left, GAP) + window.scrollX}px`;
    this.#box.style.top = `${(above > GAP ? above : at.bottom + GAP) + window.scrollY}px`;
  }

  hide() {
    this.#box.hidden = true;
  }
}
