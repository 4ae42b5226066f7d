// Light, dark, or as the system says.

import { keep, kept, thisBrowser } from "./storage.js";

const THEMES = ["system", "light", "dark"];
const NAMES = { system: "as the system says", light: "light", dark: "dark" };
const PLACE = "ramify-theme";

export function startTheme(button) {
  let theme = THEMES.find((name) => name === kept(thisBrowser, PLACE)) ?? "system";
  const show = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.title = `Colours: ${NAMES[theme]}`;
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    // The first press changes what is seen.
    const order = dark ? ["system", "light", "dark"] : ["system", "dark", "light"];
    theme = order[(order.indexOf(theme) + 1) % order.length];
    keep(thisBrowser, PLACE, theme);
    show();
  });
  show();
}
