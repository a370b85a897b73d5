// Bits: what becomes of a number in a small format. Its code's bits can be clicked, its way into the format and back is
// shown step by step, beside a second format, on a line of the numbers that there are, and in a block with one scale.
//
// The model has
//   value, scale     what is typed: numbers as text; a value may be a code of the first format, as 0x7E
//   format, beside   names of two formats
//   clamp            whether a number beyond the format is clamped before it is rounded
//   code             the code that the reader made of the first format, if it is one of several NaN; else -1
//   beside_code      the same of the second format
//   zoom             how much of the line is seen: 0 is the closest, each step twice as much
//   element, rounding, others   the block: its format, how its scale is rounded, and the 31 numbers beside the value
//   formats          the formats' data: `Format` of helpers/numerics/number_formats.py, a list
import {
  ROUNDINGS, atIndex, bitsOf, decode, encode, fields, hexOf, indexOf, largest, nanCode, neighbours, range, round,
  roundBlock, smallest, step,
} from "./formats.mjs";
import { draw, few, field, fill, input, label, linkTo, make, redrawn, select, show } from "./elements.mjs";

const BLOCK = 32;
const TRIES = ["465", "464", "0.001", "0.0009", "1/3", "2^-9", "0x7E", "-1e6", "inf", "nan"];
const CODES = { format: "code", beside: "beside_code" }; // of a panel, the model's key
const FIELD_NAMES = ["sign", "exponent", "mantissa"];

// Words ---------------------------------------------------------------------------------------------------------------

const CODE = /^(0x[\da-f]+|0b[01]+)$/i;

/** What is typed is a code, as 0x7E or 0b1000: its number. Of other text null. */
const codeIn = text => (CODE.test(text.trim()) ? Number(text.trim()) : null);

/** A factor such as 3.5, 1e-3 or 2^-9; undefined of other text, and where a double makes 0 or infinity of it. */
function factorOf(text) {
  const found = /^\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)(?:\^([+-]?\d+))?\s*$/i.exec(text);
  if (!found) return undefined;
  const [, base, power] = found;
  const number = power === undefined ? Number(base) : Number(base) ** Number(power);
  const isLost = number === 0 && /[1-9]/.test(base.replace(/e.*/i, "")); // as of 1e-400
  return Number.isFinite(number) && !isLost ? number : undefined;
}

/**
 * A number as it is typed: also a fraction as 465/448, a product as 1.5*2^-9, inf and nan, and a code of a format. Of other
 * text, and beyond a double: undefined.
 */
export function parse(text, format = null) {
  const trimmed = text.trim();
  const code = codeIn(trimmed);
  if (code !== null) return format && code < 2 ** format.bits ? decode(format, code) : undefined;
  if (/^[+-]?nan$/i.test(trimmed)) return NaN;
  const infinite = /^([+-]?)inf(inity)?$/i.exec(trimmed);
  if (infinite) return infinite[1] === "-" ? -Infinity : Infinity;
  const parts = trimmed.split("/").map(part => part.split("*").map(factorOf));
  if (parts.length > 2 || parts.flat().includes(undefined)) return undefined;
  const [over, under = 1] = parts.map(factors => factors.reduce((product, factor) => product * factor));
  const quotient = over / under;
  const isLost = quotient === 0 && !parts[0].includes(0);
  return Number.isFinite(quotient) && !isLost ? quotient : undefined;
}

/** What is wrong with what was typed, in a sentence; nothing if all is right. */
export function complaint(valueText, scaleText, format) {
  if (parse(valueText, format) === undefined) {
    if (codeIn(valueText) !== null) return `“${valueText}” is not a code of ${label(format)}, which has ${format.bits} bits.`;
    return `“${valueText}” is not a number that a double holds. Give one such as 3.14, 1e-3, 1/3, 2^-9, inf or nan, or a code such as 0x7E or 0b1000.`;
  }
  const scale = parse(scaleText);
  if (scale > 0 && Number.isFinite(scale)) return "";
  return `The scale “${scaleText}” is not a finite number above zero. A scale is what a code is multiplied by.`;
}

