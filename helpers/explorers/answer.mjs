// Prints the answer of an explorer as HTML: what its page shows before any script runs.
//
//     node answer.mjs NAME [plain] < the model's values, as JSON
//
// The module makes elements as it does in a browser. Here an element only knows how it is written. `plain`: with those
// attributes alone that a notebook's output may have.
import { readFileSync } from "node:fs";

const [name, plain] = process.argv.slice(2);
const PLAIN = ["scope", "colspan"];

const escaped = text => text.replace(/[&<>"]/g, letter => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);

class Element {
  attributes = new Map();
  children = [];

  constructor(name) {
    this.name = name;
  }

  setAttribute(key, value) {
    if (!plain || PLAIN.includes(key)) this.attributes.set(key, String(value));
  }

  toggleAttribute(key, is) {
    if (is) this.setAttribute(key, "");
  }

  addEventListener() {} // nobody touches it here

  append(...children) {
    this.children.push(...children);
  }

  toString() {
    const attributes = [...this.attributes].map(([key, value]) => ` ${key}="${escaped(value)}"`).join("");
    return `<${this.name}${attributes}>${written(this.children)}</${this.name}>`;
  }
}

const written = children => children.map(child => (child instanceof Element ? String(child) : escaped(String(child)))).join("");

globalThis.document = { createElement: name => new Element(name) };
const { answer } = await import(`./${name}.mjs`);
const values = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(written(answer({ get: key => values[key] })));
