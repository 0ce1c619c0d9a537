"""Drafts from a part of the vocabulary in the real engine: the same answers, the drafts that are counted, refusals."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinyworld.documents import DocumentSampler
from tinyworld.tokenizer import load_tokenizer
from tinyworld.world import World
from vllm import ModelRegistry

from slimqwen import checkpoint, progress
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.config import write_config
from slimqwen.evals.engine import compare_tokens
from slimqwen.evals.engine_process import Request, Response, generate_responses
from slimqwen.models.mtp_head import count_served_steps, load_drafting_model, summarise_acceptance
from slimqwen.recipe.sampled_outputs import OUTPUTS
from slimqwen.recipe.stages import quantise_lm_head, trim_draft_vocab
from slimqwen.recipe.stages.quantise_lm_head import QuantiseLmHeadParameters
from slimqwen.recipe.stages.redistill_mtp import AGREEMENT
from slimqwen.recipe.stages.trim_draft_vocab import TrimDraftVocabParameters
from slimqwen.serving.in_process import counter, engine, vector
from slimqwen.vllm_plugin import draft_vocabulary
from slimqwen.vllm_plugin.errors import PluginError
from tests.checkpoints import edited_tensors, in_old_layout
from tests.noise import near_tie_nats

TINY = Path(__file__).parents[2] / "weights" / "tiny"
DEPTH, TOKENS, PROMPTS = 4, 40, 20
EPSILON = torch.finfo(torch.bfloat16).eps

LOCAL_ARGMAX = {
    "speculative_config": {
        "method": "mtp",
        "num_speculative_tokens": DEPTH,
        "use_local_argmax_reduction": True,
    }
}

pytestmark = pytest.mark.engine


def drafting_model(llm: Any) -> Any:
    return (
        llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter.model
    )


def requests(tokens: int) -> list[Request]:
    tokenizer = load_tokenizer(TINY)
    prose = DocumentSampler(World(), left_out=(), mix={"prose": 1.0}).stream(seed=5)
    ids = [tokenizer(document.text)["input_ids"][:24] for document in itertools.islice(prose, PROMPTS)]
    return [Request(tuple(prompt), tokens) for prompt in ids]


@pytest.fixture(scope="module")
def undrafted() -> tuple[list[Response], float]:
    """What the engine without speculation answers, and a few tokens after it; nats up to which two tokens tie in it."""
    asked = requests(TOKENS + DEPTH - 1)
    with engine(TINY) as llm:
        answers = generate_responses(llm, asked, log_probabilities=True)
        return answers, near_tie_nats(llm, asked, answers)


@pytest.fixture(scope="module")
def answers(undrafted: tuple[list[Response], float]) -> list[Response]:
    return undrafted[0]


@pytest.fixture(scope="module")
def trimmed(answers: list[Response], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """trimmed(size, bits=16): tiny with a draft head for the ids of half of the answers."""
    root = tmp_path_factory.mktemp("trimmed")
    source = shutil.copytree(TINY, root / "sampled")
    rows = [
        {"prompt": request.prompt, "continuation": answer.tokens, "held_out": number % 2 == 0}
        for number, (request, answer) in enumerate(zip(requests(TOKENS), answers, strict=True))
    ]
    (source / OUTPUTS).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(size: int, source: Path = source, bits: int = 16) -> Path:
        folder = root / f"{source.name}-{size}-{bits}"
        if not folder.exists():
            folder.mkdir()
            parameters = TrimDraftVocabParameters(size=size, bits=bits)
            trim_draft_vocab.trim_draft_vocabulary(source, folder, parameters, progress.silent)
        return folder

    return make


class Served:
    """What a drafting engine answers, its counters, and the scores that its drafting model gives.

    Args:
        arguments: of the engine instead of `DEPTH`.
    """

    def __init__(self, folder: Path, **arguments: Any) -> None:
        speculation = arguments or {"num_speculative_tokens": DEPTH}
        with engine(folder, **speculation) as llm:
            model = drafting_model(llm)
            self.kind = type(model).__name__
            self.tokens = [answer.tokens for answer in generate_responses(llm, requests(TOKENS))]
            self.drafts = counter(llm, "vllm:spec_decode_num_drafts")
            self.accepted = vector(llm, "vllm:spec_decode_num_accepted_tokens_per_pos")
            hidden = torch.randn(3, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
            with torch.inference_mode():
                self.scores = model.compute_logits(hidden)
                self.hidden = hidden
                self.top = model.get_top_tokens(hidden)

    @property
    def length(self) -> float:
        return 1 + sum(self.accepted) / self.drafts


@pytest.fixture(scope="module")
def serve() -> Callable[..., Served]:
    """serve(folder): one engine for each checkpoint, kept for all tests."""
    done: dict[Path, Served] = {}

    def once(folder: Path) -> Served:
        if folder not in done:
            done[folder] = Served(folder)
        return done[folder]

    return once


def test_a_checkpoint_without_a_draft_head_gets_vllm_s_own_class(serve: Callable[..., Served]) -> None:
    assert serve(TINY).kind == "Qwen3_5MTP"


@pytest.mark.parametrize(("size", "bits"), [(4096, 16), (128, 16), (4096, 8), (4096, 4)])
def test_no_greedy_answer_changes(
    size: int,
    bits: int,
    undrafted: tuple[list[Response], float],
    trimmed: Callable[..., Path],
    serve: Callable[..., Served],
) -> None:
    answers, tie_nats = undrafted
    served, whole = serve(trimmed(size, bits=bits)), serve(TINY)
    assert served.kind == "DraftVocabularyMTP"
    same = 0
    for answer, tokens, untrimmed in zip(answers, served.tokens, whole.tokens, strict=True):
        expected = Response(answer.tokens[:TOKENS], answer.log_probabilities)
        comparison = compare_tokens(expected, tokens, tie_nats)
        assert comparison.near_tie or not comparison.differs, comparison
        same += tokens == untrimmed
    # Draft depths differ between the two, and with them the shapes of matrix products: a near tie may fall either way.
    assert same > PROMPTS / 2


@pytest.fixture
def without_draft_vocabulary() -> Iterator[None]:
    """vLLM's own class in place of the plugin's, as in a plain engine; a CPU needs the patches to draft."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # once a process; it would replace the class again
    ModelRegistry.register_model("Qwen3_5MTP", "vllm.model_executor.models.qwen3_5_mtp:Qwen3_5MTP")
    yield
    ModelRegistry.register_model("Qwen3_5MTP", "slimqwen.vllm_plugin.draft_vocabulary:DraftVocabularyMTP")