const LAST_BITS = 2 ** -50; // of a number's size: a double has 53 bits, and two roundings spoil the last ones

/**
 * What becomes of a value, as `round` says. What differs from a number of the format in a double's last bits alone, as
 * 44.8 / 0.1 from 448, is that number: the difference is the double's, not the format's.
 */
export function became(format, value, scale, clamp) {
  const r = round(format, value, scale, clamp);
  const { decoded } = r;
  const isThat = Number.isFinite(decoded) && decoded !== 0 && Math.abs(r.target - decoded) <= LAST_BITS * Math.abs(decoded);
  if (!isThat) return r;
  const exact = { target: decoded, below: decoded, above: decoded, unclamped: decoded, isBeyond: false, isTie: false };
  return { ...r, ...exact, dequantized: value, error: 0, relative: 0 };
}

/** On which side of a format's range a number is. Only a format without a sign has a smallest number other than 0. */
function side(format, target) {
  return !format.signed && target < range(format)[0] ? "below the smallest number" : "beyond the largest number";
}

/** The answer for one format, in a sentence or two. */
export function sentence(format, value, scale, clamp) {
  const r = became(format, value, scale, clamp);
  const into = `${show(value)} becomes ${show(r.dequantized)} in ${label(format)}`;
  if (Number.isNaN(value)) {
    return format.nan_code === null
      ? `${label(format)} has no NaN: a cast stores ${hexOf(format, r.code)}, which reads as ${show(r.decoded)}.`
      : `NaN stays NaN in ${label(format)}: code ${hexOf(format, r.code)}.`;
  }
  if (r.error === 0) return `${into}: exact.`;
  if (!Number.isFinite(r.decoded)) return `${into}: it is ${side(format, r.target)}, and nothing clamps it.`;
  if (!Number.isFinite(r.error)) return clamp ? `${into}: clamped.` : `${into}: ${side(format, r.target)}, rounds to it.`;
  const off = value === 0 ? `off by ${few(r.error)}` : `off by ${few(r.error)}, ${few(100 * r.relative)} %`;
  return `${into}: ${off}${beyond(format, r, clamp)}.`;
}

function beyond(format, r, clamp) {
  if (!r.isBeyond) return "";
  return clamp ? `, clamped; a cast without the clamp gives ${show(r.unclamped)}` : `; ${side(format, r.target)}, rounds to it`;
}

/** The steps from a value to what is read back: [what is done, what it gives] each. */
function steps(format, value, scale, clamp, r) {
  const [least, most] = range(format);
  const limits = format.signed ? `±${show(most)}` : `${show(least)} to ${show(most)}`;
  const found = [["Divide by the scale", `${show(value)} ÷ ${show(scale)} = ${show(r.target)}`]];
  const clamped = Math.min(Math.max(r.target, least), most);
  if (!clamp) found.push([`No clamp to ${limits}`, r.isBeyond ? `it stays ${side(format, r.target)}` : "none needed"]);
  else if (Number.isNaN(r.target)) found.push([`Clamp to ${limits}`, "NaN stays NaN"]);
  else found.push([`Clamp to ${limits}`, r.isBeyond ? show(clamped) : "unchanged"]);
  found.push(["Round to nearest, ties to even", rounded(format, clamp ? clamped : r.target, r)]);
  const bits = `${bitsOf(format, r.code)} = ${hexOf(format, r.code)}`;
  found.push(["Store the code", bits]);
  found.push(["Multiply by the scale", `${show(r.decoded)} × ${show(scale)} = ${show(r.dequantized)}`]);
  const relative = r.error && Number.isFinite(r.relative) ? ` (${few(100 * r.relative)} % of the value)` : "";
  found.push(["Error", Number.isNaN(r.error) ? "none to speak of" : `${few(r.error)}${relative}`]);
  return found;
}

