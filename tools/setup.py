"""Set up the project inside this checkout: uv in .tools/, every locked package in .venv/. Needs only a python3.

`make` runs it before each target; on Windows run `py tools\\setup.py` yourself. With everything in place it takes
a fraction of a second. Written for any python3 from 3.8 on: it runs before the project's own Python is there.
"""
import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

UV = "0.13.8"  # one version for everybody: uv.lock is written and read alike
# Only for a python3 without pip, to install uv with.
PIP = ("https://files.pythonhosted.org/packages/c9/bc/b7db44f5f39f9d0494071bddae6880eb645970366d0a200022a1a93d57f5/"
       "pip-25.0.1-py3-none-any.whl")
PIP_SHA256 = "c46efd13b6aa8279f33f2864459c8ce587ea6a1a59ee20de055868d8f7688f7f"
# Where a machine says that its packages come from; the first that is set counts.
MIRRORS = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
LAB_SETTINGS = {
    # A double click opens either half of a chapter's pair as a notebook.
    "@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Jupytext Notebook"}},
    # No question about news in front of the first chapter, and no request off the machine.
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
}
ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".tools"
BIN, EXE = ("Scripts", ".exe") if os.name == "nt" else ("bin", "")


def uv_path():
    """Path of this checkout's own uv, installed on first use."""
    uv, stamp = TOOLS / BIN / ("uv" + EXE), TOOLS / ("uv-" + UV)
    if not (uv.exists() and stamp.exists()):
        print("Installing uv " + UV + " into .tools/", flush=True)
        install_uv()
        stamp.touch()
    return str(uv)


