"""docs/glossary.md on the pages: a section at the foot of each, and the meaning of abbreviations in headings."""

import re
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup, escape

_ROW = re.compile(r"^\| (?P<term>[^|]+) \| (?P<meaning>[^|]+) \|$", re.MULTILINE)
_WORD = re.compile(r"[A-Z][A-Z0-9]*\b")


def read(root: Path) -> Mapping[str, str]:
    """Meanings by term; empty where a repository has no glossary."""
    file = root / "docs" / "glossary.md"
    text = file.read_text(encoding="utf-8").replace("`", "") if file.is_file() else ""
    rows = {row["term"]: row["meaning"] for row in _ROW.finditer(text)}
    return {term: meaning for term, meaning in rows.items() if term != "term"}


def abbreviations(glossary: Mapping[str, str]) -> Mapping[str, str]:
    """Meanings by the terms in capital letters."""
    return {
        name: meaning for term, meaning in glossary.items() for name in term.split(", ") if name.isupper()
    }


def explained(text: str, meanings: Mapping[str, str]) -> Markup:
    """A heading whose abbreviations tell their meaning to a pointer."""

    def expansion(match: re.Match[str]) -> str:
        if match[0] not in meanings:
            return match[0]
        return Markup('<abbr title="{}">{}</abbr>').format(meanings[match[0]], match[0])

    # Escaped first: an entity has no capital letter.
    return Markup(_WORD.sub(expansion, str(escape(text))))
