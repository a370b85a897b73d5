// "Check my model": for a function that is pasted, how fp8lens is asked what XLA makes of it: the command, a test, and how
// to dump the program that it is a part of. Nothing is run here.
//
// The model has
//   code             the text of a file with the function, or of the function alone
//   asked            the function's name; "" for the file's last
//   shapes           of each argument by its name, as `fp8lens --shapes` has them: {"x": "bf16[64,256]"}; of what is no
//                    array, such as Flax's variables, Python that makes it by shapes alone
//   chip, gemm       for what it is compiled, and who may run its matmuls
//   backward         whether its gradients are compiled too
//   types, libraries, chips, command   what can be chosen, and what makes a dump: helpers/explorers/model.py
import { coloured, copying, field, fill, linkTo, make, partsOfPython, redrawn, select } from "./elements.mjs";

const FILE = "layers.py";
const IMPORTS = "import jax\nimport jax.numpy as jnp\n";
const SHAPE = /^(\w+)\[((?:\d+(?:,\d+)*)?)\]$/;
const FIRST = "bf16[512,1024]"; // an example of an argument's type and shape
const NAME = String.raw`[\p{L}_][\p{L}\p{M}\p{N}_]*`;

/** The functions of a code, each with the names of its arguments that have no default: those that no class or function
 * holds, or if there are none, all. */
export function signaturesOf(code) {
  const found = [...code.matchAll(new RegExp(String.raw`^([ \t]*)def\s+(${NAME})\s*\(`, "gmu"))];
  const outer = found.filter(([, indent]) => !indent);
  return (outer.length ? outer : found).map(one => ({
    name: one[2].normalize("NFKC"), // as Python has it
    names: argumentsOf(code.slice(one.index + one[0].length)),
  }));
}

