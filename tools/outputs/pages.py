"""The pages that are no chapters: each number in them is printed by a chapter they link to, or
computed here.
"""

import functools
import re
import tomllib

import nbformat

from fp8lens.guard import KERNELS_MAY_GROW, MAY_GROW
from tools.outputs import chapters, prose

ROOT = chapters.ROOT
PAGES = ("README.md", "fp8lens/README.md", "notebooks/glossary.md")
# How the package's page shows an option: numbers that claim nothing.
EXAMPLES = (
    "`count=2`",
    "`min_flops_share=0.9`",
    '`mesh(target, {"data": 8})`',
    '`{"seconds": 60, "gigabytes": 4}`',
)


@functools.cache
def shown(name: str) -> prose.Shown:
    """What the cells of one chapter show; nothing where there is no such chapter."""
    try:
        (path,) = chapters.find([name])
    except chapters.Refused:
        return prose.Shown()
    return prose.together(map(prose.shown_by, nbformat.read(path, 4).cells))


def problems(name: str, source: str) -> list[str]:
    """What is wrong in such a page, here given as text."""
    computed = {"README.md": of_the_readme, "fp8lens/README.md": of_the_package}
    facts = computed[name]() if name in computed else []
    return prose.page_problems(source, shown, facts)


def of_the_readme() -> list[str]:
    """The phrases in the README that have a number which no chapter prints."""
    setup = (ROOT / "tools" / "setup.py").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    programs = [
        path for path in (ROOT / "tools" / "attack").glob("*.py") if path.stem != "__init__"
    ]
    counted = {number: word for word, number in prose.WORDS.items()}[str(len(programs))]
    (cuda, driver), *_ = re.findall(r"(\d+) \(driver (\d+) or newer\)", setup)
    readme = (ROOT / "README.md").read_text()
    # a test compares the README's table with what the command prints
    (roofline,) = re.findall(r"^time at least .* (\S+)$", readme, re.M)[:1]
    made = chapters.with_contents(readme)
    rows = re.findall(r"^\| \[.*\(notebooks/\w+\.ipynb\) \|.*", made, re.M)
    return [
        *rows,
        f"takes {roofline} of its bf16 time in FP8, by the roofline",
        f"{2**8} codes of an FP8 number",
        *re.findall(r"about a minute and \d+ GB", setup),
        f"CUDA {cuda} ({driver} or newer)",
        f"{counted.capitalize()} programs",
        project["license"].replace("-", " License "),
    ]


def of_the_package() -> list[str]:
    """The phrases in the page of `fp8lens` that have a number."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, end = map(int, re.findall(r"3\.(\d+)", project["requires-python"]))
    statuses = re.findall(
        r"exit status: (\d); (\d) where [^;]*; (\d) for [^;]*; (\d) where",
        (ROOT / "fp8lens" / "cli.py").read_text(),
    )
    (answer, not_fp8, unusable, died), *_ = statuses
    return [
        "Python " + " or ".join(f"3.{minor}" for minor in range(first, end)),
        f"Its exit status is {answer} if it has an answer",
        f"The status is {not_fp8} if `--require-fp8` does not hold",
        f"{unusable} if the command cannot use its",
        f"{died} if the file",
        f"the memory at the peak grew by more than {MAY_GROW:.0%}",
        f"the number of kernels grew by more than {KERNELS_MAY_GROW:.0%};",
        *EXAMPLES,
    ]
