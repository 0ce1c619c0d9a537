import json
import os
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.serving import flags
from slimqwen.variant import ConfigError


@pytest.fixture
def resolve(add_variant, tmp_path):
    """Resolve a variant of the given lines, on top of a minimal one."""

    def resolved(*lines):
        add_variant("v", "VLLM_MODEL=weights/v\n" + "".join(f"{line}\n" for line in lines))
        return flags.resolve(variant.load("v", tmp_path))

    return resolved


@pytest.mark.parametrize("name", variant.names())
def test_every_committed_variant_is_accepted_by_the_installed_vllm(name):
    resolved = flags.resolve(variant.load(name))

    options = {option for action in flags._parser()._actions for option in action.option_strings}
    given = [word for flag in resolved.flags.values() for word in flag.argv if word.startswith("--")]
    assert given
    assert set(given) <= options
    parsed = flags._parser().parse_args([word for flag in resolved.flags.values() for word in flag.argv])
    assert parsed.served_model_name == ["default"]
    assert parsed.port == 8080


def test_switches_lists_json_and_numbers_become_the_words_that_vllm_expects(resolve):
    resolved = resolve(
        "VLLM_ENABLE_PREFIX_CACHING=0",
        "VLLM_ENFORCE_EAGER=1",
        "VLLM_CUDAGRAPH_CAPTURE_SIZES=5,10, 15",
        'VLLM_SPECULATIVE_CONFIG=\'{"method": "mtp", "num_speculative_tokens": 4}\'',
        "VLLM_MAX_NUM_SEQS=8",
        "VLLM_DISABLE_LOG_STATS=0",
        "VLLM_ENABLE_SERVER_LOAD_TRACKING=1",
    )

    words = {name: flag.argv for name, flag in resolved.flags.items()}
    assert words["enable-prefix-caching"] == ("--no-enable-prefix-caching",)
    assert words["enforce-eager"] == ("--enforce-eager",)
    assert words["cudagraph-capture-sizes"] == ("--cudagraph-capture-sizes", "5", "10", "15")
    assert words["speculative-config"][1] == '{"method": "mtp", "num_speculative_tokens": 4}'
    assert words["disable-log-stats"] == ()
    assert words["enable-server-load-tracking"] == ("--enable-server-load-tracking",)
    assert resolved.flags["cudagraph-capture-sizes"].value == [5, 10, 15]
    assert resolved.flags["speculative-config"].value["num_speculative_tokens"] == 4
    assert resolved.flags["max-num-seqs"].value == 8


def test_names_that_vllm_or_torch_read_pass_into_the_environment(resolve):
    names = (
        "VLLM_CPU_KVCACHE_SPACE",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCH_LOGS",
        "PYTORCH_ALLOC_CONF",
        "TRITON_CACHE_DIR",
    )
    resolved = resolve(*(f"{name}=1" for name in names))
    assert dict(resolved.environment) == dict.fromkeys(names, "1")


def test_a_flag_beats_the_environment_variable_of_the_same_name(resolve):
    resolved = resolve("VLLM_PORT=8081")

    assert resolved.flags["port"].value == 8081
    assert "VLLM_PORT" not in resolved.environment


def depth_schedule(ranges: str) -> str:
    return (
        'VLLM_SPECULATIVE_CONFIG=\'{"method": "mtp", "num_speculative_tokens": 4, '
        f'"num_speculative_tokens_per_batch_size": {ranges}}}\''
    )


