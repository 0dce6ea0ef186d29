// Owns light and dark: follows the system until told otherwise. Not a module, so that it runs before the first paint.
(() => {
  "use strict";
  const NAMES = ["auto", "light", "dark"];
  const STORED = "blockdraft-theme";
  const root = document.documentElement;

  function stored() {
    try {
      return localStorage.getItem(STORED);
    } catch {
      return null; // storage is off: the choice lasts as long as the page
    }
  }

  function choose(name) {
    root.dataset.theme = name;
    try {
      localStorage.setItem(STORED, name);
    } catch {
      // as above
    }
  }

  root.dataset.theme = NAMES.includes(stored()) ? stored() : "auto";
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      button.textContent = `Theme: ${root.dataset.theme}`;
    };
    button.addEventListener("click", () => {
      choose(NAMES[(NAMES.indexOf(root.dataset.theme) + 1) % NAMES.length]);
      show();
    });
    show();
  });
})();
