"use strict";
for (const table of document.querySelectorAll("table.sort")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button")?.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((one, two) => {
        const [a, b] = [key(one), key(two)];
        const [x, y] = [Number(a), Number(b)];
        if (a === "" || b === "") return (a === "") - (b === "");
        return (Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y) * (down ? -1 : 1);
      });
      table.tBodies[0].append(...rows);
    });
  });
}
document.querySelector("button.theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