def install_uv():
    try:
        import venv  # noqa: F401
    except ImportError:
        raise SystemExit("This python3 has no venv module. Debian and Ubuntu: sudo apt install python3-venv")
    create = [sys.executable, "-m", "venv", "--clear", str(TOOLS)]
    # A fresh Debian or Ubuntu python3 cannot put pip into a venv: its ensurepip is in python3-venv.
    has_pip = subprocess.run(create, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    if not has_pip:
        subprocess.run(create + ["--without-pip"], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        pip = ["-m", "pip"] if has_pip else [str(download_pip(Path(scratch)) / "pip")]
        subprocess.run([str(TOOLS / BIN / ("python" + EXE))] + pip + [
            "install", "--quiet", "--disable-pip-version-check", "uv==" + UV], check=True,
            env=dict(os.environ, PIP_USER="0"))


def download_pip(folder):
    """Path of a pip wheel, which Python runs as it is."""
    try:
        with urllib.request.urlopen(PIP) as answer:
            wheel = answer.read()
    except OSError as error:
        raise SystemExit("This python3 has no pip, and pip could not be downloaded (%s). Debian and Ubuntu: "
                         "sudo apt install python3-venv" % error)
    if hashlib.sha256(wheel).hexdigest() != PIP_SHA256:
        raise SystemExit("pip arrived damaged: run the command again")
    path = folder / PIP.rsplit("/", 1)[1]
    path.write_bytes(wheel)
    return path


def cuda_driver():
    """Newest CUDA the NVIDIA driver here can run, as (major, minor), or None where no GPU can be used."""
    # /proc/driver/nvidia also shows in containers without access to the GPU: ask the driver library itself.
    for name in ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"):
        try:
            cuda = ctypes.CDLL(name)
        except OSError:
            continue
        version, devices = ctypes.c_int(), ctypes.c_int()
        if (cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(devices)) == 0 and devices.value
                and cuda.cuDriverGetVersion(ctypes.byref(version)) == 0):
            return version.value // 1000, version.value % 1000 // 10
    return None


def extras(driver):
    """uv's arguments for the machine's driver: CUDA's libraries are several GB, for GPU machines only. With GPU=1 they
    are installed without one, for a machine that shares these files, and then stay."""
    libraries = ROOT / ".venv" / "lib"
    if os.environ.get("GPU") == "1" or driver is None and any(libraries.glob("*/site-packages/nvidia_cublas-*")):
        return ["--extra", "gpu"]
    if driver is None:
        return []
    if driver < (13, 0):
        print("The NVIDIA driver here runs CUDA %d.%d; the GPU packages need CUDA 13 (driver 580 or newer). Going on "
              "without the GPU: compiling for Hopper needs none." % driver)
        return []
    return ["--extra", "gpu"]


def python_choice(uv, env):
    """3.12 as .python-version says; where the machine has only 3.13, that, rather than downloading another."""
    for version in ("3.12", "3.13"):
        env = dict(env, PYENV_VERSION=version)  # pyenv hides every other version than .python-version's
        found = subprocess.run([uv, "python", "find", "--no-python-downloads", "--system", version], cwd=str(ROOT),
                               env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if found.returncode == 0:
            return ["--python", version], env
    return [], env


def environment():
    """What uv is to see: the machine's own certificates, its package index, a folder to keep downloads in."""
    # Company networks have certificates of theirs, which uv's built-in ones do not include.
    env = dict(os.environ, UV_SYSTEM_CERTS="1")
    env.pop("VIRTUAL_ENV", None)  # an environment active in the shell is not this project's
    mirror = next((env[name] for name in MIRRORS if env.get(name)), None)
    for name in MIRRORS:
        env.pop(name, None)
    if mirror:
        env["UV_DEFAULT_INDEX"] = mirror
    cache = Path(env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "uv")
    if "UV_CACHE_DIR" not in env and not os.access(str(nearest(cache)), os.W_OK):
        env["UV_CACHE_DIR"] = str(TOOLS / "cache")
    return env


def nearest(folder):
    """The folder, or the nearest above it that exists."""
    return folder if folder.exists() or folder == folder.parent else nearest(folder.parent)


def steps(uv, choice, env, again):
    """The commands that install what uv.lock names, each file with its hash. `again`: nothing there can be trusted."""
    if "UV_DEFAULT_INDEX" not in env:
        return [[uv, "sync", "--locked", "--quiet"] + choice + ["--reinstall"] * again]
    # The lock names the public index; from another index the same files are taken, which their hashes prove.
    wanted, python = str(TOOLS / "requirements.txt"), str(ROOT / ".venv" / BIN / ("python" + EXE))
    version = choice[:2] if choice[:1] == ["--python"] else []
    return [
        [uv, "export", "--frozen", "--quiet", "--no-emit-project", "--output-file", wanted] + choice,
        [uv, "venv", "--quiet", "--allow-existing"] + version + [str(ROOT / ".venv")],
        [uv, "pip", "sync", "--quiet", "--require-hashes", "--python", python, wanted] + ["--reinstall"] * again,
        [uv, "pip", "install", "--quiet", "--no-deps", "--python", python, "--editable", str(ROOT)],
    ]


def install(uv, choice, env):
    """Install what is not there. A file says so while it runs: what was stopped half-way is installed anew."""
    unfinished, made_from = TOOLS / "installing", ROOT / ".venv" / "made-from"
    again = unfinished.exists()
    if "UV_DEFAULT_INDEX" in env:
        files = b"".join((ROOT / name).read_bytes() for name in ("uv.lock", "pyproject.toml"))
        wanted = hashlib.sha256(repr(choice).encode() + files).hexdigest()
        done = made_from.exists() and made_from.read_text() == wanted
    else:
        wanted = None
        check = [uv, "sync", "--locked", "--check", "--quiet"] + choice
        done = subprocess.run(check, cwd=str(ROOT), env=env, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL).returncode == 0
    if done and not again:
        return 0
    start = time.time()
    if again:
        print("An installation was stopped half-way: it begins anew", flush=True)
    print("Installing the locked packages into .venv/: about a minute and 2 GB, once", flush=True)
    unfinished.touch()
    for command in steps(uv, choice, env, again):
        code = subprocess.run(command, cwd=str(ROOT), env=env).returncode
        if code:
            print("Not installed. Once what stands above is mended, run the same command again.", file=sys.stderr)
            return code
    if wanted:
        made_from.write_text(wanted)
    unfinished.unlink()
    print("Installed in %d s" % (time.time() - start), flush=True)
    return 0


def main():
    env = environment()
    uv = uv_path()
    python, env = python_choice(uv, env)
    code = install(uv, python + extras(cuda_driver()), env)
    if code:
        return code
    # Into .venv, where JupyterLab looks for defaults; a reader's own settings stay theirs.
    settings = ROOT / ".venv" / "etc" / "jupyter" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(LAB_SETTINGS, indent=2))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Stopped: the same command begins anew.")
    except OSError as error:
        sys.exit("%s: %s. Make room, or the folder writable, and run the same command again."
                 % (error.strerror, error.filename))
