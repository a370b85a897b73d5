// What a model becomes: each program of the census, by library, model, pass, chip and release of JAX, with its share of FLOPs in
// FP8, its matmuls, kernels, bytes and peak memory.
//
// The model has
//   library, model, of, chip, gemm, release    what a row must have; "" for any. `model` may be "largest": a decoder, a block, or
//                                              experts with a router. `release` may be "newest"
//   find                                       words that a row's way, library or setting must have
//   sort                                       a key of COLUMNS; with "-" before it the other way round
//   row                                        the row whose details are shown: its way, model, pass, chip, gemm and release
//   pages                                      the way to the other explorers' pages; undefined where there are none
//   labels, ways, texts, rows                  what helpers/explorers/models.py makes of the record
import { field, fill, input, linkTo, make, redrawn, select } from "./elements.mjs";

const FIELDS = ["way", "model", "of", "chip", "gemm", "release"];
const LARGEST = ["decoder", "block", "routed"];
const NUMBERS = ["matmuls", "fp8", "flops", "fp8Flops", "kernels", "bytes", "peak"];
const REFERENCE = "../11_libraries.html"; // from the page of its own
const NO_GPU = "XLA had no GPU to time on: with its default it took the first Triton kernel that compiles, which is not what a GPU would choose.";

// The rows ------------------------------------------------------------------------------------------------------------

/** The record's rows, each an object; `ratio`: the bytes that it moves, over those of the same model in bf16. */
export function rowsOf(model) {
  const texts = model.get("texts");
  const ways = model.get("ways");
  const pages = model.get("pages");
  const rows = model.get("rows").map(cells => {
    const [numbers, [forFp8, forFp8Bytes], lost, outside, error, program] = cells.slice(FIELDS.length);
    const row = Object.fromEntries(FIELDS.map((key, place) => [key, texts[cells[place]]]));
    NUMBERS.forEach((key, place) => { row[key] = numbers[place]; });
    return {
      ...row, ...ways[row.way], forFp8, forFp8Bytes,
      key: FIELDS.map(key => row[key]).join(" | "),
      share: row.flops ? row.fp8Flops / row.flops : null,
      lost: lost.map(([count, why, fix]) => ({ count, why: texts[why], fix: texts[fix] })),
      outside: outside.map(([count, what]) => ({ count, what: texts[what] })),
      error: error === null ? "" : texts[error],
      program: program === null || pages === undefined ? "" : `${pages}dump.html#program=${texts[program]}`,
    };
  });
  const byKey = new Map(rows.map(row => [row.key, row]));
  for (const row of rows) {
    const rest = row.key.slice(row.way.length);
    const wide = byKey.get(`${row.way.split(",")[0]}, no FP8${rest}`) ?? byKey.get(`bf16, no FP8${rest}`);
    row.ratio = row.bytes && wide?.bytes && wide !== row ? row.bytes / wide.bytes : null;
  }
  return rows;
}

const CHOSEN = ["library", "model", "of", "chip", "gemm", "release"];

/** What each field can be, with what is said of it: the record's values, and those that stand for several. */
function choicesOf(model, rows) {
  const labels = model.get("labels");
  const named = key => Object.entries(labels[key]).filter(([value]) => rows.some(row => row[key] === value));
  const all = key => [...new Set(rows.map(row => row[key]))].map(value => [value, value]);
  return {
    library: [["", "Any"], ...all("library").sort()],
    model: [["largest", "Largest models"], ["", "Any"], ...named("model")],
    of: [["", "Both"], ...named("of")],
    chip: [["", "Any"], ...named("chip")],
    gemm: [["", "Any"], ...named("gemm")],
    release: [["newest", `${rows[0].release}, newest`], ["", "Any"], ...all("release").slice(1)],
  };
}

