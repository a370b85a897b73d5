// Delayed scaling: a tensor's largest magnitude, its amax, step by step; the scale that each step gets from the steps
// before it; what is too large for that scale, and what is too small.
//
// The model has
//   trace            the name of a trace of amaxes, or "own"
//   drawn            the reader's own trace, as text
//   history, margin  how many steps are remembered; how many binades are left free above their largest amax
//   depth            the smallest numbers that matter are amax / 2^depth
//   format           the name of the format
//   step             the step that is looked at, from 0
//   traces, formats  amaxes by name; the formats' data
import { draw, few, field, fill, input, label, linkTo, make, redrawn, select, show } from "./elements.mjs";
import { largest, smallest } from "./formats.mjs";

const TINY = 2 ** -126; // the smallest normal number of float32: no scale is smaller
const OWN_STEPS = 60; // as many of a trace that is seen does the reader's own begin with
export const MOST_STEPS = 2000; // of the reader's own trace: more cannot be told apart on a screen

// The arithmetic ------------------------------------------------------------------------------------------------------

export const SCHEMES = {
  delayed: "Delayed",
  last: "Delayed, history of 1",
  current: "Current",
  frozen: "Frozen",
};

const WHAT = {
  delayed: "the largest amax of the history",
  last: "the amax of the step before",
  current: "the step's own amax: the tensor is read twice",
  frozen: "the largest amax of the first steps, kept",
};

/**
 * The scale of a step from the amaxes that it knows, in float32: the number to multiply by to dequantize. 1 if all are 0.
 * The same as `scale_of` of notebooks/recipes/fp8_decoder.py, with a margin.
 */
export function scaleOf(format, amaxes, margin) {
  const amax = Math.max(0, ...amaxes);
  if (amax === 0) return 1;
  return Math.max(Math.fround(Math.fround(amax) / Math.fround(largest(format) * 2 ** -margin)), TINY);
}

/** A trace in one scheme: for each step its scale, how far it reaches, and what happens to the tensor. */
export function simulate(format, trace, scheme, { history, margin, depth }) {
  const length = scheme === "last" ? 1 : history;
  const half = smallest(format) / 2; // what is no larger becomes zero
  let kept = [];
  const steps = [];
  for (const [number, amax] of trace.entries()) {
    const known = scheme === "current" ? [amax].filter(Number.isFinite) : kept;
    const scale = scaleOf(format, known, margin);
    const most = Math.max(0, ...known);
    const reach = most > 0 ? Math.max(most * 2 ** margin, TINY * largest(format)) : largest(format);
    const lowest = amax / 2 ** depth;
    steps.push({
      amax, scale, reach, lowest,
      known: known.length,
      bottom: scale * half,
      saturates: amax > reach,
      underflows: amax > 0 && lowest <= scale * half,
    });
    // an amax that is not finite would spoil the scale: it is left out
    const isKept = Number.isFinite(amax) && (scheme !== "frozen" || number < length);
    if (isKept) kept = [amax, ...kept].slice(0, length);
  }
  return steps;
}

// A function takes only so many arguments: Math.max(...numbers) fails on many numbers.
const largestOf = (numbers, beginning) => numbers.reduce((most, number) => Math.max(most, number), beginning);
const smallestOf = (numbers, beginning) => numbers.reduce((least, number) => Math.min(least, number), beginning);

/** Of a simulation: how many steps saturate and underflow, and how far the worst is beyond its scale. */
export function summary(steps) {
  const beyond = steps.filter(step => step.saturates);
  return {
    saturates: beyond.length,
    worst: largestOf(beyond.map(step => step.amax / step.reach), 1),
    underflows: steps.filter(step => step.underflows).length,
  };
}

/** The numbers of a text; undefined if one is none, or negative. */
export function parseTrace(text) {
  const numbers = text.split(/[\s,;]+/).filter(part => part).map(Number);
  return numbers.length && numbers.every(number => number >= 0) ? numbers : undefined;
}

/** What the reader is told of the own trace, in a sentence; nothing if all of it is shown. */
export function traceProblem(text) {
  const numbers = parseTrace(text);
  if (!numbers) return "Not yet: your trace has something that is no number, or is below zero. Another is shown.";
  return numbers.length > MOST_STEPS ? `Your trace has ${numbers.length} steps. The first ${MOST_STEPS} are shown.` : "";
}

/** What is wrong with an amax as it is typed, in a sentence; nothing if it is right. */
export function amaxProblem(text) {
  const number = Number(text);
  const isRight = text.trim() !== "" && number >= 0 && Number.isFinite(number);
  return isRight ? "" : "Not yet: the amax of a step must be a finite number, not below zero.";
}

// Words ---------------------------------------------------------------------------------------------------------------

