"""A baseline of a checkpoint: what is found in it, and how it is served."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.checkpoint import MissingCheckpointError
from slimqwen.recipe.base_variant import REASONS, CheckpointFacts
from slimqwen.serving import flags, in_process
from slimqwen.variant import DRAFTS_NOTE, scaffold
from tests.zoo.published_forms import PUBLISHED_FORMS


@pytest.mark.parametrize(
    ("published", "found", "not_found"),
    [
        ("text", ["text only", "4 layers of width 192", "8192 rows, 8192 tokens", "BF16", "16 bits; drafts 3"], []),
        ("multimodal", ["of which the language model is served", "16 bits; drafts 3 tokens"], []),
        ("no-mtp", ["none, so no drafts"], ["16 bits; drafts"]),
        ("w4a16-mtp", ["quantised: compressed-tensors, 4-bit int; calibrate needs 16 bits", "quantised; drafts 3"], []),
        ("gptq", ["quantised: gptq, 4-bit"], []),
        ("more-rows", ["tokens"], []),
    ],
)  # fmt: skip
def test_what_is_found_in_a_checkpoint(
    tmp_path: Path, published: str, found: list[str], not_found: list[str]
) -> None:
    facts = CheckpointFacts.read(PUBLISHED_FORMS[published].build(tmp_path / published))
    said = "\n".join(f"{name}: {value}" for name, value in facts.lines())
    assert [text for text in found if text not in said] == []
    assert [text for text in not_found if text in said] == []
    settings = facts.settings()
    assert ("VLLM_LANGUAGE_MODEL_ONLY" in settings) == (published == "multimodal")
    assert ("VLLM_SPECULATIVE_CONFIG" in settings) == (published != "no-mtp")
    # Prefix hits beside drafts are known trouble for models with recurrent states.
    assert settings["VLLM_ENABLE_PREFIX_CACHING"] == ("1" if published == "no-mtp" else "0")
    assert ("VLLM_PREFIX_MATCH_UNIT" in settings) == (published == "no-mtp")


def test_the_context_is_the_checkpoints_own_where_that_is_short_and_tools_are_those_of_its_template(
    tmp_path: Path,
) -> None:
    folder = PUBLISHED_FORMS["text"].build(tmp_path / "text")
    facts = CheckpointFacts.read(folder)
    assert (facts.context, facts.takes_tools) == (4096, False)
    body = "{% for message in messages %}{{ message }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(f"{{{{ tools }}}}{body}")
    facts = CheckpointFacts.read(folder)
    assert (facts.takes_tools, facts.thinks) == (True, False)
    assert ("chat template", "chat_template.jinja, takes tools") in facts.lines()
    assert facts.settings()["VLLM_TOOL_CALL_PARSER"] == "hermes"
    (folder / "chat_template.jinja").write_text(f"{{{{ tools }}}}<function={body}")
    assert CheckpointFacts.read(folder).settings()["VLLM_TOOL_CALL_PARSER"] == "qwen3_coder"
    (folder / "chat_template.jinja").unlink()
    assert ("chat template", "none") in CheckpointFacts.read(folder).lines()


@pytest.mark.parametrize(
    ("end", "thinks"),
    [
        ("<think>\n", True),
        ("{% if enable_thinking is false %}<think></think>{% else %}<think>{% endif %}", True),
        ("{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}", True),
        ("{% if enable_thinking %}<think>{% else %}<think>\n\n</think>{% endif %}", False),
        ("{# no <think> #}", False),
        ("<think>{{ missing.field.deeper }}", False),
    ],
)
def test_thoughts_have_a_parser_where_the_model_thinks_unasked(
    tmp_path: Path, end: str, thinks: bool
) -> None:
    folder = PUBLISHED_FORMS["text"].build(tmp_path / "text")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}" + end
    )
    facts = CheckpointFacts.read(folder)
    assert facts.thinks == thinks
    assert facts.settings().get("VLLM_REASONING_PARSER") == ("qwen3" if thinks else None)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpointError, match="give the folder of a checkpoint"):
        CheckpointFacts.read(tmp_path)


def test_vllm_takes_the_lines_of_a_baseline(tmp_path: Path) -> None:
    folder = PUBLISHED_FORMS["multimodal"].build(tmp_path / "weights" / "mine")
    (tmp_path / "experiments").mkdir()
    lines = {"VLLM_MODEL": "weights/mine", **CheckpointFacts.read(folder).settings()}
    made = scaffold.create("base", None, "It is as it is.", lines=lines, reasons=REASONS, root=tmp_path)
    text = (made / "config.env").read_text()
    for key in ("VLLM_HOST", "VLLM_SHUTDOWN_TIMEOUT"):
        assert f"# {REASONS[key]}\n{key}=" in text
    comment, _, _ = text.partition("VLLM_ENABLE_PREFIX_CACHING=0\n")
    assert (
        " ".join(comment.split("\n# ")[-2:])
        .strip()
        .endswith("`slimqwen eval engine NAME` shows whether 1 is right here.")
    )
    assert max(map(len, text.splitlines())) <= 120
    assert DRAFTS_NOTE in " ".join((made / "README.md").read_text().split())
    base = variant.load("base", tmp_path)
    assert (base.baseline, base.lineage, base.weights) == (None, ("base",), folder)
    assert flags.resolve(base)
    shutil.rmtree(folder)


def test_attention_alone_needs_no_unit_of_hits(tmp_path: Path) -> None:
    facts = CheckpointFacts.read(PUBLISHED_FORMS["no-mtp"].build(tmp_path / "dense"))
    text = {key: value for key, value in facts.text.items() if not key.startswith(("linear_", "layer_types"))}
    settings = dataclasses.replace(facts, text=text).settings()
    assert settings["VLLM_ENABLE_PREFIX_CACHING"] == "1"
    assert "VLLM_PREFIX_MATCH_UNIT" not in settings


@pytest.mark.engine
def test_the_second_request_with_a_beginning_finds_it(tmp_path: Path) -> None:
    """By whole blocks of this model nothing of a prompt of 60 tokens would be found."""
    from vllm import SamplingParams

    folder = PUBLISHED_FORMS["no-mtp"].build(tmp_path / "no-mtp")
    unit = int(CheckpointFacts.read(folder).settings()["VLLM_PREFIX_MATCH_UNIT"])
    prompts = [
        {"prompt_token_ids": [300 + number * 7 % 900 for number in range(60)] + [last]} for last in (5, 6, 7)
    ]
    greedy, found = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), {}
    for caches in (False, True):
        more = {"enable_prefix_caching": caches, **({"prefix_match_unit": unit} if caches else {})}
        with in_process.engine(folder, **more) as llm:
            responses = [
                llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts
            ]
            found[caches] = responses, in_process.counter(llm, "vllm:prefix_cache_hits")
    assert found[False][1] == 0
    assert found[True][1] > 0
    assert found[True][0] == found[False][0]
