"use strict";
// A button behind every command and setting that is meant to be copied; without scripts a click
// still selects it whole.
for (const code of document.querySelectorAll("code.copy")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copier";
  button.textContent = "copy";
  button.setAttribute("aria-label", "copy " + code.textContent);
  const select = () => {
    const range = document.createRange();
    range.selectNodeContents(code);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
  };
  const say = (done) => {
    button.textContent = done ? "copied" : "select and copy";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  };
  button.addEventListener("click", () => {
    const plain = () => { select(); say(document.execCommand("copy")); };
    if (!navigator.clipboard) { plain(); return; }
    navigator.clipboard.writeText(code.textContent).then(() => say(true), plain);
  });
  code.after(" ", button);
}
