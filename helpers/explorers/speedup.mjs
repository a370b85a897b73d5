// When is FP8 faster? A matmul [M, K] x [N, K] on a chip, in bf16 and in FP8, with what has to be quantized first: where the
// time goes, from which M on FP8 is faster, and what was measured of such matmuls. All seconds here are rooflines.
//
// The model has
//   m, n, k        the sizes
//   chip           the name of a chip
//   a, b           how the operands arrive: "fp8", or "given" or "amax" for bf16 and its scale
//   out            the result's type
//   chips          by name: bandwidth in bytes/s, and peak FLOP/s of "bf16" and "f8e4m3fn"
//   bits           of a value, by type
//   moved          bytes that quantizing moves for each value, by how the operand arrives
//   ways, outs     what is said of a, b and out
//   weights        N and K of models' weights, by name
//   most           the largest size
//   points         measurements: helpers/explorers/speedup.py has the fields
//   first          m to out, for what in the address is none of these
import { draw, few, field, fill, input, linkTo, make, redrawn, select } from "./elements.mjs";

const [BF16, FP8] = ["bf16", "f8e4m3fn"];
const SIZES = { m: "M, rows of A", n: "N, rows of B", k: "K, columns of both" };
const NEAR = 2; // a measurement is near if its N and K differ by no larger factor
const STEPS = 17; // sliders go from 2^0 to 2^17

// The arithmetic ------------------------------------------------------------------------------------------------------

/**
 * Seconds of each part of a chosen matmul, by type. As `matmul_seconds` and `quantize_seconds` of fp8lens: the longer of
 * arithmetic and memory traffic, and the bytes that quantizing moves. `m` may be any positive number.
 */
export function timesOf({ chips, bits, moved }, { m, n, k, chip, a, b, out }) {
  const { bandwidth, peak } = chips[chip];
  const flops = 2 * m * n * k;
  function matmul(type, result) {
    const bytes = (bits[type] * (m + n) * k + bits[result] * m * n) / 8;
    const arithmetic = flops / peak[type];
    const memory = bytes / bandwidth;
    return { flops, bytes, arithmetic, memory, matmul: Math.max(arithmetic, memory), a: 0, b: 0 };
  }
  const wide = matmul(BF16, out === "f32" ? "f32" : BF16);
  const eight = matmul(FP8, out);
  eight.a = (moved[a] * (m * k)) / bandwidth;
  eight.b = (moved[b] * (n * k)) / bandwidth;
  for (const one of [wide, eight]) one.seconds = one.matmul + one.a + one.b;
  return { [BF16]: wide, [FP8]: eight };
}

/** Times as fast as bf16. */
export function ratioOf(given, choice) {
  const times = timesOf(given, choice);
  return times[BF16].seconds / times[FP8].seconds;
}

const SAME = 1e-9; // times that differ by no more are the same, but for how floats round

/** 1 if more seconds are saved than quantizing takes, -1 if fewer, 0 if as many. */
function paysOf(saved, quantizing) {
  if (Math.abs(saved - quantizing) <= SAME * saved) return 0;
  return saved > quantizing ? 1 : -1;
}

const END = 2 ** 40; // what does not change before this M does not change behind it

/** Where something changes, once, behind `low` and up to `high`: the first number for which it is as it is for `high`. */
function changeOf(isSo, low, high) {
  const will = isSo(high);
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (isSo(middle) === will) high = middle;
    else low = middle;
  }
  return high;
}

/** The M for which FP8 is faster, as pairs [first, last]; null for the last if there is none. */
export function fasterOf(given, choice) {
  function isFaster(m) {
    const { [BF16]: wide, [FP8]: eight } = timesOf(given, { ...choice, m });
    return paysOf(wide.matmul - eight.matmul, eight.a + eight.b) > 0;
  }
  // Between these M all times grow by the same in each row, so "faster" changes at most once.
  const knots = new Set([1, END]);
  for (const type of [BF16, FP8]) {
    const isReached = m => {
      const { arithmetic, memory } = timesOf(given, { ...choice, m })[type];
      return arithmetic >= memory;
    };
    if (isReached(1) || !isReached(END)) continue;
    const at = changeOf(isReached, 1, END);
    knots.add(at - 1).add(at);
  }
  const ordered = [...knots].sort((one, other) => one - other);
  const changes = [];
  for (const [number, high] of ordered.entries()) {
    const low = ordered[number - 1];
    if (number === 0 || isFaster(low) === isFaster(high)) continue;
    changes.push(changeOf(isFaster, low, high));
  }
  const ranges = isFaster(1) ? [[1, null]] : [];
  for (const m of changes) {
    if (isFaster(m)) ranges.push([m, null]);
    else ranges.at(-1)[1] = m - 1;
  }
  return ranges;
}

