"""Tables of Markdown files, for scripts that change what they are generated from."""

from pathlib import Path

from _console import console

from slimqwen.errors import SlimqwenError
from slimqwen.report import tables


def bring_up_to_date(root: Path) -> None:
    """Rewrite every table that no longer says what its records do; where that cannot be, say so: the change stands."""
    try:
        outdated = tables.outdated(root)
    except SlimqwenError as error:
        console.print(f"tables left as they are: {error}", markup=False, soft_wrap=True)
        return
    for file, fresh in outdated.items():
        file.write_text(fresh, encoding="utf-8")
        console.print(f"rewritten: {file.relative_to(root)}", markup=False, soft_wrap=True)
