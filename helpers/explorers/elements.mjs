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

/** A button that copies the address of what is seen; nothing in a notebook, where there is none. */
export function linkTo(model) {
  if (typeof model.address !== "string") return "";
  const said = make("span", { role: "status", class: "quiet" });
  async function copy() {
    const address = new URL(model.address, location.href).href;
    try {
      await navigator.clipboard.writeText(address);
      said.textContent = "Copied.";
    } catch {
      said.textContent = address; // the browser does not let a page copy
    }
  }
  // After a change it is another link.
  model.on("change", () => {
    said.textContent = "";
  });
  return make("span", { class: "controls" }, make("button", { type: "button", onclick: copy }, "Copy the link"), said);
}
