"""The program that installs packages into .venv: uv, or pip where uv cannot be had.

uv reads neither pip.conf nor PIP_*. What these say about where packages come from is read once and passed to both as
options, and nothing else of them is: what says where packages go (PIP_USER, PIP_TARGET, PIP_PREFIX) or which versions
are taken (PIP_CONSTRAINT) has no effect on .venv. The standard library is enough, as nothing is installed yet.
"""

import ast
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

UV_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "no-index": "--no-index",
    "trusted-host": "--allow-insecure-host",
    "cert": "--cert",
    "no-cache-dir": "--no-cache",
}
"""Setting of pip -> the option of uv. The same name is pip's own option."""

UV_VARIABLES = {
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "http_proxy", "https_proxy"),
    "timeout": ("UV_HTTP_TIMEOUT",),
}
"""Setting of pip -> environment variables, where uv has no option."""

LISTS, FLAGS = ("extra-index-url", "find-links", "trusted-host"), ("no-index", "no-cache-dir")

PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index that is used only if the machine's own has no CPU build of torch (PyPI has only the CUDA build)."""

FROM_SOURCE = "# built from its source"
"""Mark of a pin in a lock that has no wheel."""

UNREACHABLE = re.compile(r"Failed to fetch|error sending request|certificate|status code 40[137]|timed out")
"""What uv says where it cannot reach an index; pip may still, by its keyring or its own certificates."""

NOT_THERE = re.compile(r"No solution found|No matching distribution|not find a version")
OTHER_FILE = re.compile(r"[Hh]ash mismatch|DO NOT MATCH THE HASHES")
LINE_S = 30.0
"""Seconds between two lines about one step where output goes to a file."""


class InstallError(Exception):
    """An expected failure in one line: the cause, then the cure."""


class NotInIndexError(InstallError):
    """The package index has no such package."""


