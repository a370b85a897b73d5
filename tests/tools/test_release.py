"""What is published is built and tried; the workflow runs the same script."""

import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tools import release

ROOT = release.ROOT
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
needs_uv = pytest.mark.skipif(
    not release.UV.exists(), reason="needs .tools/bin/uv: run through make"
)


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    release.build(folder, "--quiet", "--offline", "--no-cache")
    return folder


@needs_uv
def test_the_wheel_reads_a_dump_in_an_empty_environment(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    options = ("--quiet", "--no-deps", "--offline", "--no-cache")
    command = release.install(tmp_path / "alone", str(wheel), *options)
    release.read_a_dump(command)
    assert release.answer([command, "--version"], str(tmp_path)) == f"fp8lens {VERSION}\n"
    with pytest.raises(SystemExit, match="fp8lens ended with 2:\nerror: a function is compiled"):
        release.compile_the_readmes_layer(command)


@needs_uv
def test_the_sdist_has_what_the_wheel_has(dist):
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert wheel.name == f"fp8lens-{VERSION}-py3-none-any.whl"
    assert sdist.name == f"fp8lens-{VERSION}.tar.gz"
    of_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert of_wheel and of_wheel | {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.skipif(sys.platform != "linux", reason="XLA's CUDA compiler has wheels for Linux only")
def test_the_readmes_layer_with_jax():
    """In this environment: with JAX an empty one needs a network."""
    release.compile_the_readmes_layer(Path(sys.executable).with_name(f"fp8lens{release.EXE}"))
    with pytest.raises(SystemExit, match="has JAX beside it"):
        release.read_a_dump(Path(sys.executable).with_name(f"fp8lens{release.EXE}"))


@needs_uv
def test_what_lies_in_the_folder_is_not_published(tmp_path):
    (tmp_path / "fp8lens-0.0.1.tar.gz").touch()
    with pytest.raises(SystemExit, match="is not empty"):
        release.build(tmp_path)


def test_the_tag_is_the_version(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=f"tag v{VERSION}, or change the version"):
        release.check_tag(f"v{VERSION}.1")
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace(f"## [{VERSION}]", "## [other]"))
    with pytest.raises(SystemExit, match="rename what is Unreleased"):
        release.check_tag(f"v{VERSION}")
    changes.write_text(f"{changes.read_text()}\n## [{VERSION}] - 2030-01-01\n")
    release.check_tag(f"v{VERSION}")


def test_the_workflow_runs_this_script_and_publishes_without_a_secret():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    commands = [step.get("run", "") for step in build["steps"]]
    assert '.venv/bin/python -m tools.release _build/dist --tag "$GITHUB_REF_NAME"' in commands
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert publish["needs"] == "build" and publish["environment"] == "pypi"
    assert publish["permissions"]["id-token"] == "write" and "permissions" not in build
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert "secrets." not in text and "--trusted-publishing always" in text


def test_citation_and_changelog_are_of_this_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (VERSION, "Apache-2.0")
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased"
