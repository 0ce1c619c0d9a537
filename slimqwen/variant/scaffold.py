"""A new variant's folder: config.env, measurements.json, README.md, and recipe.yaml if it has weights of its own."""

import json
import os
import re
import secrets
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import yaml

from slimqwen import variant as variants
from slimqwen.checkpoint.files import flush
from slimqwen.errors import SlimqwenError
from slimqwen.variant import Variant
from slimqwen.variant.claims import read_claims
from slimqwen.variant.config_env import config_env
from slimqwen.workspace import relative

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STORE = "store"
_WIDTH = 120


class ScaffoldError(SlimqwenError):
    """A variant that cannot be created. Nothing was written."""


def create(
    name: str,
    base: str | None,
    hypothesis: str,
    *,
    recipe: str | None = None,
    lines: Mapping[str, str] = MappingProxyType({}),
    reasons: Mapping[str, str] = MappingProxyType({}),
    config: str | None = None,
    root: Path | None = None,
) -> Path:
    """Create experiments/<name>/, which appears whole or not at all.

    Args:
        name: name of the variant: letters, digits, `.`, `_`, `-`; 64 at most.
        base: name of the variant whose flags the new one inherits; None for a new baseline, for which `lines` are all
            of config.env.
        hypothesis: expected result, one sentence that a measurement can refute.
        recipe: content of recipe.yaml; None for a variant that serves the checkpoint of its base.
        lines: key -> value of the lines of config.env that differ from those of `base`.
        reasons: comment to write before a line, by the line's key or key=value.
        config: content of config.env, in place of the base and `lines`.

    Returns:
        The folder.

    Raises:
        ScaffoldError: a bad or taken name, no hypothesis.
        ConfigError: no such base.
    """
    root = root or variants.repository_root()
    folder = root / "experiments" / name
    hypothesis = " ".join(hypothesis.split())
    require_new(name, root, with_weights=recipe is not None)
    if not hypothesis or "<!--" in hypothesis:
        raise ScaffoldError(
            f"{name} has no hypothesis, or one with `<!--`; give a sentence that a measurement can refute: "
            '--hypothesis "4-bit MLPs keep every task score within two points"'
        )
    base_variant = variants.load(base, root) if base else None
    measurements: dict[str, object] = {
        "schema": "measurements/1",
        "hypothesis": hypothesis,
        "baseline": (base_variant.baseline or base_variant.name) if base_variant else None,
        **({"claims": list(read_claims(hypothesis))} if base_variant else {}),
        "status": "planned",
        "verdict": None,
        "records": [],
    }
    drafts = lines.get("VLLM_SPECULATIVE_CONFIG", "1" if base_variant and base_variant.drafts else "") != ""
    files = {
        "config.env": config or _config(name, base_variant, recipe is not None, lines, reasons),
        "measurements.json": json.dumps(measurements, indent=2, ensure_ascii=False) + "\n",
        "README.md": _readme(name, hypothesis, base_variant, recipe is not None, drafts=drafts),
    }
    if recipe is not None:
        files["recipe.yaml"] = recipe
    scratch = root / ".cache"
    scratch.mkdir(exist_ok=True)
    # Not below experiments/, where a killed run would leave a folder that looks like a variant.
    staging = scratch / f"new-variant-{name}.{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        for file, content in files.items():
            (staging / file).write_text(content, encoding="utf-8")
        for path in (*staging.iterdir(), staging):
            flush(path)
        try:
            staging.rename(folder)
        except OSError as error:
            raise ScaffoldError(
                f"experiments/{name} was created meanwhile ({error.strerror}); choose another name"
            ) from None
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return folder


def copy(name: str, source: str, hypothesis: str | None = None, root: Path | None = None) -> Path:
    """Create experiments/<name>/ as a copy of another variant: its config.env lines, recipe and baseline.

    Args:
        name: name of the copy: letters, digits, `.`, `_`, `-`; 64 at most.
        source: name of the variant to copy; if that is a baseline, it becomes the baseline of the copy.
        hypothesis: expected result, one sentence; None for that of the other variant.
        root: the repository; None for the workspace of the working folder.

    Returns:
        The folder.

    Raises:
        ScaffoldError: the name is malformed or taken.
        ConfigError: there is no variant `source`.
    """
    root = root or variants.repository_root()
    original = variants.load(source, root)
    config = config_env(source, root).read_text(encoding="utf-8")
    # Another variant is no copy of the hub's repository, in whose name a recipe would find it.
    config = re.sub(r"(?m)^(SOURCE|REVISION)=.*\n", "", config)
    recipe = None
    if original.recipe:
        config = re.sub(rf"\bweights/{re.escape(source)}(?![\w.-])", f"weights/{name}", config)
        recipe = _with_moved_texts(original.recipe, root / "experiments" / name, root)
    expected = hypothesis or original.hypothesis
    return create(name, source, expected, recipe=recipe, config=config, root=root)