/** What happens in all steps, in a sentence. */
export function answerOf(steps, { history, margin, depth }) {
  const { saturates, worst, underflows } = summary(steps);
  const count = number => `${number} of ${steps.length} steps`;
  const clipped = saturates
    ? `the largest number saturates in ${count(saturates)}, at worst ${few(worst)} times beyond the scale`
    : "nothing saturates";
  const lost = underflows
    ? `numbers of amax / 2^${depth} become zero in ${count(underflows)}`
    : `nothing down to amax / 2^${depth} becomes zero`;
  return `With a history of ${history} and a margin of ${margin}, ${clipped}; ${lost}.`;
}

function sentenceOf(step, number, depth) {
  const known = step.known ? `knows ${step.known} ${step.known === 1 ? "amax" : "amaxes"}` : "knows no amax";
  const parts = [
    `Step ${number} ${known}: its scale is ${few(step.scale)}, which reaches ${few(step.reach)}.`,
    step.saturates
      ? `Its amax ${few(step.amax)} is beyond that and saturates.`
      : `Its amax ${few(step.amax)} fits.`,
  ];
  if (step.underflows) parts.push(`Numbers of amax / 2^${depth} become zero.`);
  return parts.join(" ");
}

// The chart -----------------------------------------------------------------------------------------------------------

const HEIGHT = 280;
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 8, 10, 30];

/** A whole number as an exponent. */
const raised = number => [...String(number)].map(letter => "⁰¹²³⁴⁵⁶⁷⁸⁹"[letter] ?? "⁻").join("");

function chart(onPress) {
  const svg = draw("svg", { role: "img", height: HEIGHT });
  let place = { width: 300, count: 1, low: 0, high: 1 };

  function press(event) {
    const box = svg.getBoundingClientRect();
    const inside = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    const step = Math.min(Math.max(Math.floor(inside * place.count), 0), place.count - 1);
    const up = 1 - (event.clientY - box.top - TOP) / (HEIGHT - TOP - BOTTOM);
    onPress(step, 2 ** (place.low + up * (place.high - place.low)));
  }
  svg.addEventListener("pointerdown", event => {
    svg.setPointerCapture?.(event.pointerId);
    press(event);
  });
  svg.addEventListener("pointermove", event => {
    if (event.buttons) press(event);
  });

  function update(steps, chosen, said) {
    const width = Math.max(svg.clientWidth || svg.parentElement?.clientWidth || 0, 280);
    const positive = steps.flatMap(step => [step.amax, step.reach, step.bottom, step.lowest]);
    const logs = positive.filter(number => number > 0 && Number.isFinite(number)).map(Math.log2);
    const low = Math.floor(smallestOf(logs, Infinity)) - 1;
    const high = Math.ceil(largestOf(logs, -Infinity)) + 1;
    place = { width, count: steps.length, low, high };
    const x = number => LEFT + ((number + 0.5) / steps.length) * (width - LEFT - RIGHT);
    const y = number => {
      const log = Math.min(Math.max(Math.log2(number), low), high);
      return TOP + ((high - log) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    };
    const along = key => steps.map((step, number) => `${x(number).toFixed(1)},${y(step[key]).toFixed(1)}`);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren(
      draw("polygon", { class: "band", points: [...along("reach"), ...along("bottom").reverse()].join(" ") }),
      draw("polyline", { class: "reach", points: along("reach").join(" ") }),
      draw("polyline", { class: "bottom", points: along("bottom").join(" ") }),
    );
    const every = Math.max(1, Math.ceil((high - low) / 7));
    for (let power = high; power > low; power -= every) {
      svg.append(
        draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(2 ** power), y2: y(2 ** power) }),
        draw("text", { x: LEFT - 6, y: y(2 ** power) + 4, "text-anchor": "end" }, `2${raised(power)}`),
      );
    }
    svg.append(
      draw("line", { class: "now", x1: x(chosen), x2: x(chosen), y1: TOP, y2: HEIGHT - BOTTOM }),
      draw("polyline", { class: "lowest", points: along("lowest").join(" ") }),
      draw("polyline", { class: "amax", points: along("amax").join(" ") }),
    );
    for (const [number, step] of steps.entries()) {
      if (step.saturates) svg.append(draw("circle", { class: "saturates", cx: x(number), cy: y(step.amax), r: 4 }));
      if (step.underflows) svg.append(draw("circle", { class: "underflows", cx: x(number), cy: y(step.lowest), r: 3 }));
    }
    const last = steps.length - 1;
    svg.append(
      draw("circle", { class: "amax-now", cx: x(chosen), cy: y(steps[chosen].amax), r: 6 }),
      draw("text", { x: LEFT, y: HEIGHT - 8 }, "step 0"),
      draw("text", { x: width - RIGHT, y: HEIGHT - 8, "text-anchor": "end" }, `step ${last}`),
    );
    svg.setAttribute("aria-label", `Amaxes of ${steps.length} steps, and how far each step's scale reaches. ${said}`);
  }
  return { svg, update };
}