def test_draft_depths_by_batch_size_are_passed_on(resolve):
    resolved = resolve(depth_schedule("[[1, 2, 4], [3, 8, 0]]"))
    words = resolved.flags["speculative-config"].argv
    assert json.loads(words[1])["num_speculative_tokens_per_batch_size"] == [[1, 2, 4], [3, 8, 0]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("VLLM_MAX_NUM_SEQ=8", r"VLLM_MAX_NUM_SEQ is neither.*did you mean VLLM_MAX_NUM_SEQS\?"),
        ("VLLM_MAX_NUM_SEQ=", r"VLLM_MAX_NUM_SEQ is neither.*did you mean VLLM_MAX_NUM_SEQS\?"),
        ("VLLM_NO_ENABLE_PREFIX_CACHING=1", r"did you mean VLLM_ENABLE_PREFIX_CACHING\?"),
        ("OMP_NUM_THREAD=2", r"OMP_NUM_THREAD is neither a flag nor an environment variable"),
        ("XTORCH_LOGS=1", r"XTORCH_LOGS is neither"),
        ("SOMETHING_ELSE=1", r"SOMETHING_ELSE is neither a flag nor an environment variable of vLLM"),
        ("VLLM_API_KEY=abc", r"VLLM_API_KEY is a secret; export it"),
        ("HF_TOKEN=abc", r"HF_TOKEN is a secret"),
        ("CUDA_VISIBLE_DEVICES=1", r"chooses GPUs of one machine; export it in the shell"),
        ("CUDA_DEVICE_ORDER=PCI_BUS_ID", r"chooses GPUs of one machine"),
        ("VLLM_HEADLESS=1", r"VLLM_HEADLESS=1: only `vllm serve` follows it.*; remove the line"),
        ("VLLM_API_SERVER_COUNT=2", r"only `vllm serve` follows it"),
        ("VLLM_GRPC=1", r"only `vllm serve` follows it"),
        ("VLLM_GRPC_PORT=9000", r"only `vllm serve` follows it"),
        ("VLLM_DATA_PARALLEL_MULTI_PORT_EXTERNAL_LB=1", r"only `vllm serve` follows it"),
        ("VLLM_USE_RUST_FRONTEND=1", r"only `vllm serve` follows it"),
        (
            "VLLM_CONFIG=more.yaml",
            r"VLLM_CONFIG has no place in a config.env; write the lines of that file here",
        ),
        ("VLLM_WORKER_EXTENSION_CLS=mine.Extension", r"has no place in a config.env; remove the line"),
        ("VLLM_ENFORCE_EAGER=yes", r"ENFORCE_EAGER=yes is neither on nor off; write 1 or 0"),
        ("VLLM_PORT=99999", r"VLLM_PORT=99999 is no port; write a number from 1 to 65535"),
        (
            "VLLM_CPU_KVCACHE_SPACE=abc",
            r"vLLM refuses VLLM_CPU_KVCACHE_SPACE=abc \(invalid literal.*\); correct or",
        ),
        ("VLLM_MAX_NUM_SEQS=x", r"vLLM refuses VLLM_MAX_NUM_SEQS=x \("),
        ("VLLM_MAX_NUM_SEQS=0", r"greater than or equal to 1"),
        ("VLLM_GPU_MEMORY_UTILIZATION=7", r"less than or equal to 1"),
        ("VLLM_BLOCK_SIZE=-3", r"greater than 0"),
        ("VLLM_KV_CACHE_DTYPE=fp9", r"invalid choice: 'fp9'"),
        ("VLLM_CUDAGRAPH_CAPTURE_SIZES=5,x", r"invalid int value: 'x'"),
        ("VLLM_SPECULATIVE_CONFIG={", r"is not JSON .*; correct it"),
        (
            "VLLM_SPECULATIVE_CONFIG='{\"num_speculative_token\": 4}'",
            r"did you mean num_speculative_tokens\?",
        ),
        (
            "VLLM_SPECULATIVE_CONFIG='{\"num_speculative_tokens\": -4}'",
            r"num_speculative_tokens: .*greater than 0",
        ),
        (depth_schedule("[[1, 8]]"), r"num_speculative_tokens_per_batch_size.*[Mm]issing|Field required"),
        (depth_schedule("[[1, 2, 7], [3, 8, 2]]"), r"asks for 7 drafts.*raise num_speculative_tokens to 7"),
        (depth_schedule('{"1": 4}'), r"num_speculative_tokens_per_batch_size: .*valid list"),
        ("VLLM_COMPILATION_CONFIG='{\"pass_conf\": {}}'", r"did you mean pass_config\?"),
        ('VLLM_COMPILATION_CONFIG=\'{"pass_config": {"fuse_everything": true}}\'', r"fuse_everything"),
    ],
)
def test_a_line_that_vllm_would_not_take_is_refused_with_its_place(resolve, line, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(line)
    assert str(caught.value).startswith("experiments/v/config.env:2: ")


@pytest.mark.parametrize("line", ["VLLM_HEADLESS=0", "VLLM_API_SERVER_COUNT=1", "VLLM_USE_RUST_FRONTEND=0"])
def test_what_only_vllm_serve_follows_is_taken_where_it_changes_nothing(resolve, line):
    assert resolve(line)


def test_the_flags_that_only_vllm_serve_follows_are_read_by_its_module_and_not_by_the_api_server():
    from vllm.entrypoints.cli import serve
    from vllm.entrypoints.launchers.api_server import entry

    of_serve, of_server = (Path(module.__file__).read_text() for module in (serve, entry))
    for name in flags._UNFOLLOWED:
        option = f'"{name.replace("-", "_")}"' if name == "grpc" else f".{name.replace('-', '_')}"
        assert option in of_serve, name
        assert option not in of_server, name


def test_a_variable_of_the_shell_is_as_before_the_check(resolve, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    resolve("VLLM_CPU_KVCACHE_SPACE=1")
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_two_names_of_one_flag_are_refused(resolve):
    with pytest.raises(ConfigError, match="is the same flag as VLLM_GPU_MEMORY_UTILIZATION"):
        resolve("VLLM_GPU_MEMORY_UTILIZATION=0.9", "VLLM_DEVICE_MEMORY_UTILIZATION=0.8")


def test_a_key_that_parses_as_a_prefix_only_is_not_known():
    """argparse would take --max-num-seq for --max-num-seqs: the table must not."""
    assert flags._parser().parse_args(["--max-num-seq", "8"]).max_num_seqs == 8
    assert "VLLM_MAX_NUM_SEQ" not in flags.options()


def test_a_vllm_for_gpus_that_sees_none_checks_flags_all_the_same(monkeypatch):
    from vllm import platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    monkeypatch.setattr(platforms, "current_platform", UnspecifiedPlatform())
    parser = flags._parser.__wrapped__()
    assert parser.parse_args(["--max-num-seqs", "8"]).max_num_seqs == 8
    assert UnspecifiedPlatform.device_type == ""
