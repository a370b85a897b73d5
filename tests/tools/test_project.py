"""What the project says of itself agrees: dependencies, names of modules, commands, examples."""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LAYERS = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)


def files(*patterns: str) -> list[Path]:
    listed = subprocess.check_output(["git", "ls-files", *patterns], cwd=ROOT, text=True)
    return [path for name in listed.splitlines() if (path := ROOT / name).is_file()]


def test_conda_environment_lists_the_same_packages():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip,) = (entry["pip"] for entry in listed if isinstance(entry, dict))
    conda = {entry for entry in listed if isinstance(entry, str)} | set(pip)
    groups = PYPROJECT["dependency-groups"]
    asked = [text for name in groups if name != "libraries" for text in groups[name]]
    asked += PYPROJECT["project"]["optional-dependencies"]["jax"]
    packages = {text for text in asked if not text.startswith("fp8lens")}
    python = f"python{PYPROJECT['project']['requires-python']}"
    assert conda == packages | {python, "pip", "-e ."}


def test_lock_records_the_public_registry_only():
    hosts = set(re.findall(r"\w+://([^/\"]+)", (ROOT / "uv.lock").read_text()))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


def test_no_two_modules_share_a_name():
    shared = ("__init__", "__main__", "conftest")
    names = Counter(path.stem for path in files("*.py") if path.stem not in shared)
    assert {name for name, times in names.items() if times > 1} == set()


def test_no_module_of_fp8lens_imports_from_below_it_in_contributings_table():
    place = {name: n for n, row in enumerate(LAYERS) for name in re.findall(r"`(\w+)`", row)}
    for path in files("fp8lens/*.py"):
        name = path.relative_to(ROOT / "fp8lens").with_suffix("").parts[0]
        if name not in ("__init__", "__main__"):
            imported = re.findall(r"^ *from fp8lens\.(\w+)", path.read_text(), re.M)
            assert all(place[other] <= place[name] for other in imported), path


def test_commands_in_the_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in files("*.md", ".ci/*", ".github/workflows/*"):
        used = re.findall(r"(?:`|^\s*|run: )make ([a-z-]+)", path.read_text(), re.M)
        assert set(used) <= targets, path


@pytest.mark.skipif(sys.platform != "linux", reason="XLA's CUDA compiler is for Linux alone")
def test_the_example_in_the_packages_readme_works():
    text = (ROOT / "fp8lens" / "README.md").read_text()
    namespace: dict = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.S)[0], namespace)
    examples = [value for name, value in namespace.items() if name.startswith("test_")]
    assert examples
    for example in examples:
        example()


def test_no_text_names_a_path_of_somebodys_machine():
    personal = re.compile(r"(?<![\w.:/])/(?:home/(?!(?:user|ada)\b)|root/|Users/|work/)\w+")
    for path in files("*.py", "*.md", "*.yml", "*.toml", "*.ipynb", "*.txt", "Makefile"):
        found = personal.search(path.read_text(errors="ignore"))
        assert not found, f"{path.relative_to(ROOT)}: {found and found[0]}"