function rounded(format, target, r) {
  if (Number.isNaN(target)) return show(r.decoded);
  if (!Number.isFinite(r.decoded)) return `${side(format, target)}: ${show(r.decoded)}`;
  if (r.isBeyond && target !== r.decoded) return `${side(format, target)}, rounds to it: ${show(r.decoded)}`;
  if (r.below === r.above || target === r.decoded) return `${show(r.decoded)}, which the format has`;
  const between = `between ${show(r.below)} and ${show(r.above)}`;
  if (r.isTie) return `${between}, a tie: ${show(r.decoded)} has the even code`;
  return `${between}: ${show(r.decoded)} is nearer`;
}

/** These steps as a table. */
function stepsTable(format, value, scale, clamp, r) {
  return make(
    "table", { class: "steps" },
    make("caption", { class: "unseen" }, `The way of the value into ${label(format)} and back`),
    steps(format, value, scale, clamp, r).map(([what, gives]) => make("tr", {}, make("th", { scope: "row" }, what), make("td", {}, gives))),
  );
}

/** What kind of number a code is. */
function kindOf(format, code) {
  const value = decode(format, code);
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return "infinity";
  if (value === 0) return "zero";
  return Math.abs(value) < 2 ** (1 - format.bias) && format.mantissa_bits ? "subnormal" : "normal";
}

// One format: its bits, its number, the steps -------------------------------------------------------------------------

function panel(which, formats, change) {
  const chosen = select(formats.map(format => [format.name, format.name]), name => change({ [which]: name }));
  const bits = make("div", { class: "bits", role: "group", "aria-label": "Bits of the code" });
  const result = make("p", { class: "result" });
  const about = make("p", { class: "quiet about" });
  const formula = make("p", { class: "formula-of-code" });
  const table = make("div");
  const stepper = direction => () => change({ by: direction, of: which });
  const element = make(
    "div",
    { role: "group", class: "format", "data-which": which, "aria-label": which === "format" ? "First format" : "Second format" },
    field(which === "format" ? "Format" : "Beside it", chosen),
    result, bits, formula,
    make(
      "div", { class: "controls" },
      make("button", { type: "button", "data-step": "-1", onclick: stepper(-1) }, "← Number below"),
      make("button", { type: "button", "data-step": "1", onclick: stepper(1) }, "Number above →"),
    ),
    table, about,
  );
  let drawn = "";

  function drawBits(format) {
    bits.replaceChildren();
    const counts = [format.signed ? 1 : 0, format.exponent_bits, format.mantissa_bits];
    let weight = format.bits;
    for (const [number, name] of FIELD_NAMES.entries()) {
      if (!counts[number]) continue;
      const group = make("div", { class: `bit-field ${name}` });
      const row = make("div", { class: "bit-row" });
      for (let left = counts[number]; left > 0; left--) {
        weight -= 1;
        const bit = weight;
        const place = left === 1 && counts[number] === 1 ? `${name} bit` : `${name} bit worth ${2 ** (left - 1)}`;
        const flip = () => change({ flip: 2 ** bit, of: which });
        row.append(make("button", { type: "button", class: "bit", "data-bit": bit, "data-place": place, onclick: flip }));
      }
      group.append(row, make("span", { class: "bit-name" }));
      bits.append(group);
    }
  }

  function update(format, value, scale, clamp, isWrong, codeOf) {
    fill(chosen, format.name);
    if (drawn !== format.name) drawBits(format);
    drawn = format.name;
    element.classList.toggle("waiting", isWrong);
    if (isWrong) return;
    const r = became(format, value, scale, clamp);
    r.code = codeOf(which, format, r);
    const { sign, exponent, mantissa } = fields(format, r.code);
    for (const button of bits.querySelectorAll("button")) {
      const bit = Math.floor(r.code / 2 ** button.dataset.bit) % 2;
      button.textContent = bit;
      button.setAttribute("aria-label", `${bit}, ${button.dataset.place}`);
      button.classList.toggle("set", bit === 1);
    }
    const names = { sign: sign ? "sign: −" : "sign: +", exponent: `exponent ${exponent}`, mantissa: `mantissa ${mantissa}` };
    for (const [name, text] of Object.entries(names)) {
      const shown = bits.querySelector(`.${name} .bit-name`);
      if (shown) shown.textContent = text;
    }
    result.replaceChildren(
      make("strong", { "data-answer": "dequantized" }, show(r.dequantized)), " ",
      make("code", { "data-answer": "code" }, hexOf(format, r.code)), " ",
      make("span", { class: "quiet" }, `${kindOf(format, r.code)}, ${verdict(r, value)}`),
    );
    formula.replaceChildren(...formulaOf(format, r.code));
    table.replaceChildren(stepsTable(format, value, scale, clamp, r));
    about.textContent = aboutFormat(format);
    for (const button of element.querySelectorAll("[data-step]")) {
      button.disabled = !Number.isFinite(r.decoded) || next(format, r, Number(button.dataset.step)) === r.decoded;
    }
  }
  return { element, update };
}