const LEGEND = [
  ["amax", "amax of the step"],
  ["reach", "largest number that the scale reaches"],
  ["bottom", "half the smallest number: below it all is zero"],
  ["lowest", "the smallest numbers that matter"],
];

// All of it -----------------------------------------------------------------------------------------------------------

const whole = (value, least, most, otherwise) => (Number.isInteger(value) ? Math.min(Math.max(value, least), most) : otherwise);

const firstOf = traces => Object.keys(traces)[0];

/** What is looked at, of what can be: the trace and its name, the format, the step, and what is chosen besides. */
function askedOf(model) {
  const traces = model.get("traces");
  const formats = model.get("formats");
  const isOwn = model.get("trace") === "own";
  const known = Object.hasOwn(traces, model.get("trace")) ? model.get("trace") : firstOf(traces);
  const drawn = isOwn ? parseTrace(model.get("drawn"))?.slice(0, MOST_STEPS) : undefined;
  const amaxes = drawn ?? traces[known];
  return {
    name: isOwn ? "own" : known,
    amaxes,
    format: formats.find(format => format.name === model.get("format")) ?? formats[0],
    at: whole(model.get("step"), 0, amaxes.length - 1, 0),
    chosen: {
      history: whole(model.get("history"), 1, 64, 16),
      margin: whole(model.get("margin"), 0, 8, 0),
      depth: whole(model.get("depth"), 0, 30, 14),
    },
  };
}

function schemesTable({ amaxes, format, chosen }) {
  const row = ([scheme, title]) => {
    const found = summary(simulate(format, amaxes, scheme, chosen));
    return make(
      "tr", { "data-scheme": scheme },
      make("th", { scope: "row" }, title), make("td", {}, WHAT[scheme]),
      make("td", { "data-answer": "saturates" }, show(found.saturates)),
      make("td", { "data-answer": "worst" }, found.saturates ? `${few(found.worst)} times` : "none"),
      make("td", { "data-answer": "underflows" }, show(found.underflows)),
    );
  };
  const heads = ["Scheme", "Its scale", "Saturates", "At worst", "Becomes zero"];
  return make(
    "table", { class: "schemes" },
    make("caption", { class: "unseen" }, `Schemes side by side in ${label(format)}`),
    make("tr", {}, heads.map(text => make("th", { scope: "col" }, text))),
    Object.entries(SCHEMES).map(row),
  );
}

const scrolling = (...children) =>
  make("div", { class: "scrolls", tabindex: "0", role: "group", "aria-label": "Schemes side by side" }, ...children);

/** What stands where no script runs: what happens in all steps, and the schemes beside each other. */
export function answer(model) {
  const asked = askedOf(model);
  const steps = simulate(asked.format, asked.amaxes, "delayed", asked.chosen);
  return [make("p", {}, answerOf(steps, asked.chosen)), scrolling(schemesTable(asked))];
}

