"""Set up the project inside this checkout: uv in .tools/, every locked package in .venv/. Needs
only a python3.

`make` runs it before each target; on Windows run `py tools\\setup.py` yourself. With everything in
place it takes a fraction of a second. Written for any python3 from 3.8 on: it runs before the
project's own Python is there.
"""

import contextlib
import ctypes
import errno
import hashlib
import http.client
import importlib.util
import json
import locale
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    fcntl = None  # type: ignore[assignment]

# Only for a python3 without pip, to install uv with.
PIP = (
    "https://files.pythonhosted.org/packages/c9/bc/b7db44f5f39f9d0494071bddae6880eb645970366d0a200022a1a93d57f5/"
    "pip-25.0.1-py3-none-any.whl"
)
PIP_SHA256 = "c46efd13b6aa8279f33f2864459c8ce587ea6a1a59ee20de055868d8f7688f7f"
# Where a machine says that its packages come from; the first that is set counts.
MIRRORS = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
# How pip and uv say that something cannot be reached, what that means, what to set.
UNREACHABLE = [
    (
        r"certificate|SSLError",
        "its certificate is not trusted here",
        "SSL_CERT_FILE to a file with your network's certificates",
    ),
    (
        r"[Pp]roxy|tunnel",
        "the proxy refused",
        "HTTPS_PROXY to a proxy that lets it through, or unset it",
    ),
    (
        r"Retrying \(|error sending request|dns error|[Tt]imed out|server error",
        "it gives no answer",
        "UV_DEFAULT_INDEX or PIP_INDEX_URL to a mirror that you can reach, or HTTPS_PROXY to your "
        "proxy",
    ),
    (
        r"from versions: none|\b40[134]\b|not found in the package registry",
        "it is no package index, or asks who you are",
        "UV_DEFAULT_INDEX or PIP_INDEX_URL to one that has these packages",
    ),
]
LAB_SETTINGS = {
    # A link to a page of text shows the page. JupyterLab would open it as a notebook without cells,
    # ask for its kernel, and save it as one.
    "@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Markdown Preview"}},
    # No question about news in front of the first chapter, and no request off the machine.
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
}
ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".tools"
BIN, EXE = ("Scripts", ".exe") if os.name == "nt" else ("bin", "")
# One version for everybody, as uv.lock is written and read alike, with the hash of each platform's
# wheel.
UV_WHEELS = Path(__file__).resolve().parent / "uv.txt"
UV = re.findall(r"^uv==(\S+)", UV_WHEELS.read_text(encoding="utf-8"), re.M)[0]
AGAIN = "run the same command again"
KILLED = (-9, 137)  # exit statuses of a process that the kernel ended, as it does without memory
NO_MEMORY = f"Memory ran out. Close other programs, or take a machine with more, and {AGAIN}."
# On Windows a lock is of a byte: this one is beyond the file's end, where nobody reads.
LOCKED_BYTE = 1 << 30


@contextlib.contextmanager
def alone():
    """Wait until no other set-up of this checkout runs, and keep others waiting meanwhile.

    What is locked is tools/uv.txt itself, so no file is left behind. The system frees the lock when
    the process ends, however it ends.
    """
    # Some network file systems lock only what is open for writing.
    mode = "r+b" if os.access(str(UV_WHEELS), os.W_OK) else "rb"
    with open(str(UV_WHEELS), mode) as file:
        if not try_lock(file):
            print("Waiting for another make setup in this checkout", flush=True)
            while not try_lock(file):
                time.sleep(0.2)
        yield


def try_lock(file):
    """Whether this process has the lock on an open file now; True if nothing can be locked."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            file.seek(LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except OSError as error:
        # Any other error comes of a file system without locks: two set-ups there do not wait.
        return error.errno != (errno.EACCES if fcntl is None else errno.EWOULDBLOCK)
    return True


def check_locale():
    """SystemExit where Python cannot read this folder's name in the files of .venv."""
    if str(ROOT).isascii() or not hasattr(locale, "nl_langinfo"):
        return
    with contextlib.suppress(locale.Error):  # a locale that is not installed: it stays C
        locale.setlocale(locale.LC_CTYPE, "")
    encoding = locale.nl_langinfo(locale.CODESET)
    if encoding.upper().replace("-", "") != "UTF8":
        raise SystemExit(
            f"The name of the folder {ROOT} has letters outside ASCII, and the locale's encoding "
            f"is {encoding}. Set LC_ALL=C.UTF-8, or rename the folder, and {AGAIN}."
        )