/** What is chosen; for what nobody can choose, the first of the choices. */
function choiceOf(model, choices) {
  const choice = { find: String(model.get("find") ?? ""), row: String(model.get("row") ?? "") };
  for (const key of CHOSEN) {
    const value = model.get(key);
    choice[key] = choices[key].some(([one]) => one === value) ? value : choices[key][0][0];
  }
  const asked = String(model.get("sort"));
  choice.isTurned = asked.startsWith("-");
  const sort = asked.replace(/^-/, "");
  choice.sort = Object.hasOwn(COLUMNS, sort) ? sort : "share";
  return choice;
}

/** The rows of a choice, sorted; those without the number stay last. */
export function chosenOf(rows, choice) {
  const words = choice.find.toLowerCase().split(/\s+/).filter(Boolean);
  function is(row) {
    const text = `${row.way} ${row.library} ${row.setting}`.toLowerCase();
    return CHOSEN.every(key => {
      if (key === "model" && choice.model === "largest") return LARGEST.includes(row.model);
      if (key === "release" && choice.release === "newest") return row.release === rows[0].release;
      return choice[key] === "" || row[key] === choice[key];
    }) && words.every(word => text.includes(word));
  }
  const { value, isDown } = COLUMNS[choice.sort];
  const turn = isDown === choice.isTurned ? 1 : -1;
  return rows.filter(is).sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a == "string") return turn * (a < b ? -1 : a > b ? 1 : 0);
    return turn * (a - b);
  });
}

// Words ---------------------------------------------------------------------------------------------------------------

/** Bytes in three digits: "1.66 GB". */
export function size(bytes) {
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= unit) return `${Number((bytes / unit).toPrecision(3))} ${name}`;
  }
  return `${bytes} B`;
}

const NEARLY = 0.995; // all but a router's: what percent rounds to 100