function verdict(r, value) {
  if (Number.isNaN(value)) return Number.isNaN(r.decoded) ? "as it was" : "there is no NaN";
  if (r.error === 0) return "exact";
  return Number.isFinite(r.relative) ? `${few(100 * r.relative)} % off` : "not the value";
}

/** The next number of the format above or below the one that a value became. */
function next(format, r, direction) {
  const found = step(format, r.decoded, direction);
  return format.signed || found > 0 ? found : smallest(format);
}

function aboutFormat(format) {
  const parts = [
    `${format.bits} bits`,
    `largest ${show(largest(format))}`,
    `smallest ${show(smallest(format))}`,
    `bias ${format.bias}`,
    format.inf_code === null ? "no infinity" : `infinity ${hexOf(format, format.inf_code)}`,
    format.nan_code === null ? "no NaN" : `NaN ${hexOf(format, nanCode(format))}`,
  ];
  return parts.join(" · ");
}

/** A code's number from its fields: −1^S × 2^(E − bias) × (1 + M / steps). */
function formulaOf(format, code) {
  const value = decode(format, code);
  const { sign, exponent, mantissa } = fields(format, code);
  if (!Number.isFinite(value)) return [`This code is ${show(value)}.`];
  const over = 2 ** format.mantissa_bits;
  const isSubnormal = exponent === 0 && format.mantissa_bits > 0;
  const power = isSubnormal ? `1−${format.bias}` : `${exponent}−${format.bias}`;
  const parts = [sign ? "−" : "", "2", make("sup", {}, power)];
  if (format.mantissa_bits) parts.push(isSubnormal ? ` × ${mantissa}/${over}` : ` × (1 + ${mantissa}/${over})`);
  return [...parts, ` = ${show(value)}`];
}

// The line of numbers -------------------------------------------------------------------------------------------------

const LINE_HEIGHT = 186;
const AXIS = 100;
const LETTER = 7.2; // pixels: the width of a digit of 12 pixels
const CLOSEST = 1.1; // half of what is seen at the closest, in steps from number to number
const CLOSEST_TICKS = 3; // pixels between two of them

/** What is seen of the line: [from, to]. */
function windowOf(format, value, scale, zoom) {
  const target = value / scale;
  const r = became(format, value, scale);
  if (!Number.isFinite(target)) return [-1.1 * largest(format), 1.1 * largest(format)];
  const near = indexOf(format, r.decoded);
  const around = [near - 1, near + 1].map(index => Math.abs(atIndex(format, index) - r.decoded));
  const gap = r.above - r.below || Math.max(...around);
  const half = Math.max(gap, Math.abs(target - r.decoded)) * CLOSEST * 2 ** zoom;
  const middle = r.isBeyond ? (target + r.decoded) / 2 : target;
  return [middle - half, middle + half];
}

