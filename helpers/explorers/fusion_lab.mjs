// "Fusion lab": choose a layer's types, scales, bias, activation and result, and see at once what XLA makes of it: is it FP8,
// which kernel does which line of the code, how many bytes each moves, why, and what changed since the last choice.
//
// The model has a value for each axis (helpers/explorers/fusion_lab.py, which names them), and
//   axes, grids, tries, fixes, first, shapes   what can be chosen, what of it is recorded, and what is worth a try
//   found                              for `answer` alone: the first program's code and what became of it
// On the site the answers are in fusion_lab.json.gz beside this file: many programs become the same, so it has each text
// once. In a notebook the kernel compiles what is chosen: the model has `installed` then, the kernel's JAX, and m, n and k;
// a question is a message, {choice, sizes}, and so is its answer, {asked, found} or {asked, wrong}. XLA's texts reach the
// page only as text nodes.
//
// In an element with `data-compact` it shows two programs alone, to switch between: a layer that loses two steps, and in
// one call. The attribute's value is the address of the page with all choices, to which it leads; or nothing.

import { coloured, copying, linkTo, make, pageOfRule, partsOfHlo, partsOfPython } from "./elements.mjs";

const RECORD = "fusion_lab.json.gz";
const SIZES = ["m", "n", "k"]; // in a notebook
const PAIR = ["Bias in float32, b stored as [K, N]", "All in one call"]; // of the tries, where there is little room

// The record ----------------------------------------------------------------------------------------------------------

