"""Acceptance length of a variant's served baseline on the prompts by which `redistill_mtp` judged its head.

The stage compares the trained head with that of its input, which earlier stages may have trimmed or whose target they
may have packed: both can be shorter than what is served today. A stage knows no variant, and its output is that of
every variant with the same recipe, so the baseline is measured after the stage, once, and kept among the output's
facts.
"""

from collections.abc import Sequence
from pathlib import Path

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.models.vocabulary import read_tokenizer
from slimqwen.progress import Progress, silent
from slimqwen.recipe import runner, variant_recipe
from slimqwen.recipe.sampled_outputs import read_outputs
from slimqwen.variant import Variant

_LENGTH, _DIGEST = "acceptance_length_baseline_vllm", "baseline_digest"


def compare_drafts(
    variant: Variant, outcomes: Sequence[runner.Outcome], progress: Progress = silent
) -> str | None:
    """Compare in a sentence the acceptance length of the served baseline with that of the head from `redistill_mtp`.

    Args:
        outcomes: outcomes of all or the first stages of the variant's recipe.

    Returns:
        A sentence without a full stop; None if no stage trained a head, or the baseline is missing or has no MTP head.

    Raises:
        ServingError: the baseline drafts nothing.
    """
    recipe = variant_recipe.read_recipe(variant)
    number = next((at for at, each in enumerate(outcomes) if each.stage == "redistill_mtp"), None)
    if number is None or variant.baseline is None:
        return None
    baseline = variants.load(variant.baseline, variant.root).weights
    if not (baseline / "tokenizer.json").is_file() or not has_mtp_head(baseline):
        return None
    trained, depth = outcomes[number], int(recipe.steps[number].parameters.model_dump()["depth"])
    base = variant_recipe.base_folder(recipe.base, variant.root)
    source = outcomes[number - 1].folder if number else base
    facts, digest = trained.manifest.facts, checkpoint.digest(baseline)
    if facts.get(_DIGEST) != digest:
        length = _measure_length(source, baseline, depth, progress)
        facts = runner.add_facts(trained.folder, {_LENGTH: round(length, 4), _DIGEST: digest}).facts
    kept, served = (float(facts[name]) for name in ("acceptance_length_kept_vllm", _LENGTH))  # type: ignore[arg-type]
    return (
        f"against the served baseline {variant.baseline}: acceptance length {kept:.2f} with the head that was kept, "
        f"{served:.2f} with the baseline's own, both in vLLM with K = {depth} on the same held-out prompts"
    )


def _measure_length(source: Path, baseline: Path, depth: int, progress: Progress) -> float:
    from slimqwen.serving.draft_counts import count_drafts_in_vllm

    progress("measuring the drafts of the served baseline in vLLM", 0, 0)
    held_out = [output for output in read_outputs(source) if output.held_out]
    first, second = (read_tokenizer(folder / "tokenizer.json") for folder in (source, baseline))
    # The ids are those of the stage's input, whose vocabulary may be pruned; the text is the same.
    texts = [first.decode(list(output.prompt), skip_special_tokens=False) for output in held_out]
    prompts = [second.encode(text, add_special_tokens=False).ids for text in texts]
    longest = max(len(output.continuation) for output in held_out)
    return count_drafts_in_vllm(baseline, prompts, longest, depth).mean_length
