// Runs fp8lens in Pyodide, Python compiled to WebAssembly, beside the page: the page stays alive while a dump is read, and
// ends this worker where the reader cancels.
//
// It is given {id, what, ...} and answers {id, answer} or {id, error}; meanwhile {id, told} says what it does. The answers
// are what reader.py returns: plain data.

const HERE = new URL(".", import.meta.url).href;

let pyodide;
let reader;
let current; // the id of what is being done

function tell(told) {
  postMessage({ id: current, told });
}

async function load() {
  tell("Loading Python");
  const { loadPyodide } = await import("./pyodide/pyodide.mjs");
  const archive = fetch(`${HERE}fp8lens.zip`).then((response) => response.arrayBuffer());
  pyodide = await loadPyodide({ indexURL: `${HERE}pyodide/` });
  pyodide.unpackArchive(await archive, "zip");
  tell("Loading fp8lens");
  return pyodide.runPython("import reader; reader.Reader()");
}

// Of several files, {name, file} each, the one that has the compiled program; a sentence that says which it is; and those
// that say what XLA's rewriter was given.
function choose(files) {
  if (files.length === 1) return [files[0], "", []];
  const sizes = Object.fromEntries(files.map(({ name, file }) => [name, file.size]));
  const choice = JSON.parse(reader.choose(JSON.stringify(sizes)));
  if (!choice) throw new Error(`None of these ${files.length} files is the text of a program.`);
  const beside = files.filter(({ name }) => choice.beside.includes(name));
  return [files.find(({ name }) => name === choice.name), `Read ${choice.said}`, beside];
}

// `most`: how many bytes are read. What is gzipped or zipped is unpacked by fp8lens, up to as many bytes of text.
async function bytesOf({ name, file }, most) {
  let read = 0;
  let told = 0;
  const counted = new TransformStream({
    transform(chunk, controller) {
      read += chunk.length;
      if (Date.now() - told > 100) {
        told = Date.now();
        tell(`Reading the file: ${Math.round((100 * read) / file.size)}%`);
      }
      controller.enqueue(chunk);
    },
  });
  const stream = file.stream().pipeThrough(counted);
  const chunks = [];
  let length = 0;
  try {
    for (const pieces = stream.getReader(); ; ) {
      const { done, value } = await pieces.read();
      if (done) break;
      length += value.length;
      if (length > most) {
        pieces.cancel();
        throw new RangeError(`${name} has more than ${most / 1e6} MB of text: read it with the command fp8lens.`);
      }
      chunks.push(value);
    }
  } catch (error) {
    if (error instanceof RangeError) throw error;
    throw new Error(`${name} cannot be read.`);
  }
  const bytes = new Uint8Array(length);
  let at = 0;
  for (const chunk of chunks) {
    bytes.set(chunk, at);
    at += chunk.length;
  }
  return bytes;
}

// Python's own bytes: what Python would get of JavaScript's is a view.
const toPython = (bytes) => pyodide.toPy(bytes).tobytes();

const isZip = ([p, k, three, four]) => p === 0x50 && k === 0x4b && three === 3 && four === 4;

function read(name, bytes) {
  const summary = JSON.parse(reader[isZip(bytes) ? "read_zip" : "read"](name, toPython(bytes), tell));
  if (summary.error) throw new Error(summary.error);
  return summary;
}

const DO = {
  async read({ files, most }) {
    const [file, said, beside] = choose(files);
    const bytes = await bytesOf(file, most);
    for (const one of beside) reader.lay(one.name, toPython(await bytesOf(one, most)));
    return { said, ...read(file.name, bytes), used: [file, ...beside].map(({ name }) => name) };
  },
  async example() {
    const data = await (await fetch(`${HERE}example.zip`)).arrayBuffer();
    return read("example.zip", new Uint8Array(data));
  },
  async ask({ question, of }) {
    return JSON.parse(reader.ask(question, JSON.stringify(of)));
  },
};

// Of Python's traceback, the last line says what happened.
const lastLine = (error) => String(error.message ?? error).trim().split("\n").at(-1);

async function answer({ id, what, ...given }) {
  current = id;
  try {
    reader ??= await load();
  } catch (error) {
    const said = `Python could not be started in this browser (${lastLine(error)}). In a terminal, fp8lens dump.txt says the same.`;
    return postMessage({ id, error: said, isFatal: true });
  }
  try {
    postMessage({ id, answer: await DO[what](given) });
  } catch (error) {
    const isFatal = Boolean(error.pyodide_fatal_error) || error instanceof WebAssembly.RuntimeError;
    // An error of Python's has a type, and is fp8lens' own.
    const said = error.type ? `fp8lens itself failed (${lastLine(error)}). Please report this.` : lastLine(error);
    postMessage({ id, error: said, isFatal });
  }
}

// One after the other.
let last = Promise.resolve();
onmessage = ({ data }) => {
  last = last.then(() => answer(data));
};
