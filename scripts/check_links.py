"""Checks the links between the Markdown files that git tracks: file and heading exist. A part of `make lint`."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_ANCHOR = re.compile(r"[^\w\- ]")


def anchors_of(text: str) -> set[str]:
    """The anchors that a forge gives to the headings of a Markdown text."""
    blocks = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return {_ANCHOR.sub("", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(blocks)}


def list_broken(files: list[Path], root: Path) -> Iterator[str]:
    """A line for each link of the files that leads to no file, or to no heading of its file."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        for match in _LINK.finditer(_CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)):
            path, anchor = match.groups()
            target = (file.parent / path).resolve() if path else file
            place = f"{file.relative_to(root)}:{text.count(chr(10), 0, match.start()) + 1}"
            if not target.exists():
                yield f"{place}: {path} does not exist; correct the link"
            elif (
                anchor
                and target.suffix == ".md"
                and anchor not in anchors_of(target.read_text(encoding="utf-8"))
            ):
                yield f"{place}: {path or file.name} has no heading #{anchor}; correct the link"


def main() -> int:
    """Check the files that git tracks; exit code 1 if a link is broken."""
    root = Path(__file__).resolve().parents[1]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=root, capture_output=True, check=True
    ).stdout
    files = [root / name for name in listed.decode().split("\0") if name and (root / name).is_file()]
    broken = list(list_broken(files, root))
    print("\n".join(broken) or f"{len(files)} Markdown files, every link leads somewhere")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
