"""Checks the files of an own evaluation before a recipe spends hours on a checkpoint that they will judge.

An own evaluation is a folder eval/own/<name>/ with the user's questions, texts and prompts, and limits for them.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from slimqwen.errors import SlimqwenError
from slimqwen.evals.checks import GateSettings
from slimqwen.evals.checks.quality import QualitySettings
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.text.documents import Understanding, read_documents
from slimqwen.text.files import CorpusError
from slimqwen.text.prompts import parse_own_prompts
from slimqwen.text.tables import find_table, is_table
from slimqwen.variant import Variant


def list_faults(variant: Variant, folder: Path, further: Iterable[Callable[[], object]] = ()) -> list[str]:
    """List the faults of an own evaluation, a line each, in its settings, texts, questions and prompts.

    Every file is read to its end, so that one call finds all faults. No engine is started, and the variant's own
    checkpoint need not exist.

    Args:
        variant: variant that the own evaluation will judge.
        folder: folder of the own evaluation.
        further: readers of other files; each raises a SlimqwenError with the faults that it finds.

    Returns:
        The faults; an empty list if there are none.
    """
    root, faults = variant.root, []
    readers: list[Callable[[], object]] = [lambda: _check_prompts(folder)]
    try:
        gate = GateSettings.load(folder.name, root)
    except SlimqwenError as error:
        faults += error.faults
    else:
        readers += [lambda: _check_names(folder, gate), *gate.input_readers(variant)]
    for read in (*readers, *further):
        try:
            read()
        except SlimqwenError as error:
            faults += error.faults
    return list(dict.fromkeys(faults))  # two checks may read the same file


def describe(folder: Path) -> list[str]:
    """Describe, a line each, how texts, questions and prompts of an own evaluation were understood.

    Its files must be free of faults (`list_faults`).

    Args:
        folder: folder of the own evaluation, eval/own/<name>.
    """
    root = folder.parents[2]
    gate, understanding = GateSettings.load(folder.name, root), Understanding()
    texts = gate.of(FidelitySettings).texts
    for _ in read_documents(root / texts, "paragraphs", understanding):
        pass
    planned = gate.of(QualitySettings).responses.items_to_decide
    lines = [f"{texts}: {understanding.describe()}", gate.suite(root).describe_questions(root, planned)]
    if (prompts := find_table(folder, "prompts")).is_file():
        lines.append(f"{prompts.relative_to(root)}: {len(parse_own_prompts(prompts)):,} prompts")
    return [line for line in lines if line]


_NAMES: Final = {
    **dict.fromkeys(("gate", "suite", "workload"), "yaml"),
    **dict.fromkeys(("texts", "questions", "prompts"), "jsonl"),
}
"""The files of an own evaluation without their endings, each with an ending by which it is read."""


def _check_names(folder: Path, gate: GateSettings) -> None:
    """Name each file that is called like one of an own evaluation's but is not read, such as suite.yml or prompts.txt.

    Raises:
        CorpusError: there is such a file.
    """
    root, faults = folder.parents[2], []
    named = {file for settings in gate.sections for file in settings.inputs(root)}
    for file in sorted(folder.iterdir()):
        name = file.name.partition(".")[0].lower()
        is_data = is_table(file) or file.suffix in (".txt", ".yml", ".yaml")
        is_read = file.name == f"{name}.{_NAMES.get(name)}"
        if name in ("questions", "prompts"):
            is_read = is_table(file) and file.name.startswith(name)
        if name in _NAMES and is_data and not is_read and file not in named:
            also = ", or name it in gate.yaml" if name == "texts" else ""
            faults.append(f"{file}: not read under this name; rename it to {name}.{_NAMES[name]}{also}")
    if faults:
        raise CorpusError(*faults)


def _check_prompts(folder: Path) -> None:
    if (file := find_table(folder, "prompts")).is_file():
        parse_own_prompts(file)
