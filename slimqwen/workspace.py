"""The workspace: a user's folder with experiments/, corpora/, eval/own/ and weights/.

The checkout is a workspace. Another one is a folder that `slimqwen init` made, for example a git repository of its own;
what it lacks is looked up in the installation.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from slimqwen.errors import SlimqwenError

MARKER = ".slimqwen"
"""File that makes a folder a workspace."""

MADE_OF = "made-of-commit"
"""File of an installed package with the commit that it was made of."""

HOME = "SLIMQWEN_HOME"
"""Variable of the shell that names the workspace where none holds the working folder."""


class WorkspaceError(SlimqwenError):
    """There is no workspace, or it belongs to another user."""


def installation_root() -> Path:
    """The folder with what is shipped, such as eval/: the checkout, or a part of the installed package."""
    package = Path(__file__).resolve().parent
    shipped = package / "shipped"
    return shipped if shipped.is_dir() else package.parent


def is_checkout() -> bool:
    """Whether this package runs in a checkout, and not from an installed wheel."""
    return installation_root().name != "shipped"


def name_installer(text: str) -> str:
    """Adapt a message to an installed package: `make install` becomes `slimqwen install`, `X=y` becomes `--x y`."""
    if is_checkout():
        return text
    return re.sub(
        r"make install((?: [A-Z]+=[\w-]+)*)",
        lambda found: (
            "slimqwen install" + re.sub(r"([A-Z]+)=", lambda name: f"--{name[1].lower()} ", found[1])
        ),
        text,
    )


def repository_root() -> Path:
    """The workspace: the nearest folder above the working folder that is one, else $SLIMQWEN_HOME, else the checkout.

    Raises:
        WorkspaceError: there is none, $SLIMQWEN_HOME names a folder that is none, or the workspace belongs to another
            user, whose environment lines and plugins would run.
    """
    if (found := find_workspace()) is not None:
        return found
    if is_checkout():
        return installation_root()
    raise WorkspaceError(
        f"{_working_folder() or 'this folder'} lies in no workspace; run `slimqwen init FOLDER` to make one, "
        f"or set {HOME}=FOLDER to use one"
    )


def root_to_read() -> Path:
    """The workspace, found as by `repository_root`; the installation if there is none. For commands that write nothing.

    Raises:
        WorkspaceError: the workspace belongs to another user, or $SLIMQWEN_HOME names none.
    """
    return find_workspace() or installation_root()


def find_workspace() -> Path | None:
    """The workspace that `slimqwen init` made and that holds the working folder, else $SLIMQWEN_HOME; None for none.

    None also if the working folder lies in the installation.

    Raises:
        WorkspaceError: the workspace belongs to another user, or $SLIMQWEN_HOME names a folder that is none.
    """
    folder = _working_folder()
    for above in (folder, *folder.parents) if folder else ():
        if above == installation_root():
            return None
        if (above / MARKER).is_file():
            _require_owner(above)
            return above
    if not (named := os.environ.get(HOME)):
        return None
    home = Path(named).expanduser().resolve()
    if not (home / MARKER).is_file() and home != installation_root():
        raise WorkspaceError(f"{HOME}={named} is no workspace; run `slimqwen init {named}` to make it one")
    return home


def create_workspace(folder: Path) -> list[Path]:
    """Make a folder a workspace; files that it has already stay as they are.

    Returns:
        The files that were written.

    Raises:
        WorkspaceError: the folder is a workspace already, or lies in one or in the installation.
        OSError: the folder cannot be written.
    """
    folder = folder.resolve()
    for above in (folder, *folder.parents):
        if above == installation_root() or (above / MARKER).is_file():
            raise WorkspaceError(
                f"{folder} {'is' if above == folder else f'lies in {above}, which is'} a workspace already; "
                "choose a folder outside it"
            )
    texts = {path: text.replace("NAME", folder.name) for path, text in _TEXTS.items()}
    texts["Makefile"] = _render_makefile((installation_root() / "Makefile").read_text(encoding="utf-8"))
    written = []
    for name, text in {**texts, MARKER: "workspace 1\n"}.items():  # the marker last: then it is whole
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_text(text, encoding="utf-8")
            written.append(file)
    return written


_TEXTS = {
    ".gitignore": "/weights/\n/report/\n/logs/\n/data/\n/.cache/\n/demo/\n",
    ".gitattributes": "* text=auto eol=lf\nexperiments/**/*.json -diff\nexperiments/**/*.jsonl -diff\n",
    "experiments/.gitkeep": "",
    "corpora/.gitkeep": "",
    "eval/own/.gitkeep": "",
    "README.md": """# NAME

A workspace of Slimqwen: variants in `experiments/`, texts in `corpora/`, own questions in `eval/own/`. Commit these
three; weights, logs and the page stay out of git.

```
slimqwen variant new --name base --checkpoint FOLDER          # your model; OWNER/NAME takes one from the hub
slimqwen variant new --name mine --base base --stage calibrate
slimqwen recipe run mine
slimqwen gate mine                                            # as good as base?
slimqwen bench latency mine --baseline                        # faster than base?
slimqwen serve mine
```
""",
}


def _render_makefile(text: str) -> str:
    """The checkout's Makefile with the targets alone that are verbs of `slimqwen`."""
    head, *targets = re.split(r"\n\n(?=[a-z])", text.split("# Whatever needs .venv")[0])
    head = re.sub(r"(?m)^(PYTHON|READY) .*\n", "", head).replace(".venv/bin/slimqwen", "slimqwen")
    verbs = [target for target in targets if "$(RUN)" in target or target.startswith("help:")]
    verbs = [target.replace(": | $(READY)", ":").replace(": install", ":") for target in verbs]
    phony = " ".join(target.partition(":")[0] for target in verbs)
    return "\n\n".join([head, *verbs]).rstrip() + f"\n\n.PHONY: {phony}\n"


def locate(path: Path | str, root: Path) -> Path:
    """Path of a file or folder in the workspace, or in the installation if the workspace lacks it.

    Args:
        path: relative to the workspace, such as eval/devices.yaml.
        root: the workspace.
    """
    return next((each / path for each in _layers(root) if (each / path).exists()), root / path)


def list_files(pattern: str, root: Path) -> list[Path]:
    """Files and folders that match a pattern relative to the workspace or, where it lacks them, to the installation."""
    found: dict[Path, Path] = {}
    for each in _layers(root):
        for path in each.glob(pattern):
            found.setdefault(path.relative_to(each), path)
    return [found[name] for name in sorted(found)]


def relative(path: Path, root: Path) -> Path:
    """The path relative to the workspace or the installation; unchanged if it lies in neither."""
    return next((path.relative_to(each) for each in _layers(root) if path.is_relative_to(each)), path)


def is_shipped(path: Path, root: Path) -> bool:
    """Whether a path lies in the installation and not in the workspace `root`."""
    return not path.is_relative_to(root) and path.is_relative_to(installation_root())


def _layers(root: Path) -> Iterator[Path]:
    yield root
    if (root / MARKER).is_file():  # not for any other folder, such as a copy of a part of a checkout
        yield installation_root()


def _working_folder() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None


def _require_owner(folder: Path) -> None:
    owner = (folder / MARKER).stat().st_uid
    named = os.environ.get(HOME)
    is_named = named is not None and Path(named).expanduser().resolve() == folder
    if owner not in (0, os.geteuid()) and not is_named:
        raise WorkspaceError(
            f"{folder} is a workspace of another user (uid {owner}), whose settings would run as you; "
            f"set {HOME}={folder} if you trust it"
        )
