"""How long a chapter takes to work through, counted.

    python -m tools.outputs.minutes 03

The rates suit a reader who knows JAX, runs each cell and reads what it prints. One reader, with a
stopwatch, solved every puzzle of the path by hand and needed 186 minutes. The path was counted as
118 minutes then. The difference sets BY_HAND.
"""

import re
import sys

import nbformat
from nbformat import NotebookNode

from tools.outputs.chapters import find
from tools.outputs.notebook import tags, text_of

# Words of prose, lines of visible code, lines of visible output in a minute.
WORDS, CODE, OUTPUT = 180, 12, 25
PREDICTION, PUZZLE = 0.5, 4  # minutes
BY_HAND = 6  # further minutes for a puzzle, if the reader solves it by hand
PICTURE = 12  # a picture is read like so many lines of output
PREDICT = re.compile(r"^> \*\*Predict\.\*\*", re.M)
TASK = re.compile(r"^\*\*\d+\. ", re.M)  # a puzzle's statement begins with its number


def count(notebook: NotebookNode) -> tuple[int, int]:
    """The minutes of a chapter, without its puzzles solved by hand and with them.

    Counted are prose up to the references, code that is not folded, and output that is shown at
    once or answers a prediction. A puzzle's own cells, from its statement to its solution, are in
    its minutes.
    """
    minutes, puzzles = 0.0, 0
    asked = solving = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            source, *references = re.split("^## References", cell.source, flags=re.M)
            predictions, tasks = len(PREDICT.findall(source)), len(TASK.findall(source))
            asked = asked or predictions > 0
            solving = tasks > 0 or (solving and not re.search("^#", source, re.M))
            puzzles += tasks
            text = re.sub(r"\]\([^)]*\)|<[^>]*>", "", source)  # where a link leads is not read
            words = len(re.findall(r"[^\s|>#*`$-]\S*", text))
            minutes += words / WORDS + predictions * PREDICTION + tasks * PUZZLE
            if references:
                break
        elif cell.source.startswith("# Solution"):
            solving = False
        elif not solving:
            if not {"hide-input", "hide-cell"} & {*tags(cell)}:
                minutes += _full_lines(cell.source) / CODE
            if asked or not {"hide-output", "hide-cell"} & {*tags(cell)}:
                minutes += sum(map(_lines, cell.outputs)) / OUTPUT
            asked = asked and not cell.outputs
    return round(minutes), round(minutes) + BY_HAND * puzzles


def _lines(output: NotebookNode) -> int:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if any(kind.startswith("image/") for kind in data):
        return PICTURE
    return _full_lines(text_of(data.get("text/plain", "")))


def _full_lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


if __name__ == "__main__":
    for path in find(sys.argv[1:]):
        reading, with_puzzles = count(nbformat.read(path, 4))
        print(f"{path.stem:24}{reading:3} minutes, {with_puzzles:3} with the puzzles")
