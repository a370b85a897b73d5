"""An environment is whole or made anew: uv is played by a script, which writes down its calls."""

import concurrent.futures
import shutil

import pytest

from tools import environments
from tools.environments import Environment, NotMadeError, variables

# It makes the folder that it is asked for, slowly, and fails where a file says so.
UV = """#!/bin/sh
echo "$1" >> calls
sleep 0.2
test "$1" = venv && mkdir -p .venv-one/bin && touch .venv-one/bin/python
if test "$1" = pip && test -e broken; then cat broken; exit 1; fi
exit 0
"""
ONE = Environment("one", "3.12", install=("jax==0.11.2",))


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a lock, a pyproject.toml and that uv."""
    for name in ("pyproject.toml", "uv.lock"):
        (tmp_path / name).write_text(name)
    uv = tmp_path / ".tools" / environments.BIN / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(UV)
    uv.chmod(0o755)
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments, "UV", uv)
    return tmp_path


def calls(checkout) -> list[str]:
    return (checkout / "calls").read_text().split()


def test_it_is_made_once(checkout):
    assert ONE.make() == checkout / ".venv-one" / environments.BIN / "python"
    assert ONE.make().exists()
    assert calls(checkout) == ["venv", "pip"]


def test_it_is_made_anew_for_another_request_lock_or_project(checkout):
    ONE.make()
    (checkout / ".venv-one" / "left").touch()
    Environment("one", "3.12", install=("jax==0.12.0",)).make()
    assert not (checkout / ".venv-one" / "left").exists()
    for number, name in enumerate(("uv.lock", "pyproject.toml"), 3):
        (checkout / name).write_text("changed")
        Environment("one", "3.12", install=("jax==0.12.0",)).make()
        assert calls(checkout) == ["venv", "pip"] * number


def test_it_is_made_anew_where_its_python_has_gone(checkout):
    ONE.make().unlink()
    assert ONE.make().exists()


def test_what_was_interrupted_is_made_anew(checkout, monkeypatch):
    (checkout / "broken").write_text("no such package")
    with pytest.raises(NotMadeError, match=r"(?s)\.venv-one could not be made.*no such package"):
        ONE.make()
    (checkout / "broken").unlink()
    ONE.make()
    assert calls(checkout) == ["venv", "pip"] * 2

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    (checkout / "uv.lock").write_text("another")
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ONE.make()
    (checkout / "uv.lock").write_text("uv.lock")  # as when the whole of it was made
    assert not ONE.is_made()


def test_two_at_once_make_it_once(checkout):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(ONE.make) for _ in range(2)]
    assert {run.result() for run in runs} == {ONE.interpreter}
    assert calls(checkout) == ["venv", "pip"]


def test_a_missing_network_is_told_from_a_mistake(checkout):
    for said, unreachable in (("dns error: no such host", True), ("no such package", False)):
        (checkout / "broken").write_text(said)
        with pytest.raises(NotMadeError) as raised:
            ONE.make()
        assert raised.value.unreachable == unreachable
    environments.UV.unlink()
    with pytest.raises(NotMadeError, match="make setup"):
        ONE.make()


def test_another_environment_sees_nothing_of_this_one(monkeypatch):
    for name in ("VIRTUAL_ENV", "PYTHONPATH", "JAX_PLATFORMS", "NIGHTLY", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, "here")
    monkeypatch.setenv("HTTPS_PROXY", "proxy")
    assert "here" not in variables().values()
    assert variables(JAX_PLATFORMS="cpu")["JAX_PLATFORMS"] == "cpu"
    assert variables()["HTTPS_PROXY"] == "proxy"