function render({ model, el }) {
  const formats = model.get("formats");
  const traces = model.get("traces");
  el.classList.add("explorer", "explorer-scaling");
  el.dataset.lmSuppressShortcuts = "true"; // keys that are pressed here are not JupyterLab's commands

  function save(changes) {
    for (const [key, value] of Object.entries(changes)) model.set(key, value);
    model.save_changes();
  }

  /** The reader's own trace: it begins with what is seen, in fewer steps. */
  function own() {
    const { name, amaxes: now } = askedOf(model);
    if (name === "own" || now.length <= OWN_STEPS) return [...now];
    return Array.from({ length: OWN_STEPS }, (_, number) => now[Math.floor((number * now.length) / OWN_STEPS)]);
  }

  function redraw(step, amax) {
    const numbers = own();
    const at = Math.floor((step * numbers.length) / askedOf(model).amaxes.length);
    numbers[at] = Number(amax.toPrecision(3));
    save({ trace: "own", drawn: numbers.join(" "), step: at });
  }

  let isDrawing = false;
  const picture = chart((step, amax) => (isDrawing ? redraw(step, amax) : save({ step })));
  const slider = (key, least, most) =>
    make("input", { type: "range", min: least, max: most, oninput: event => save({ [key]: Number(event.target.value) }) });
  const trace = select([...Object.keys(traces).map(name => [name, name]), ["own", "my own"]], name => {
    save(name === "own" ? { trace: "own", drawn: own().join(" "), step: 0 } : { trace: name });
  });
  const format = select(formats.map(one => [one.name, one.name]), name => save({ format: name }));
  const history = slider("history", 1, 64);
  const margin = slider("margin", 0, 8);
  const depth = slider("depth", 0, 30);
  const step = slider("step", 0, 1);
  const wrongAmax = make("p", { class: "wrong", role: "alert" });
  function sayOfAmax(problem) {
    wrongAmax.textContent = problem;
    amax.setAttribute("aria-invalid", String(Boolean(problem)));
  }
  // What is no amax is not kept when the field is left.
  function leftAmax() {
    sayOfAmax("");
    fill(amax, few(askedOf(model).amaxes[Number(step.value)]));
  }
  const amax = input(text => {
    const problem = amaxProblem(text);
    sayOfAmax(problem);
    if (!problem) redraw(Number(step.value), Number(text));
  }, { inputmode: "decimal", onblur: leftAmax });
  const drawing = make("input", {
    type: "checkbox",
    onchange: event => {
      isDrawing = event.target.checked;
      picture.svg.classList.toggle("drawing", isDrawing);
    },
  });
  const move = (by, text) => make("button", {
    type: "button",
    onclick: () => save({ step: Math.min(Math.max(Number(step.value) + by, 0), Number(step.max)) }),
  }, text);
  const before = move(-1, "← Step before");
  const after = move(1, "Next step →");
  const numbers = make("textarea", {
    rows: 3, spellcheck: "false", oninput: event => save({ trace: "own", drawn: event.target.value }),
  });
  const told = make("div", { class: "answer", "aria-live": "polite" });
  const wrong = make("p", { class: "wrong", role: "alert" });
  const now = make("p", { class: "now", "aria-live": "polite" });
  const meant = make("p", { class: "quiet meant" });
  const schemes = scrolling();
  const legend = make("ul", { class: "legend" });
  for (const [name, text] of LEGEND) legend.append(make("li", { class: name }, text));
  legend.append(make("li", { class: "saturates" }, "saturates"), make("li", { class: "underflows" }, "becomes zero"));

  const labels = new Map();
  const sliding = (text, control) => {
    const shown = field(text, control, "slide");
    labels.set(control, [shown.firstChild, text]);
    return shown;
  };
  const stepping = sliding("Step", step);
  el.replaceChildren(
    make("div", { class: "controls" }, field("Trace of amaxes", trace), field("Format", format)),
    make("div", { class: "controls" }, sliding("History", history), sliding("Margin", margin), sliding("Depth", depth)),
    meant,
    wrong, told,
    make("div", { class: "controls" }, field("Draw the amaxes on the picture", drawing, "check")),
    picture.svg, legend, linkTo(model),
    make("div", { class: "controls" }, before, after, stepping),
    now,
    make("div", { class: "controls" }, field("Amax of this step", amax)),
    wrongAmax,
    make("h2", {}, "Schemes side by side"),
    schemes,
    make("details", {}, make("summary", {}, "The trace in numbers"), field("Amaxes, from the first step on", numbers)),
  );

  function name(control, value, text) {
    control.value = value;
    const [place, words] = labels.get(control);
    place.textContent = `${words}: ${text}`;
  }

  function update() {
    const asked = askedOf(model);
    const { amaxes, at, chosen } = asked;
    wrong.textContent = asked.name === "own" ? traceProblem(model.get("drawn")) : "";
    fill(trace, asked.name);
    fill(format, asked.format.name);
    step.max = amaxes.length - 1;
    name(history, chosen.history, `${chosen.history} steps`);
    name(margin, chosen.margin, `${chosen.margin} binades`);
    name(depth, chosen.depth, `amax / 2^${chosen.depth}`);
    meant.textContent =
      "History: the scale takes the largest amax of so many earlier steps. Margin: each binade doubles what the scale reaches. "
      + `Depth: of a tensor, numbers down to amax / 2^${chosen.depth} = amax / ${2 ** chosen.depth} matter. `
      + "The page counts the steps in which these become 0.";
    name(step, at, `${at} of ${amaxes.length - 1}`);
    before.disabled = at === 0;
    after.disabled = at === amaxes.length - 1;
    if (document.activeElement !== amax) fill(amax, few(amaxes[at]));
    if (document.activeElement !== numbers) fill(numbers, amaxes.map(few).join(" "));
    const steps = simulate(asked.format, amaxes, "delayed", chosen);
    const said = answerOf(steps, chosen);
    told.replaceChildren(make("p", {}, said));
    now.textContent = sentenceOf(steps[at], at, chosen.depth);
    picture.update(steps, at, said);
    schemes.replaceChildren(schemesTable(asked));
  }

  return redrawn(model, picture.svg, update);
}

export default { render };