// Words ---------------------------------------------------------------------------------------------------------------

export function duration(seconds) {
  if (seconds >= 1) return `${few(seconds)} s`;
  if (seconds >= 1e-3) return `${few(seconds * 1e3)} ms`;
  return seconds >= 1e-6 ? `${few(seconds * 1e6)} µs` : `${few(seconds * 1e9)} ns`;
}

function rangeText([from, to]) {
  if (to === null) return from === 1 ? "for every M" : `from M = ${from} on`;
  return from === 1 ? `up to M = ${to}` : `from M = ${from} to ${to}`;
}

function verdictOf(bf16, fp8) {
  if ((Math.max(bf16, fp8) / Math.min(bf16, fp8)).toFixed(2) === "1.00") return "FP8 and bf16 are equally fast, within half a percent";
  if (fp8 < bf16) return `FP8 is ${(bf16 / fp8).toFixed(2)} times as fast as bf16`;
  return `bf16 is ${(fp8 / bf16).toFixed(2)} times as fast as FP8`;
}

const limitOf = ({ arithmetic, memory }) => (arithmetic >= memory ? "arithmetic" : "memory bandwidth");

function limitsText(wide, eight) {
  const [one, other] = [limitOf(wide), limitOf(eight)];
  if (one === other) return `The matmul's limit is ${one} in both types.`;
  return `The matmul's limit is ${one} in bf16, and ${other} in FP8.`;
}

function inequalityText(saved, quantizing) {
  if (!quantizing) return `The matmul takes ${duration(saved)} less in FP8, and nothing has to be quantized.`;
  const than = { 1: "less than that", "-1": "more than that", 0: "as much" }[paysOf(saved, quantizing)];
  return `The matmul takes ${duration(saved)} less in FP8. Quantizing takes ${duration(quantizing)}, ${than}.`;
}

/** The answer, the sentence that matters first. */
export function sentencesOf(given, choice) {
  const { [BF16]: wide, [FP8]: eight } = timesOf(given, choice);
  const [bf16, fp8] = [wide.seconds, eight.seconds];
  const [one, other] = bf16 < fp8 ? [bf16, fp8] : [fp8, bf16];
  const ranges = fasterOf(given, choice).map(rangeText).join(" and ") || "for no M";
  const said = [
    `${verdictOf(bf16, fp8)}: ${duration(one)} against ${duration(other)}, by the ${choice.chip}'s roofline, without launches.`,
    limitsText(wide, eight),
    inequalityText(wide.matmul - eight.matmul, eight.a + eight.b),
    `With all else as chosen, FP8 is faster ${ranges}.`,
  ];
  if ([choice.m, choice.n, choice.k].some(size => size % 16)) {
    said.push("XLA pads a size that is not a multiple of 16, in extra kernels, which are not counted.");
  }
  return said;
}

/** Whether a measurement is drawn beside the curves of a choice. */
function isNear(point, choice) {
  const isAbout = (one, other) => Math.max(one / other, other / one) <= NEAR;
  const [, n, k] = point.shape;
  return point.speedup !== null && point.chip === choice.chip && isAbout(n, choice.n) && isAbout(k, choice.k);
}

/** What is estimated of a measured matmul. */
export function estimateOf(given, { shape, chip, a, b }) {
  const [m, n, k] = shape;
  const choice = { m, n, k, chip, a, b, out: BF16 };
  return { ratio: ratioOf(given, choice), seconds: timesOf(given, choice)[FP8].seconds };
}

// The charts ----------------------------------------------------------------------------------------------------------

