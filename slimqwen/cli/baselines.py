"""Finds or makes the baseline for the MODEL of `slimqwen optimise`: a repository, folder, GGUF file or variant."""

import re
from pathlib import Path

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import progress_bar, relative
from slimqwen.cli.report import update_page
from slimqwen.cli.variants import create_baseline
from slimqwen.errors import SlimqwenError
from slimqwen.variant import Variant

_LONGEST_NAME = 40
"""Characters of a baseline's name, which leave room for what the names of its variants add."""


class ModelError(SlimqwenError):
    """The MODEL of `slimqwen optimise` cannot be used: its name is taken, or its download exceeds --disk."""


def name_of(model: str) -> str:
    """Name of the baseline for MODEL: that of a named variant, else one derived from the folder, file or repository."""
    known = variants.names()
    path = Path(model if Path(model).exists() else model.partition("@")[0])
    stem = path.stem if path.suffix == ".gguf" else path.resolve().name
    named = re.sub(r"[^a-z0-9._-]+", "-", stem.lower())[:_LONGEST_NAME].strip("-._")
    name = model if model in known else named
    return variants.load(name).baseline or name if name in known else name


def find_base(
    model: str, name: str, evaluation: str | None, disk: float | None, yes: bool
) -> tuple[Variant, float]:
    """Find the baseline for MODEL; make it if it is missing, and download its checkpoint if a hub has that.

    Args:
        model: MODEL of the command line: a repository, folder, GGUF file or variant.
        name: name of the baseline, from `name_of`.
        evaluation: evaluation of a new baseline; None for `core`.
        disk: most GB to download; None for no limit.
        yes: whether to download without asking.

    Returns:
        The baseline, and the GB that were downloaded.

    Raises:
        ModelError: a variant of that name has another checkpoint, or the download exceeds `disk`.
        HubError: the hub cannot be reached, or hides or lacks the repository.
        typer.Abort: the user declined the download.
    """
    from slimqwen import hub

    root = variants.repository_root()
    base = variants.load(name, root) if name in variants.names(root) else None
    if base and not _is_of(model, base):
        raise ModelError(
            f"{name} is a variant of another checkpoint, {relative(base.weights)}; make a baseline of {model}: "
            f"`slimqwen variant new --name NAME --checkpoint {model}`, then `slimqwen optimise NAME`"
        )
    again = f"`slimqwen optimise {model}`"
    is_here = (base.weights / "config.json").is_file() if base else Path(model).exists()
    source = base.settings.get("SOURCE") if base else None
    size = 0.0
    if not is_here and (source or (base is None and re.fullmatch(r"[\w.-]+/[\w.-]+(/.+|@.+)?", model))):
        repository, _, revision = (source.value if source else model).partition("@")
        asked = hub.Repository(repository, "model", revision or None, again, "MODEL")
        size = hub.count_bytes(asked) / 1e9
        if disk is not None and size > disk:
            raise ModelError(f"{repository} has {size:.2f} GB, more than --disk {disk:g}; raise --disk")
        if not yes:
            typer.confirm(f"Download {repository}, {size:.2f} GB?", abort=True)
    if base is None:
        update_page(create_baseline(name, model, None, evaluation or "core", again))
    elif not is_here and source:
        with progress_bar() as progress:
            hub.download_checkpoint(base, progress)
    return variants.load(name, root), size


def _is_of(model: str, base: Variant) -> bool:
    """Whether a baseline is of the checkpoint that MODEL names."""
    path, source = Path(model), base.settings.get("SOURCE")
    if model in variants.names(base.root) or path.suffix == ".gguf":
        return True
    if path.exists():
        return path.resolve() == base.weights.resolve()
    return source is not None and source.value == model.partition("@")[0]


def name_served(name: str, context: int | None, sequences: int | None) -> str:
    """Name of the baseline that serves this context (tokens) and number of sequences; None keeps the present value."""
    known = variants.load(name).settings if name in variants.names() else {}
    for key, value, letter in (("VLLM_MAX_MODEL_LEN", context, "c"), ("VLLM_MAX_NUM_SEQS", sequences, "s")):
        if value is not None and (key not in known or known[key].value != str(value)):
            name += f"-{letter}{value}"
    return name


def serve_with(base: Variant, context: int | None, sequences: int | None) -> Variant:
    """The baseline with this context length (tokens) and number of sequences; the variant is written if it is missing.

    None keeps the baseline's value; with both None it is the baseline itself.
    """
    from slimqwen.variant import scaffold
    from slimqwen.variant.config_env import quoted

    name = name_served(base.name, context, sequences)
    if name not in variants.names(base.root):
        asked = {"VLLM_MAX_MODEL_LEN": context, "VLLM_MAX_NUM_SEQS": sequences}
        # A copy of a hub's repository lies under the name of the variant that says so, the first baseline.
        own = {
            key: quoted(each.value)
            for key, each in base.settings.items()
            if key not in ("SOURCE", "REVISION")
        }
        own |= {key: str(value) for key, value in asked.items() if value is not None}
        hypothesis = (
            f"{base.name} for other requests: what every variant for them has to beat at equal quality."
        )
        update_page(scaffold.create(name, None, hypothesis, lines=own, root=base.root))
    return variants.load(name, base.root)
