// What explorers are made of: elements, and numbers as text.

/** The short name of the field, as `Format.label` in Python: "E4M3FN", "BF16". */
export const label = format => format.name.split("_").at(-1).toUpperCase().replace("FLOAT", "F");

/** A number in nine digits at most: "0.333333333", "1e+30". */
export function show(number) {
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "infinity" : "-infinity";
  if (Object.is(number, -0)) return "-0";
  const size = Math.abs(number);
  if (size && (size < 1e-4 || size >= 1e9)) return number.toExponential(8).replace(/\.?0+e/, "e");
  return String(Number(number.toPrecision(9)));
}

/** The same in three digits at most. */
export const few = number => (Number.isFinite(number) ? show(Number(number.toPrecision(3))) : show(number));

/** An element with attributes, listeners (on...) and children; a child that is a string becomes text. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (typeof value == "boolean") element.toggleAttribute(key, value);
    else if (value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== ""));
  return element;
}

export function draw(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

let named = 0;

/** A control under its label, or beside it. */
export function field(text, control, className = "") {
  named += 1;
  control.id ||= `explorer-field-${named}`;
  return make("div", { class: `field ${className}` }, make("label", { for: control.id }, text), control);
}

export function input(change, attributes = {}) {
  const given = { type: "text", autocomplete: "off", spellcheck: "false", ...attributes };
  return make("input", { ...given, oninput: event => change(event.target.value) });
}

export function select(options, change) {
  const control = make("select", { onchange: event => change(event.target.value) });
  for (const [value, text] of options) control.append(make("option", { value }, text));
  return control;
}

/** Give a field a value, but not while it is typed in: the caret would jump. */
export function fill(control, value) {
  if (control.value !== value) control.value = value;
}

/** Update now, and once a frame after the model or the element's size has changed. Returns what ends that. */
export function redrawn(model, element, update) {
  let frame = 0;
  const later = () => {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(update);
  };
  const sized = new ResizeObserver(later);
  sized.observe(element);
  model.on("change", later);
  update();
  return () => {
    model.off("change", later);
    sized.disconnect();
    cancelAnimationFrame(frame);
  };
}

/** A button that copies a text, made when it is pressed; if the browser lets no page copy, the text is shown. */
export function copying(text, title, attributes = {}) {
  const said = make("span", { role: "status", class: "quiet" });
  async function copy() {
    const copied = text();
    try {
      await navigator.clipboard.writeText(copied);
      said.textContent = "Copied.";
    } catch {
      said.textContent = copied;
    }
  }
  return make("span", { class: "controls copying" }, make("button", { type: "button", onclick: copy, ...attributes }, title), said);
}

/** A button that copies the address of what is seen; nothing where the page's address does not say it. */
export function linkTo(model) {
  if (typeof model.address !== "string") return "";
  const button = copying(() => new URL(model.address, location.href).href, "Copy the link");
  // After a change it is another link.
  model.on("change", () => {
    button.lastChild.textContent = "";
  });
  return button;
}

/** A rule's page, from any page of the site. In what Node makes, from an explorer's own. */
export const pageOfRule = rule =>
  typeof location == "object" ? new URL(`../../rules/${rule}.html`, import.meta.url).href : `../../rules/${rule}.html`;

// Code in colours: the class of a part is the name of what it matched.
const STRING = String.raw`"(?:[^"\]|\[^])*"?`;
const PYTHON = new RegExp(
  String.raw`(?<literal>${STRING}|\b\d[\d.e_]*\b)|(?<comment>#.*)` +
    String.raw`|(?<keyword>\b(?:and|as|assert|class|def|else|for|from|if|import|in|is|lambda|not|or|return|with|None|True|False)\b)` +
    String.raw`|(?<fp8>\b(?:e4m3|e5m2|float8_\w+)\b)|(?<opcode>\b[a-z_]\w*(?=\())`,
  "gm",
);
// As `parts` of fp8lens/hlo/text.py.
const HLO = new RegExp(
  String.raw`(?<target>(?<=custom_call_target=)${STRING})|(?<other>${STRING})|(?<keyword>^HloModule|^ENTRY|\bROOT\b)` +
    String.raw`|(?<fp8>\bf[48]e\w+)|(?<literal>(?<=\bconstant\()[^{}()]+)|(?<opcode>(?<= )[a-z][a-z\d-]*(?=\())`,
  "gm",
);

/** The parts of a text, each with the name of the group that matched it, or "". */
function* partsOf(text, pattern) {
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    if (end < match.index) yield [text.slice(end, match.index), ""];
    const [name] = Object.entries(match.groups).find(([, part]) => part !== undefined);
    yield [match[0], name === "other" ? "" : name];
    end = match.index + match[0].length;
  }
  if (end < text.length) yield [text.slice(end), ""];
}

export const partsOfPython = text => [...partsOf(text, PYTHON)];
export const partsOfHlo = text => [...partsOf(text, HLO)];

/** Such parts as elements. */
export const coloured = parts => parts.map(([text, name]) => (name ? make("span", { class: `hlo-${name}` }, text) : text));
