"""What the target says is sampled: the same each time, and apart for training and for measuring."""

from pathlib import Path

import pytest

from slimqwen import progress
from slimqwen.checkpoint.files import file_records
from slimqwen.models.outline import Outline
from slimqwen.recipe.sampled_outputs import OUTPUTS, read_outputs
from slimqwen.recipe.stages import sample_outputs
from slimqwen.recipe.stages.sample_outputs import CorpusError, Prompts
from tests.checkpoints import TINY
from tests.recipe.stages.sampling import FEW, sampled_from


@pytest.mark.engine
def test_the_same_target_says_the_same(sampled: Path, tmp_path: Path) -> None:
    again = sampled_from(TINY, tmp_path / "again")
    assert (again / OUTPUTS).read_bytes() == (sampled / OUTPUTS).read_bytes()


@pytest.mark.engine
def test_the_checkpoint_goes_through_sampling_unchanged(sampled: Path) -> None:
    after = file_records(sampled)
    del after[OUTPUTS]
    assert after == file_records(TINY)


@pytest.mark.engine
def test_texts_to_measure_on_are_others_than_texts_to_train_on(sampled: Path) -> None:
    outputs = list(read_outputs(sampled))
    held_out = {output.prompt for output in outputs if output.held_out}
    assert len(held_out) == FEW.held_out
    assert not held_out & {output.prompt for output in outputs if not output.held_out}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "A short text."}\n', "gives 1 different prompts, but 64 are needed"),
        ("no json\n", "line 1: not JSON"),
    ],
)
def test_a_corpus_that_is_no_use_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(content)
    parameters = FEW.model_copy(update={"prompts": Prompts(path=file)})
    with pytest.raises(CorpusError, match=message):
        sample_outputs.write_sampled_outputs(TINY, tmp_path, parameters, progress.silent)


def test_given_prompts_are_taken_whole_and_texts_by_their_first_third(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"prompt": "one two three four five six"}\n{"text": "one two three four five six"}\n')

    def words(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(range(2 * len(text.split())))}

    taken = list(sample_outputs._prompts(Prompts(path=file), TINY, words))
    assert [len(ids) for ids in taken] == [12, 4]


def test_a_recipe_learns_beforehand_that_prompts_are_too_few_or_the_context_is_too_short(
    tmp_path: Path,
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "number {number}"}}\n' for number in range(20)))
    outline, enough = Outline.read(TINY), {"prompts": Prompts(path=file), "texts": 12, "held_out": 8}

    def faults(**changes: int) -> list[str]:
        parameters = FEW.model_copy(update=enough | changes)
        return [fault.text for fault in sample_outputs.inspect_prompts(outline, parameters)]

    assert faults() == []
    assert ["21 are needed" in text for text in faults(texts=13)] == [True]
    assert ["exceed the context of" in text for text in faults(tokens=10**6)] == [True]
