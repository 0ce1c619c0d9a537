"""Checks the files of an own evaluation before a recipe spends hours on a checkpoint that they will judge."""

from collections.abc import Callable, Iterable
from pathlib import Path

from slimqwen.errors import SlimqwenError
from slimqwen.evals.checks import GateSettings
from slimqwen.text.prompts import parse_own_prompts
from slimqwen.variant import Variant


def list_faults(variant: Variant, folder: Path, further: Iterable[Callable[[], object]] = ()) -> list[str]:
    """List the faults of an own evaluation, a line each, in its settings, texts, questions and prompts.

    Each file is read to its end, and each check says what it lacks of what can be read, so that one look finds all.
    No engine is started, and the variant's own checkpoint need not exist.

    Args:
        variant: variant that the own evaluation will judge.
        folder: folder of the own evaluation.
        further: readers of other files; each raises a SlimqwenError with the faults that it finds.
    """
    root, faults = variant.root, []
    prompts = folder / "prompts.jsonl"
    readers: list[Callable[[], object]] = [lambda: parse_own_prompts(prompts)] if prompts.is_file() else []
    try:
        readers += GateSettings.load(folder.name, root).input_readers(variant)
    except SlimqwenError as error:
        faults += error.faults
    for read in (*readers, *further):
        try:
            read()
        except SlimqwenError as error:
            faults += error.faults
    return list(dict.fromkeys(faults))  # two checks may read the same file