/** The record. A server may have unpacked it already. */
async function load() {
  const answer = await fetch(new URL(`./${RECORD}`, import.meta.url));
  if (!answer.ok) throw new Error(`${RECORD} could not be loaded (${answer.status}).`);
  const bytes = await answer.arrayBuffer();
  const [one, two] = new Uint8Array(bytes, 0, 2);
  if (one !== 0x1f || two !== 0x8b) return JSON.parse(new TextDecoder().decode(bytes));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/** What can be asked of the record. */
class Answers {
  constructor(record, names, grids) {
    this.record = record;
    this.names = names;
    this.grids = grids;
  }

  /** A choice's number; -1 for one that is not recorded. As `number` in Python. */
  number(choice) {
    let before = 0;
    for (const grid of this.grids) {
      const isIn = this.names.every(name => grid[name].includes(choice[name]));
      if (isIn) return this.names.reduce((at, name) => at * grid[name].length + grid[name].indexOf(choice[name]), 0) + before;
      before += this.names.reduce((count, name) => count * grid[name].length, 1);
    }
    return -1;
  }

  of(choice) {
    const { programs, outcomes, codes, steps, words, reasons, lines } = this.record;
    const [outcome, code, step] = programs[this.number(choice)];
    const found = { ...outcomes[outcome], code: codes[code].map(n => words[n]), steps: steps[step] };
    if (found.error) return { ...found, kernels: [], reasons: [], hlo: [] };
    return { ...found, reasons: found.reasons.map(n => reasons[n]), hlo: found.hlo.map(n => lines[n]) };
  }
}

const WIDE = 900; // pixels from which on all stands side by side, as in fusion_lab.css
const WAIT = 3000; // milliseconds until a reader is told that the kernel does not answer

/** What can be asked of a notebook's kernel: `tell` gets what it answers to the last question. */
class Kernel {
  #asked = "";
  #since = 0;
  #timer = 0;

  constructor(model, tell, late) {
    this.model = model;
    this.late = late;
    this.heard = message => {
      if (!message?.asked || JSON.stringify(message.asked) !== this.#asked) return; // another view's, or an earlier one
      this.#asked = "";
      clearTimeout(this.#timer);
      tell({ ...message, milliseconds: performance.now() - this.#since });
    };
    model.on("msg:custom", this.heard);
  }

  ask(question) {
    const asked = JSON.stringify(question);
    if (asked === this.#asked) return;
    this.#asked = asked;
    this.#since = performance.now();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(this.late, WAIT);
    this.model.send(question);
  }

  close() {
    clearTimeout(this.#timer);
    this.model.off("msg:custom", this.heard);
  }
}

/** The recorded choice nearest to one, with the value of `kept` as it is; and the names of what is other. */
export function nearest(choice, kept, names, grids, first) {
  if (!grids.length) return [choice, []]; // nothing is recorded: everything can be asked
  const others = grids
    .filter(grid => !kept || grid[kept].includes(choice[kept]))
    .map(grid => [grid, names.filter(name => !grid[name].includes(choice[name]))])
    .sort((one, other) => one[1].length - other[1].length);
  const [grid, changed] = others[0];
  const found = { ...choice };
  for (const name of changed) found[name] = grid[name].includes(first[name]) ? first[name] : grid[name][0];
  return [found, changed];
}

// Words ---------------------------------------------------------------------------------------------------------------

/** Bytes as fp8lens writes them: "50.3 MB". */
export function size(bytes) {
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= unit) return `${Number((bytes / unit).toPrecision(3))} ${name}`;
  }
  return `${bytes} B`;
}

const counted = count => (count === 1 ? "one kernel" : `${count} kernels`);

function verdict(found) {
  if (found.error) return ["It does not compile", found.error];
  const work = `${counted(found.kernels.length)}, ${size(found.bytes)} moved`;
  return [found.fp8 ? "FP8" : `Not FP8: ${found.math}`, work];
}

/** What stands behind a kernel's title. */
const detailsOf = kernel => (kernel.detail ? `: ${kernel.detail}` : "");

const ADDED = " (in no line of the code: XLA adds it)";

/** Whether no line of the code asks for a kernel. The first line is `def`. */
const isAdded = (found, n) => !found.steps.some((does, line) => line && does.includes(n));

/** What a fix saves, in a sentence, from the answer before it and the one after it; nothing if that is not known. */
export function saving(found, fixed) {
  if (!fixed || fixed.error || found.error) return "";
  const said = [];
  if (fixed.kernels.length !== found.kernels.length) {
    said.push(`${counted(fixed.kernels.length)} instead of ${found.kernels.length}`);
  }
  if (fixed.bytes !== found.bytes) said.push(`${size(fixed.bytes)} moved instead of ${size(found.bytes)}`);
  return said.length ? `With the fix: ${said.join(", ")}.` : "";
}

/** What changed between two answers, in sentences. */
function difference(found, before) {
  if (found.error || before.error) return [];
  const said = [];
  if (found.fp8 !== before.fp8) said.push(found.fp8 ? "It is FP8 now." : "It is no longer FP8.");
  const [now, then] = [found.kernels.length, before.kernels.length];
  said.push(now === then ? `Still ${counted(now)}` : `Kernels: ${then} → ${now}`);
  const moved = found.bytes === before.bytes ? "as many bytes." : `bytes: ${size(before.bytes)} → ${size(found.bytes)}.`;
  said[said.length - 1] += `; ${moved}`;
  const rules = reasons => new Set(reasons.map(reason => reason.rule));
  const [has, had] = [rules(found.reasons), rules(before.reasons)];
  const gone = [...had].filter(rule => !has.has(rule));
  const come = [...has].filter(rule => !had.has(rule));
  if (come.length) said.push(`New: ${come.join(", ")}.`);
  if (gone.length) said.push(`Fixed: ${gone.join(", ")}.`);
  return said;
}

// The page ------------------------------------------------------------------------------------------------------------

const KINDS = { fp8: "fp8", wide: "wide", other: "other" };

/** The class that gives a kernel its colour: matmuls have their own, the others alternate. */
function inks(kernels) {
  let others = 0;
  return kernels.map(kernel => (kernel.kind === "other" ? `other-${others++ % 4}` : KINDS[kernel.kind]));
}

// What scrolls can be scrolled from a keyboard.
const region = name => ({ tabindex: "0", role: "group", "aria-label": name });

function verdictOf(found) {
  const [head, rest] = verdict(found);
  return make("p", { class: "verdict" }, make("strong", {}, head), `: ${rest}.`);
}

const tag = (n, ink) => make("span", { class: `tag ${ink}` }, String(n + 1));

/** The code, each line with the kernels that do it; their numbers are seen where they change. */
function codeOf(found, before) {
  const ink = inks(found.kernels);
  const old = new Set(before ? before.code : found.code);
  const list = make("ol", { class: "code" });
  let last = "";
  for (const [n, line] of found.code.entries()) {
    const does = found.steps[n] ?? [];
    const who = does.length ? `kernel ${does.map(k => k + 1).join(" and ")}` : "";
    const tags = who === last ? [] : does.map(k => tag(k, ink[k]));
    for (const one of tags) one.setAttribute("aria-hidden", "true");
    const owner = does.length ? ink[does[does.length - 1]] : "nobody";
    list.append(
      make(
        "li", { class: old.has(line) ? owner : `${owner} new` },
        make("span", { class: "tags" }, ...tags),
        make("code", {}, coloured(partsOfPython(line))),
        make("span", { class: "unseen" }, who && ` (${who})`),
      ),
    );
    last = who;
  }
  return list;
}

/** Kernels, as bars that begin where the one before ends. */
function kernelsOf(found, before) {
  const ink = inks(found.kernels);
  const whole = Math.max(found.bytes, before?.bytes ?? 0, 1);
  const list = make("ol", { class: "kernels" });
  if (before && !before.error && before.bytes !== found.bytes) {
    const bar = make("span", { class: "bar", style: `width:${(100 * before.bytes) / whole}%` });
    const text = make("span", { class: "what" }, make("span", { class: "quiet" }, "before this change"));
    list.append(make("li", { class: "before" }, make("span", { class: "tag" }, "–"), text, make("span", { class: "moved quiet" }, size(before.bytes)), make("span", { class: "track" }, bar)));
  }
  let from = 0;
  for (const [n, kernel] of found.kernels.entries()) {
    const style = `margin-left:${(100 * from) / whole}%;width:${(100 * kernel.bytes) / whole}%`;
    from += kernel.bytes;
    list.append(
      make(
        "li", { class: ink[n] },
        tag(n, ink[n]),
        make(
          "span", { class: "what" },
          make("b", {}, kernel.title), detailsOf(kernel),
          isAdded(found, n) ? make("span", { class: "quiet" }, ADDED) : "",
        ),
        make("span", { class: "moved" }, size(kernel.bytes)),
        make("span", { class: "track" }, make("span", { class: "bar", style })),
      ),
    );
  }
  return list;
}

const lossOf = lost => `${LOST[lost] ?? `Outside of the call, ${lost}`}: `;

/** Each reason with its fix. `fixOf` gives a rule's change, if there is one, and `savingOf` what that saves. */
function reasonsOf(found, fixOf, savingOf, apply, label, isLive) {
  if (!found.reasons.length) {
    const text = found.fp8 ? "It is FP8, and all work that the call can do is in the call." : "";
    return make("p", { class: "none" }, text || "Nothing to say: the operands are not quantized.");
  }
  const list = make("ul", { class: "reasons" });
  for (const { lost, reason, fix, rule } of found.reasons) {
    const change = fixOf(rule);
    const saved = savingOf(rule);
    const name = isLive ? make("code", {}, rule) : make("a", { href: pageOfRule(rule) }, rule);
    list.append(
      make(
        "li", { "data-rule": rule },
        make("p", {}, make("b", {}, lossOf(lost)), reason, "."),
        make("p", {}, make("b", {}, "Fix: "), fix, ".", saved && ` ${saved}`),
        make(
          "div", { class: "controls" },
          change ? make("button", { type: "button", class: "main", onclick: () => apply(change) }, `Apply the fix: ${label(change)}`) : "",
          make("span", {}, "Rule ", name),
        ),
      ),
    );
  }
  return list;
}

// What a matmul lost, as a reason begins.
const LOST = {
  fp8: "Not FP8",
  epilogue: "The activation is outside of the call",
  bias: "The bias is outside of the call",
  amax: "The amax is outside of the call",
  output: "The result's conversion is outside of the call",
  scale: "A scale is outside of the call",
  transpose: "A kernel transposes an operand",
  pad: "A kernel pads an operand",
  copy: "A kernel copies an operand",
  sum: "Products are added by another kernel",
  duplicate: "Something runs more often than it has to",
  kernel: "A kernel is left",
};

const unnumbered = line => line.replace(/\.\d+|_\d+/g, "");

/** HLO, with the lines that the program before did not have; without marks where most are new. */
function hloOf(found, before) {
  const pre = make("pre");
  const old = new Set((before ?? found).hlo.map(unnumbered));
  const isNew = line => line.trim() && !old.has(unnumbered(line));
  const isOther = found.hlo.filter(isNew).length > found.hlo.length * 0.8;
  for (const line of found.hlo) {
    const shown = coloured(partsOfHlo(line));
    pre.append(...(isNew(line) && !isOther ? [make("span", { class: "new" }, ...shown)] : shown), "\n");
  }
  return pre;
}

// As Python writes it.
const tupleOf = shape => `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`;

/** A program as a file that runs: its code, the shapes of its arguments, and how fp8lens is asked. `shape`: M, N, K. */
export function fileOf(found, choice, [m, n, k], release) {
  const [left, right = left] = choice.operands.split("-");
  const types = {
    a: [left, [m, k]],
    b: [right, choice.stored === "nk" ? [n, k] : [k, n]],
    a_scales: ["f32", [m, 1]],
    bias: [choice.bias, [n]],
  };
  const names = found.code[0].replace(/^.*\(|\).*$/g, "").split(", ");
  const shapes = names.map(name => {
    const [type, shape] = types[name] ?? ["f32", []];
    return `        jax.ShapeDtypeStruct(${tupleOf(shape)}, ${type}),  # ${name}`;
  });
  const options = `target="${choice.chip}", gemm="${choice.library}"`;
  return `# ${verdict(found).join(": ")}; compiled for ${choice.chip} with JAX ${release}. Neither of these needs a GPU:
#
#     python layer.py
#     fp8lens layer.py:layer --args arguments --target ${choice.chip} --gemm ${choice.library} --ledger --reasons
import jax
import jax.numpy as jnp

e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32


${found.code.join("\n")}


def arguments():
    """Shapes and types alone: no array is needed to compile."""
    return (
${shapes.join("\n")}
    )


if __name__ == "__main__":
    from fp8lens import inspect

    print(inspect(layer, *arguments(), ${options}).report)
`;
}

/** A table for `answer`. */
function tableOf(heads, rows) {
  return make(
    "table", {},
    make("tr", {}, heads.map(text => make("th", { scope: "col" }, text))),
    rows.map(cells => make("tr", {}, cells.map(cell => make("td", {}, cell)))),
  );
}

/** What stands where no script runs: the code with the numbers of its kernels, the kernels, and the reasons. */
export function answer(model) {
  const found = model.get("found");
  if (!found.error && !found.kernels) {
    return [make("pre", {}, found.code.join("\n")), make("p", {}, "What XLA makes of it is not recorded.")];
  }
  const { code, kernels = [], steps = [], reasons = [] } = found;
  const ink = inks(kernels);
  const tagsOf = does => does.map(k => tag(k, ink[k])).flatMap((one, at) => (at ? [" ", one] : [one]));
  // No-break spaces: a notebook's output has no style, and on a phone a line is to wrap.
  const indented = line => line.replace(/^ +/, spaces => "\u00a0".repeat(spaces.length));
  const lines = code.map((line, n) => [tagsOf(steps[n] ?? []), make("code", {}, indented(line))]);
  const works = kernels.map((kernel, n) => [
    tag(n, ink[n]), size(kernel.bytes), `${kernel.title}${detailsOf(kernel)}${isAdded(found, n) ? ADDED : ""}`,
  ]);
  return [
    verdictOf(found),
    make("div", { class: "scrolls", ...region("The program") }, tableOf(["kernel", "line"], lines)),
    kernels.length ? tableOf(["kernel", "moves", "is"], works) : "",
    reasons.length ? make("ul", {}, reasons.map(one => make("li", {}, `${one.reason}. `, make("em", {}, "Fix:"), ` ${one.fix}.`))) : "",
  ];
}

async function render({ model, el }) {
  const [axes, grids, tries, fixes, first] = ["axes", "grids", "tries", "fixes", "first"].map(key => model.get(key));
  const installed = model.get("installed") ?? ""; // in a notebook
  const isCompact = "compact" in el.dataset;
  const names = axes.map(axis => axis.name);
  const byName = new Map(axes.map(axis => [axis.name, axis]));
  el.classList.add("explorer", "explorer-fusion_lab");

  // What is recorded: until it is there, and if it cannot be loaded, the page shows the stored answer.
  const answers = installed ? null : new Answers(await load(), names, grids);
  const told = make("div", { class: "told", role: "status", tabindex: "-1" });
  const note = make("p", { class: "note" });
  const shown = make("div", { class: "shown" });
  const about = make("p", { class: "quiet about" });
  const controls = new Map();
  let kernel = null; // or who compiles
  let wanted = null; // the question whose answer is shown, or is waited for
  let last = null; // the question whose answer is shown
  let kept = "";
  let before = null; // the answer that was shown before it

  const label = change => Object.entries(change).map(([name, value]) => `${byName.get(name).label}: ${byName.get(name).values[value]}`).join(", ");

  function chosen() {
    const choice = {};
    for (const { name, values } of axes) {
      const value = model.get(name);
      choice[name] = Object.hasOwn(values, value) ? value : first[name];
    }
    return choice;
  }

  const sizes = () => (installed ? SIZES.map(name => model.get(name)) : []);

  function changedToo(choice, others) {
    if (!others.length) return "";
    return `Also changed, because the other combinations are not recorded: ${label(Object.fromEntries(others.map(name => [name, choice[name]])))}.`;
  }

  function change(values) {
    [kept] = Object.keys(values);
    const [fitting] = nearest({ ...chosen(), ...values }, kept, names, grids, first);
    const other = names.filter(name => fitting[name] !== chosen()[name] && !(name in values));
    note.textContent = changedToo(fitting, other);
    for (const name of names) model.set(name, fitting[name]);
    model.save_changes();
    show();
  }

  function resize(name, text) {
    const length = Number(text);
    note.textContent = Number.isInteger(length) && length > 0 ? "" : `${name.toUpperCase()} is ${text || "empty"}: give a whole number.`;
    if (note.textContent) return;
    model.set(name, length);
    model.save_changes();
    show();
  }

  // The button that was pressed is gone then: what it changed is read next.
  function fix(values) {
    change(values);
    told.focus();
  }

  function show() {
    const [choice] = nearest(chosen(), "", names, grids, first);
    for (const name of names) controls.get(name).value = choice[name];
    for (const [at, length] of sizes().entries()) controls.get(SIZES[at]).value = length;
    for (const button of el.querySelectorAll("[data-try]")) {
      const tried = { ...first, ...tries[button.dataset.try] };
      button.setAttribute("aria-pressed", String(names.every(name => choice[name] === tried[name])));
    }
    const question = { choice, sizes: sizes() };
    if (!(answers || kernel) || JSON.stringify(question) === JSON.stringify(wanted)) return;
    wanted = question;
    if (answers) return answer(question, answers.of(choice));
    shown.setAttribute("aria-busy", "true");
    kernel.ask(question);
  }

  function answer(question, found) {
    shown.removeAttribute("aria-busy");
    draw(found, question, last ? changes(last, question) : []);
    last = question;
    before = found;
  }

  /** What differs between two questions, in words. */
  function changes(was, is) {
    const chosenNow = axes.filter(({ name }) => was.choice[name] !== is.choice[name]);
    const said = chosenNow.map(({ name, label, values }) => `${label}: ${values[was.choice[name]]} → ${values[is.choice[name]]}`);
    for (const [at, length] of is.sizes.entries()) {
      if (length !== was.sizes[at]) said.push(`${SIZES[at].toUpperCase()}: ${was.sizes[at]} → ${length}`);
    }
    return said;
  }

  // What the kernel says.
  function hear({ asked, found, wrong, milliseconds }) {
    note.textContent = "";
    if (wrong !== undefined) {
      shown.removeAttribute("aria-busy");
      note.textContent = wrong;
      wanted = null; // may be asked again
      return;
    }
    answer(asked, { kernels: [], reasons: [], hlo: [], steps: [], ...found });
    about.textContent = `Compiled by JAX ${installed} in this notebook's kernel for ${asked.choice.chip}, ${Math.round(milliseconds)} ms after it was chosen. Nothing here was measured on a GPU.`;
  }

  function draw(found, question, what) {
    const { choice } = question;
    const fixOf = rule => fixes[rule]?.find(one => Object.entries(one).some(([axis, value]) => choice[axis] !== value));
    // Known of what is recorded; in a notebook it would have to be compiled first.
    function savingOf(rule) {
      const fixed = { ...choice, ...fixOf(rule) };
      return answers && fixOf(rule) && answers.number(fixed) >= 0 ? saving(found, answers.of(fixed)) : "";
    }
    const [main] = found.reasons;
    const state = found.error || !found.fp8 ? "bad" : found.kernels.length === 1 ? "good" : "fair";
    told.className = `told ${state}`;
    const sentences = before ? difference(found, before) : [];
    const mainReason = main && make("p", { class: "main-reason" }, make("b", {}, lossOf(main.lost)), `${main.reason}. ${savingOf(main.rule)}`);
    // In few words: which choices do it, and what is lost.
    const losses = found.reasons.map(one => `${LOST[one.lost] ?? one.lost}.`).join(" ");
    const short = main && make("p", { class: "main-reason" }, make("b", {}, `${label(tries[PAIR[0]])}. `), losses);
    told.replaceChildren(
      verdictOf(found),
      (isCompact ? short : mainReason) ?? "",
      make("p", { class: "changed" }, what.length ? make("b", {}, `${what.join("; ")}. `) : "", sentences.join(" ")),
    );
    const shape = installed ? question.sizes : model.get("shapes")[choice.sizes];
    const copy = copying(() => fileOf(found, choice, shape, installed || choice.release), "Copy the code");
    const code = make(
      "div", { role: "group", class: "lines", "aria-label": "The code" },
      make("div", { class: "head" }, make("h2", {}, "Which kernel does which line"), isCompact ? "" : copy),
      make("div", { class: "scrolls", ...region("The code, line by line") }, codeOf(found, before)),
    );
    if (found.error) return shown.replaceChildren(code);
    const kernels = make("div", { role: "group", class: "bytes", "aria-label": "Kernels" }, make("h2", {}, "What each kernel moves"), kernelsOf(found, before));
    if (isCompact) return shown.replaceChildren(code, kernels);
    const isOpen = shown.querySelector("details")?.open ?? el.clientWidth >= WIDE;
    const hlo = make(
      "details", { class: "hlo" },
      make("summary", {}, "The compiled program, in HLO"),
      make("div", { class: "scrolls", ...region("HLO") }, hloOf(found, before)),
    );
    hlo.open = isOpen;
    const reasons = reasonsOf(found, fixOf, savingOf, fix, label, Boolean(installed));
    const why = make("div", { role: "group", class: "why", "aria-label": "Reasons" }, make("h2", {}, found.reasons.length ? "Why, and the fix" : "Why"), reasons);
    shown.replaceChildren(code, make("div", {}, kernels, why), hlo);
  }

  for (const { name, label: text, values } of axes) {
    const select = make("select", { name, onchange: event => change({ [name]: event.target.value }) });
    for (const [value, shownAs] of Object.entries(values)) select.append(make("option", { value }, shownAs));
    controls.set(name, select);
  }
  const fields = axes.map(axis => make("label", { class: `field ${axis.name}` }, make("span", {}, axis.label), controls.get(axis.name)));
  for (const name of installed ? SIZES : []) {
    const input = make("input", { name, inputmode: "numeric", autocomplete: "off", onchange: event => resize(name, event.target.value.trim()) });
    controls.set(name, input);
    fields.push(make("label", { class: "field" }, make("span", {}, name.toUpperCase()), input));
  }
  const press = name => () => change({ ...tries[name], ...Object.fromEntries(names.filter(n => !(n in tries[name])).map(n => [n, first[n]])) });
  const buttonOf = (name, attributes, ...more) =>
    make("button", { type: "button", "data-try": name, "aria-pressed": "false", onclick: press(name), ...attributes }, ...more);
  /** A large button that says what becomes of its program, with all that this moves as a bar. */
  function largeButtonOf(name) {
    const [bytes, most] = [name, PAIR[0]].map(one => answers.of({ ...first, ...tries[one] }).bytes);
    const found = answers.of({ ...first, ...tries[name] });
    const bar = make("span", { class: "track" }, make("span", { class: "bar", style: `width:${(100 * bytes) / most}%` }));
    return buttonOf(name, { class: "large" }, make("b", {}, name), make("span", {}, verdict(found)[1]), bar);
  }
  const group = { class: "controls tries", role: "group", "aria-label": "Programs to try" };
  if (isCompact) {
    const address = el.dataset.compact;
    const lead = make("p", { class: "more" }, address ? make("a", { href: address }, "All choices, why, and the fix: the fusion lab") : "");
    el.replaceChildren(make("div", { class: "lab" }, make("div", { ...group, class: "pair" }, PAIR.map(largeButtonOf)), told, shown, lead));
    press(PAIR[0])();
  } else {
    const buttons = Object.keys(tries).map(name => buttonOf(name, {}, name));
    const choices = make("div", { class: "fields", role: "group", "aria-label": "The program" }, ...fields);
    el.replaceChildren(
      make(
        "div", { class: "lab" },
        make("div", group, make("span", { class: "quiet" }, "Try"), ...buttons), told,
        make("div", { class: "side" }, choices, note, linkTo(model)), shown, about,
      ),
    );
  }
  const [fitting, others] = nearest(chosen(), "", names, grids, first);
  if (others.length) note.textContent = changedToo(fitting, others);
  const follow = () => queueMicrotask(show);
  const followed = [...names, ...(installed ? SIZES : [])].map(name => `change:${name}`).join(" ");
  model.on(followed, follow);

  if (installed) {
    kernel = new Kernel(model, hear, () => {
      note.textContent = "The kernel has not answered yet: it compiles when the cell that runs has ended. A kernel that was stopped does not answer.";
    });
    note.textContent = "The kernel compiles the first program.";
    show();
    return () => {
      kernel.close();
      model.off(followed, follow);
    };
  }
  const { programs, date } = answers.record;
  about.textContent = `${programs.length.toLocaleString("en")} programs, compiled with JAX ${Object.keys(byName.get("release").values).join(", ")} on ${date}. Nothing here was measured on a GPU.`;
  show();
}

export default { render };