def _with_moved_texts(recipe: Path, folder: Path, root: Path) -> str:
    """Content of a recipe with its texts named as a recipe in another folder names them."""
    content = recipe.read_text(encoding="utf-8")
    for node in sorted(_list_texts(yaml.compose(content)), key=lambda node: -node.start_mark.index):
        if len(Path(node.value).parts) == 1 and not Path(node.value).suffix:
            continue  # a name, such as self
        file = Path(os.path.normpath(recipe.parent / node.value))
        is_shipped = relative(file, root).parts[:-1] == ("eval", "texts") and file.suffix == ".jsonl"
        text = file.stem if is_shipped else os.path.relpath(file, folder)
        written = json.dumps(text, ensure_ascii=False) if node.style else text
        content = content[: node.start_mark.index] + written + content[node.end_mark.index :]
    return content


def _list_texts(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    """The values in a recipe that name a text."""
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _list_texts(each)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value in ("corpus", "path") and isinstance(value, yaml.ScalarNode):
                yield value
            else:
                yield from _list_texts(value)


def require_new(name: str, root: Path, *, with_weights: bool = False) -> None:
    """Check that a new variant can have this name.

    Raises:
        ScaffoldError: the name is malformed or taken; or, for a variant with weights of its own, weights/<name> is.
    """
    folder = root / "experiments" / name
    if not _NAME.fullmatch(name) or name == _STORE:
        raise ScaffoldError(
            f"{name!r} cannot name a variant: use letters, digits, . _ - (64 at most), a letter or digit first; "
            f"{_STORE!r} is taken by the recipes"
        )
    if folder.exists() or folder.is_symlink():
        raise ScaffoldError(f"experiments/{name} exists; choose another name")
    weights = root / "weights" / name
    if with_weights and weights.exists() and not weights.is_symlink():
        raise ScaffoldError(f"weights/{name} exists and no recipe made it; choose another name")


def _config(
    name: str, base: Variant | None, with_weights: bool, lines: Mapping[str, str], reasons: Mapping[str, str]
) -> str:
    weights = f"VLLM_MODEL=weights/{name}\n" if with_weights else ""
    written = "".join(
        f"{_comment(reasons.get(f'{key}={value}') or reasons.get(key, ''))}{key}={value}\n"
        for key, value in lines.items()
    )
    if base is None:
        return written
    if lines:
        return f"BASE={base.name}\n{weights}{written}"
    return (
        f"BASE={base.name}\n{weights}"
        f"# A line for each flag of vLLM that is to differ from {base.name}: VLLM_MAX_NUM_SEQS=8 is --max-num-seqs 8.\n"
    )


def _comment(text: str) -> str:
    """Lines of a comment; none for an empty text."""
    lines = textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)


def _readme(name: str, hypothesis: str, base: Variant | None, with_weights: bool, *, drafts: bool) -> str:
    if base is None:
        content = "The baseline of its variants: `config.env` names the checkpoint and how it is served."
    elif with_weights:
        content = f"`recipe.yaml` says how its checkpoint is made; `slimqwen recipe run {name}` makes it."
    else:
        content = f"The checkpoint is that of `{base.name}`; `config.env` has the flags that differ."
    wrapped = [
        textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
        for text in (
            f"**Hypothesis.** {hypothesis}",
            content,
            *([f"{variants.DRAFTS_NOTE}."] if drafts else []),
        )
    ]
    tables = [f"gate {name}", f"results {name}"][base is None :]  # no gate judges a baseline
    blocks = [f"<!-- table:{table} -->\n<!-- end -->" for table in tables]
    return "\n\n".join([f"# {name}", *wrapped, *blocks]) + "\n"