/** How far one can zoom out: until the whole format is seen, and no further. */
function mostZoom(format, value, scale) {
  const [from, to] = windowOf(format, value, scale, 0);
  if (!(to > from)) return 0;
  return Math.min(Math.max(Math.ceil(Math.log2((4 * largest(format)) / (to - from))), 0), 60);
}

function line(change) {
  const svg = draw("svg", { role: "img", height: LINE_HEIGHT });
  const zoom = make("input", { type: "range", min: 0, step: 1, oninput: event => change({ zoom: Number(event.target.value) }) });
  const button = (by, name, text) => {
    const press = () => change({ zoom: Math.min(Math.max(Number(zoom.value) + by, 0), Number(zoom.max)) });
    return make("button", { type: "button", "aria-label": name, onclick: press }, text);
  };
  const closer = button(-1, "Zoom in", "+");
  const wider = button(1, "Zoom out", "−");
  const element = make(
    "div", { role: "group", class: "line", "aria-label": "The line of numbers" },
    make("h2", {}, "On the line of numbers"),
    svg,
    make("div", { class: "controls" }, closer, field("Zoom out", zoom, "beside"), wider),
    make("p", { class: "quiet" }, "Press the line to take a number from it."),
  );
  let seen = [0, 1];
  let scaled = 1;
  svg.addEventListener("click", event => {
    const box = svg.getBoundingClientRect();
    const target = seen[0] + ((event.clientX - box.left) / box.width) * (seen[1] - seen[0]);
    // as many digits as a pixel is worth
    const digits = Math.ceil(Math.log10(Math.abs(target) / ((seen[1] - seen[0]) / box.width)));
    const value = target * scaled;
    if (Number.isFinite(value)) change({ value: String(Number(value.toPrecision(Math.min(Math.max(digits, 1), 12)))) });
  });

  function update(formats, value, scale, clamp, zoomed, isWrong) {
    element.classList.toggle("waiting", isWrong);
    if (isWrong) return;
    const [first] = formats;
    const most = mostZoom(first, value, scale);
    zoom.max = most;
    zoom.value = Math.min(zoomed, most);
    closer.disabled = Number(zoom.value) <= 0;
    wider.disabled = Number(zoom.value) >= most;
    seen = windowOf(first, value, scale, Number(zoom.value));
    scaled = scale;
    zoom.setAttribute("aria-valuetext", `${few(seen[0])} to ${few(seen[1])}`);
    const width = Math.max(svg.clientWidth || svg.parentElement?.clientWidth || 0, 280);
    svg.setAttribute("viewBox", `0 0 ${width} ${LINE_HEIGHT}`);
    drawLine(svg, width, seen, formats, value, scale, clamp);
  }
  return { element, svg, update };
}

