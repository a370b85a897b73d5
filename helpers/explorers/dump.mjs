// "Read my dump": what became of a program's matmuls, read in the browser by fp8lens itself.
//
// A dump is somebody else's text. It reaches the page only as text nodes: nothing here parses HTML, and no name of a dump
// becomes an address, a class or the name of an attribute. The worker (dump.worker.mjs) does the reading; the page asks it
// for the part that is on the screen.

import { copying, make as h, pageOfRule } from "./elements.mjs";

const PART = 100; // rows that are shown at once
const MOST = 64_000_000; // bytes of text: what a browser's memory holds as Python's objects
const VIEWS = {
  matmuls: "Matmuls",
  lost: "Why not FP8",
  kernels: "Kernels",
  sent: "Between devices",
  hlo: "HLO",
};
const CANCELLED = "cancelled";
const COMMAND = "In a terminal, fp8lens dump.txt says the same.";

// What was read last in this tab, so that a reload of the page shows it again. It is in this browser's database under a
// number that the tab knows: the time. What other tabs have left there is deleted after a day.
const KEY = "fp8lens-dump";
const DAY = 86_400_000; // milliseconds

async function inDatabase(act) {
  const base = await new Promise((resolve, reject) => {
    const asked = indexedDB.open(KEY, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore("dumps");
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  try {
    const transaction = base.transaction("dumps", "readwrite");
    const asked = act(transaction.objectStore("dumps"));
    return await new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(asked.result);
      transaction.onabort = () => reject(transaction.error);
    });
  } finally {
    base.close();
  }
}

const kept = {
  /** Keep files, [{name, file}]. Whether the browser did. */
  async keep(files) {
    try {
      const key = Date.now() + Math.random();
      await inDatabase((dumps) => dumps.put(files, key));
      sessionStorage.setItem(KEY, String(key));
      return true;
    } catch {
      return false;
    }
  },
  async files() {
    try {
      await inDatabase((dumps) => dumps.delete(IDBKeyRange.upperBound(Date.now() - DAY)));
      const key = Number(sessionStorage.getItem(KEY));
      return key ? ((await inDatabase((dumps) => dumps.get(key))) ?? []) : [];
    } catch {
      return [];
    }
  },
  async forget() {
    try {
      const key = Number(sessionStorage.getItem(KEY));
      sessionStorage.removeItem(KEY);
      if (key) await inDatabase((dumps) => dumps.delete(key));
    } catch {} // a browser that keeps nothing
  },
};

// The worker, started when it is first needed. It runs under the page's own policy, which a worker of a plain address
// would not: it, too, may ask nobody else for anything.
class Lens {
  #worker;
  #waiting = new Map();
  #count = 0;

  ask(what, given = {}, tell = () => {}) {
    this.#worker ??= this.#start();
    const id = ++this.#count;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject, tell });
      this.#worker.postMessage({ id, what, ...given });
    });
  }

  get isRunning() {
    return this.#worker !== undefined;
  }

  stop(why = CANCELLED) {
    this.#worker?.terminate();
    this.#worker = undefined;
    for (const { reject } of this.#waiting.values()) reject(new Error(why));
    this.#waiting.clear();
  }

  #start() {
    const module = new URL("./dump.worker.mjs", import.meta.url).href;
    const address = URL.createObjectURL(new Blob([`import ${JSON.stringify(module)};`], { type: "text/javascript" }));
    const worker = new Worker(address, { type: "module" });
    worker.onmessage = ({ data: { id, told, answer, error, isFatal } }) => {
      const waiting = this.#waiting.get(id);
      if (!waiting) return;
      if (told !== undefined) return waiting.tell(told);
      this.#waiting.delete(id);
      if (error === undefined) waiting.resolve(answer);
      else waiting.reject(Object.assign(new Error(error), { isFatal }));
    };
    worker.onerror = (event) => {
      event.preventDefault();
      this.stop(`Python could not be started in this browser. ${COMMAND}`);
    };
    return worker;
  }
}

