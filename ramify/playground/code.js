// A dialog with text to copy: a search as code, settings as a link.

import { find } from "./elements.js";

export class CodeDialog {
  constructor() {
    find("code-close").addEventListener("click", () => find("code-dialog").close());
    find("code-copy").addEventListener("click", () => copy(find("code")));
  }

  show(title, text, note = "") {
    find("code-title").textContent = title;
    find("code").textContent = text;
    find("code-note").textContent = note;
    find("code-note").hidden = !note;
    find("code-copied").textContent = "";
    find("code-dialog").showModal();
    find("code-copy").focus();
  }
}

/** Where the page was not loaded over a safe connection browsers lend no clipboard: the text is selected instead. */
async function copy(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    find("code-copied").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(element);
    find("code-copied").textContent = "Selected: copy it with Ctrl C.";
  }
}
