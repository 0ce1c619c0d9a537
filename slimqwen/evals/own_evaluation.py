"""Checks the files of an own evaluation before a recipe spends hours on a checkpoint that they will judge."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.checkpoint import read_config, text_config
from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.errors import SlimqwenError
from slimqwen.evals.drafting import AcceptanceSettings, cut_class_tokens
from slimqwen.evals.gate_checks import GateSettings
from slimqwen.evals.suites.suite import Suite
from slimqwen.models.vocabulary import read_tokenizer
from slimqwen.text.prompts import documents, parse_own_prompts
from slimqwen.variant import Variant


def list_faults(variant: Variant, folder: Path, further: Iterable[Callable[[], object]] = ()) -> list[str]:
    """List the faults of an own evaluation, a line each, in its settings, texts, questions and prompts.

    Each file is read to its end, and each check says what it lacks of what can be read, so that one look finds all.
    No engine is started, and the variant's own checkpoint need not exist.

    Args:
        variant: variant that the own evaluation will judge.
        folder: folder of the own evaluation.
        further: checks outside this package; each raises a SlimqwenError with the faults that it finds.
    """
    root, faults = variant.root, []
    prompts = folder / "prompts.jsonl"
    checks: list[Callable[[], object]] = [lambda: parse_own_prompts(prompts)] if prompts.is_file() else []
    try:
        gate = GateSettings.load(folder.name, root)
    except SlimqwenError as error:
        faults += error.faults
    else:
        checks += [
            lambda: gate.fidelity.read_texts(root),
            lambda: list(documents(gate.acceptance.documents, gate.acceptance.seed, root)),
            lambda: list(documents(gate.engine.text, gate.engine.seed, root)),
            lambda: _cut_prompts_of_drafts(variant, gate.acceptance),
            lambda: Suite.load(gate.quality, root).require_questions(root),
        ]
    for check in (*checks, *further):
        try:
            check()
        except SlimqwenError as error:
            faults += error.faults
    return list(dict.fromkeys(faults))  # two checks may read the same file


def _cut_prompts_of_drafts(variant: Variant, settings: AcceptanceSettings) -> None:
    """Cut the prompts of the acceptance check as the gate will; a CorpusError if the documents have too few tokens."""
    if variant.baseline is None:
        return
    weights = variants.load(variant.baseline, variant.root).weights
    file = weights / "tokenizer.json"
    if not file.is_file() or not has_mtp_head(weights):
        return
    tokenizer = read_tokenizer(file)
    context = int(text_config(read_config(weights))["max_position_embeddings"])
    served = variant.settings.get("VLLM_MAX_MODEL_LEN")
    with contextlib.suppress(ValueError):  # vLLM's own refusal names the line
        limit = variants.read_token_count(served.value) if served else -1
        context = min(context, limit) if limit > 0 else context
    # The gate also leaves room for a few drafted tokens, whose number is not known before vLLM reads the flags.
    cut_class_tokens(
        settings,
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        max(1, context - settings.tokens),
        variant.root,
        skips_faults=True,  # the faults of the documents are those of another check
    )