// The files of what was dropped, those in its folders too.
async function filesOf(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return [...transfer.files];
  const files = [];
  const inside = async (entry) => {
    if (entry.isFile) files.push(await new Promise((resolve, reject) => entry.file(resolve, reject)));
    else {
      const reader = entry.createReader();
      for (;;) {
        const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
        if (!some.length) break;
        for (const one of some) await inside(one);
      }
    }
  };
  for (const entry of entries) await inside(entry);
  return files;
}

const nameOf = (file) => file.webkitRelativePath || file.name;

const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** A table of which a part is shown, and the button that shows more; `row` makes the <tr>s of one row. */
function tableOf(head, name, rows, row) {
  const body = h("tbody");
  const more = h("button", { type: "button" });
  let shown = 0;
  const add = () => {
    body.append(...rows.slice(shown, shown + PART).flatMap(row));
    shown = Math.min(rows.length, shown + PART);
    more.textContent = `Show more (${(rows.length - shown).toLocaleString("en")} left)`;
    more.toggleAttribute("hidden", shown >= rows.length);
  };
  more.addEventListener("click", add);
  add();
  const cells = head.map((text) => h("th", { scope: "col" }, text));
  return [
    h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": name }, h("table", {}, h("thead", {}, h("tr", {}, cells)), body)),
    more,
  ];
}

/** Each matmul, with what else is said of it below; `lead` makes of a name what leads to its instruction. */
function matmulsOf({ report, totals }, lead) {
  if (!report.rows.length) return [h("p", {}, totals)];
  const row = ({ cells, at, isFp8, below }) => {
    const [runs, sizes, ...others] = cells;
    return [
      h("tr", { class: isFp8 ? "" : "lost" }, h("td", {}, runs), h("td", {}, lead(sizes, at)), others.map((cell) => h("td", {}, cell))),
      ...below.map(({ text, isOutside }) =>
        h("tr", { class: isOutside ? "below outside" : "below" }, h("td", { colspan: String(cells.length) }, text)),
      ),
    ];
  };
  return [
    ...tableOf(report.head, "Matmuls", report.rows, row),
    h("p", { class: "quiet" }, totals),
  ];
}

/** Each matmul that is not FP8, or left work to other kernels, and why, as the compiled program alone tells it. */
function lostOf(lost, lead) {
  const item = ({ title, at, source, isFp8, runs, flops, why, kernels }) =>
    h(
      "li",
      { class: isFp8 ? "" : "lost" },
      h("p", {}, lead(title, at), source ? ` at ${source}` : "", runs === "1" ? "" : `, runs ${runs} times`, `: ${flops}`),
      why ? h("p", {}, why) : "",
      kernels.map(({ name, at: place, text }) => h("p", { class: "outside" }, lead(name, place), ` ${text}`)),
    );
  return h("ul", { class: "plain" }, lost.map(item));
}

/** XLA's rules that the program breaks, and the fix of each: where the dump has what XLA's rewriter was given. */
function reasonsOf(reasons, lead) {
  const item = ({ matmul, at, source, lost, blamed, reason, fix, rule, chain, matmuls }) =>
    h(
      "li",
      { "data-rule": rule },
      h("p", {}, at ? lead(matmul, at) : matmul, source ? ` at ${source}` : "", matmuls > 1 ? `, and ${counted(matmuls - 1, "other")} alike` : ""),
      h("p", {}, `Lost ${lost}${blamed}: ${reason}.`),
      ...chain.split("\n").filter(Boolean).map((line) => h("p", { class: "quiet" }, line)),
      h("p", {}, h("b", {}, "Fix: "), `${fix}.`),
      h("p", {}, "Rule ", h("a", { href: pageOfRule(rule) }, rule)),
    );
  return h("ul", { class: "plain reasons" }, reasons.map(item));
}

/** What the colours say. */
const legend = () =>
  h(
    "p",
    { class: "quiet legend" },
    h("span", { class: "mark lost" }, "not FP8"),
    h("span", { class: "mark outside" }, "work left to other kernels"),
    "in HLO: ",
    h("span", { class: "hlo-fp8" }, "FP8"),
    h("span", { class: "hlo-opcode" }, "operation"),
    h("span", { class: "hlo-target" }, "library's call"),
    h("span", { class: "hlo-literal" }, "constant"),
  );

