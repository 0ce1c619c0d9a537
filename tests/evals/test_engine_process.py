"""What an engine's process does: prompt lengths, requests, the noise of ties; real engines of the embedded model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.checkpoint.config import read_config, write_config
from slimqwen.evals import EvalError
from slimqwen.evals.engine import compare_engine
from slimqwen.evals.engine_process import (
    SHORTEST,
    EngineRun,
    EngineSettings,
    Request,
    Response,
    Tokens,
    _respond_in_sessions,
    choose_lengths,
    choose_turns,
    cut_requests,
    generate_responses,
    measure_tie_noise,
    run_engine,
    run_reference,
)
from slimqwen.progress import silent
from slimqwen.text.files import CorpusError

ROOT = variant.repository_root()
TINY = ROOT / "weights" / "tiny"
CONTEXT_LEN = 640
SETTINGS = EngineSettings(
    name="p", text="tinyworld_passages", seed=5, noise_factor=3, draft_tokens=3, concurrency=4, lengths=6,
    output_tokens=8, timeout_s=300,
)  # fmt: skip
PLAIN = {
    "dtype": "bfloat16", "max-model-len": CONTEXT_LEN, "max-num-batched-tokens": CONTEXT_LEN, "max-num-seqs": 1,
    "enforce-eager": True, "enable-prefix-caching": False,
}  # fmt: skip
WAYS = ("alone", "cached", "together", "joining", "session")
DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}
SERVED = PLAIN | {
    "max-num-seqs": 4, "max-num-batched-tokens": 256, "enable-prefix-caching": True, "speculative-config": DRAFTS,
}  # fmt: skip


def test_lengths_are_short_consecutive_around_the_budget_and_at_the_end_of_the_context() -> None:
    lengths = choose_lengths(SETTINGS, block_size=256, token_budget=2048, context_len=4096)
    assert lengths == [*SHORTEST, *range(511, 517), 2047, 2048, 2049, 4088, 4095]
    assert (SHORTEST[0], SHORTEST[-1]) == (1, 16)


@pytest.mark.parametrize(
    ("context_len", "consecutive"), [(515, range(509, 515)), (20, range(14, 20)), (5, range(1, 5))]
)
def test_no_length_reaches_beyond_a_short_context(context_len: int, consecutive: range) -> None:
    lengths = choose_lengths(SETTINGS, block_size=256, token_budget=2048, context_len=context_len)
    short = [length for length in SHORTEST if length < context_len]
    assert lengths == sorted({*short, *consecutive, max(1, context_len - 8), context_len - 1})


def test_turns_begin_beyond_two_blocks_cross_a_block_end_and_reach_the_end_of_the_context() -> None:
    assert choose_turns(12, block_size=256, context_len=4096) == [513, 531, 762, 780, 4084]
    assert choose_turns(12, block_size=256, context_len=774) == [513, 531, 762]
    assert choose_turns(12, block_size=256, context_len=100) == [88]


def test_prompts_are_beginnings_of_one_text_and_end_with_the_context() -> None:
    requests = cut_requests(SETTINGS, TINY, ROOT, [3, 40, 60, 63], 64)
    assert [len(each.prompt) for each in requests] == [3, 40, 60, 63]
    assert [each.output_tokens for each in requests] == [8, 8, 4, 1]
    assert all(requests[-1].prompt[: len(each.prompt)] == each.prompt for each in requests)


def test_a_text_shorter_than_the_context_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"text": "A short text of ten words."}\n')
    settings = SETTINGS.model_copy(update={"text": "own.jsonl"})
    (request,) = cut_requests(settings, TINY, tmp_path, [200], 256)
    period = request.prompt.index(request.prompt[0], 1)
    assert request.prompt == (request.prompt[:period] * 200)[:200]
    (tmp_path / "own.jsonl").write_text("")
    with pytest.raises(CorpusError, match=r"own\.jsonl has no text"):
        cut_requests(settings, TINY, tmp_path, [200], 256)


class Writing:
    """An engine that writes the same two tokens after every prompt, with what it is asked of them."""

    def generate(self, prompts: Sequence[Any], sampling: Sequence[Any], use_tqdm: bool) -> list[Any]:
        self.asked = [
            (each["prompt_token_ids"], one.max_tokens, one.logprobs)
            for each, one in zip(prompts, sampling, strict=True)
        ]
        assert {(one.temperature, one.ignore_eos) for one in sampling} == {(0.0, True)}
        position = {5: SimpleNamespace(logprob=-0.5), 6: SimpleNamespace(logprob=-1.0)}
        logprobs = [position] * 2 if sampling[0].logprobs else None
        output = SimpleNamespace(token_ids=[5, 6], logprobs=logprobs)
        return [SimpleNamespace(outputs=[output], num_cached_tokens=None)] * len(prompts)


def test_responses_have_log_probabilities_where_they_are_asked_for() -> None:
    engine, requests = Writing(), [Request((1, 2), 2), Request((3,), 2)]
    assert generate_responses(engine, requests) == [Response((5, 6), ())] * 2
    assert engine.asked == [([1, 2], 2, None), ([3], 2, None)]
    position = {5: -0.5, 6: -1.0}
    likeliest = generate_responses(engine, requests[1:], log_probabilities=True)
    assert likeliest == [Response((5, 6), (position, position))]


class Rereading:
    """An engine whose log-probabilities of a prompt are those of the responses, moved."""

    def __init__(self, log_probabilities: Sequence[Mapping[int, float]], moved: Mapping[int, float]) -> None:
        self.positions = [
            {token: value + moved.get(token, 0) for token, value in row.items()}
            for row in log_probabilities[:-1]  # the last token is not read again
        ]
        self.prompts: list[int] = []

    def generate(self, prompts: Sequence[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        (prompt,) = prompts
        self.prompts.append(len(prompt["prompt_token_ids"]))
        read = [
            {token: SimpleNamespace(logprob=value) for token, value in row.items()} for row in self.positions
        ]
        before = len(prompt["prompt_token_ids"]) - len(read)
        return [SimpleNamespace(prompt_logprobs=[None] * before + read)]


LOG_PS = ({1: -0.5, 2: -1.0, 3: -9.0}, {4: -0.1, 5: -8.0}, {6: -0.1})
"""At the second position nothing ties."""


def noise(moved: Mapping[int, float]) -> float:
    return measure_tie_noise(Rereading(LOG_PS, moved), [Request((7, 8, 9), 3)], [Response((1, 4, 6), LOG_PS)])


def test_the_noise_of_a_tie_is_the_largest_shift_of_two_likely_tokens_on_a_second_reading() -> None:
    assert noise({2: 0.2, 5: 3.0}) == pytest.approx(0.2)
    assert noise({1: 0.3, 2: 0.1}) == pytest.approx(0.2)
    assert noise({1: 0.1, 2: 0.1}) == pytest.approx(0.0)


def test_long_responses_are_not_reread() -> None:
    requests = [Request((7,) * length, 3) for length in (1021, 1022)]
    engine = Rereading(LOG_PS, {})
    measure_tie_noise(engine, requests, [Response((1, 4, 6), LOG_PS)] * 2)
    assert engine.prompts == [1021 + 2]


def test_without_two_likely_tokens_there_is_no_noise_to_measure() -> None:
    response = Response((4, 6), ({4: -0.1, 5: -8.0}, {6: -0.1}))
    with pytest.raises(EvalError, match="in 1 responses no two tokens are about as likely"):
        measure_tie_noise(Rereading(response.log_probabilities, {}), [Request((7,), 1)], [response])


class Counting:
    """An engine whose response is the last token of a prompt, counted on; with what it knows, was sent and was left."""

    def __init__(self) -> None:
        self.prompts: list[list[Tokens]] = []
        self.known: set[Tokens] = set()
        self.abandoned: list[Tokens] = []
        self.llm_engine = self

    def generate(self, prompts: Sequence[Any], sampling: Sequence[Any], use_tqdm: bool) -> list[Any]:
        self.prompts.append([tuple(each["prompt_token_ids"]) for each in prompts])
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[prompt[-1] + 1000, prompt[-1] + 2000], logprobs=None)],
                num_cached_tokens=3 if prompt[:3] in self.known else 0,
            )
            for prompt in self.prompts[-1]
        ]

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        self.abandoned.append(tuple(prompt["prompt_token_ids"]))

    def step(self) -> list[str]:
        return ["the first token"]

    def abort_request(self, names: list[str]) -> None:
        assert names == ["abandoned"]


def test_a_turn_is_the_prompt_before_it_the_response_and_new_text_one_after_the_other_or_at_once() -> None:
    engine, settings = Counting(), SETTINGS.model_copy(update={"output_tokens": 2, "concurrency": 2})
    responses, _ = _respond_in_sessions(engine, [Request(tuple(range(10)), 2)], settings, [3, 6, 8], silent)
    first = [(0, 1, 2), (5, 6, 7)]
    second = [(*first[0], 1002, 2002, 5), (*first[1], 1007, 2007, 0)]
    third = [(*second[0], 1005, 2005), (*second[1], 1000, 2000)]
    burst = [tuple(range(10))]
    assert engine.prompts == [first[:1], first[1:], burst, second, burst, third[:1], third[1:]]
    assert engine.abandoned == [first[0], second[0]]
    turns = [request.prompt for way, request in responses if way == "session"]
    assert turns == [*first, *second, *third]
    assert responses["session", Request((5, 6, 7), 2)] == (1007, 2007)
    assert responses["burst", Request(burst[0], 2)] == (1009, 2009)


def test_a_turn_that_finds_nothing_of_its_session_is_cold_but_not_the_first_and_last() -> None:
    engine, settings = Counting(), SETTINGS.model_copy(update={"output_tokens": 2, "concurrency": 2})
    engine.known = {(5, 6, 7)}
    _, cold = _respond_in_sessions(engine, [Request(tuple(range(10)), 2)], settings, [3, 6, 8, 10], silent)
    assert cold == [6, 8]


Reference = tuple[dict[Request, Response], float]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """An engine with everything, over prompt lengths for this machine's blocks.

    Its checkpoint is as a published text-only Qwen3.5: config.json has fields of M-RoPE.
    """
    folder = tmp_path_factory.mktemp("mrope")
    for file in TINY.iterdir():
        (folder / file.name).symlink_to(file)
    config = read_config(TINY)
    config["rope_parameters"] |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    (folder / "config.json").unlink()
    write_config(folder, config)
    return run_engine(folder, (SETTINGS, SERVED, WAYS, None, ROOT), silent)


@pytest.fixture(scope="module")
def reference(served: EngineRun) -> Reference:
    """The plain engine's responses, and what ties there."""
    turns = [request for way, request, _ in served.responses if way == "session"]
    requests = [*served.requests, *turns]
    responses, noise = run_reference(TINY, (PLAIN, requests), silent)
    return dict(zip(requests, responses, strict=True)), SETTINGS.noise_factor * noise


