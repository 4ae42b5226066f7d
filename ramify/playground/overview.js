// The whole tree on a narrow strip, with a frame around the part that is in view. For the mouse: keys scroll the tree itself.

import { draw, make } from "./elements.js";

export class Overview {
  constructor(scroll) {
    this.scroll = scroll;
    this.lines = draw("g");
    this.frame = draw("rect", { class: "in-view" });
    this.svg = draw("svg", { preserveAspectRatio: "none" }, this.lines, this.frame);
    this.element = make("div", "overview", this.svg);
    this.element.setAttribute("aria-hidden", "true");
    this.element.title = "The whole tree: click or drag to look elsewhere";
    scroll.addEventListener("scroll", () => this.follow());
    this.element.addEventListener("pointerdown", (event) => {
      this.element.setPointerCapture(event.pointerId);
      this.#look(event);
    });
    this.element.addEventListener("pointermove", (event) => {
      if (this.element.hasPointerCapture(event.pointerId)) this.#look(event);
    });
  }

  /** `strokes`: { d, style, colour } each; `size` is the tree's own, before it is zoomed. */
  show(strokes, size) {
    this.size = size;
    this.svg.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    this.lines.replaceChildren(...strokes.map(({ d, style, colour }) => {
      const line = draw("path", { d, class: style });
      line.style.setProperty("--group", colour);
      return line;
    }));
    this.follow();
  }

  /** Frames what is in view; where that is everything, there is nothing to look over. */
  follow() {
    const { scrollLeft, scrollTop, clientWidth, clientHeight, scrollWidth, scrollHeight } = this.scroll;
    this.element.hidden = scrollWidth <= clientWidth + 1 && scrollHeight <= clientHeight + 1;
    const { width, height } = this.size;
    this.frame.setAttribute("x", (scrollLeft / scrollWidth) * width);
    this.frame.setAttribute("y", (scrollTop / scrollHeight) * height);
    this.frame.setAttribute("width", (clientWidth / scrollWidth) * width);
    this.frame.setAttribute("height", (clientHeight / scrollHeight) * height);
  }

  #look(event) {
    const box = this.element.getBoundingClientRect();
    const { clientWidth, clientHeight, scrollWidth, scrollHeight } = this.scroll;
    this.scroll.scrollLeft = ((event.clientX - box.left) / box.width) * scrollWidth - clientWidth / 2;
    this.scroll.scrollTop = ((event.clientY - box.top) / box.height) * scrollHeight - clientHeight / 2;
  }
}
