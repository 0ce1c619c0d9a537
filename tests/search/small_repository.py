"""A repository in small for searches: the embedded model, its incumbent and its settings, by links."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def link_repository(folder: Path) -> Path:
    """Link what a search reads of the real repository into a folder."""
    for parent, names in {
        "experiments": ("tiny", "tiny-mtp4", "tiny-classic"),
        "weights": ("tiny",),
        "eval": tuple(path.name for path in (ROOT / "eval").iterdir() if path.name != "search"),
    }.items():
        (folder / parent).mkdir(exist_ok=True)
        for name in names:
            (folder / parent / name).symlink_to(ROOT / parent / name)
    (folder / "eval" / "search").mkdir()
    (folder / "eval" / "search" / "tinyworld.yaml").symlink_to(Path(__file__).with_name("tinyworld.yaml"))
    return folder
