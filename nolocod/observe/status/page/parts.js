// What the status page and the run's page are made of: lists of figures, tables, and the choice between day and night.
import { element, say } from "./words.js";

export function facts(list, told) {
  const names = Object.keys(told);
  if (list.dataset.names !== names.join()) {
    list.dataset.names = names.join();
    list.replaceChildren(...names.map((name) => element("div", {}, element("dt", {}, name), element("dd"))));
  }
  names.forEach((name, index) => say(list.children[index].lastChild, String(told[name])));
}

// Roles are given by name because narrow screens show each row as a card, which takes the tables' own away.
export function rows(table, cells, none) {
  const heads = [...table.tHead.rows[0].cells];
  const cell = (content, index) => index
    ? element("td", { role: "cell", class: heads[index].className, "data-head": heads[index].textContent }, content)
    : element("th", { role: "rowheader", scope: "row" }, content);
  const made = cells.map((row) => element("tr", { role: "row" }, ...row.map(cell)));
  const empty = element("tr", { role: "row" }, element("td", { role: "cell", colspan: heads.length, class: "quiet" }, none));
  table.tBodies[0].replaceChildren(...(made.length ? made : [empty]));
}

// The system's choice, until the button is pressed: then it is kept.
export function themes(button) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let choice = null; // the system's
  const stored = (ask) => {
    try {
      ask();
    } catch {} // a browser that blocks storage throws: then the choice is as old as the page
  };
  const shine = () => {
    const name = choice ?? (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = name;
    say(button, name === "dark" ? "Light" : "Dark");
  };
  stored(() => choice = localStorage.getItem("theme"));
  shine();
  dark.addEventListener("change", shine);
  button.addEventListener("click", () => {
    choice = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    stored(() => localStorage.setItem("theme", choice));
    shine();
  });
}