function drawLine(svg, width, [from, to], formats, value, scale, clamp) {
  // no further than just beyond the edge, where infinity is too
  const x = number => Math.min(Math.max(((number - from) / (to - from)) * width, -20), width + 20);
  svg.replaceChildren(draw("line", { x1: 0, x2: width, y1: AXIS, y2: AXIS, class: "axis" }));
  const said = [];
  for (const [number, format] of formats.entries()) {
    const r = became(format, value, scale, clamp);
    const isAbove = number === 0;
    const side = isAbove ? "above" : "below";
    for (const [place, isPower] of ticks(format, from, to, width)) {
      const length = isPower ? 18 : 11;
      const end = isAbove ? AXIS - length : AXIS + length;
      svg.append(draw("line", { x1: x(place), x2: x(place), y1: AXIS, y2: end, class: `tick ${side}` }));
    }
    const y = isAbove ? AXIS - 24 : AXIS + 34;
    const taken = [];
    const important = [r.decoded, r.below, r.above].filter(Number.isFinite);
    const others = ticks(format, from, to, width).map(([place]) => place);
    for (const place of new Set([...important, ...others])) {
      const text = show(place);
      const half = (text.length * LETTER) / 2;
      const at = x(place);
      if (at - half < 0 || at + half > width || taken.some(([low, high]) => at + half > low - 8 && at - half < high + 8)) continue;
      taken.push([at - half, at + half]);
      const isAnswer = place === r.decoded;
      svg.append(draw("text", { x: at, y, class: isAnswer ? "answer" : "", "text-anchor": "middle" }, text));
    }
    const title = { x: 2, y: isAbove ? 14 : LINE_HEIGHT - 8, class: "title" };
    svg.append(draw("text", title, `${label(format)} ${isAbove ? "above" : "below"} the line`));
    if (Number.isFinite(r.decoded) && r.decoded >= from && r.decoded <= to) {
      const ring = draw("circle", { cx: x(r.decoded), cy: AXIS, r: isAbove ? 9 : 13, class: `ring ${side}` });
      const y = AXIS + (isAbove ? -4 : 4);
      if (!Number.isNaN(value)) svg.append(draw("line", { x1: x(value / scale), x2: x(r.decoded), y1: y, y2: y, class: `error ${side}` }));
      svg.append(ring);
    }
    const between = r.below === r.above ? "" : `, between ${show(r.below)} and ${show(r.above)}`;
    said.push(`${label(format)} gives ${show(r.decoded)}${between}`);
  }
  const target = value / scale;
  if (target >= from && target <= to) {
    const text = show(target);
    const half = (text.length * LETTER) / 2;
    const at = Math.min(Math.max(x(target), half), width - half);
    svg.append(
      draw("line", { x1: x(target), x2: x(target), y1: AXIS - 46, y2: AXIS, class: "leader" }),
      draw("text", { x: at, y: AXIS - 52, class: "answer", "text-anchor": "middle" }, text),
      draw("circle", { cx: x(target), cy: AXIS, r: 5, class: "target" }),
    );
  }
  svg.setAttribute("aria-label", `The line from ${few(from)} to ${few(to)}, with ${show(target)} on it: ${said.join("; ")}.`);
}

/** The numbers of a format in a window, none closer than a few pixels: [number, whether it is a power of two]. */
function ticks(format, from, to, width) {
  const found = [];
  const apart = ((to - from) / width) * CLOSEST_TICKS;
  const [least, most] = range(format);
  let [, place] = neighbours(format, Math.max(from, least));
  while (place <= to && found.length < 500) {
    if (place >= from) found.push([place, Number.isInteger(Math.log2(Math.abs(place)))]);
    if (place >= most) break;
    const [, following] = neighbours(format, Math.max(place + apart, step(format, place, 1)));
    if (!(following > place)) break;
    place = following;
  }
  return found;
}

// A block with one scale ----------------------------------------------------------------------------------------------

const HOW = {
  up: "up: nothing saturates",
  down: "down: as the MX specification",
  nearest: "to the nearest",
};