/** What stands until a dump is read, and where no script runs: the example. */
export function answer(model) {
  const example = model.get("example");
  const lead = (text) => text;
  return [
    h("noscript", {}, h("p", {}, `To read a dump of your own here, this page needs scripts. ${COMMAND}`)),
    h(
      "div",
      { class: "stored" },
      h("p", {}, "Of its example, a part of a transformer's block, the page says:"),
      h("p", { class: "verdict" }, example.answer),
      legend(),
      matmulsOf(example, lead),
      reasonsOf(example.reasons, lead),
    ),
  ];
}

class Page {
  lens = new Lens();
  summary = null;
  drawn = new Set(); // the views that show this dump
  turn = 0; // how often something was read
  way = 0; // how often a place in the HLO was asked for
  lead = (text, at) => this.leadTo(text, at);

  constructor(model, el) {
    this.model = model;
    this.el = el;
    this.build();
    model.on("change:view", () => this.show());
    model.on("change:at", () => this.attempt(() => this.go()));
    model.on("change:find", () => this.attempt(() => this.search()));
    model.on("change:program", () => this.attempt(() => this.stored()));
  }

  // The controls -----------------------------------------------------------------------------------------------------

  build() {
    const why = this.model.get("lacks") || (typeof WebAssembly == "object" ? "" : `This browser has no WebAssembly. ${COMMAND}`);
    this.status = h("p", { role: "status", class: "told" });
    this.bar = h("progress", { "aria-label": "Reading", hidden: true });
    this.cancel = h("button", { type: "button", hidden: true, onclick: () => this.stop() }, "Cancel");
    this.example = h("div", {}, answer(this.model));
    this.result = h("div", { class: "result" });
    this.place = h("p", { class: "quiet" }, this.sharedPlace());
    this.el.replaceChildren(
      why ? h("p", { class: "lacks" }, why) : this.ways(),
      why || !this.place.textContent ? "" : this.place,
      h("div", { class: "controls busy" }, this.status, this.bar, this.cancel),
      this.example,
      this.result,
    );
  }

  // A link can say where in a dump to look; the dump itself stays with who has it.
  sharedPlace() {
    if (!this.model.get("at") && !this.model.get("find")) return "";
    return "This link leads to a place in a dump. Give the dump, or open the example, to see it.";
  }

