"""A published folder in vLLM without Slimqwen's draft vocabulary and with it: one checkpoint, the same tokens."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tinyworld.documents import DocumentSampler
from tinyworld.tokenizer import load_tokenizer
from tinyworld.world import World
from vllm import ModelRegistry

from slimqwen import checkpoint, progress, variant
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.files import carry_all, file_records
from slimqwen.evals.engine import compare_tokens
from slimqwen.evals.engine_process import Request, Response, generate_responses
from slimqwen.evals.publication import publish_variant
from slimqwen.recipe.sampled_outputs import OUTPUTS
from slimqwen.recipe.stages import quantise_lm_head, trim_draft_vocab
from slimqwen.recipe.stages.quantise_lm_head import QuantiseLmHeadParameters
from slimqwen.recipe.stages.trim_draft_vocab import TrimDraftVocabParameters
from slimqwen.serving.in_process import counter, engine
from tests.evals.recipe_made import gated
from tests.noise import near_tie_nats

TINY = Path(__file__).parents[2] / "weights" / "tiny"
DEPTH, TOKENS, PROMPTS = 4, 24, 8
CLASS = "vllm.model_executor.models.qwen3_5_mtp:Qwen3_5MTP"
OURS = "slimqwen.vllm_plugin.draft_vocabulary:DraftVocabularyMTP"

pytestmark = pytest.mark.engine


def requests(tokens: int = TOKENS) -> list[Request]:
    tokenizer = load_tokenizer(TINY)
    prose = DocumentSampler(World(), left_out=(), mix={"prose": 1.0}).stream(seed=5)
    ids = [tokenizer(document.text)["input_ids"][:24] for document in itertools.islice(prose, PROMPTS)]
    return [Request(tuple(prompt), tokens) for prompt in ids]


@pytest.fixture
def published(made: variant.Variant, stamps: None, tmp_path: Path) -> Path:
    """The folder that `variant publish` writes of a 4-bit head and drafts from half of the vocabulary."""
    sampled, packed = shutil.copytree(TINY, tmp_path / "sampled"), tmp_path / "packed"
    rows = ({"prompt": each.prompt[:8], "continuation": each.prompt[8:], "held_out": n % 2 == 0} for n, each in
            enumerate(requests()))  # fmt: skip
    packed.mkdir()
    quantise_lm_head.quantise_output_head(sampled, packed, QuantiseLmHeadParameters(), progress.silent)
    (packed / OUTPUTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    trimmed = tmp_path / "trimmed"
    trimmed.mkdir()
    trim_draft_vocab.trim_draft_vocabulary(
        packed, trimmed, TrimDraftVocabParameters(size=4096), progress.silent
    )
    store = made.weights.resolve()
    for file in store.iterdir():
        if file.name != "manifest.json":
            file.unlink()
    carry_all(trimmed, store)
    manifest = checkpoint.Manifest.read(store)
    manifest.model_copy(update={"files": file_records(store)}).write(store)
    gated(made)
    target = tmp_path / "out" / "small"
    publish_variant(made, target, "apache-2.0")
    assert checkpoint.digest(target) == checkpoint.digest(trimmed)
    assert (target / draft_head.FILE).is_file()
    return target


@pytest.fixture
def without_draft_vocabulary() -> Iterator[Callable[[], None]]:
    """vLLM's own class in place of the plugin's, until the function is called; a CPU needs the patches to draft."""
    from vllm.plugins import load_general_plugins

    def use(name: str) -> None:
        ModelRegistry.register_model("Qwen3_5MTP", name)

    load_general_plugins()  # once a process; it would replace the class again
    use(CLASS)
    yield lambda: use(OURS)
    use(OURS)


def test_vllm_s_own_head_drafts_from_all_ids_and_answers_as_slimqwen_s_does(
    published: Path, without_draft_vocabulary: Callable[[], None], tmp_path: Path
) -> None:
    with engine(published) as llm:
        asked = requests(TOKENS + DEPTH - 1)
        answers = generate_responses(llm, asked, log_probabilities=True)
        tie_nats = near_tie_nats(llm, asked, answers)
    with engine(published, num_speculative_tokens=DEPTH) as llm:
        plain = [answer.tokens for answer in generate_responses(llm, requests())]
        assert counter(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    without_draft_vocabulary()
    # vLLM keeps the class that it found for a folder.
    with engine(shutil.copytree(published, tmp_path / "again"), num_speculative_tokens=DEPTH) as llm:
        ours = [answer.tokens for answer in generate_responses(llm, requests())]
        assert counter(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    for answer, *drafted in zip(answers, plain, ours, strict=True):
        expected = Response(answer.tokens[:TOKENS], answer.log_probabilities)
        for tokens in drafted:
            comparison = compare_tokens(expected, tokens, tie_nats)
            assert comparison.near_tie or not comparison.differs, comparison
    assert sum(one == other for one, other in zip(plain, ours, strict=True)) > PROMPTS / 2
