// Owns the settings panel: what stands in its fields, as numbers or null where a field is empty.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const POLICIES = { fixed: "It takes all of them.", adaptive: "It takes what is fastest at each moment." };
const NARROW = "(max-width: 899px)"; // as in page.css

export class Settings {
  #model = "";
  #form = document.getElementById("settings-form");
  #width = document.getElementById("width");
  #isAuto = document.getElementById("width-auto");

  constructor() {
    const toggle = document.getElementById("settings-toggle");
    const panel = document.getElementById("settings");
    const show = (isOpen) => {
      panel.hidden = !isOpen;
      toggle.setAttribute("aria-expanded", String(isOpen));
    };
    toggle.addEventListener("click", () => {
      show(panel.hidden);
      if (!panel.hidden) panel.scrollIntoView({ block: "nearest" });
    });
    show(!window.matchMedia(NARROW).matches);
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#width.addEventListener("input", () => this.#showWidth());
    this.#isAuto.addEventListener("change", () => this.#showWidth());
    for (const [id, name] of [["is-coloured", "coloured"], ["is-stepped", "stepped"]]) {
      const box = document.getElementById(id);
      const apply = () => document.body.classList.toggle(name, box.checked);
      box.addEventListener("change", apply);
      apply();
    }
  }

  // info: what GET /info said.
  adopt(info) {
    this.#model = info.model;
    const hasDraft = info.draft !== null && info.max_width > 1;
    document.getElementById("width-set").disabled = !hasDraft;
    if (hasDraft) {
      this.#width.max = info.max_width;
      this.#width.value = info.max_width;
    }
    document.getElementById("width-hint").textContent = hasDraft
      ? `The anchor and up to ${info.max_width - 1} proposals. ${POLICIES[info.width_policy] ?? ""}`
      : `Plain decoding only. ${info.draft_off_reason ?? "This server has no draft."}`;
    this.#showWidth();
  }

  open() {
    if (document.getElementById("settings").hidden) document.getElementById("settings-toggle").click();
  }

  // {model, system, width, temperature, ...}, or null after the first wrong field has been shown.
  read() {
    for (const name of NUMBERS) {
      const field = document.getElementById(name);
      if (!field.checkValidity()) {
        this.open();
        field.reportValidity();
        return null;
      }
    }
    const read = { model: this.#model, system: document.getElementById("system").value };
    read.width = this.#isAuto.checked ? null : Number(this.#width.value);
    for (const name of NUMBERS) {
      const text = document.getElementById(name).value;
      read[name] = text === "" ? null : Number(text);
    }
    return read;
  }

  #showWidth() {
    this.#width.disabled = this.#isAuto.checked;
    document.getElementById("width-shown").textContent = this.#isAuto.checked ? "auto" : this.#width.value;
  }
}
