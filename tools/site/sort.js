// A table of an output whose head names its columns is sorted by a click on a name: up, then down.
// By the number with which a cell begins, where cells have one, else by its text; empty cells stay last.
const order = new Intl.Collator("en", { numeric: true });

function compare(one, other) {
  const [a, b] = [one, other].map((text) => parseFloat(text.replace("−", "-").replace("+", "")));
  return Number.isNaN(a) || Number.isNaN(b) ? order.compare(one, other) : a - b;
}

function sort(head) {
  const down = head.getAttribute("aria-sort") === "ascending";
  const body = head.closest("table").tBodies[0];
  const text = (row) => row.cells[head.cellIndex].textContent.trim();
  const isEmpty = (row) => !/\w/.test(text(row));
  const rows = [...body.rows].sort((a, b) =>
    isEmpty(a) - isEmpty(b) || compare(text(a), text(b)) * (down ? -1 : 1));
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
}

document.addEventListener("DOMContentLoaded", () => {
  for (const head of document.querySelectorAll(".cell_output thead th[scope=col]")) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.title = "Sort by this column";
    button.onclick = () => sort(head);
    head.append(button);
  }
});
