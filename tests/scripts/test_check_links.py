"""A link to a file or heading that is gone is named with its line."""

from pathlib import Path

import check_links


def test_links_to_what_is_gone_are_named(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A stage, and more\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n[a](there.md#a-stage-and-more) [b](#page) [c](https://x.org/#y)\n`[d](nowhere.md)`\n"
        "[e](there.md#no-heading)\n[f](gone.md)\n"
    )
    assert list(check_links.list_broken([page], tmp_path)) == [
        "page.md:4: there.md has no heading #no-heading; correct the link",
        "page.md:5: gone.md does not exist; correct the link",
    ]
