"""How long a chapter takes to work through, counted: words, visible code, visible output,
predictions, puzzles.

    python tools/outputs/minutes.py 03        what a chapter's minutes are made of

The rates are the project's own. They suit a reader who knows JAX, runs each cell and reads what it
prints. One reader, with a stopwatch, solved every puzzle of the path by hand and needed 186
minutes. The path was counted as 118 minutes then. The difference sets BY_HAND.
"""

import dataclasses
import re
import sys

import nbformat

from tools import outputs

# Words of prose, lines of visible code, lines of visible output in a minute.
WORDS, CODE, OUTPUT = 180, 12, 25
PREDICTION, PUZZLE = 0.5, 4  # minutes
BY_HAND = 6  # further minutes for a puzzle, if the reader solves it by hand
PICTURE = 12  # a picture is read like so many lines of output
PREDICT = re.compile(r"^> \*\*Predict\.\*\*", re.M)
TASK = re.compile(r"^\*\*\d+\. ", re.M)  # a puzzle's statement begins with its number


@dataclasses.dataclass(frozen=True)
class Count:
    """What a chapter holds for its reader."""

    words: int = 0
    code: int = 0
    output: int = 0
    predictions: int = 0
    puzzles: int = 0

    @property
    def minutes(self) -> int:
        """What the counted takes, by the rates above."""
        return round(
            self.words / WORDS
            + self.code / CODE
            + self.output / OUTPUT
            + self.predictions * PREDICTION
            + self.puzzles * PUZZLE
        )

    @property
    def with_puzzles(self) -> int:
        """What it takes if the reader solves every puzzle by hand."""
        return self.minutes + BY_HAND * self.puzzles

    def __str__(self) -> str:
        return (
            f"{self.minutes:3} minutes, {self.with_puzzles:3} with the puzzles: "
            f"{self.words} words, {self.code} lines of code, {self.output} of output, "
            f"{self.predictions} predictions, {self.puzzles} puzzles"
        )


def count(notebook) -> Count:
    """What is counted: prose but for references, code that is not folded away, and output that is
    shown at once or answers a prediction. A puzzle's own cells, from its statement to its solution,
    are in its minutes.
    """
    words = code = shown = predictions = puzzles = 0
    asked = solving = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            source, *references = re.split("^## References", cell.source, flags=re.M)
            predictions += len(PREDICT.findall(source))
            puzzles += len(TASK.findall(source))
            asked, solving = (
                asked or bool(PREDICT.search(source)),
                bool(TASK.search(source)) or (solving and not re.search("^#", source, re.M)),
            )
            text = re.sub(r"\]\([^)]*\)|<[^>]*>", "", source)  # where a link leads is not read
            words += len(re.findall(r"[^\s|>#*`$-]\S*", text))
            if references:
                break
            continue
        folded = set(outputs.tags(cell))
        solution = cell.source.startswith("# Solution")
        if solving or solution:
            solving = not solution
            continue
        if not folded & {"hide-input", "hide-cell"}:
            code += sum(bool(line.strip()) for line in cell.source.splitlines())
        answers = asked and bool(cell.outputs)
        if answers or not folded & {"hide-output", "hide-cell"}:
            shown += sum(map(_lines, cell.outputs))
        asked = asked and not cell.outputs
    return Count(words, code, shown, predictions, puzzles)


def _lines(output) -> int:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if any(kind.startswith("image/") for kind in data):
        return PICTURE
    return sum(
        bool(line.strip()) for line in outputs.text_of(data.get("text/plain", "")).splitlines()
    )


def main() -> None:
    """Print the count of each chapter named."""
    counts = []
    for path in outputs.find(sys.argv[1:], outputs.NOTEBOOKS):
        found = count(nbformat.read(path, 4))
        counts.append(found)
        print(f"{path.stem:24}{found}")
    total = sum(found.minutes for found in counts)
    with_puzzles = sum(found.with_puzzles for found in counts)
    print(f"{'together':24}{total:3} minutes, {with_puzzles:3} with the puzzles")


if __name__ == "__main__":
    main()