/** A share in percent: 100 % is all, and 0 % is none. */
function percent(share) {
  if (share > NEARLY && share < 1) return "> 99 %";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** The answer, the sentence that matters first. */
export function sentencesOf(rows, choice) {
  if (!rows.length) return ["The record has no such program. Choose “Any” in one of the fields."];
  const good = rows.filter(row => row.share);
  const none = rows.filter(row => row.share === 0).length;
  const broken = rows.filter(row => row.error).length;
  const said = [`${good.length} of ${count(rows.length, "program")} ${good.length === 1 ? "has" : "have"} matmuls in FP8.`];
  const whole = good.filter(row => row.share > NEARLY).length;
  if (whole) said[0] += ` In ${whole} all or nearly all FLOPs of matmuls are in FP8.`;
  else if (good.length) {
    const best = good.reduce((one, other) => (other.share > one.share ? other : one));
    said[0] += ` The most FLOPs in FP8: ${percent(best.share)}, ${best.way}.`;
  }
  if (none || broken) {
    const parts = [none && `${none} without an FP8 matmul`, broken && `${broken} that ${broken === 1 ? "does" : "do"} not compile`];
    said.push(`There ${none + broken === 1 ? "is" : "are"} ${parts.filter(Boolean).join(", and ")}.`);
  }
  if (choice.gemm === "auto" || choice.gemm === "") said.push(NO_GPU);
  return said;
}

// The table -----------------------------------------------------------------------------------------------------------

function shareOf({ share, error }) {
  if (error) return "does not compile";
  const bar = make("span", { class: "bar", "aria-hidden": "true" }, make("span", { style: `width:${(100 * share).toFixed(1)}%` }));
  return [bar, make("span", {}, percent(share))];
}

const told = (value, text) => (value === null || value === undefined ? "–" : text(value));

function bytesOf(row) {
  if (!row.bytes) return "–";
  return row.ratio === null ? size(row.bytes) : [size(row.bytes), make("span", { class: "quiet" }, ` ${row.ratio.toFixed(2)} × bf16`)];
}

// What a row shows, in its order; `isDown`: the largest first.
const COLUMNS = {
  way: { title: "Setting", value: row => row.way.toLowerCase(), isDown: false },
  share: { title: "FLOPs in FP8", value: row => row.share, isDown: true, cell: shareOf },
  fp8: { title: "Matmuls in FP8", value: row => row.fp8 ?? null, isDown: true, cell: row => told(row.fp8, fp8 => `${fp8} of ${row.matmuls}`) },
  kernels: { title: "Kernels", value: row => row.kernels ?? null, isDown: false, cell: row => told(row.kernels, number => number.toLocaleString("en")) },
  bytes: { title: "Bytes moved", value: row => row.bytes ?? null, isDown: false, cell: bytesOf },
  peak: { title: "Peak memory", value: row => row.peak ?? null, isDown: false, cell: row => told(row.peak, size) },
};

/** What of a row the choice leaves open, and so its name must say. */
function nameOf(row, choice, labels) {
  const open = FIELDS.slice(1).filter(key => (key === "release" ? choice.release === "" : choice[key] === "" || (key === "model" && choice.model === "largest")));
  return open.map(key => labels[key]?.[row[key]] ?? `JAX ${row[key]}`).join(", ");
}

/** A row's link to its program in "Read my dump". */
function readOf(row, text = "Read it") {
  return row.program ? make("a", { href: row.program, "aria-label": `Read the program of ${row.way} in “Read my dump”` }, text) : "";
}

function detailsOf(row, isOwnPage) {
  const item = (...children) => make("li", {}, ...children);
  const parts = [
    row.setting && make("p", {}, "Set: ", make("code", {}, row.setting)),
    row.says && make("p", {}, "Its documentation says: ", make("a", { href: row.url }, `“${row.says}”`)),
    row.error && make("p", {}, row.error),
    row.lost.length && make("ul", {}, row.lost.map(({ count: n, why, fix }) => item(
      make("b", {}, `${count(n, "matmul")} not in FP8: `), `${why}. `, fix ? `Fix: ${fix}.` : "",
    ))),
    row.outside.length && make("p", {}, `Work around matmuls that other kernels do: ${row.outside.map(({ count: n, what }) => `${what}, ${n}`).join("; ")}.`),
    row.forFp8 && make("p", {}, `${count(row.forFp8, "kernel")} ${row.forFp8 === 1 ? "makes or undoes" : "make or undo"} FP8, and ${row.forFp8 === 1 ? "moves" : "move"} ${size(row.forFp8Bytes)}.`),
    row.program && make("p", {}, readOf(row, "Read its program"), " with every kernel and reason."),
    isOwnPage && make("p", {}, make("a", { href: REFERENCE }, "Chapter 11 explains the settings")),
  ];
  return parts.filter(Boolean);
}

/** The table of rows; `isOwnPage`: not in a chapter; `turn(key)` is called of a column to sort by, `toggle(row)` of a row to open: without scripts neither. */
function tableOf(rows, choice, labels, isOwnPage, turn = null, toggle = null) {
  const head = Object.entries(COLUMNS).map(([key, { title, isDown }]) => {
    const isSorted = key === choice.sort;
    const order = isSorted ? (isDown === choice.isTurned ? "ascending" : "descending") : undefined;
    const name = turn ? make("button", { type: "button", onclick: () => turn(key) }, title) : title;
    return make("th", { scope: "col", "aria-sort": order }, name);
  });
  const body = rows.flatMap(row => {
    const isOpen = row.key === choice.row;
    const opens = { type: "button", class: "way", "aria-expanded": String(isOpen), "data-key": row.key, onclick: () => toggle(row) };
    const way = toggle ? make("button", opens, row.way) : make("b", {}, row.way);
    const more = nameOf(row, choice, labels);
    const cells = Object.entries(COLUMNS).slice(1).map(([key, { title, cell }]) => make("td", { "data-of": key, "data-title": title }, cell(row)));
    const line = make(
      "tr", { class: row.error ? "broken" : "" },
      make("th", { scope: "row" }, way, more ? make("span", { class: "quiet" }, more) : ""),
      cells,
      make("td", { "data-of": "read" }, readOf(row)),
    );
    if (!isOpen) return [line];
    return [line, make("tr", { class: "details" }, make("td", { colspan: String(head.length + 1) }, detailsOf(row, isOwnPage)))];
  });
  return make(
    "table", {},
    make("caption", { class: "unseen" }, "What each program becomes"),
    make("thead", {}, make("tr", {}, head, make("th", { scope: "col" }, rows.some(row => row.program) ? "Program" : ""))),
    make("tbody", {}, body),
  );
}

const paragraphs = texts => texts.map(text => make("p", {}, text));

/** What stands where no script runs: the rows that are chosen first. */
export function answer(model) {
  const rows = rowsOf(model);
  const choice = choiceOf(model, choicesOf(model, rows));
  const chosen = chosenOf(rows, choice);
  return [
    make("div", { class: "answer" }, paragraphs(sentencesOf(chosen, choice))),
    make("div", { class: "table" }, tableOf(chosen, choice, model.get("labels"), model.get("pages") === "")),
  ];
}

// All of it -----------------------------------------------------------------------------------------------------------

const TITLES = { library: "Library", model: "Model", of: "Pass", chip: "Chip", gemm: "Multiplied by", release: "JAX" };
const PART = 60; // rows that are shown at once

function render({ model, el }) {
  const rows = rowsOf(model);
  const choices = choicesOf(model, rows);
  const labels = model.get("labels");
  let shown = PART;
  let of = "";

  function set(values) {
    model.set(values);
    model.save_changes();
  }
  const controls = Object.fromEntries(CHOSEN.map(key => [key, select(choices[key], value => set({ [key]: value }))]));
  const find = input(value => set({ find: value }), { type: "search", placeholder: "fp8, qwix, einsum" });
  const sort = select(Object.entries(COLUMNS).map(([key, { title }]) => [key, title]), value => set({ sort: value }));
  const told = make("div", { class: "answer", role: "status" });
  const table = make("div", { class: "table" });
  const more = make("button", { type: "button", onclick: () => { shown += PART; update(); } });
  el.classList.add("explorer", "explorer-models");
  el.replaceChildren(
    make(
      "div", { class: "controls fields" },
      CHOSEN.map(key => field(TITLES[key], controls[key])), field("Search", find), field("Sort by", sort, "sort"),
    ),
    told, table, more, linkTo(model),
  );

  function turn(key) {
    const choice = choiceOf(model, choices);
    set({ sort: key === choice.sort && !choice.isTurned ? `-${key}` : key });
  }
  function toggle(row) {
    set({ row: model.get("row") === row.key ? "" : row.key });
  }

  function update() {
    const choice = choiceOf(model, choices);
    for (const key of CHOSEN) fill(controls[key], choice[key]);
    fill(find, choice.find);
    fill(sort, choice.sort);
    const chosen = chosenOf(rows, choice);
    const filter = CHOSEN.map(key => choice[key]).join() + choice.find;
    if (filter !== of) shown = PART;
    of = filter;
    const at = chosen.findIndex(row => row.key === choice.row);
    if (at >= shown) shown = at + PART;
    told.replaceChildren(...paragraphs(sentencesOf(chosen, choice)));
    const focused = el.contains(document.activeElement) ? document.activeElement : null;
    const [key, title] = [focused?.dataset.key, focused?.closest("thead") && focused.textContent];
    table.replaceChildren(tableOf(chosen.slice(0, shown), choice, labels, model.get("pages") === "", turn, toggle));
    // The table is made anew: what had the focus has it again.
    const buttons = [...table.querySelectorAll("button")];
    buttons.find(one => (key ? one.dataset.key === key : title && one.textContent === title))?.focus({ preventScroll: true });
    more.textContent = `Show more (${chosen.length - shown} left)`;
    more.hidden = shown >= chosen.length;
  }
  return redrawn(model, told, update);
}

export default { render };
