"""A new variant's folder: config.env, measurements.json, README.md, and recipe.yaml if it has weights of its own."""

import json
import re
import shutil
import tempfile
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.recipe import recipe_file
from slimqwen.recipe.corpus import TextSource
from slimqwen.recipe.registry import STAGES
from slimqwen.records import store
from slimqwen.report import tables
from slimqwen.variant import Variant

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STORE = "store"
_WIDTH = 120
_EMBEDDED = "tiny"


class ScaffoldError(SlimqwenError):
    """A variant that cannot be created; nothing was written."""


def create(
    name: str, base: str, hypothesis: str, *, stages: Sequence[str] = (), root: Path | None = None
) -> Path:
    """Create experiments/<name>/, which appears whole or not at all.

    Args:
        name: letters, digits, `.`, `_`, `-`; 64 at most.
        base: the variant that it inherits its flags from, and whose checkpoint it serves or its recipe starts from.
        hypothesis: what the variant is expected to show, one sentence.
        stages: of a recipe, in order; none for a variant that only changes flags.
        root: the repository.

    Returns:
        The folder.

    Raises:
        ScaffoldError: a bad or taken name, no hypothesis.
        UnknownVariantError: no such base.
        slimqwen.recipe.recipe_file.RecipeError: no such stage, or an order that cannot be.
        SlimqwenError: the base cannot be read, or a stage needs its checkpoint and that is missing.
    """
    root = root or variants.repository_root()
    folder = root / "experiments" / name
    hypothesis = " ".join(hypothesis.split())
    _require_name(name, folder, root, with_weights=bool(stages))
    if not hypothesis or "<!--" in hypothesis:
        raise ScaffoldError(
            f"{name} needs a hypothesis, one sentence that a measurement can refute and no comment: "
            'HYPOTHESIS="4-bit MLPs keep every task score within two points"'
        )
    start = variants.load(base, root)
    baseline = start.baseline or start.name
    scratch = root / ".cache"
    scratch.mkdir(exist_ok=True)
    # Not below experiments/, where a run that was killed would leave what looks like a variant.
    staging = Path(tempfile.mkdtemp(dir=scratch, prefix=f"new-variant-{name}."))
    try:
        if stages:
            recipe = staging / "recipe.yaml"
            recipe.write_text(_recipe(start, stages), encoding="utf-8")
            try:
                recipe_file.read(recipe)
            except recipe_file.RecipeError as error:
                # The file is gone when this is read: only what is wrong with it counts.
                raise recipe_file.RecipeError(f"STAGES: {str(error).partition(': ')[2]}") from None
        (staging / "config.env").write_text(_config(name, start, bool(stages)), encoding="utf-8")
        measurements: store.Record = {
            "schema": store.present_versions()["measurements"],
            "hypothesis": hypothesis,
            "baseline": baseline,
            "status": "planned",
            "verdict": None,
            "records": [],
        }
        store.validate(measurements, f"experiments/{name}/measurements.json")
        (staging / "measurements.json").write_text(
            json.dumps(measurements, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        readme = _readme(name, hypothesis, start, stages)
        (staging / "README.md").write_text(readme, encoding="utf-8")
        for path in (*staging.iterdir(), staging):
            checkpoint.flush(path)
        staging.chmod(0o755)  # mkdtemp gives 0700
        try:
            staging.rename(folder)
        except OSError as error:
            raise ScaffoldError(f"experiments/{name} was created meanwhile ({error.strerror})") from None
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return folder


def _require_name(name: str, folder: Path, root: Path, *, with_weights: bool) -> None:
    if not _NAME.fullmatch(name) or name == _STORE:
        raise ScaffoldError(
            f"{name!r} cannot name a variant: begin with a letter or digit, go on with these and . _ - (64 at most), "
            f"and leave {_STORE!r} to the recipes"
        )
    if folder.exists() or folder.is_symlink():
        raise ScaffoldError(f"experiments/{name} is there already; choose another name")
    weights = root / "weights" / name
    if with_weights and weights.exists() and not weights.is_symlink():
        raise ScaffoldError(
            f"weights/{name} is there already and no recipe's to replace; choose another name"
        )


def _config(name: str, base: Variant, with_weights: bool) -> str:
    weights = f"VLLM_MODEL=weights/{name}\n" if with_weights else ""
    return (
        f"BASE={base.name}\n{weights}"
        f"# A line for each flag of vLLM that is to differ from {base.name}: VLLM_MAX_NUM_SEQS=8 is --max-num-seqs 8.\n"
    )


def _recipe(base: Variant, stages: Sequence[str]) -> str:
    lines = [
        f"description: The checkpoint of {base.name} through {', '.join(stages)}.",
        f"base: {base.name}",
        "stages:",
    ]
    for stage in stages:
        given = _parameters(stage, base)
        entry = yaml.safe_dump({stage: given}, sort_keys=False) if given else f"{stage}:\n"
        lines.append(f"  - {textwrap.indent(entry, '    ').strip()}")
    return "\n".join(lines) + "\n"


def _parameters(stage: str, base: Variant) -> dict[str, Any]:
    """What has no default, or none that fits: the text that the stage reads, and the size of a vocabulary."""
    if stage not in STAGES:
        return {}  # reading the recipe names the nearest
    fields = STAGES[stage].parameters.model_fields
    given: dict[str, Any] = {}
    if "size" in fields:
        checkpoint.check(base.weights, variants.making_command(base.weights, base.root))
        # As much as tiny-v4k cuts: a place to begin, which `make analyze-vocab` says more about.
        given["size"] = checkpoint.text_config(checkpoint.read_config(base.weights))["vocab_size"] // 2
    for name, field in fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, TextSource):
            given[name] = _text(base)
    return given


def _text(base: Variant) -> dict[str, str]:
    """The embedded world's text for its own models; for others a file of the family, mixed by its owner."""
    if _EMBEDDED in base.lineage:
        return {"source": "tinyworld"}
    return {"source": "file", "path": f"../../corpora/{base.lineage[-1]}.jsonl"}


def _readme(name: str, hypothesis: str, base: Variant, stages: Sequence[str]) -> str:
    if stages:
        what = (
            f"`recipe.yaml` takes the checkpoint of `{base.name}` through {', '.join(stages)}; "
            f"`make recipe VARIANT={name}` makes the result."
        )
    else:
        what = f"The checkpoint is that of `{base.name}`; `config.env` has the flags that differ."
    paragraphs = (f"**Hypothesis.** {hypothesis}", what)
    wrapped = [
        textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False) for text in paragraphs
    ]
    blocks = [f"<!-- table:{table} -->\n<!-- end -->" for table in (f"gate {name}", f"results {name}")]
    text = "\n\n".join([f"# {name}", *wrapped, *blocks]) + "\n"
    return tables.rewrite(text, partial(tables.build_markdown, base.root))
