// Runs explorers on a page of the site, where no kernel is.
//
// An explorer is one ES module: `export default { render({ model, el }) }`, with anywidget's model, so that JupyterLab runs
// the same file. On a page it stands in
//
//     <div class="explorer" data-explorer="bits" data-state='{"format": "e4m3fn", "code": 56}'> an answer to read </div>
//
// `data-state` has what the explorer begins with. Those keys are kept in the page's address, as #format=e5m2&code=60, if
// they differ from it: the address can be sent to somebody, and the browser's back button undoes a step. Anything else that
// the explorer sets is kept in memory, and so is what `data-data` has, which the explorer needs besides. What the element
// holds is for readers without scripts: Node made it with the same module (answer.mjs). The explorer replaces it when it has
// what it needs; if it fails, the answer stays.
//
// Where it stands among other things, as in a chapter, it has `data-quiet`: it leaves the page's address alone.

const STEP = 1000; // milliseconds: changes that follow each other sooner are one step back
const REST = 150; // and the address is written when nothing has changed for so long

// A value as the address has it, and back. What the reader's address holds is of the type of what the explorer begins with,
// or not taken; an explorer must still look whether it is a value that it knows.
function write(value) {
  return typeof value == "string" ? value : JSON.stringify(value);
}

function read(text, beginning) {
  if (typeof beginning == "string") return text;
  try {
    const value = JSON.parse(text);
    const isSame = typeof value == typeof beginning && Array.isArray(value) == Array.isArray(beginning);
    return isSame && value !== null ? value : beginning;
  } catch {
    return beginning;
  }
}

// anywidget's model, whose values are the page's address.
export class Model {
  #beginning;
  #values;
  #listeners = new Map();
  #timer = 0;
  #written = 0;
  #isQuiet;

  constructor(beginning, data = {}, isQuiet = false) {
    this.#beginning = beginning;
    this.#isQuiet = isQuiet;
    this.#values = new Map(Object.entries({ ...data, ...beginning, ...this.#inAddress() }));
    if (isQuiet) return;
    addEventListener("popstate", () => this.#follow());
    addEventListener("hashchange", () => this.#follow());
  }

  get(key) {
    return this.#values.get(key);
  }

  set(key, value) {
    const entries = typeof key == "object" ? Object.entries(key) : [[key, value]];
    const changed = entries.filter(([name, one]) => write(one ?? null) !== write(this.get(name) ?? null));
    for (const [name, one] of changed) this.#values.set(name, one);
    for (const [name, one] of changed) this.#tell(`change:${name}`, one);
    if (changed.length) this.#tell("change");
  }

  save_changes() {
    if (this.#isQuiet) return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#save(), REST);
  }

  on(names, listener) {
    for (const name of names.split(" ")) {
      if (!this.#listeners.has(name)) this.#listeners.set(name, new Set());
      this.#listeners.get(name).add(listener);
    }
  }

  // Without a listener: all of that name; without a name: all.
  off(names, listener) {
    for (const name of names ? names.split(" ") : [...this.#listeners.keys()]) {
      if (listener) this.#listeners.get(name)?.delete(listener);
      else this.#listeners.delete(name);
    }
  }

  send() {} // to a kernel

  // The address of the page with these values: what a reader can send to somebody. Where it has none, undefined.
  get address() {
    if (this.#isQuiet) return undefined;
    const kept = new URLSearchParams();
    for (const [key, beginning] of Object.entries(this.#beginning)) {
      const value = this.get(key);
      if (write(value) !== write(beginning)) kept.set(key, write(value));
    }
    const fragment = kept.toString();
    return location.pathname + location.search + (fragment && `#${fragment}`);
  }

  #tell(name, value) {
    for (const listener of [...(this.#listeners.get(name) ?? [])]) listener(this, value);
  }

  #inAddress() {
    const found = {};
    if (this.#isQuiet || !location.hash.includes("=")) return found; // or a place on the page
    for (const [key, text] of new URLSearchParams(location.hash.slice(1))) {
      if (Object.hasOwn(this.#beginning, key)) found[key] = read(text, this.#beginning[key]);
    }
    return found;
  }

  #save() {
    const { address } = this;
    if (address === location.pathname + location.search + location.hash) return;
    const isSameStep = Date.now() - this.#written < STEP;
    this.#written = Date.now();
    history[isSameStep ? "replaceState" : "pushState"](null, "", address);
  }

  // Back, forward, or a link to this page with other values.
  #follow() {
    if (location.hash && !location.hash.includes("=")) return;
    clearTimeout(this.#timer);
    this.set({ ...this.#beginning, ...this.#inAddress() });
  }
}

async function show(el) {
  const { explorer, state, data } = el.dataset;
  const answer = [...el.childNodes];
  try {
    const { default: module } = await import(`./${explorer}.mjs`);
    const model = new Model(JSON.parse(state ?? "{}"), JSON.parse(data ?? "{}"), "quiet" in el.dataset);
    await module.render({ model, el });
    el.dataset.shown = ""; // tests wait for it
  } catch (error) {
    const said = document.createElement("p");
    said.textContent = `This page only shows its first answer: ${error.message}`;
    el.replaceChildren(...answer, said);
    throw error;
  }
}

for (const el of document.querySelectorAll(".explorer[data-explorer]")) show(el);
