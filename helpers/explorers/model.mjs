// "Bring your model": for a function that is pasted, how fp8lens is asked what XLA makes of it: the command, a test, and how
// to dump the program that it is a part of. Nothing is run here.
//
// The model has
//   code             the text of a file with the function, or of the function alone: its first `def` counts
//   shapes           of the function's arguments, as `fp8lens --shapes` has them: "bf16[64,256] f32[]"
//   chip, gemm       for what it is compiled, and who may run its matmuls
//   backward         whether its gradients are compiled too
//   types, libraries, chips, command   what can be chosen, and what makes a dump: helpers/explorers/model.py
import { coloured, copying, field, fill, linkTo, make, partsOfPython, redrawn, select } from "./elements.mjs";

const FILE = "layers.py";
const IMPORTS = "import jax\nimport jax.numpy as jnp\n";
const SHAPE = /^(\w+)\[((?:\d+(?:,\d+)*)?)\]$/;
const FIRST = "bf16[512,1024]"; // what an argument is until it is said

/** The name of the first function of a code, and its arguments that have no default; null if there is none. */
export function signatureOf(code) {
  const found = /^[ \t]*def\s+(\w+)\s*\(/m.exec(code);
  if (!found) return null;
  const parts = [""];
  let depth = 0;
  for (const letter of code.slice(found.index + found[0].length).replace(/#.*/g, "")) {
    if (depth === 0 && letter === ")") break;
    depth += "([{".includes(letter) - ")]}".includes(letter);
    if (depth === 0 && letter === ",") parts.push("");
    else parts[parts.length - 1] += letter;
  }
  const names = [];
  for (const part of parts.map(one => one.trim())) {
    if (part.startsWith("*")) break; // what follows is given by name
    if (/^\w/.test(part) && !part.includes("=")) names.push(/^\w+/.exec(part)[0]);
  }
  return { name: found[1], names };
}

const shapesOf = text => text.split(" ").filter(Boolean);

/** What cannot be answered, in a sentence; "" if all can. */
function complaint(given, signature) {
  if (!signature) return "There is no function: paste one that begins with def.";
  const { names } = signature;
  if (names[0] === "self") return "This is a method: write a function that calls it, such as def step(variables, x): return model.apply(variables, x).";
  if (!names.length) return "The function has no arguments: XLA would compute its result when it compiles.";
  for (const [at, name] of names.entries()) {
    const [, type] = SHAPE.exec(given.shapes[at]) ?? [];
    if (!Object.hasOwn(given.types, type ?? "")) {
      return `Of ${name}, give a type and a shape, such as f32[64,256], or f32[] for one number. Types: ${Object.keys(given.types).join(", ")}.`;
    }
  }
  if (given.backward && !differentiated(given, names).length) {
    return "There is nothing to differentiate: no argument is an array of bf16, f16 or f32.";
  }
  return "";
}

/** The numbers of the arguments that have a gradient: arrays of a float type wider than FP8. */
function differentiated(given, names) {
  const isWide = at => /^(bf16|f16|f32)\[\d/.test(given.shapes[at]);
  return names.map((_, at) => at).filter(isWide);
}

/** The file with the function, and beside it one that computes its gradients. */
function fileOf(given, { name, names }) {
  const hasImports = /^\s*(import|from)\s/m.test(given.code);
  const own = `${hasImports ? "" : `${IMPORTS}\n\n`}${given.code.trim()}\n`;
  if (!given.backward) return own;
  const numbers = differentiated(given, names);
  return `${own}

def ${name}_and_gradients(*arguments):
    """The gradients of ${numbers.map(at => names[at]).join(", ")}, by a loss in the place of yours."""

    def loss(*arguments):
        results = jax.tree.leaves(${name}(*arguments))
        return sum(jnp.sum(jnp.square(one.astype(jnp.float32))) for one in results)

    return jax.value_and_grad(loss, argnums=(${numbers.join(", ")},))(*arguments)
`;
}

function testOf(given, { names }, asked) {
  const shapes = names.map((name, at) => {
    const [, type, dims] = SHAPE.exec(given.shapes[at]);
    const tuple = dims.includes(",") || !dims ? `(${dims.replaceAll(",", ", ")})` : `(${dims},)`;
    return `        jax.ShapeDtypeStruct(${tuple}, jnp.${given.types[type]}),  # ${name}`;
  });
  return `${IMPORTS}from fp8lens import assert_fp8_gemms

from ${FILE.replace(".py", "")} import ${asked}


def test_${asked}_multiplies_in_fp8():
    shapes = [
${shapes.join("\n")}
    ]
    assert_fp8_gemms(${asked}, *shapes, target="${given.chip}", gemm="${given.gemm}")
`;
}

/** What the page gives for a function: a title, what it is for, and a text each. */
export function textsOf(given) {
  const signature = signatureOf(given.code);
  const wrong = complaint(given, signature);
  if (wrong) return { wrong, texts: [] };
  const asked = given.backward ? `${signature.name}_and_gradients` : signature.name;
  const shapes = given.shapes.slice(0, signature.names.length).join(" ");
  const options = `--target ${given.chip} --gemm ${given.gemm}`;
  return {
    wrong: "",
    texts: [
      { name: FILE, say: "Save this, with all that the function needs.", text: fileOf(given, signature) },
      {
        name: "The command",
        say: "It compiles, and says of each matmul in which type it multiplies, what is left outside, why, and the fix. It needs no GPU.",
        text: `fp8lens ${FILE}:${asked} --shapes "${shapes}" ${options} --ledger --reasons\n`,
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

const KEYS = ["code", "chip", "gemm", "backward", "types", "command"];

function given(model) {
  const found = Object.fromEntries(KEYS.map(key => [key, model.get(key)]));
  const count = signatureOf(found.code)?.names.length ?? 0;
  const shapes = shapesOf(model.get("shapes"));
  return {
    ...found,
    shapes: Array.from({ length: count }, (_, at) => shapes[at] ?? FIRST),
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
  const rows = make("div", { class: "arguments", role: "group", "aria-label": "Types and shapes of the arguments" });
  const wrong = make("p", { class: "wrong", role: "alert" });
  const texts = make("div", { class: "texts" });
  let named = "";
  let drawn = "";

  /** A field for each argument, made anew when the function has others. */
  function drawRows(values) {
    const names = signatureOf(values.code)?.names ?? [];
    if (names.join() !== named) {
      const change = at => event => {
        const shapes = given(model).shapes;
        shapes[at] = event.target.value.replace(/\s/g, "") || "?";
        save({ shapes: shapes.join(" ") });
      };
      const input = at => make("input", { type: "text", autocomplete: "off", spellcheck: "false", oninput: change(at) });
      rows.replaceChildren(...names.map((name, at) => field(name, input(at))));
      named = names.join();
    }
    for (const [at, input] of [...rows.querySelectorAll("input")].entries()) {
      if (document.activeElement !== input) fill(input, values.shapes[at]);
    }
  }

  el.replaceChildren(
    make(
      "div", { class: "both" },
      make(
        "div", {},
        field("Your function", code), rows,
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