function block(formats, change) {
  const small = formats.filter(format => format.signed && format.bits <= 8);
  const element = select(small.map(format => [format.name, format.name]), name => change({ element: name }));
  const rounding = select(ROUNDINGS.map(how => [how, HOW[how]]), how => change({ rounding: how }));
  const others = make("textarea", { rows: 3, spellcheck: "false", oninput: event => change({ others: event.target.value }) });
  const said = make("p", { class: "said", "aria-live": "polite" });
  const scale = make("p", { class: "scale-of-block" });
  const cells = make("ol", { class: "cells" });
  const section = make(
    "div", { role: "group", class: "block", "aria-label": "A block with one scale" },
    make("h2", {}, `A block of ${BLOCK} with one scale`),
    make(
      "p", {},
      "In the MX formats, 32 numbers share one scale, a power of two, which is stored in E8M0. The first of them is the "
      + "value above, before its scale. One large number makes the scale large, and then small numbers become zero.",
    ),
    make("div", { class: "controls" }, field("Element", element), field("Round the scale", rounding)),
    said, scale, cells,
    make("details", {}, make("summary", {}, "The other numbers"), field(`${BLOCK - 1} numbers`, others)),
  );

  function clear() {
    scale.replaceChildren();
    cells.replaceChildren();
  }

  function update(state, byName, value) {
    fill(element, state.element);
    fill(rounding, state.rounding);
    fill(others, state.others);
    const format = byName.get(state.element);
    const numbers = state.others.split(/[\s,;]+/).filter(text => text).map(text => parse(text));
    const values = [value, ...numbers];
    if (values.some(number => !Number.isFinite(number))) {
      clear();
      said.textContent = "A block needs finite numbers: the value above, and those below.";
      return;
    }
    if (values.length > BLOCK) {
      clear();
      said.textContent = `A block has ${BLOCK} numbers, and these are ${values.length}.`;
      return;
    }
    const { exponent, amax, rounded: found } = roundBlock(format, values, state.rounding);
    const states = found.map((r, number) => stateOf(r, values[number]));
    const count = name => states.filter(one => one === name).length;
    const counts = ["exact", "rounded", "clamped", "zero"].map(name => `${count(name)} ${name}`);
    said.textContent = `The largest is ${show(amax)}, so the scale is ${show(2 ** exponent)}. Of ${values.length}: ${counts.join(", ")}.`;
    const e8m0 = byName.get("float8_e8m0fnu");
    scale.replaceChildren("Scale: ", make("code", { "data-answer": "scale" }, `2^${exponent}`), ", in E8M0 ");
    if (e8m0) {
      const code = encode(e8m0, 2 ** exponent);
      scale.append(make("code", {}, `${bitsOf(e8m0, code)} = ${hexOf(e8m0, code)}`));
    }
    cells.replaceChildren(...found.map((r, number) => cellOf(values[number], r, states[number])));
  }
  return { section, update };
}

function stateOf(r, value) {
  if (r.error === 0) return "exact";
  if (r.decoded === 0 && value !== 0) return "zero";
  return r.isBeyond ? "clamped" : "rounded";
}

function cellOf(value, r, state) {
  const name = state === "rounded" ? `${few(100 * r.relative)} % off` : state;
  return make(
    "li", { class: state },
    make("span", { class: "was" }, few(value)),
    make("span", { class: "is" }, few(r.dequantized)),
    make("span", { class: "kind" }, name),
  );
}

// All of it -----------------------------------------------------------------------------------------------------------

/** What is asked: the typed numbers, the two formats, and what is wrong with it, if anything is. */
function askedOf(model) {
  const formats = model.get("formats");
  const formatOf = key => formats.find(format => format.name === model.get(key)) ?? formats[0];
  const [typed, scaleTyped] = [model.get("value"), model.get("scale")];
  const chosen = [formatOf("format"), formatOf("beside")];
  const scale = parse(scaleTyped);
  const isCode = codeIn(typed) !== null;
  const decoded = parse(typed, chosen[0]);
  return {
    value: isCode && decoded !== undefined ? decoded * (scale ?? 1) : decoded,
    scale,
    // A code is shown as it is: infinity would be clamped.
    clamp: model.get("clamp") && !(isCode && Math.abs(decoded) === Infinity),
    chosen,
    problem: complaint(typed, scaleTyped, chosen[0]),
  };
}

/** A paragraph for each format; none of what cannot be answered. */
function paragraphs({ value, scale, clamp, chosen, problem }) {
  if (problem) return [];
  return chosen.map(format => make("p", {}, sentence(format, value, scale, clamp)));
}

/** What stands where no script runs: for each format its sentence and its steps. */
export function answer(model) {
  const asked = askedOf(model);
  if (asked.problem) return [make("p", {}, asked.problem)];
  const { value, scale, clamp, chosen } = asked;
  const table = format => stepsTable(format, value, scale, clamp, became(format, value, scale, clamp));
  return paragraphs(asked).flatMap((said, number) => [said, table(chosen[number])]);
}