class PackageClient:
    """Installs exact versions into one environment."""

    def __init__(self, python: Path, log: Path, wheels: Path | None = None) -> None:
        """Take packages from where pip does, or from one folder alone."""
        self.python, self.log = python, log
        self.places = [] if wheels is None else ["--no-index", "--find-links", str(wheels)]
        self.settings = read_settings(python) if wheels is None else {}
        self.uv: Path | None = None

    def fetch_uv(self, lock: Path, folder: Path) -> None:
        """Have the uv of a lock in a folder of its own; without it pip goes on installing."""
        uv = folder / "bin" / "uv"
        version = re.search(r"^uv==([^\s;\\]+)", lock.read_text(), re.MULTILINE)
        assert version is not None
        with suppress(OSError):
            said = subprocess.run([uv, "--version"], capture_output=True, text=True).stdout.split()
            if said[1:2] == [version[1]]:
                self.uv = uv
                return
        shutil.rmtree(folder, ignore_errors=True)
        try:
            self.install("uv", lock.read_text(), "--target", str(folder), "--retries", "1")
        except InstallError as error:
            show(f"uv cannot be had, so pip installs, which takes longer ({error})\n")
        else:
            self.uv = uv

    def install(self, what: str, requirements: str = "", *options: str, index: str | None = None) -> None:
        """Install requirements, the text of a lock; `index` replaces every index of the settings.

        Raises:
            NotInIndexError: the index does not have one of them.
            InstallError: it has another file of one of them, or the program failed otherwise.
        """
        if self.uv is not None:
            begun = time.monotonic()
            with _in_file(requirements) as words:
                settings = self._settings(index)
                command = [*self._uv_command(settings), *options, *words]
                code, lines = run_logged(what, command, self.log, uv_environment(settings))
            if code == 0 or not UNREACHABLE.search("\n".join(lines)):
                return self._finish(what, code, lines, begun)
            show(f"uv does not reach the package index ({summarise(lines)}); pip tries\n")
            self.uv = None
        self.run_pip(what, ["install", "--no-build-isolation"], requirements, *options, index=index)

    def run_pip(
        self, what: str, verb: Sequence[str], requirements: str, *options: str, index: str | None = None
    ) -> None:
        """Have pip install, download or build requirements; arguments and errors as those of `install`."""
        python = [str(self.python), "-I", "-m", "pip", "--isolated"]
        how = ["--no-deps", "--progress-bar", "off", "--disable-pip-version-check"]
        places = [*self.places, *pip_options(self._settings(index))]
        # Under --isolated pip still reads the settings file of the machine, unless told so.
        environment = os.environ | {"PIP_CONFIG_FILE": os.devnull}
        begun = time.monotonic()
        with _in_file(requirements) as words:
            command = [*python, *verb, *how, *places, *options, *words]
            self._finish(what, *run_logged(what, command, self.log, environment), begun)

    def _settings(self, index: str | None) -> dict[str, str]:
        if index is None:
            return self.settings
        others = {key: value for key, value in self.settings.items() if key not in ("no-index", *LISTS[:2])}
        return {**others, "index-url": index}

    def _uv_command(self, settings: Mapping[str, str]) -> list[str]:
        # By the default strategy a package is taken from the first index that has the name: torch's CPU build, which
        # the second one has, would not be found. Exact versions make that safe, and hashes safer.
        strategy = ["--index-strategy", "unsafe-best-match"]
        words = [str(self.uv), "--no-config", "pip", "install", "--python", str(self.python), "--no-deps"]
        # As pip does. Else modules are compiled at their first import, and anew at each start where that cannot be kept
        # (PYTHONDONTWRITEBYTECODE, another user's .venv): a start of vLLM took 20 to 30 s longer.
        compiled = "--compile-bytecode"
        return [*words, "--no-build-isolation", compiled, *strategy, *self.places, *uv_options(settings)]

    def _finish(self, what: str, code: int, lines: Sequence[str], begun: float) -> None:
        if code == 0:
            show(f"{what}: done ({time.monotonic() - begun:.0f} s)\n")
            return
        show(f"{what}: not installed\n")
        output, cause = "\n".join(lines), summarise(lines)
        kind, cure = (
            InstallError,
            "check the network and the package index that pip uses, then run make install again",
        )
        if "No space left" in output:
            cure = "free some disk and run make install again, which goes on"
        elif OTHER_FILE.search(output):
            cure = (
                "the index has another file than the lock names: name another index with PIP_INDEX_URL; after a change "
                "of the lock run python3 scripts/lock.py"
            )
        elif NOT_THERE.search(output):
            kind = NotInIndexError
        raise kind(f"{what}: {cause}; {cure}; log: {os.path.relpath(self.log)}")