@pytest.mark.engine
def test_drafts_cached_prefixes_chunks_and_batches_change_no_token(
    served: EngineRun, reference: Reference
) -> None:
    engine, _ = compare_engine("served", SERVED, served, *reference, 1.0)
    assert (engine.verdict, engine.wrong) == ("pass", {})
    turns = [request for way, request, _ in served.responses if way == "session"]
    (joined,) = [request for way, request, _ in served.responses if way == "joining"]
    assert len(joined.prompt) == 1
    assert engine.responses == 3 * len(served.requests) + len(SHORTEST) + len(turns) + 1
    ends = [len(request.prompt) + request.output_tokens for request in turns]
    assert ends[-4:] == [CONTEXT_LEN] * 4
    assert len(turns) >= 12
    assert not engine.cold_turns
    assert (engine.sequences, engine.draft_tokens, engine.prefix_caching) == (4, 3, True)
    assert engine.cached_tokens > 0
    assert engine.accepted_drafts > 0


@pytest.mark.engine
def test_an_engine_that_is_wrong_for_several_requests_at_a_time_is_found(
    served: EngineRun, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample.sampler import Sampler

    def unlikeliest_of_several(logits: Any) -> Any:
        return logits.argmin(dim=-1) if len(logits) > 1 else logits.argmax(dim=-1)

    monkeypatch.setattr(Sampler, "greedy_sample", staticmethod(unlikeliest_of_several))
    flags = PLAIN | {"max-num-seqs": 4}
    run = run_engine(TINY, (SETTINGS, flags, WAYS, served.requests, ROOT), silent)
    engine, _ = compare_engine("served", flags, run, *reference, 1.0)
    assert engine.verdict == "fail"
    assert set(engine.wrong) == {"together", "joining"}
    assert len(engine.wrong["together"]) > len(run.requests) / 2


FindBlock = Callable[[Any, Any, list[int]], Any]


def find_nothing(find: FindBlock) -> FindBlock:
    """A prefix cache that never hits."""
    return lambda pool, block_hash, group_ids: None


def find_the_first(find: FindBlock) -> FindBlock:
    """A prefix cache that returns the blocks of the session that was found first."""
    first: dict[tuple[int, ...], Any] = {}

    def found(pool: Any, block_hash: Any, group_ids: list[int]) -> Any:
        blocks = find(pool, block_hash, group_ids)
        return blocks and first.setdefault(tuple(group_ids), blocks)

    return found


@pytest.mark.engine
@pytest.mark.parametrize(("planted", "verdict"), [(find_nothing, "inconclusive"), (find_the_first, "fail")])
def test_a_prefix_cache_that_finds_nothing_or_the_state_of_another_session_is_named(
    planted: Callable[[FindBlock], FindBlock],
    verdict: str,
    served: EngineRun,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "get_cached_block", planted(BlockPool.get_cached_block))
    flags = {name: value for name, value in SERVED.items() if name != "speculative-config"}
    run = run_engine(TINY, (SETTINGS, flags, ("session",), served.requests, ROOT), silent)
    monkeypatch.undo()
    requests = list(dict.fromkeys(request for _, request, _ in run.responses))
    responses, _ = run_reference(TINY, (PLAIN, requests), silent)
    by_request = dict(zip(requests, responses, strict=True))
    engine, _ = compare_engine("served", flags, run, by_request, reference[1], 1.0)
    assert engine.verdict == verdict
    assert set(engine.wrong) == ({"session"} if verdict == "fail" else set())