  ways() {
    const pick = (folder) => {
      const input = h("input", { type: "file", multiple: true, webkitdirectory: folder, hidden: true });
      input.addEventListener("change", () => {
        const files = [...input.files];
        input.value = ""; // else the same file, chosen again, changes nothing
        this.read(files.map((file) => ({ name: nameOf(file), file })));
      });
      return [h("button", { type: "button", onclick: () => input.click() }, folder ? "Choose a folder" : "Choose a file"), input];
    };
    const text = h("textarea", { rows: "4", spellcheck: "false", "aria-label": "The text of a dump" });
    const paste = h(
      "div",
      { class: "paste", hidden: true },
      text,
      h("button", { type: "button", onclick: () => this.read([{ name: "pasted.txt", file: new File([text.value], "pasted.txt") }]) }, "Read this text"),
    );
    const toggle = () => {
      paste.hidden = !paste.hidden;
      if (!paste.hidden) text.focus();
    };
    const command = this.model.get("command");
    const first = h(
      "div",
      { class: "make" },
      h(
        "p",
        {},
        h("b", {}, "1. Make a dump"),
        " where your program runs: XLA writes it to the folder dumps when it compiles. Without a GPU, see ",
        h("a", { href: "model.html" }, "Check my model"),
        ".",
      ),
      h("div", { class: "command" }, h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "The command" }, h("code", {}, command)), copying(() => command, "Copy the command")),
    );
    const area = h(
      "div",
      { class: "drop" },
      h(
        "div",
        { class: "controls" },
        h("span", {}, h("b", {}, "2. Drop it here"), ", the folder or its zip, or"),
        pick(false),
        pick(true),
        h("button", { type: "button", onclick: toggle }, "Paste its text"),
        h("button", { type: "button", class: "main", onclick: () => this.read(null) }, "Open the example"),
      ),
      h("p", { class: "quiet" }, `HLO as XLA dumps it (.txt, .gz, .zip), up to ${MOST / 1e6} MB of text. Nothing is uploaded. With the first dump, Python is loaded (5 MB).`),
      paste,
    );
    area.addEventListener("dragover", (event) => {
      event.preventDefault();
      area.classList.add("over");
    });
    area.addEventListener("dragleave", () => area.classList.remove("over"));
    area.addEventListener("drop", async (event) => {
      event.preventDefault();
      area.classList.remove("over");
      const files = await filesOf(event.dataTransfer);
      this.read(files.map((file) => ({ name: nameOf(file), file })));
    });
    return h("div", {}, first, area);
  }

  // Reading ----------------------------------------------------------------------------------------------------------

  // `files`, {name, file} each, is null for the example; `program` names one that the site has. What cannot be read leaves
  // the report that is shown, and what is kept.
  async read(files, program = "") {
    if (files && !files.length) return;
    const turn = ++this.turn;
    const before = document.activeElement;
    this.busy(true);
    try {
      const summary = await this.lens.ask(files ? "read" : "example", { files, most: MOST }, (told) => this.tell(told));
      this.model.set("program", program);
      this.model.save_changes();
      this.clear();
      this.summary = summary;
      this.tell(summary.said || `Read ${summary.name}.`, false, summary.answer);
      this.open();
      await this.keep(program ? null : files?.filter(({ name }) => summary.used.includes(name)), turn);
    } catch (error) {
      if (error.isFatal) this.lens.stop();
      if (!this.summary) kept.forget();
      else if (!this.lens.isRunning) {
        this.clear(); // the worker that had it is gone: it is read anew
        await this.again();
      }
      if (error.message !== CANCELLED) this.tell(error.message, true);
    } finally {
      if (turn === this.turn) this.busy(false);
      this.refocus(before);
    }
  }

  // A control that cannot be used while something is read loses the focus: it gets it back.
  refocus(before) {
    const now = document.activeElement;
    if ((now === document.body || now === this.cancel) && this.el.contains(before)) before.focus({ preventScroll: true });
  }

  // What a control asks of the worker; what goes wrong is said.
  async attempt(action) {
    try {
      await action();
    } catch (error) {
      if (error.message !== CANCELLED) this.tell(error.message, true);
    }
  }

  // `further` is for who hears the page: who sees it reads it below.
  tell(text, isWrong = false, further = "") {
    this.status.replaceChildren(text, ...(further ? [h("span", { class: "unseen" }, ` ${further}`)] : []));
    this.status.classList.toggle("wrong", isWrong);
  }

  busy(is) {
    this.bar.hidden = this.cancel.hidden = !is;
    if (is) this.tell("Starting");
    for (const area of this.el.querySelectorAll(".drop, .result")) area.inert = is;
    this.el.toggleAttribute("data-busy", is);
  }

  // What the page keeps over a reload, and says so. What is read meanwhile is another's affair.
  async keep(files, turn) {
    await kept.forget();
    const isKept = files ? await kept.keep(files) : false;
    if (turn !== this.turn || !isKept) return;
    const forget = h("button", { type: "button", onclick: () => this.forget("Forgotten: nothing is kept of the dump.") }, "Forget it");
    this.keeping.replaceChildren("This browser keeps the dump for this tab, so that a reload shows it again; at most for a day. ", forget);
  }

  // The program that the address names.
  async stored() {
    const program = this.model.get("program");
    if (!/^[a-z0-9-]+$/.test(program)) return;
    const name = `${program}.txt.gz`;
    const found = await fetch(new URL(`programs/${name}`, import.meta.url));
    if (!found.ok) throw new Error(`This site has no program ${program}.`);
    await this.read([{ name, file: new File([await found.blob()], name) }], program);
  }

  // The dump that was read before this page was loaded again.
  async again() {
    if (this.model.get("program")) return this.stored();
    const turn = this.turn;
    const files = await kept.files();
    if (files.length && turn === this.turn) await this.read(files);
  }

  stop() {
    const isShown = this.summary !== null;
    this.lens.stop();
    if (isShown) this.tell("Cancelled.");
    else this.forget("Cancelled. Nothing is kept of the dump.");
  }

  forget(said) {
    this.clear();
    this.tell(said);
    kept.forget();
    this.el.querySelector(".drop button").focus(); // the button that was pressed is gone
  }

  clear() {
    this.summary = null;
    this.drawn.clear();
    this.result.replaceChildren();
    this.example.hidden = false;
  }

  async ask(question, of = {}) {
    return this.lens.ask("ask", { question, of });
  }

  // The answer -------------------------------------------------------------------------------------------------------

  open() {
    const { summary } = this;
    this.example.hidden = this.place.hidden = true;
    this.tabs = new Map();
    this.panels = new Map();
    const list = h("div", { role: "tablist", "aria-label": "What to see of the dump", class: "tabs" });
    for (const [view, title] of Object.entries(VIEWS)) {
      const tab = h("button", { type: "button", role: "tab", id: `tab-${view}`, "aria-controls": `panel-${view}` }, title);
      tab.addEventListener("click", () => this.choose(view));
      tab.addEventListener("keydown", (event) => this.step(event, view));
      this.tabs.set(view, tab);
      list.append(tab);
      this.panels.set(view, h("div", { role: "tabpanel", id: `panel-${view}`, "aria-labelledby": `tab-${view}`, hidden: true }));
    }
    this.keeping = h("p", { class: "quiet keeping" });
    this.result.replaceChildren(
      h("p", { class: "verdict" }, summary.answer),
      h("p", { class: "quiet" }, `${summary.name} (module ${summary.module}, ${counted(summary.instructions, "instruction")}, ${counted(summary.computations.length, "computation")})`),
      h("div", { class: "controls" }, h("button", { type: "button", onclick: () => this.attempt(() => this.export()) }, "Save as JSON")),
      this.keeping,
      legend(),
      list,
      ...this.panels.values(),
    );
    this.show();
  }

  choose(view) {
    this.model.set("view", view);
    this.model.save_changes();
  }

  step(event, view) {
    const order = Object.keys(VIEWS);
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = by ? order.at((order.indexOf(view) + by) % order.length) : { Home: order[0], End: order.at(-1) }[event.key];
    if (!next) return;
    event.preventDefault();
    this.choose(next);
    this.tabs.get(next).focus();
  }

  show() {
    if (!this.summary) return;
    const asked = this.model.get("view");
    const view = Object.hasOwn(VIEWS, asked) ? asked : "matmuls";
    for (const [name, tab] of this.tabs) {
      tab.setAttribute("aria-selected", String(name === view));
      tab.tabIndex = name === view ? 0 : -1;
      this.panels.get(name).hidden = name !== view;
    }
    if (this.drawn.has(view)) return;
    this.drawn.add(view);
    const panel = this.panels.get(view);
    this.attempt(async () => {
      try {
        await this[view](panel);
      } catch (error) {
        this.drawn.delete(view); // it is drawn anew when it is next opened
        panel.replaceChildren();
        throw error;
      }
    });
  }

  async export() {
    const name = this.summary.name.split("/").at(-1).replace(/(\.txt)?(\.gz)?$/, "");
    const address = URL.createObjectURL(new Blob([await this.ask("json")], { type: "application/json" }));
    h("a", { href: address, download: `${name}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  // A name that leads to an instruction.
  leadTo(text, at) {
    const go = () => {
      this.model.set({ view: "hlo", at });
      this.model.save_changes();
    };
    return at ? h("button", { type: "button", class: "link", onclick: go }, text) : text;
  }

  matmuls(panel) {
    panel.append(...matmulsOf(this.summary, this.lead));
  }

  lost(panel) {
    const { lost, reasons, flags } = this.summary;
    if (reasons?.length) panel.append(reasonsOf(reasons, this.lead));
    if (!lost.length && !reasons?.length) return panel.append(h("p", {}, "Every matmul is in FP8, and leaves no work to other kernels."));
    const without =
      "What the compiled program alone tells. For XLA's rules and the fix, dump with " +
      `XLA_FLAGS="--xla_dump_to=dumps ${flags}" and give the whole folder; or give the function to fp8lens: ` +
      "fp8lens layers.py:layer --shapes \u2026 --reasons.";
    if (!lost.length) return;
    panel.append(h("p", { class: "quiet" }, reasons ? "The same, as the compiled program alone tells it:" : without), lostOf(lost, this.lead));
  }

  kernels(panel) {
    const { head, rows } = this.summary.kernels;
    const byBytes = [...rows].sort((one, other) => other.bytes - one.bytes);
    const order = h(
      "select",
      { "aria-label": "Order of the kernels" },
      h("option", { value: "bytes" }, "most bytes first"),
      h("option", { value: "program" }, "as they run"),
    );
    const place = h("div");
    const row = ({ cells, at, bytes }) => {
      const [kind, runs, moved, name, ...others] = cells;
      const bar = h("span", { class: "bar" });
      bar.style.width = `${Math.max(1, Math.round((100 * bytes) / (byBytes[0].bytes || 1)))}%`;
      return h(
        "tr",
        {},
        h("td", {}, kind),
        h("td", { class: "number" }, runs),
        h("td", { class: "number" }, moved, h("span", { class: "track" }, bar)),
        h("td", {}, this.lead(name, at)),
        others.map((cell) => h("td", {}, cell)),
      );
    };
    const draw = () => {
      const shown = order.value === "bytes" ? byBytes : rows;
      place.replaceChildren(...tableOf(head.map((name) => name || "kind"), "Kernels", shown, row));
    };
    order.addEventListener("change", draw);
    const classes = this.summary.classes.map(([text, meaning]) => h("li", {}, text, h("br"), h("span", { class: "quiet" }, meaning)));
    panel.append(h("ul", { class: "classes" }, classes), h("div", { class: "controls" }, h("label", {}, "Order ", order)), place);
    draw();
  }

  sent(panel) {
    const { head, rows, totals } = this.summary.sent;
    const row = ({ cells, below }) => [
      h("tr", { class: below.length ? "lost" : "" }, cells.map((cell) => h("td", {}, cell))),
      ...below.map((text) => h("tr", { class: "below" }, h("td", { colspan: String(cells.length) }, text))),
    ];
    panel.append(...(rows.length ? tableOf(head, "Collectives", rows, row) : []), h("p", {}, totals));
  }

  // HLO --------------------------------------------------------------------------------------------------------------

  hlo(panel) {
    const input = h("input", { type: "search", "aria-label": "Search the HLO", value: this.model.get("find"), placeholder: "a name, an opcode, a type" });
    const form = h("form", { class: "controls", role: "search" }, input, h("button", { type: "submit" }, "Search"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.model.set("find", input.value);
      this.model.save_changes();
    });
    this.found = h("div", { class: "found" });
    this.folds = new Map();
    this.list = h("div", { class: "folds" });
    panel.append(form, this.found, this.list);
    for (const { name, title, length } of this.summary.computations) this.fold(name, `${title} \u00b7 ${counted(length, "instruction")}`);
    if (this.model.get("find")) this.attempt(() => this.search());
    if (this.model.get("at")) this.attempt(() => this.go());
    else this.openEntry();
  }

  // ENTRY is the first computation.
  openEntry() {
    const [entry] = this.folds.values();
    entry.open = true;
  }

  // A computation's fold, whose lines are asked for when it is opened.
  fold(name, title) {
    const body = h("div", { class: "code" });
    const fold = h("details", { class: "fold" }, h("summary", {}, h("code", {}, title)), body);
    fold.addEventListener("toggle", () => {
      if (fold.open && !body.childElementCount) this.attempt(() => this.lines(name, body, {}));
    });
    this.folds.set(name, fold);
    this.list.append(fold);
  }

  // Lines of a computation, from `start` on, or around an instruction, with what stands before and after a click away.
  async lines(name, body, of) {
    const part = await this.ask("listing", { name, count: PART, ...of });
    let { start } = part;
    let end = start + part.rows.length;
    const lines = h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": `HLO of ${name}` }, part.rows.map((row) => this.line(row)));
    const before = h("button", { type: "button" });
    const after = h("button", { type: "button" });
    const label = () => {
      before.hidden = start === 0;
      after.hidden = end >= part.count;
      before.textContent = `Show ${Math.min(PART, start)} before (${start.toLocaleString("en")} there)`;
      after.textContent = `Show ${Math.min(PART, part.count - end)} more (${(part.count - end).toLocaleString("en")} left)`;
    };
    const addBefore = async () => {
      const from = Math.max(0, start - PART);
      const { rows } = await this.ask("listing", { name, start: from, count: start - from });
      lines.prepend(...rows.map((row) => this.line(row)));
      start = from;
      label();
    };
    const addAfter = async () => {
      const { rows } = await this.ask("listing", { name, start: end, count: PART });
      lines.append(...rows.map((row) => this.line(row)));
      end += rows.length;
      label();
    };
    before.addEventListener("click", () => this.attempt(addBefore));
    after.addEventListener("click", () => this.attempt(addAfter));
    label();
    body.replaceChildren(before, lines, after);
  }

  line({ at, pieces, bytes }) {
    const line = h("div", { class: "line" });
    line.at = at;
    const text = h("div", { class: "text" });
    for (const [part, style, to] of pieces) {
      if (to === at) text.append(h("button", { type: "button", class: "link own", "aria-expanded": "false", onclick: ({ currentTarget }) => this.attempt(() => this.about(line, currentTarget)) }, part));
      else if (to) text.append(this.lead(part, to));
      else text.append(style ? h("span", { class: `hlo-${style}` }, part) : part);
    }
    if (bytes) text.append(h("span", { class: "bytes" }, ` ${bytes}`));
    line.append(text);
    return line;
  }

  // What HLO says of an instruction, below its line.
  async about(line, button) {
    const open = line.querySelector(".about");
    button.setAttribute("aria-expanded", String(!open));
    if (open) return open.remove();
    const about = await this.ask("about", { at: line.at });
    const near = (title, all) =>
      all.length ? h("div", {}, h("b", {}, title), h("ul", {}, all.map(({ at, text }) => h("li", {}, this.lead(text, at))))) : "";
    const facts = about.facts.map(([name, text]) => h("div", {}, h("b", {}, name), h("pre", { tabindex: "0" }, text)));
    line.append(
      h(
        "div",
        { class: "about" },
        near("reads", about.makers),
        about.users.length ? near("read by", about.users) : h("p", {}, "Nothing in its computation reads it."),
        near("computes", about.called),
        near("its computation is called by", about.callers),
        facts,
      ),
    );
  }

  // Open and mark the instruction, or the computation, that the address names. The last call wins: an earlier one that is
  // still under way would replace the lines that the reader has, and take the focus.
  async go() {
    const at = this.model.get("at");
    if (!this.summary || !at) return;
    this.show();
    if (!this.drawn.has("hlo")) return;
    const way = ++this.way;
    const [name, instruction] = at.split("/");
    const fold = this.folds.get(name);
    try {
      if (!fold) throw new Error(name);
      const body = fold.querySelector(".code");
      const known = [...body.querySelectorAll(".line")].some((line) => line.at === at);
      if (!known || !fold.open) await this.lines(name, body, instruction ? { around: instruction } : {});
      if (way !== this.way) return;
    } catch {
      if (way !== this.way) return;
      this.openEntry();
      return this.tell(`This dump has no ${at}.`, true);
    }
    fold.open = true;
    for (const marked of this.list.querySelectorAll(".here")) marked.classList.remove("here");
    const line = [...fold.querySelectorAll(".line")].find((one) => one.at === at);
    (line ?? fold).classList.add("here");
    (line ?? fold).scrollIntoView({ block: "center" });
    (line?.querySelector(".own") ?? fold.querySelector("summary")).focus({ preventScroll: true });
  }

  async search() {
    const words = this.model.get("find");
    if (!this.summary) return;
    if (!this.drawn.has("hlo")) return;
    if (!words) return this.found.replaceChildren();
    const { rows, count } = await this.ask("find", { words });
    this.found.replaceChildren(
      h("p", { role: "status" }, count > rows.length ? `${counted(count, "line")}, the first ${rows.length}:` : counted(count, "line")),
      h("ul", {}, rows.map(({ at, text }) => h("li", {}, this.lead(text, at)))),
    );
  }
}

export default {
  render({ model, el }) {
    el.classList.add("explorer", "explorer-dump");
    const page = new Page(model, el);
    page.attempt(() => page.again());
    return () => page.lens.stop();
  },
};