def uv_path():
    """Path of this checkout's own uv, installed on first use."""
    uv, stamp = TOOLS / BIN / ("uv" + EXE), TOOLS / ("uv-" + UV)
    if not (uv.exists() and stamp.exists()):
        print("Installing uv " + UV + " into .tools/", flush=True)
        install_uv()
        stamp.touch()
    return str(uv)


def install_uv():
    """Put uv into .tools/, its wheel checked against the hash in tools/uv.txt."""
    if importlib.util.find_spec("venv") is None:
        raise SystemExit(
            "This python3 has no venv module. Debian and Ubuntu: sudo apt install python3-venv"
        )
    create = [sys.executable, "-m", "venv", "--clear", str(TOOLS)]
    # A fresh Debian or Ubuntu python3 cannot put pip into a venv: its ensurepip is in python3-venv.
    has_pip = (
        subprocess.run(create, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    )
    if not has_pip and subprocess.run(create + ["--without-pip"]).returncode:
        raise SystemExit(f"{TOOLS} could not be made. Once what stands above is fixed, {AGAIN}.")
    with tempfile.TemporaryDirectory() as scratch:
        pip = ["-m", "pip"] if has_pip else [str(download_pip(Path(scratch)) / "pip")]
        code, what_to_do = run(
            [str(TOOLS / BIN / ("python" + EXE))]
            + pip
            + [
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--only-binary",
                ":all:",
                "--require-hashes",
                "--requirement",
                str(UV_WHEELS),
            ],
            pip_environment(),
        )
    if code:
        raise SystemExit("uv is not installed. " + what_to_do)


def pip_environment():
    """What pip is to see: the index and the certificates that uv will see, where it is not told of
    its own."""
    env = dict(os.environ, PIP_USER="0")
    for name in ("PIP_DRY_RUN", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"):
        env.pop(name, None)  # it would go elsewhere, or nowhere
    env.setdefault("PIP_RETRIES", "2")
    mirror = next((env[name] for name in MIRRORS if env.get(name)), None)
    if mirror and not env.get("PIP_INDEX_URL"):
        env["PIP_INDEX_URL"] = re.sub(r"^[\w.-]+=", "", mirror)  # to uv an index can have a name
    if env.get("SSL_CERT_FILE"):
        env.setdefault("PIP_CERT", env["SSL_CERT_FILE"])
    return env


def run(command, env):
    """Run a command that may need a network: its status, and what to do about a failure, which it
    has shown."""
    done = subprocess.run(command, cwd=str(ROOT), env=env, stderr=subprocess.PIPE)
    said = done.stderr.decode("utf-8", "replace")
    sys.stderr.write(said)
    if done.returncode in KILLED:
        return 1, f"{Path(command[0]).name} was killed. {NO_MEMORY}"
    return done.returncode, done.returncode and advice(said, env)


def advice(said, env):
    """What to do about what pip or uv said, as one or two sentences."""
    if "DO NOT MATCH THE HASHES" in said or "Hash mismatch" in said:
        return (
            "What arrived is not the file that was published: the index, or something on the way "
            "to it, alters files. Set UV_DEFAULT_INDEX or PIP_INDEX_URL to another."
        )
    index = next(
        (env[name] for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX") if env.get(name)),
        "https://pypi.org",
    )
    where = (re.findall(r"https?://[^\s/`']+", said) or [index])[0]
    where = re.sub(r"//[^/@]*@", "//", where)  # and no password
    for pattern, meaning, setting in UNREACHABLE:
        if re.search(pattern, said):
            if where == "https://github.com":
                setting = (
                    "up Python 3.12 or 3.13 on this machine, or HTTPS_PROXY to a proxy that "
                    "reaches it"
                )
            return f"{where} could not be reached: {meaning}. Set {setting}, and {AGAIN}."
    return f"Once what stands above is fixed, {AGAIN}."


def download_pip(folder):
    """Path of a pip wheel, which Python runs as it is."""
    try:
        with urllib.request.urlopen(PIP, timeout=60) as answer:
            wheel = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise SystemExit(
            f"This python3 has no pip, and pip could not be downloaded ({error}). Set HTTPS_PROXY "
            "or SSL_CERT_FILE as your network wants it, or on Debian and Ubuntu: sudo apt install "
            "python3-venv"
        ) from None
    if hashlib.sha256(wheel).hexdigest() != PIP_SHA256:
        raise SystemExit("pip arrived damaged: run the command again")
    path = folder / PIP.rsplit("/", 1)[1]
    path.write_bytes(wheel)
    return path


def cuda_driver():
    """Newest CUDA the NVIDIA driver here can run, as (major, minor), or None where no GPU can be
    used."""
    # /proc/driver/nvidia also shows in containers without access to the GPU: ask the driver library
    # itself.
    for name in ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"):
        try:
            cuda = ctypes.CDLL(name)
        except OSError:
            continue
        version, devices = ctypes.c_int(), ctypes.c_int()
        if (
            cuda.cuInit(0) == 0
            and cuda.cuDeviceGetCount(ctypes.byref(devices)) == 0
            and devices.value
            and cuda.cuDriverGetVersion(ctypes.byref(version)) == 0
        ):
            return version.value // 1000, version.value % 1000 // 10
    return None


def extras(driver):
    """uv's arguments for the machine's driver: CUDA's libraries are several GB, for GPU machines
    only. With GPU=1 they are installed without one, for a machine that shares these files, and then
    stay."""
    libraries = ROOT / ".venv" / "lib"
    if (
        os.environ.get("GPU") == "1"
        or driver is None
        and any(libraries.glob("*/site-packages/nvidia_cublas-*"))
    ):
        return ["--extra", "gpu"]
    if driver is None:
        return []
    if driver < (13, 0):
        print(
            f"The NVIDIA driver here runs CUDA {driver[0]}.{driver[1]}; the GPU packages need CUDA "
            "13 (driver 580 or newer). Going on without the GPU: compiling for Hopper needs none."
        )
        return []
    return ["--extra", "gpu"]


def python_choice(uv, env):
    """3.12 as .python-version says; where the machine has only 3.13, that, rather than downloading
    another."""
    for version in ("3.12", "3.13"):
        env = dict(
            env, PYENV_VERSION=version
        )  # pyenv hides every other version than .python-version's
        found = subprocess.run(
            [uv, "python", "find", "--no-python-downloads", "--system", version],
            cwd=str(ROOT),
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if found.returncode == 0:
            return ["--python", version], env
    return [], env


def environment():
    """What uv is to see: the machine's own certificates, its package index, folders to keep
    downloads in."""
    # Company networks have certificates of theirs, which uv's built-in ones do not include.
    env = dict(os.environ, UV_SYSTEM_CERTS="1")
    # An environment active in the shell is not this project's, nor is a choice of another folder,
    # or of fewer packages.
    for name in (
        "VIRTUAL_ENV",
        "UV_PROJECT_ENVIRONMENT",
        "UV_PROJECT",
        "UV_WORKING_DIR",
        "UV_NO_DEFAULT_GROUPS",
        "UV_NO_GROUP",
        "UV_NO_DEV",
        "UV_NO_SYNC",
        "UV_CONFIG_FILE",
        "UV_NO_VERIFY_HASHES",
    ):
        env.pop(name, None)
    mirror = next((env[name] for name in MIRRORS if env.get(name)), None)
    for name in MIRRORS:
        env.pop(name, None)
    if mirror:
        env["UV_DEFAULT_INDEX"] = mirror
    for name, xdg, at_home, here in (
        ("UV_CACHE_DIR", "XDG_CACHE_HOME", ".cache", "cache"),
        ("UV_PYTHON_INSTALL_DIR", "XDG_DATA_HOME", ".local/share", "python"),
    ):
        folder = Path(env.get(xdg) or os.path.join(os.path.expanduser("~"), at_home), "uv")
        if name not in env and not os.access(str(nearest(folder)), os.W_OK):
            env[name] = str(TOOLS / here)
    return env


def nearest(folder):
    """The folder, or the nearest above it that exists."""
    return folder if folder.exists() or folder == folder.parent else nearest(folder.parent)


def steps(uv, choice, env, again):
    """The commands that install what uv.lock names, each file with its hash. `again`: nothing there
    can be trusted."""
    if "UV_DEFAULT_INDEX" not in env:
        return [[uv, "sync", "--locked", "--quiet"] + choice + ["--reinstall"] * again]
    # The lock names the public index; from another index the same files are taken, which their
    # hashes prove.
    wanted, python = str(TOOLS / "requirements.txt"), str(ROOT / ".venv" / BIN / ("python" + EXE))
    version = choice[:2] if choice[:1] == ["--python"] else []
    return [
        [uv, "export", "--frozen", "--quiet", "--no-emit-project", "--output-file", wanted]
        + choice,
        [uv, "venv", "--quiet", "--allow-existing"] + version + [str(ROOT / ".venv")],
        [uv, "pip", "sync", "--quiet", "--require-hashes", "--python", python, wanted]
        + ["--reinstall"] * again,
        [uv, "pip", "install", "--quiet", "--no-deps", "--python", python, "--editable", str(ROOT)],
    ]


def install(uv, choice, env):
    """Install what is not there. A file says so while it runs: what was stopped half-way is
    installed anew."""
    unfinished, made_from = TOOLS / "installing", ROOT / ".venv" / "made-from"
    again = unfinished.exists()
    if "UV_DEFAULT_INDEX" in env:
        files = b"".join((ROOT / name).read_bytes() for name in ("uv.lock", "pyproject.toml"))
        wanted = hashlib.sha256(repr(choice).encode() + files).hexdigest()
        done = made_from.exists() and made_from.read_text() == wanted
    else:
        wanted = None
        check = [uv, "sync", "--locked", "--check", "--quiet"] + choice
        done = (
            subprocess.run(
                check, cwd=str(ROOT), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ).returncode
            == 0
        )
    if done and not again:
        return 0
    start = time.time()
    if again:
        print("An installation was stopped half-way: it begins anew", flush=True)
    print("Installing the locked packages into .venv/: about a minute and 2 GB, once", flush=True)
    unfinished.touch()
    for command in steps(uv, choice, env, again):
        code, what_to_do = run(command, env)
        if code:
            print("Not installed. " + what_to_do, file=sys.stderr)
            return code
    if wanted:
        made_from.write_text(wanted)
    unfinished.unlink()
    print(f"Installed in {time.time() - start:.0f} s", flush=True)
    return 0


def main():
    """Install what is missing. The exit status."""
    check_locale()
    env = environment()
    uv = uv_path()
    python, env = python_choice(uv, env)
    code = install(uv, python + extras(cuda_driver()), env)
    if code:
        return code
    # Into .venv, where JupyterLab looks for defaults; a reader's own settings stay theirs.
    settings = ROOT / ".venv" / "etc" / "jupyter" / "labconfig" / "default_setting_overrides.json"
    text = json.dumps(LAB_SETTINGS, indent=2)
    if not (settings.exists() and settings.read_text() == text):  # the checkout may be read-only
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(text)
    return 0


def run_alone():
    """What the command does: `main`, one at a time, and every failure as a sentence."""
    try:
        with alone():
            return main()
    except KeyboardInterrupt:
        return "Stopped: the same command begins anew."
    except MemoryError:
        return NO_MEMORY
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return NO_MEMORY
        return (
            f"{error.strerror}: {error.filename}. Make room, or the folder writable, and {AGAIN}."
        )


if __name__ == "__main__":
    sys.exit(run_alone())