const HEIGHT = 270;
const [LEFT, RIGHT, TOP, BOTTOM] = [46, 14, 16, 44];
const APART = 20; // numbers of measurements, in pixels
const NARROW = 500; // pixels: a phone's width has fewer numbers on an axis

/** The curves that are always drawn, thin, and how A and B arrive in them. */
const USUAL = [["fp8", "fp8"], ["given", "fp8"], ["amax", "amax"]];

const points = pairs => pairs.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");

const powers = (base, low, high, every) =>
  Array.from({ length: Math.floor((high - low) / every) + 1 }, (_, number) => base ** (low + number * every));

function frame(svg, title) {
  const width = Math.max(svg.clientWidth || svg.parentElement?.clientWidth || 0, 280);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren(
    draw("text", { class: "title", x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, title),
  );
  return width;
}

/** A chart of the speedup against M. Pressing it gives an M. */
function speedupChart(onPress) {
  const svg = draw("svg", { role: "img", height: HEIGHT, class: "speedups" });
  let place = { width: 300, high: STEPS };

  function press(event) {
    const box = svg.getBoundingClientRect();
    const inside = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    onPress(2 ** Math.min(Math.max(Math.round(inside * place.high), 0), place.high));
  }
  svg.addEventListener("pointerdown", event => {
    svg.setPointerCapture?.(event.pointerId);
    press(event);
  });
  svg.addEventListener("pointermove", event => {
    if (event.buttons) press(event);
  });

  function update(given, choice, near, said) {
    const width = frame(svg, "M, rows of A");
    const high = Math.max(STEPS, Math.ceil(Math.log2(choice.m)));
    place = { width, high };
    const rows = Array.from({ length: high * 4 + 1 }, (_, number) => 2 ** (number / 4));
    const curve = (a, b) => rows.map(m => [m, ratioOf(given, { ...choice, m, a, b })]);
    const chosen = curve(choice.a, choice.b);
    const others = USUAL.map(([a, b]) => curve(a, b));
    const tops = [chosen, ...others].flat().map(([, ratio]) => ratio);
    const top = Math.max(2.2, ...tops, ...near.map(point => point.speedup)) * 1.02;
    const x = m => LEFT + (Math.log2(m) / high) * (width - LEFT - RIGHT);
    const y = ratio => HEIGHT - BOTTOM - (ratio / top) * (HEIGHT - TOP - BOTTOM);
    const path = pairs => points(pairs.map(([m, ratio]) => [x(m), y(ratio)]));
    for (const ratio of [0, 0.5, 1, 1.5, 2]) {
      svg.append(
        draw("line", { class: ratio === 1 ? "one" : "grid", x1: LEFT, x2: width - RIGHT, y1: y(ratio), y2: y(ratio) }),
        draw("text", { class: ratio === 1 ? "strong" : "", x: LEFT - 7, y: y(ratio) + 4, "text-anchor": "end" }, String(ratio)),
      );
    }
    for (const m of powers(2, 0, high, width < NARROW ? 4 : 2)) {
      svg.append(draw("text", { x: x(m), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, String(m)));
    }
    for (const [number, other] of others.entries()) {
      svg.append(draw("polyline", { class: `usual usual-${number}`, points: path(other) }));
    }
    svg.append(
      draw("line", { class: "now", x1: x(choice.m), x2: x(choice.m), y1: TOP, y2: HEIGHT - BOTTOM }),
      draw("polyline", { class: "chosen", points: path(chosen) }),
    );
    const placed = [];
    for (const [number, point] of near.entries()) {
      const [at, height] = [x(Math.min(point.shape[0], 2 ** high)), y(point.speedup)];
      const isTaken = left => placed.some(other => Math.hypot(left - other.left, height - other.height) < APART);
      let left = at - APART;
      while (isTaken(left) && left > LEFT + APART) left -= APART;
      placed.push({ left, height });
      svg.append(
        draw("line", { class: "measured", x1: left, x2: at, y1: height, y2: height }),
        draw("circle", { class: "point", cx: at, cy: height, r: 3 }),
        draw("circle", { class: "measured", cx: left, cy: height, r: 8.5 }),
        draw("text", { class: "measured", x: left, y: height + 4, "text-anchor": "middle" }, String(number + 1)),
      );
    }
    svg.append(draw("circle", { class: "chosen", cx: x(choice.m), cy: y(ratioOf(given, choice)), r: 6 }));
    svg.setAttribute("aria-label", `Times as fast as bf16, against M from 1 to ${2 ** high}. ${said}`);
  }
  return { svg, update };
}

/** Both types' rooflines, and the chosen matmul below them. */
function rooflineChart() {
  const svg = draw("svg", { role: "img", height: HEIGHT, class: "rooflines" });

  function update(given, choice) {
    const width = frame(svg, "FLOPs for each byte moved");
    const { bandwidth, peak } = given.chips[choice.chip];
    const times = timesOf(given, choice);
    const [low, high] = [0, 5];
    const [bottom, top] = [Math.log10(bandwidth), Math.log10(peak[FP8]) + 0.35];
    const clamp = (number, least, most) => Math.min(Math.max(number, least), most);
    const x = intensity => LEFT + ((clamp(Math.log10(intensity), low, high) - low) / (high - low)) * (width - LEFT - RIGHT);
    const y = rate => TOP + ((top - clamp(Math.log10(rate), bottom, top)) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    for (const rate of powers(10, Math.ceil(bottom), top - 0.2, 1)) {
      svg.append(
        draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(rate), y2: y(rate) }),
        draw("text", { x: LEFT - 7, y: y(rate) + 4, "text-anchor": "end" }, String(rate / 1e12)),
      );
    }
    for (const intensity of powers(10, low, high - 1, 1)) {
      svg.append(draw("text", { x: x(intensity), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, String(intensity)));
    }
    for (const [type, name, shift] of [[BF16, "bf16", 16], [FP8, "FP8", -7]]) {
      const ridge = peak[type] / bandwidth;
      const line = [[1, bandwidth], [ridge, peak[type]], [10 ** high, peak[type]]];
      svg.append(
        draw("polyline", { class: `roof ${name}`, points: points(line.map(([at, rate]) => [x(at), y(rate)])) }),
        draw("text", { class: name, x: width - RIGHT, y: y(peak[type]) + shift, "text-anchor": "end" }, `${name}: ${few(peak[type] / 1e12)}`),
      );
    }
    svg.append(draw("text", { class: "title", x: LEFT, y: TOP - 3, "text-anchor": "start" }, "TFLOP/s"));
    const { [BF16]: wide, [FP8]: eight } = times;
    const quantized = eight.bytes + (eight.a + eight.b) * bandwidth;
    const mark = (name, bytes, seconds) => {
      const place = { cx: x(wide.flops / bytes), cy: y(wide.flops / seconds) };
      svg.append(draw("circle", { class: name, ...place, r: 6 }));
      return place;
    };
    const from = mark("FP8 alone", eight.bytes, eight.matmul);
    if (quantized > eight.bytes) {
      const to = mark("FP8 all", quantized, eight.seconds);
      svg.append(draw("line", { class: "link", x1: from.cx, y1: from.cy, x2: to.cx, y2: to.cy }));
    }
    mark("bf16", wide.bytes, wide.seconds);
    const words = [
      `bf16: ${few(wide.flops / wide.bytes)} FLOPs a byte, ${few(wide.flops / wide.seconds / 1e12)} TFLOP/s.`,
      `FP8, the matmul: ${few(wide.flops / eight.bytes)} FLOPs a byte, ${few(wide.flops / eight.matmul / 1e12)} TFLOP/s.`,
    ];
    if (quantized > eight.bytes) {
      words.push(`FP8 with quantizing: ${few(wide.flops / quantized)} FLOPs a byte, ${few(wide.flops / eight.seconds / 1e12)} TFLOP/s.`);
    }
    svg.setAttribute("aria-label", `Rooflines of the ${choice.chip} in bf16 and FP8, and the chosen matmul. ${words.join(" ")}`);
    return words;
  }
  return { svg, update };
}

// Parts of the page ---------------------------------------------------------------------------------------------------

/** What the bars and the table are made of: a class, a name, and its seconds in a time of `timesOf`. */
const PARTS = [
  ["arithmetic", "Arithmetic", one => one.arithmetic],
  ["waiting", "Waiting for memory", one => one.matmul - one.arithmetic],
  ["making-a", "Quantizing A", one => one.a],
  ["making-b", "Quantizing B", one => one.b],
];

function barOf(name, one, longest) {
  const bar = make("span", { class: "bar", "aria-hidden": "true" });
  for (const [part, , seconds] of PARTS) {
    const share = (100 * seconds(one)) / longest;
    if (share > 0) bar.append(make("span", { class: part, style: `width:${share}%` }));
  }
  return make("div", { class: "timed" }, make("b", {}, name), bar, make("span", { class: "total" }, duration(one.seconds)));
}

function tableOf(given, choice) {
  const { [BF16]: wide, [FP8]: eight } = timesOf(given, choice);
  const what = `[${choice.m}, ${choice.k}] times [${choice.n}, ${choice.k}] on the ${choice.chip}`;
  const head = text => make("th", { scope: "col" }, text);
  const row = (part, name, cells) => make(
    "tr", { "data-part": part },
    make("th", { scope: "row" }, make("span", { class: `chip ${part}`, "aria-hidden": "true" }), name),
    cells.map(cell => make("td", {}, cell)),
  );
  const text = seconds => (seconds ? duration(seconds) : "none");
  return make(
    "table", { class: "parts" },
    make("caption", { class: "unseen" }, `Where the time goes: ${what}`),
    make("tr", {}, make("td"), head("bf16"), head("FP8")),
    PARTS.map(([part, name, seconds]) => row(part, name, [text(seconds(wide)), text(seconds(eight))])),
    row("together", "Together", [duration(wide.seconds), duration(eight.seconds)]),
    row("traffic", "The matmul's limit", [limitOf(wide), limitOf(eight)]),
  );
}

/** How far an estimate is off: "+4 %". */
function percent(share) {
  const off = Math.round(100 * (share - 1));
  return `${off > 0 ? "+" : off < 0 ? "−" : ""}${Math.abs(off)} %`;
}

const sizesOf = ({ shape }) => shape.join(" × ");

function sourceOf({ source, url, date }) {
  return [url ? make("a", { href: url }, source) : source, " ", make("span", { class: "date" }, date)];
}

/** A table of measurements, each with a button that chooses its sizes. */
function measurementsOf(caption, heads, list, show, cells) {
  const table = make(
    "table", { class: "measurements" },
    make("caption", { class: "unseen" }, caption),
    make("tr", {}, ["M × N × K, and the source", ...heads].map(text => make("th", { scope: "col" }, text))),
  );
  for (const point of list) {
    const button = make("button", { type: "button", onclick: () => show(point), "aria-label": `Choose ${sizesOf(point)}: ${point.what}` }, sizesOf(point));
    const how = make("div", { class: "how" }, `${point.what}; ${point.hardware}; `, sourceOf(point));
    table.append(make("tr", {}, make("td", {}, button, how), cells(point).map(text => make("td", {}, text))));
  }
  return scrolling(caption, table);
}

/** What may be wider than the page, as where text is large. */
function scrolling(name, ...children) {
  return make("div", { class: "scrolls", tabindex: "0", role: "group", "aria-label": name }, ...children);
}

function measuredPart(given, show) {
  const own = given.points.filter(point => !point.url);
  const compared = given.points.filter(point => point.speedup !== null);
  const alone = given.points.filter(point => point.speedup === null);
  return [
    make("h2", {}, "Published and measured"),
    make("p", {}, own.length
      ? `This project measured ${own.length} of these matmuls. The others are published by their authors. Press a row's sizes to choose them.`
      : "There is no record of a GPU here. These figures are published by others. Press a row's sizes to choose them."),
    make("h3", {}, "Times as fast as bf16"),
    measurementsOf("Times as fast as bf16, estimated and measured", ["Estimated", "Measured", "Error"], compared, show, point => {
      const { ratio } = estimateOf(given, point);
      return [ratio.toFixed(2), point.speedup.toFixed(2), percent(ratio / point.speedup)];
    }),
    make("p", { class: "quiet" }, "Error is the estimate's. It counts three bytes for each value that gets a scale by row or block. XLA's kernels for blocks move more: chapter 18 compiles them."),
    make("h3", {}, "FP8 alone"),
    measurementsOf("FP8 alone, roofline and measured", ["Roofline", "Measured", "Reached"], alone, show, point => {
      const { seconds } = estimateOf(given, point);
      return [duration(seconds), duration(point.seconds), `${Math.round((100 * seconds) / point.seconds)} %`];
    }),
    make("p", { class: "quiet" }, "An H800 has the H100's rates, which the estimate takes; a GB200 those of the B200."),
  ];
}

// All of it -----------------------------------------------------------------------------------------------------------

const DATA = ["chips", "bits", "moved", "ways", "outs", "weights", "most", "points", "first"];
const dataOf = model => Object.fromEntries(DATA.map(key => [key, model.get(key)]));

const isSize = (given, number) => Number.isInteger(number) && number >= 1 && number <= given.most;

/** What is chosen; in place of what cannot be, what the explorer begins with. */
function choiceOf(given, model) {
  const known = { chip: given.chips, a: given.ways, b: given.ways, out: given.outs };
  const choice = {};
  for (const [key, first] of Object.entries(given.first)) {
    const value = model.get(key);
    const isKnown = key in SIZES ? isSize(given, value) : Object.hasOwn(known[key], value);
    choice[key] = isKnown ? value : first;
  }
  return choice;
}

function paragraphs(given, choice) {
  const [head, ...rest] = sentencesOf(given, choice);
  const [verdict, how] = head.split(": ");
  return [make("p", {}, make("strong", {}, verdict), `: ${how}`), make("p", {}, rest.join(" "))];
}

/** What stands where no script runs: the sentences, and where the time goes. */
export function answer(model) {
  const given = dataOf(model);
  const choice = choiceOf(given, model);
  return [...paragraphs(given, choice), tableOf(given, choice)];
}

function render({ model, el }) {
  const given = dataOf(model);
  el.classList.add("explorer", "explorer-speedup");
  el.dataset.lmSuppressShortcuts = "true"; // keys that are pressed here are not JupyterLab's commands

  function save(changes) {
    for (const [key, value] of Object.entries(changes)) model.set(key, value);
    model.save_changes();
  }

  const wrong = make("p", { class: "wrong", role: "alert" });
  const controls = {};
  const taken = {}; // of each size: the number that its field was given last, or that was typed

  function typed(key, text) {
    const digits = text.replace(/[\s,_]/g, "");
    const number = /^\d{1,16}$/.test(digits) ? Number(digits) : NaN;
    const isRight = isSize(given, number);
    controls[key].typed.setAttribute("aria-invalid", String(!isRight));
    wrong.textContent = isRight ? "" : `Not yet: ${key.toUpperCase()} must be a whole number from 1 to ${given.most}.`;
    if (!isRight) return;
    taken[key] = number;
    save({ [key]: number });
  }

  /** What is not a size is not kept when the field is left. */
  function left(key) {
    controls[key].typed.setAttribute("aria-invalid", "false");
    wrong.textContent = "";
    fill(controls[key].typed, String(choiceOf(given, model)[key]));
  }

  const sizes = Object.entries(SIZES).map(([key, text]) => {
    const box = input(value => typed(key, value), { inputmode: "numeric", onblur: () => left(key) });
    const slider = make("input", {
      type: "range", min: 0, max: STEPS, "aria-label": `${key.toUpperCase()} in powers of two`,
      oninput: event => save({ [key]: 2 ** Number(event.target.value) }),
    });
    controls[key] = { typed: box, slider };
    const shown = field(text, box, "size");
    shown.append(slider);
    return shown;
  });
  const weights = select([["", "my own"], ...Object.keys(given.weights).map(name => [name, name])], name => {
    if (!name) return;
    const [n, k] = given.weights[name];
    save({ n, k });
  });
  const options = values => Object.entries(values);
  const chip = select(Object.keys(given.chips).map(name => [name, name]), value => save({ chip: value }));
  const a = select(options(given.ways), value => save({ a: value }));
  const b = select(options(given.ways), value => save({ b: value }));
  const out = select(options(given.outs), value => save({ out: value }));

  const told = make("div", { class: "answer", "aria-live": "polite" });
  const bars = make("div", { class: "bars" });
  const inequality = make("p", { class: "inequality" });
  const parts = scrolling("Seconds of each part");
  const speedups = speedupChart(m => save({ m }));
  const rooflines = rooflineChart();
  const legend = make("ul", { class: "legend" });
  const near = make("ul", { class: "near" });
  const roofs = make("ul", { class: "legend" });

  function show({ shape, chip: name, a: ofA, b: ofB }) {
    const [m, n, k] = shape;
    save({ m, n, k, chip: name, a: ofA, b: ofB, out: BF16 });
    told.scrollIntoView({ block: "start" });
  }

  el.replaceChildren(
    told, linkTo(model),
    make(
      "div", { class: "controls fields" },
      ...sizes, field("Weights of a model", weights, "wide"), field("Chip", chip),
      field("A arrives in", a), field("B is stored in", b), field("Result", out),
    ),
    wrong,
    make("h2", {}, "Where the time goes"),
    bars, inequality, parts,
    make("h2", {}, "Times as fast as bf16, against M"),
    speedups.svg, legend, near,
    make("h2", {}, "Rooflines"),
    rooflines.svg, roofs,
    ...measuredPart(given, show),
  );

  function updateControls(choice) {
    for (const key of Object.keys(SIZES)) {
      const { slider } = controls[key];
      // What is typed stays as it is typed, such as 12,345, until something else changes the size: a step back, too.
      if (taken[key] !== choice[key]) left(key);
      taken[key] = choice[key];
      slider.value = Math.round(Math.log2(choice[key]));
      slider.setAttribute("aria-valuetext", String(choice[key]));
    }
    const isOf = name => given.weights[name][0] === choice.n && given.weights[name][1] === choice.k;
    weights.value = Object.keys(given.weights).find(isOf) ?? "";
    fill(chip, choice.chip);
    fill(a, choice.a);
    fill(b, choice.b);
    fill(out, choice.out);
  }

  function update() {
    const choice = choiceOf(given, model);
    updateControls(choice);
    const { [BF16]: wide, [FP8]: eight } = timesOf(given, choice);
    told.replaceChildren(...paragraphs(given, choice));
    const longest = Math.max(wide.seconds, eight.seconds);
    bars.replaceChildren(barOf("bf16", wide, longest), barOf("FP8", eight, longest));
    const [saved, spent] = [wide.matmul - eight.matmul, eight.a + eight.b];
    inequality.replaceChildren(
      make("span", {}, make("b", {}, duration(saved)), " saved in the matmul"),
      make("span", { class: "than" }, { 1: ">", "-1": "<", 0: "=" }[paysOf(saved, spent)]),
      make("span", {}, make("b", {}, spent ? duration(spent) : "0 µs"), " spent on quantizing"),
    );
    parts.replaceChildren(tableOf(given, choice));
    const found = given.points.filter(point => isNear(point, choice));
    speedups.update(given, choice, found, sentencesOf(given, choice)[0].split(": ")[0]);
    const named = (ofA, ofB) => `A: ${given.ways[ofA]}; B: ${given.ways[ofB]}`;
    legend.replaceChildren(
      make("li", { class: "chosen" }, `as chosen: ${named(choice.a, choice.b)}`),
      ...USUAL.flatMap(([ofA, ofB], number) => {
        const isChosen = ofA === choice.a && ofB === choice.b;
        return isChosen ? [] : [make("li", { class: `usual-${number}` }, named(ofA, ofB))];
      }),
    );
    near.replaceChildren(...found.map((point, number) => make(
      "li", {}, make("b", {}, String(number + 1)),
      make("span", {}, `${point.source}, ${sizesOf(point)}, ${point.what}: ${point.speedup.toFixed(2)}, estimated ${estimateOf(given, point).ratio.toFixed(2)}`),
    )));
    const words = rooflines.update(given, choice);
    roofs.replaceChildren(...words.map((text, number) => make("li", { class: ["bf16", "FP8 alone", "FP8 all"][number] }, text)));
  }

  return redrawn(model, speedups.svg, update);
}

export default { render };