function render({ model, el }) {
  const formats = model.get("formats");
  const byName = new Map(formats.map(format => [format.name, format]));
  el.classList.add("explorer", "explorer-bits");
  el.dataset.lmSuppressShortcuts = "true"; // keys that are pressed here are not JupyterLab's commands

  function save(changes) {
    for (const [key, value] of Object.entries(changes)) model.set(key, value);
    model.save_changes();
  }

  /** A change of the model's values; or of a code: a bit to flip, or a step to the next number. */
  function change({ flip, by, of, ...changes }) {
    if (flip === undefined && by === undefined) return save(changes);
    const { value, scale, clamp, chosen, problem } = askedOf(model);
    if (problem) return;
    const format = chosen[of === "format" ? 0 : 1];
    const r = became(format, value, scale, clamp);
    const before = codeOf(of, format, r);
    // a code has 16 bits at most, so that ^ keeps them all
    const code = flip === undefined ? encode(format, next(format, r, by)) : before ^ flip;
    const decoded = decode(format, code);
    const isNaNStill = Number.isNaN(value) && Number.isNaN(decoded);
    // The code that was made has to be what is shown: infinity would be clamped, and NaN has several codes.
    save({
      value: typed(decoded * scale),
      ...(isNaNStill ? {} : { code: -1, beside_code: -1 }),
      [CODES[of]]: Number.isNaN(decoded) ? code : -1,
      clamp: clamp && Math.abs(decoded) !== Infinity,
    });
  }

  /** The code of what a value became: of a NaN, the one that the reader made. */
  function codeOf(which, format, r) {
    const made = (which === "format" ? codeIn(model.get("value")) : null) ?? model.get(CODES[which]) ?? -1;
    const isThat = Number.isNaN(r.decoded) && made >= 0 && Number.isNaN(decode(format, made));
    return isThat && made < 2 ** format.bits ? made : r.code;
  }

  const value = input(text => change({ value: text }));
  const scale = input(text => change({ scale: text }));
  const clamp = make("input", { type: "checkbox", onchange: event => change({ clamp: event.target.checked }) });
  const wrong = make("p", { class: "wrong", role: "alert" });
  const said = make("div", { class: "answer", "aria-live": "polite" });
  const tries = make("div", { class: "controls tries", role: "group", "aria-label": "Values to try" });
  for (const text of TRIES) tries.append(make("button", { type: "button", onclick: () => change({ value: text }) }, text));
  const first = panel("format", formats, change);
  const second = panel("beside", formats, change);
  const numbers = line(change);
  const blocks = block(formats, change);
  el.replaceChildren(
    make("div", { class: "controls asked" }, field("Value", value, "wide"), field("Scale", scale, "wide"),
      field("Clamp first", clamp, "check")),
    tries, wrong, said, linkTo(model),
    make("div", { class: "formats" }, first.element, second.element),
    numbers.element, blocks.section,
  );

  function update() {
    const asked = askedOf(model);
    const { chosen, problem } = asked;
    fill(value, model.get("value"));
    fill(scale, model.get("scale"));
    clamp.checked = asked.clamp;
    wrong.textContent = problem && `Not yet: ${problem}`;
    value.setAttribute("aria-invalid", asked.value === undefined);
    scale.setAttribute("aria-invalid", Boolean(problem) && asked.value !== undefined);
    said.replaceChildren(...paragraphs(asked));
    const given = [asked.value, asked.scale, asked.clamp];
    first.update(chosen[0], ...given, Boolean(problem), codeOf);
    second.update(chosen[1], ...given, Boolean(problem), codeOf);
    numbers.update(chosen, ...given, model.get("zoom"), Boolean(problem));
    const element = byName.has(model.get("element")) ? model.get("element") : "float8_e4m3fn";
    const rounding = ROUNDINGS.includes(model.get("rounding")) ? model.get("rounding") : ROUNDINGS[0];
    blocks.update({ element, rounding, others: model.get("others") }, byName, asked.value);
  }

  return redrawn(model, numbers.svg, update);
}

/** A number as one would type it: it must read back as the same number. */
function typed(number) {
  if (Number.isNaN(number)) return "nan";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  return Object.is(number, -0) ? "-0" : String(number);
}

export default { render };