def normalise(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(lock: Path) -> dict[str, str]:
    """The lines of each package of a lock, by its normalised name."""
    entries = re.findall(r"^[^#\s](?:.*\\\n)*.*", lock.read_text(), re.MULTILINE)
    return {normalise(entry.partition("=")[0]): entry for entry in entries}


@contextmanager
def _in_file(requirements: str) -> Iterator[list[str]]:
    """Requirements in a file, as the words that name it to uv and to pip; no words for none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "requirements.txt")
        file.write_text(requirements)
        yield ["--requirement", str(file)] if requirements else []


def read_settings(python: Path) -> dict[str, str]:
    """Where pip takes packages from, by its settings files and PIP_*: the keys of `UV_OPTIONS` and `UV_VARIABLES`.

    Raises:
        InstallError: pip cannot read its settings.
    """
    # These are options of `pip config` as well, where they would leave out some files, or all output.
    whole = os.environ | dict.fromkeys(("PIP_USER", "PIP_GLOBAL", "PIP_SITE", "PIP_QUIET"), "0")
    command = [str(python), "-I", "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, env=whole)
    if listed.returncode != 0:
        said = " ".join(listed.stderr.split())
        raise InstallError(f"pip cannot read its settings: {said}; correct that file or variable")
    found = [
        (section, "timeout" if key == "default-timeout" else key, str(ast.literal_eval(value)))
        for section, key, value in re.findall(r"^([^.\n]+)\.([\w-]+)=(['\"].*)$", listed.stdout, re.MULTILINE)
    ]
    order = {"global": 0, "install": 1, ":env:": 2}  # pip's own: the last one that has a value is taken
    settings = {
        key: value
        for section, key, value in sorted(found, key=lambda one: order.get(one[0], -1))
        if section in order and value.strip() and (key in UV_OPTIONS or key in UV_VARIABLES)
    }
    for flag in FLAGS:
        if settings.get(flag, "on").lower() not in ("1", "true", "t", "yes", "y", "on"):
            del settings[flag]
    if "find-links" in settings:
        settings["find-links"] = " ".join(filter(is_there, settings["find-links"].split()))
    return settings


def is_there(link: str) -> bool:
    """Whether a value of find-links is no file of this machine, or one that exists: pip skips others, uv ends."""
    url = urlsplit(link)
    return url.scheme not in ("", "file") or Path(url2pathname(url.path)).expanduser().exists()


def pip_options(settings: Mapping[str, str]) -> list[str]:
    """Settings as options of pip."""
    return [word for key in settings for word in _words(f"--{key}", key, settings[key])]


def uv_options(settings: Mapping[str, str]) -> list[str]:
    """Settings as options of uv, with the certificates and the cache that this machine has."""
    words = [
        word for key, option in UV_OPTIONS.items() for word in _words(option, key, settings.get(key, ""))
    ]
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get(
        "CURL_CA_BUNDLE"
    )  # pip reads these by itself
    if "cert" not in settings:
        if bundle:
            words += ["--cert", bundle]
        elif ssl.create_default_context().cert_store_stats()["x509_ca"]:
            words.append(
                "--system-certs"
            )  # as pip does since 24.2: uv's own list lacks a company's certificates
    cache = Path(os.environ.get("UV_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "uv"))
    try:
        cache.expanduser().mkdir(parents=True, exist_ok=True)
        writable = os.access(cache.expanduser(), os.W_OK)
    except (OSError, RuntimeError):
        writable = False
    return words if writable or "--no-cache" in words else [*words, "--no-cache"]


def uv_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of uv: without settings of its own, which could send packages elsewhere too."""
    environment = {
        key: value for key, value in os.environ.items() if key == "UV_CACHE_DIR" or key[:3] != "UV_"
    }
    # No limit: on a busy host a file may take longer than its minute.
    environment["UV_COMPILE_BYTECODE_TIMEOUT"] = "0"
    for key, variables in UV_VARIABLES.items():
        if value := settings.get(key):
            environment |= dict.fromkeys(variables, value)
    return environment


def _words(option: str, key: str, value: str) -> list[str]:
    if key in FLAGS:
        return [option] if value else []
    values = value.split() if key in LISTS else [value] if value else []
    return [word for one in values for word in (option, one)]


def summarise(lines: Sequence[str]) -> str:
    """The cause of a failure in one line, from the output of pip or uv."""
    errors = [line.partition(":")[2].strip() for line in lines if re.match(r"ERROR:|error:", line)]
    causes = [line.partition(":")[2].strip() for line in lines if line.startswith("  cause:")]
    if OTHER_FILE.search("".join(errors)):  # pip names the package in the line after
        return "Hash mismatch for " + "".join(
            re.findall(r"^ +(\S+) from ", "\n".join(lines), re.MULTILINE)[:1]
        )
    parts = [*errors[-1:], *dict.fromkeys([*causes[:1], *causes[-1:]])]
    return ": ".join(parts) or next((line.strip() for line in reversed(lines) if line.strip()), "no message")


def run_logged(
    what: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """Run a command with its output in a log, and show now and then that it is at work: exit code and lines."""
    lines: list[str] = []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            with suppress(OSError), log.open("a") as file:  # the disk may be full
                file.write(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    begun = shown = time.monotonic()
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
                break
            now = time.monotonic()
            last = lines[-1].strip()[:60] if lines else "begun"
            if sys.stdout.isatty():
                show(f"{what}: {now - begun:.0f} s, {last}")
            elif now - shown >= LINE_S:
                show(f"{what}: {now - begun:.0f} s, {last}\n")
                shown = now
    except BaseException:
        process.terminate()
        process.wait()
        raise
    reader.join()
    return process.returncode, lines


def show(text: str) -> None:
    """Overwrite the current line on a terminal; elsewhere write only finished lines."""
    if sys.stdout.isatty():
        print("\r\033[K" + text, end="", flush=True)
    elif text.endswith("\n"):
        print(text, end="", flush=True)