function argumentsOf(rest) {
  const parts = [""];
  let depth = 0;
  for (const letter of rest.replace(/#.*/g, "")) {
    if (depth === 0 && letter === ")") break;
    depth += "([{".includes(letter) - ")]}".includes(letter);
    if (depth === 0 && letter === ",") parts.push("");
    else parts[parts.length - 1] += letter;
  }
  const names = [];
  for (const part of parts.map(one => one.trim())) {
    if (part.startsWith("*")) break; // what follows is given by name
    const [name] = new RegExp(`^${NAME}`, "u").exec(part) ?? [];
    if (name && !part.includes("=")) names.push(name.normalize("NFKC"));
  }
  return names;
}

/** The function that is asked about: the one that is named, else the file's last that has arguments. */
export function signatureOf({ code, asked }) {
  const all = signaturesOf(code);
  return all.findLast(one => one.name === asked) ?? all.findLast(one => one.names.length) ?? all.at(-1) ?? null;
}

const INIT = name => `jax.eval_shape(model.init, jax.random.key(0), ${name})`;

/** What is said of an argument; of Flax's variables what mostly makes them. */
function saidOf({ shapes }, name, names) {
  if (Object.hasOwn(shapes, name)) return String(shapes[name]);
  return name === "variables" ? INIT(names.find(one => one !== name) ?? "x") : "";
}

const shapeOf = text => SHAPE.exec(text.replace(/\s/g, ""));
const isMade = text => !shapeOf(text) && text.includes("(");

/** What cannot be answered, in a sentence; "" if all can. */
function complaint(given, signature) {
  if (!signature) return "There is no function: paste one that begins with def.";
  const { names } = signature;
  if (names[0] === "self") return "This is a method: write a function that calls it, such as def step(variables, x): return model.apply(variables, x).";
  if (!names.length) return "The function has no arguments: XLA would compute its result when it compiles.";
  for (const name of names) {
    const text = saidOf(given, name, names);
    if (/^\s*\w+\s*\[[^\]]*@/.test(text)) {
      return `${name} is sharded. What this page gives is for one device: leave out @ and what follows it, or write the command yourself, with --mesh data=8.`;
    }
    if (isMade(text)) continue;
    const [, type] = shapeOf(text) ?? [];
    if (!Object.hasOwn(given.types, type ?? "")) {
      return `Of ${name}, give a type and a shape, such as ${FIRST}, or f32[] for one number. Types: ${Object.keys(given.types).join(", ")}.`;
    }
  }
  if (given.backward && !differentiated(given, names).length) {
    return "There is nothing to differentiate: no argument is an array of bf16, f16 or f32.";
  }
  return "";
}

/** The numbers of the arguments that have a gradient: arrays of a float type wider than FP8, and what is no array. */
function differentiated(given, names) {
  const isWide = text => isMade(text) || /^(bf16|f16|f32)\[\d/.test(text.replace(/\s/g, ""));
  return names.map((_, at) => at).filter(at => isWide(saidOf(given, names[at], names)));
}

/** An argument in Python. */
function arrayOf(given, text) {
  const [, type, dims] = shapeOf(text);
  const tuple = dims.includes(",") || !dims ? `(${dims.replaceAll(",", ", ")})` : `(${dims},)`;
  return `jax.ShapeDtypeStruct(${tuple}, jnp.${given.types[type]})`;
}

/** The function of --args; "" where each argument is an array, whose shape the command has. */
function makerOf(given, { name, names }) {
  const said = names.map(one => [one, saidOf(given, one, names)]);
  if (!said.some(([, text]) => isMade(text))) return "";
  const lines = [
    ...said.filter(([, text]) => !isMade(text)).map(([one, text]) => `${one} = ${arrayOf(given, text)}`),
    ...said.filter(([, text]) => isMade(text)).map(([one, text]) => `${one} = ${text.trim()}`),
  ];
  return `

def ${name}_arguments():
    """What ${name} is compiled with: shapes alone, nothing is computed."""
    ${lines.join("\n    ")}
    return ${names.join(", ")}${names.length > 1 ? "" : ","}
`;
}

/** The file with the function, and beside it one that makes its arguments, and one that computes its gradients. */
function fileOf(given, signature) {
  const hasImports = /^\s*(import|from)\s/m.test(given.code);
  const own = `${hasImports ? "" : `${IMPORTS}\n\n`}${given.code.trim()}\n`;
  const further = makerOf(given, signature) + (given.backward ? gradientsOf(given, signature) : "");
  const knowsJax = /^import (.*, *)?jax *(,|#|$)/m.test(own) && /^(import|from) .*\bjnp\b/m.test(own);
  return `${own}${further && !knowsJax ? `\n${IMPORTS}` : ""}${further}`;
}

function gradientsOf(given, { name, names }) {
  const numbers = differentiated(given, names);
  return `

def ${name}_and_gradients(*arguments):
    """The gradients of ${numbers.map(at => names[at]).join(", ")}, by a loss in the place of yours."""

    def loss(*arguments):
        results = jax.tree.leaves(${name}(*arguments))
        return sum(jnp.sum(jnp.square(one.astype(jnp.float32))) for one in results)

    return jax.value_and_grad(loss, argnums=(${numbers.join(", ")},))(*arguments)
`;
}

function testOf(given, { name, names }, asked) {
  const module = FILE.replace(".py", "");
  const target = `target="${given.chip}", gemm="${given.gemm}"`;
  if (makerOf(given, { name, names })) {
    return `from fp8lens import assert_fp8_gemms

from ${module} import ${asked}, ${name}_arguments


def test_${asked}_multiplies_in_fp8():
    assert_fp8_gemms(${asked}, *${name}_arguments(), ${target})
`;
  }
  const shapes = names.map(one => `        ${arrayOf(given, saidOf(given, one, names))},  # ${one}`);
  return `${IMPORTS}from fp8lens import assert_fp8_gemms

from ${module} import ${asked}


def test_${asked}_multiplies_in_fp8():
    shapes = [
${shapes.join("\n")}
    ]
    assert_fp8_gemms(${asked}, *shapes, ${target})
`;
}

/** What the page gives for a function: a title, what it is for, and a text each. */
export function textsOf(given) {
  const signature = signatureOf(given);
  const wrong = complaint(given, signature);
  if (wrong) return { wrong, texts: [] };
  const asked = given.backward ? `${signature.name}_and_gradients` : signature.name;
  const shapes = signature.names.map(one => saidOf(given, one, signature.names).replace(/\s/g, "")).join(" ");
  const how = makerOf(given, signature) ? `--args ${signature.name}_arguments` : `--shapes "${shapes}"`;
  const options = `--target ${given.chip} --gemm ${given.gemm}`;
  return {
    wrong: "",
    texts: [
      { name: FILE, say: "Save this, with all that the function needs.", text: fileOf(given, signature) },
      {
        name: "The command",
        say: "It compiles, and says of each matmul in which type it multiplies, what is left outside, why, and the fix. It needs no GPU.",
        text: `fp8lens ${FILE}:${asked} ${how} ${options} --ledger --reasons\n`,
      },
      { name: `test_${FILE}`, say: "It fails, with these reasons, if a matmul is not FP8.", text: testOf(given, signature, asked) },
      {
        name: "The dump",
        say: "Of your whole program, where it runs. Give the folder to Read my dump, or to fp8lens dumps --reasons.",
        text: `${given.command}\n`,
      },
    ],
  };
}

const KEYS = ["code", "asked", "shapes", "chip", "gemm", "backward", "types", "command"];

function given(model) {
  const found = Object.fromEntries(KEYS.map(key => [key, model.get(key)]));
  return {
    ...found,
    chip: model.get("chips").includes(found.chip) ? found.chip : "H100",
    gemm: Object.hasOwn(model.get("libraries"), found.gemm) ? found.gemm : "cublaslt",
  };
}

function shownText({ name, say, text }, copy) {
  const code = name.endsWith(".py") ? coloured(partsOfPython(text)) : [text];
  return make(
    "div", { role: "group", class: "text", "aria-label": name },
    make("div", { class: "head" }, make("h2", {}, name), copy ? copying(() => text, "Copy", { "aria-label": `Copy ${name}` }) : ""),
    make("p", {}, say),
    make("div", { class: "scrolls", tabindex: "0", role: "group", "aria-label": `${name}, its text` }, make("pre", { class: name.endsWith(".py") ? "" : "command" }, code)),
  );
}

/** What stands where no script runs: the texts of the first function. */
export function answer(model) {
  return textsOf(given(model)).texts.map(one => shownText(one, false));
}

function render({ model, el }) {
  el.classList.add("explorer", "explorer-model");
  el.dataset.lmSuppressShortcuts = "true"; // keys that are pressed here are not JupyterLab's commands
  function save(changes) {
    model.set(changes);
    model.save_changes();
  }
  const code = make("textarea", { rows: "8", spellcheck: "false", oninput: event => save({ code: event.target.value }) });
  const options = values => values.map(one => (Array.isArray(one) ? one : [one, one]));
  const chip = select(options(model.get("chips")), value => save({ chip: value }));
  const gemm = select(Object.entries(model.get("libraries")), value => save({ gemm: value }));
  const backward = make("input", { type: "checkbox", onchange: event => save({ backward: event.target.checked }) });
  const ofFile = select([], value => save({ asked: value }));
  const which = make("div");
  const rows = make("div", { class: "arguments", role: "group", "aria-label": "Types and shapes of the arguments" });
  const wrong = make("p", { class: "wrong", role: "alert" });
  const texts = make("div", { class: "texts" });
  let named = "";
  let drawn = "";

  /** The file's functions, and a field for each argument of the one that is asked about; made anew where they are others. */
  function drawRows(values) {
    const all = signaturesOf(values.code).map(one => one.name);
    const { name, names } = signatureOf(values) ?? { name: "", names: [] };
    if (JSON.stringify([all, name, names]) !== named) {
      ofFile.replaceChildren(...all.map(one => make("option", { value: one }, one)));
      ofFile.value = name;
      which.replaceChildren(all.length > 1 ? field("Which function", ofFile) : "");
      const change = one => event => save({ shapes: { ...model.get("shapes"), [one]: event.target.value } });
      const text = one => make("input", { type: "text", autocomplete: "off", spellcheck: "false", placeholder: FIRST, oninput: change(one) });
      rows.replaceChildren(...names.map(one => field(one, text(one))));
      named = JSON.stringify([all, name, names]);
    }
    for (const [at, input] of [...rows.querySelectorAll("input")].entries()) {
      const text = saidOf(values, names[at], names);
      input.parentElement.classList.toggle("wide", isMade(text));
      if (document.activeElement !== input) fill(input, text);
    }
  }

  el.replaceChildren(
    make(
      "div", { class: "both" },
      make(
        "div", {},
        field("Your function", code), which, rows,
        make("p", { class: "quiet" }, `Of an argument that is no array, such as Flax's variables, write what makes it: ${INIT("x")}.`),
        make("div", { class: "controls" }, field("Chip", chip), field("Matmuls by", gemm), field("with gradients", backward, "check")),
        wrong, linkTo(model),
      ),
      texts,
    ),
  );
  return redrawn(model, el, () => {
    const values = given(model);
    fill(code, values.code);
    fill(chip, values.chip);
    fill(gemm, values.gemm);
    backward.checked = values.backward;
    drawRows(values);
    const found = textsOf(values);
    if (JSON.stringify(found) === drawn) return; // what is said below a text, "Copied.", stays
    drawn = JSON.stringify(found);
    wrong.textContent = found.wrong;
    texts.replaceChildren(...found.texts.map(one => shownText(one, true)));
  });
}

export default { render };