@pytest.mark.usefixtures("without_draft_vocabulary")
def test_an_engine_without_the_draft_vocabulary_serves_the_folder_and_drafts_from_all_ids(
    answers: list[Response], trimmed: Callable[[int], Path], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    # vLLM keeps the class that it found for a folder.
    folder = shutil.copytree(trimmed(128), tmp_path / "plain")
    with engine(folder) as llm:
        undrafted = [answer.tokens for answer in generate_responses(llm, requests(TOKENS + DEPTH - 1))]
    assert undrafted == [answer.tokens for answer in answers]
    drafted, whole = Served(folder), serve(TINY)
    assert drafted.kind == whole.kind == "Qwen3_5MTP"
    assert (drafted.tokens, drafted.accepted) == (whole.tokens, whole.accepted)


def test_an_engine_takes_a_draft_head_that_the_index_lists_as_well(
    trimmed: Callable[[int], Path], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    old = Served(in_old_layout(shutil.copytree(trimmed(128), tmp_path / "old")))
    assert (old.kind, old.tokens, old.accepted) == (
        "DraftVocabularyMTP",
        serve(trimmed(128)).tokens,
        serve(trimmed(128)).accepted,
    )


def test_fewer_ids_mean_shorter_drafts(trimmed: Callable[[int], Path], serve: Callable[..., Served]) -> None:
    whole, half, few = (serve(folder).length for folder in (TINY, trimmed(4096), trimmed(128)))
    assert half > 0.95 * whole
    assert few < 0.9 * whole


@pytest.mark.parametrize("bits", [8, 4])
def test_a_packed_draft_head_drafts_as_well(
    bits: int, trimmed: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    packed, whole = serve(trimmed(4096, bits=bits)), serve(trimmed(4096))
    assert packed.length > 0.98 * whole.length


@pytest.mark.parametrize(("size", "bits"), [(4096, 16), (128, 16), (4096, 4)])
def test_acceptance_counted_by_vllm_agrees_with_the_drafting_model_s(
    size: int,
    bits: int,
    answers: list[Response],
    trimmed: Callable[..., Path],
    serve: Callable[..., Served],
) -> None:
    folder = trimmed(size, bits=bits)
    texts = [
        (request.prompt, answer.tokens) for request, answer in zip(requests(TOKENS), answers, strict=True)
    ]
    offline = summarise_acceptance(count_served_steps(load_drafting_model(folder), texts, DEPTH), DEPTH)
    assert offline.mean_length == pytest.approx(serve(folder).length, rel=AGREEMENT)


def test_local_argmax_drafts_the_same(trimmed: Callable[[int], Path], serve: Callable[..., Served]) -> None:
    reduced = Served(trimmed(128), **LOCAL_ARGMAX)
    assert reduced.tokens == serve(trimmed(128)).tokens
    assert reduced.accepted == serve(trimmed(128)).accepted


@pytest.mark.parametrize(("size", "bits"), [(128, 16), (4096, 8), (4096, 4)])
def test_full_rows_are_minus_infinity_but_for_the_ids(
    size: int, bits: int, trimmed: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    folder = trimmed(size, bits=bits)
    head, served = load_drafting_model(folder, with_layers=False).draft_head, serve(folder)
    assert head is not None
    assert served.scores.shape == (3, 8192)
    possible = torch.isfinite(served.scores)
    assert possible.sum(1).tolist() == [size] * 3
    assert possible[0].nonzero()[:, 0].tolist() == head.token_ids.tolist()
    assert torch.equal(served.scores.argmax(-1), served.top)
    expected = head(served.hidden.float())
    torch.testing.assert_close(
        served.scores[:, head.token_ids].float(), expected, atol=4 * EPSILON, rtol=4 * EPSILON
    )


def test_drafts_of_a_packed_output_head_are_accepted_as_long(
    trimmed: Callable[..., Path], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    packed = tmp_path / "packed"
    packed.mkdir()
    quantise_lm_head.quantise_output_head(TINY, packed, QuantiseLmHeadParameters(), progress.silent)
    shutil.copyfile(trimmed(4096) / OUTPUTS, packed / OUTPUTS)
    # At half of the ids nearly every draft of the whole head has a row.
    assert serve(trimmed(4096, packed)).length == pytest.approx(serve(packed).length, rel=AGREEMENT)


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("token_ids", torch.arange(256) + 7937, "has 7937 to 8192 in torch.int64, but the ids of the voc"),
        ("token_ids", torch.arange(256) - 1, "has -1 to 254"),
        ("token_ids", torch.arange(256.0), "has 0.0 to 255.0 in torch.float32"),
        ("token_ids", torch.zeros(256, dtype=torch.int64), "does not ascend"),
        ("token_ids", torch.arange(255), r"is \[255\], config.json says \[256\]"),
        ("weight", torch.zeros(128, 192), r"is \[128, 192\], config.json says \[256, 192\]"),
        ("bias", torch.zeros(256), r"is \[256\], config.json says no such tensor"),
    ],
)  # fmt: skip
def test_a_damaged_draft_head_is_refused_in_one_line(part: str, tensor: torch.Tensor, message: str) -> None:
    model = object.__new__(draft_vocabulary.DraftVocabularyMTP)
    model.config = SimpleNamespace(vocab_size=8192, **{draft_head.SIZE_KEY: 256})
    built = {"weight": torch.zeros(256, 192), "token_ids": torch.zeros(256)}
    model.model = SimpleNamespace(draft_head=SimpleNamespace(named_parameters=built.items))
    name = draft_head.PREFIX + part
    with pytest.raises(
        PluginError, match=rf"{name} {message}.*; make the checkpoint anew with the stage trim"
    ):
        list(model._checked([("model.norm.weight", torch.ones(1)), (name, tensor)], set()))


@pytest.mark.parametrize(
    ("announced", "message"),
    [
        (256, "the checkpoint lacks mtp.draft_head.token_ids; make the checkpoint anew"),
        (9000, "mtp_draft_vocab_size is 9000, but the vocabulary has 8192 ids; make the checkpoint anew"),
    ],
)
def test_an_engine_refuses_a_draft_head_that_is_not_the_announced_one(
    trimmed: Callable[[int], Path], tmp_path: Path, announced: int, message: str
) -> None:
    folder = shutil.copytree(trimmed(256), tmp_path / "damaged")
    with edited_tensors(folder) as tensors:
        del tensors[draft_head.TOKEN_IDS]
    write_config(folder, {**checkpoint.read_config(folder), draft_head.SIZE_KEY: announced})
    with (
        pytest.raises(PluginError, match=message),
        engine(folder, num_speculative_tokens=1, max_model_len=64, max_num_seqs=1),
    ):
        pass


@pytest.mark.parametrize("bits", [16, 4])
def test_two_devices_share_the_draft_head_and_draft_as_one(
    bits: int, trimmed: Callable[..., Path], serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two CPUs in place of two GPUs: vLLM's own workers, collectives and loaders."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # it would want a NUMA node for each
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(trimmed(4096, bits=bits), num_speculative_tokens=DEPTH, **parallel) as llm:
        tokens = [answer.tokens for answer in generate_responses(llm, requests(TOKENS))]
        drafts = counter(llm, "vllm:spec_decode_num_drafts")
        accepted = sum(vector(llm, "vllm:spec_decode_num_accepted_tokens_per_pos"))
    one = serve(trimmed(4096, bits=bits))
    assert 1 + accepted / drafts == pytest.approx(one.length, rel=AGREEMENT)
    # Sums of two halves round otherwise: a near tie may fall either way.
    assert sum(a == b for a, b in zip(tokens, one.tokens, strict=True)) > PROMPTS / 2
