import math
import statistics

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slimqwen.bench import BenchError
from slimqwen.bench.workload import PromptClass, Workload
from slimqwen.records.settings import SettingsError
from slimqwen.variant import repository_root

ROOT = repository_root()
CLASSES = Workload.load("classes", ROOT)
NAMES = sorted(file.stem for file in (ROOT / "eval" / "workloads").glob("*.yaml"))
BASE = {
    "documents": "tinyworld",
    "seed": 1,
    "reference_context_tokens": 256,
    "min_tokens": 4,
    "warmup_requests": 0,
    "rounds": 1,
    "sampling": {},
}
ONE = {"prompt_tokens": 64, "output_tokens": 16, "requests": 4}


@pytest.fixture
def load(tmp_path):
    """A workload whose file says this."""

    def written(classes, **fields):
        file = tmp_path / "eval" / "workloads" / "mine.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump({**BASE, **fields, "classes": classes}, sort_keys=False))
        return Workload.load("mine", tmp_path)

    return written


@given(st.integers(256, 100_000))
def test_scaled_classes_fit_the_context_and_keep_their_order(context):
    short, medium, long = CLASSES.scaled(context)
    assert all(c.prompt_tokens + c.output_tokens <= context for c in (short, medium, long))
    assert short.prompt_tokens < medium.prompt_tokens < long.prompt_tokens
    if context >= CLASSES.reference_context_tokens:
        assert [c.prompt_tokens for c in (short, medium, long)] == [64, 2048, 8192]


def test_the_lengths_that_the_workload_file_states_come_out():
    assert [(c.prompt_tokens, c.output_tokens) for c in CLASSES.scaled(1024)] == [
        (16, 16),
        (248, 31),
        (992, 31),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_fits_the_embedded_model_and_a_context_of_13312(name):
    for context in (4096, 13312):
        one = Workload.load(name, ROOT)
        for c in one.scaled(context, max_num_seqs=8, block_tokens=528):
            assert c.prompt_tokens + c.output_tokens <= context
            for prompt, output in c.lengths((1, 2), one.min_tokens, context):
                assert prompt + output <= context
                assert min(prompt, output) >= one.min_tokens


def test_a_context_too_short_for_any_class_is_refused():
    with pytest.raises(BenchError, match="VLLM_MAX_MODEL_LEN"):
        CLASSES.scaled(20)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gap_ms": 25, "load": 2}, "exclude each other"),
        ({"gap_ms": 25, "concurrency": 2}, "exclude each other"),
        ({"load": 0.5}, "share of the throughput of the first class; remove `load` from the first"),
        (
            {"requests": 1},
            r"mine\.yaml:\d+: classes\.one\.requests: Input should be greater than or equal to 2",
        ),
        ({"requets": 3}, r"mine\.yaml:13: unknown key 'requets'; did you mean requests\?"),
    ],
)
def test_a_class_that_contradicts_itself_is_refused(load, changes, said):
    with pytest.raises(SettingsError, match=said):
        load({"one": {**ONE, **changes}, "later": ONE})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "the same `requests` and longer prompts"),
        ({"prompt_tokens": 65, "requests": 5}, "the same `requests` and longer prompts"),
        ({"prompt_tokens": 65, "spread": 1.0}, "have fixed lengths; remove `spread`"),
    ],
)
def test_a_turn_continues_the_sessions_that_there_are_with_longer_prompts(load, changes, said):
    assert load({"first": ONE, "one": {**ONE, "prompt_tokens": 65}}, shape="sessions")
    with pytest.raises(SettingsError, match=said):
        load({"first": ONE, "one": {**ONE, **changes}}, shape="sessions")


def test_sessions_end_exactly_with_the_served_context_whatever_it_is():
    for context in (4096, 5000, 13312, 262144):
        *turns, end = Workload.load("agent", ROOT).scaled(context, block_tokens=528)
        assert end.prompt_tokens + end.output_tokens == context
        assert [c.prompt_tokens for c in (*turns, end)] == sorted({c.prompt_tokens for c in (*turns, end)})


@pytest.mark.parametrize("column", ["ttft_ms", "ttft_ms.p50", "speed", "goodput_per_s.mean"])
def test_a_column_that_no_record_has_is_refused(load, column):
    with pytest.raises(SettingsError, match="columns"):
        load({"one": ONE}, columns=[column])


def test_a_class_that_arrives_has_no_limit_and_the_others_have_that_of_the_workload(load):
    one = load({"first": ONE, "load-2": {**ONE, "load": 2}, "staggered": {**ONE, "gap_ms": 5}})
    assert [(c.name, c.concurrency) for c in one.expanded()] == [
        ("first", 1),
        ("load-2", "unlimited"),
        ("staggered", "unlimited"),
    ]


@pytest.mark.parametrize(
    ("max_num_seqs", "clients"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_a_sweep_of_the_concurrency_ends_with_max_num_seqs(load, max_num_seqs, clients):
    swept = load({"clients": {**ONE, "concurrency": "1..max_num_seqs"}}).expanded(max_num_seqs)
    assert [c.concurrency for c in swept] == clients
    assert [c.name for c in swept] == [f"clients-{n}" for n in clients]
    assert all(c.requests == max(4, n) for c, n in zip(swept, clients, strict=True))


def test_prefixes_are_as_many_whole_blocks_as_fit(load):
    classes = {
        "cold": {**ONE, "prompt_tokens": 120},
        "warm": {**ONE, "prompt_tokens": 120},
    }
    one = load(classes, shape="prefixes", config={"VLLM_ENABLE_PREFIX_CACHING": "1"})
    assert one.needs_prefix_cache
    assert [c.prompt_tokens for c in one.scaled(256, block_tokens=32)] == [3 * 32 + 16] * 2
    with pytest.raises(BenchError, match="whole blocks of 128"):
        one.scaled(256, block_tokens=128)


def test_drawn_lengths_have_the_mean_and_the_spread_of_the_file():
    c = PromptClass(name="x", prompt_tokens=161, output_tokens=338, requests=4000, spread=1.0)
    lengths = c.lengths((1, 2, 3), 2, 100_000)
    assert lengths == c.lengths((1, 2, 3), 2, 100_000)
    assert lengths != c.lengths((1, 3, 3), 2, 100_000)
    for values, mean in zip(zip(*lengths, strict=True), (161, 338), strict=True):
        # The mean of 4,000 such lengths has a standard error of mean x sqrt((e - 1) / 4000), 2 %.
        assert statistics.mean(values) == pytest.approx(mean, rel=0.1)
        assert statistics.stdev(map(math.log, values)) == pytest.approx(1.0, rel=0.05)
    assert all(p + o <= 512 for p, o in c.lengths((1, 2, 3), 16, 512))
