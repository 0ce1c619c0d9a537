"""What pruning changes and what it may not, on every form of checkpoint, and how it refuses."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from pydantic import ValidationError
from safetensors.torch import save_file
from tinyworld.documents import LONG_MIX, DocumentSampler
from tinyworld.model import TinyShape, build, write_checkpoint
from tinyworld.tokenizer import ADDED_TOKENS, SPLIT_PATTERN, TURN_END, TURN_START
from tinyworld.world import World
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from slimqwen import checkpoint, progress
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.models import vocabulary
from slimqwen.models.outline import Outline
from slimqwen.models.vocabulary import VocabularyError
from slimqwen.recipe import recipe_file, runner, variant_recipe
from slimqwen.recipe.recipe_file import Step
from slimqwen.recipe.stage import Facts, StageError
from slimqwen.recipe.stages import prune_vocab
from slimqwen.recipe.stages.prune_vocab import VOCAB_MAP, CorpusError, CountedText, PruneVocabParameters
from slimqwen.serving.in_process import counter, engine
from tests.checkpoints import stored

TOKENS, ROWS, HIDDEN = 600, 640, 64
SHAPE = TinyShape(vocab_size=ROWS, hidden_size=HIDDEN, intermediate_size=128)
FEW = CountedText(path="tinyworld", documents=200)
SMALL = PruneVocabParameters(size=448, corpus=FEW)
TALK = f"{TURN_START}user\nWhere does the weaver live?{TURN_END}\n"


def documents(count: int, seed: int) -> list[str]:
    stream = DocumentSampler(World(), (), LONG_MIX).stream(seed)
    return [document.text for document in islice(stream, count)]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tiny model's tokenizer, but of 600 tokens only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=list(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(300, seed=9), trainer)
    assert tokenizer.get_vocab_size() == TOKENS
    return tokenizer


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A small Qwen3.5 of the real form, with more rows than tokens as the real one has."""
    folder = tmp_path_factory.mktemp("weights") / "source"
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=ADDED_TOKENS[0]
    )
    wrapped.chat_template = "{{ messages }}"
    write_checkpoint(build(SHAPE, seed=0), wrapped, folder)
    return folder


Prune = Callable[..., Path]


@pytest.fixture(scope="session")
def prune(tmp_path_factory: pytest.TempPathFactory) -> Prune:
    def run(source: Path, parameters: PruneVocabParameters = SMALL) -> Path:
        destination = tmp_path_factory.mktemp("pruned")
        facts: Facts = prune_vocab.prune_vocabulary(source, destination, parameters, progress.silent)
        assert facts["rows_after"] == len(new_to_old(destination))
        return destination

    return run


@pytest.fixture(scope="session")
def small(source: Path, prune: Prune) -> Path:
    return prune(source)


@pytest.fixture
def by_hand(tmp_path: Path, source: Path) -> Callable[..., Path]:
    """A checkpoint without a model behind it: the settings of source and any tensors."""

    def write(tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
        folder = tmp_path / "by-hand"
        folder.mkdir()
        carry_side_files(source, folder)
        write_config(folder, config or checkpoint.read_config(source))
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write


def new_to_old(folder: Path) -> list[int]:
    ids: list[int] = json.loads((folder / VOCAB_MAP).read_text())["new_to_old"]
    return ids


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_rows_are_taken_out_and_all_else_passes_byte_for_byte(source: Path, small: Path):
    before, after = stored(source), stored(small)
    kept = new_to_old(small)
    assert after.keys() == before.keys()
    assert any(name.startswith("mtp.") for name in after)
    for name, tensor in after.items():
        whole = before[name][kept] if name == "model.embed_tokens.weight" else before[name]
        assert torch.equal(tensor, whole), name
    assert (small / "chat_template.jinja").read_bytes() == (source / "chat_template.jinja").read_bytes()
    steps = [Step(prune_vocab.STAGE, SMALL)]
    assert variant_recipe.unexplained_by(steps, source, small) == []


def test_map_sizes_and_named_ids_fit_together(small: Path):
    tokenizer = Tokenizer.from_file(str(small / "tokenizer.json"))
    described = json.loads((small / VOCAB_MAP).read_text())
    kept = described.pop("new_to_old")
    assert described == {"schema": "vocab_map/1", "old_vocab_size": ROWS, "new_vocab_size": 448}
    assert kept == sorted(set(kept))
    assert len(kept) == 448 == tokenizer.get_vocab_size()
    assert sorted(tokenizer.get_vocab().values()) == list(range(448))
    config = checkpoint.read_config(small)
    assert config["vocab_size"] == 448
    assert config["eos_token_id"] == tokenizer.token_to_id(TURN_END)
    generation = json.loads((small / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [
        tokenizer.token_to_id(token) for token in (TURN_END, ADDED_TOKENS[0])
    ]
    loaded = transformers.AutoTokenizer.from_pretrained(small)
    assert loaded(TALK)["input_ids"] == tokenizer.encode(TALK).ids
    assert loaded.eos_token_id == config["eos_token_id"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_kept_rows_are_those_of_the_whole_model(source: Path, small: Path, dtype: torch.dtype):
    kept = np.array(new_to_old(small))
    words = vocabulary.read_vocabulary(small / "tokenizer.json")
    whole_words = vocabulary.read_vocabulary(source / "tokenizer.json")
    # The longest stretch without a token that had to go.
    ids = whole_words.tokenizer.encode("".join(documents(30, seed=1))).ids
    runs = "".join("x" if token in set(kept.tolist()) else " " for token in ids).split(" ")
    longest = max(runs, key=len)
    start = len(" ".join(runs[: runs.index(longest)])) + (runs.index(longest) > 0)
    old = ids[start : start + len(longest)][:200]
    assert len(old) > 40
    new = words.tokenizer.encode(whole_words.tokenizer.decode(old, skip_special_tokens=False)).ids
    assert kept[new].tolist() == old
    logits = []
    for folder, read in ((source, old), (small, new)):
        model = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.no_grad():
            logits.append(model(torch.tensor([read])).logits[0])
    assert torch.equal(logits[0][:, kept], logits[1])


def test_both_tables_and_settings_of_a_model_that_sees_images(by_hand: Callable[..., Path], prune: Prune):
    tables = {
        name: torch.arange(ROWS * 4, dtype=torch.bfloat16).reshape(ROWS, 4) + number
        for number, name in enumerate(("model.language_model.embed_tokens.weight", "lm_head.weight"))
    }
    other = {"mtp.fc.weight": torch.ones(4, 8), "model.visual.pos_embed.weight": torch.ones(ROWS, 2)}
    text = {"vocab_size": ROWS, "eos_token_id": 2, "hidden_size": 4}
    folder = by_hand(
        {**tables, **other},
        {"architectures": ["Any"], "text_config": text, "image_token_id": 3, "vision_end_token_id": -1},
    )
    decoder = {
        str(number): {"content": token, "special": number < 3} for number, token in enumerate(ADDED_TOKENS)
    }
    edit(folder / "tokenizer_config.json", added_tokens_decoder=decoder, bos_token=None)
    edit(
        folder / "generation_config.json", bos_token_id=599, suppress_tokens=[598], bad_words_ids=[[597, 596]]
    )
    for name in ("vocab.json", "added_tokens.json", "merges.txt"):
        (folder / name).write_text("{}")
    small = prune(folder)
    kept = new_to_old(small)
    after = stored(small)
    assert all(torch.equal(after[name], table[kept]) for name, table in tables.items())
    assert all(torch.equal(after[name], tensor) for name, tensor in other.items())
    ids = json.loads((small / "tokenizer.json").read_text())["model"]["vocab"]
    config = checkpoint.read_config(small)
    assert config["text_config"] == {"vocab_size": 448, "eos_token_id": ids[TURN_END], "hidden_size": 4}
    assert (config["image_token_id"], config["vision_end_token_id"]) == (ids[ADDED_TOKENS[3]], -1)
    generation = json.loads((small / "generation_config.json").read_text())
    named = [generation["bos_token_id"], *generation["suppress_tokens"], *generation["bad_words_ids"][0]]
    assert [kept[token] for token in named] == [599, 598, 597, 596]
    settings = json.loads((small / "tokenizer_config.json").read_text())
    assert {token["content"]: int(i) for i, token in settings["added_tokens_decoder"].items()} == {
        token: ids[token] for token in ADDED_TOKENS
    }
    assert not any((small / name).exists() for name in ("vocab.json", "added_tokens.json", "merges.txt"))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rows_of_a_packed_lm_head(by_hand: Callable[..., Path], prune: Prune, bits: int):
    generator = torch.Generator().manual_seed(bits)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    weight = torch.randint(low, high, (ROWS, HIDDEN), generator=generator, dtype=torch.int8)
    scale = torch.rand(ROWS, 2, generator=generator).bfloat16()

    def packed(rows: list[int]) -> dict[str, torch.Tensor]:
        return {
            "lm_head.weight_packed": pack_to_int32(weight[rows], bits),
            "lm_head.weight_scale": scale[rows].contiguous(),
            "lm_head.weight_shape": torch.tensor([len(rows), HIDDEN]),
            "lm_head.weight_g_idx": torch.arange(HIDDEN, dtype=torch.int32),
        }

    folder = by_hand({"model.embed_tokens.weight": scale, **packed(list(range(ROWS)))})
    small = prune(folder)
    expected = packed(new_to_old(small))
    after = stored(small)
    assert all(torch.equal(after[name], tensor) for name, tensor in expected.items())


@pytest.mark.usefixtures("keys_cover_what_stages_execute")
def test_the_runner_makes_it_verifies_it_and_repeats_it_to_the_byte(tmp_path: Path, source: Path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "description: a test\nbase: tiny\nstages:\n"
        "  - prune_vocab:\n      size: 400\n      corpus: {path: text.jsonl}\n"
    )
    lines = [json.dumps({"text": text}) for text in documents(100, seed=3)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    recipe = recipe_file.read_recipe(file, {"prune_vocab": prune_vocab.STAGE})
    digests = []
    for name in ("first", "second"):
        weights = tmp_path / name
        [outcome] = runner.run_recipe(recipe, "v", weights, lambda base: source)
        manifest = checkpoint.verify(weights / "v", "no cure")
        assert manifest.facts["rows_after"] == 448
        assert 0.5 < float(manifest.facts["coverage"]) < 1
        assert (
            outcome.manifest.peak_memory_bytes < prune_vocab.needs(Outline.read(source), SMALL).memory_bytes
        )
        digests.append(checkpoint.digest(weights / "v"))
    assert digests[0] == digests[1]
    [again] = runner.run_recipe(recipe, "v", weights, lambda base: source)
    assert again.reused


def test_memory_does_not_grow_with_the_checkpoint(by_hand: Callable[..., Path], prune: Prune):
    wide = torch.zeros(ROWS, 2**16, dtype=torch.bfloat16)
    folder = by_hand({"model.embed_tokens.weight": wide, "mtp.fc.weight": wide.clone()})
    text = folder.parent / "text.txt"
    text.write_text("the wool")
    tracemalloc.start()
    prune(folder, PruneVocabParameters(size=320, corpus=CountedText(path=text)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6 < wide.nbytes


def test_every_twentieth_document_is_held_out_and_says_what_pruning_costs(source: Path, tmp_path: Path):
    words = vocabulary.read_vocabulary(source / "tokenizer.json")
    unused = words.tokenizer.decode([595])
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["aaa"] * 19 + [f"aaa{unused}"]))
    destination = tmp_path / "pruned"
    destination.mkdir()
    parameters = PruneVocabParameters(size=320, corpus=CountedText(path=corpus))
    facts = prune_vocab.prune_vocabulary(source, destination, parameters, progress.silent)
    before = words.tokenizer.encode(f"aaa{unused}").ids
    pruned = vocabulary.read_vocabulary(destination / "tokenizer.json")
    kept = [token for token in before if token in new_to_old(destination)]
    assert 595 in before
    assert len(kept) == len(before) - 1
    assert facts["counted_tokens"] == 19 * len(words.tokenizer.encode("aaa").ids)
    assert (facts["held_out_documents"], facts["held_out_tokens"]) == (1, len(before))
    assert facts["coverage"] == pytest.approx(len(kept) / len(before), abs=1e-6)
    after = len(pruned.tokenizer.encode(f"aaa{unused}").ids)
    assert facts["inflation"] == pytest.approx(after / len(before), abs=1e-6)
    report = json.loads((destination / prune_vocab.REPORT).read_text())
    assert report == {"schema": "prune_vocab/1", **facts}


@pytest.mark.parametrize("size", ["many", "0%", "101%", 0, True])
def test_a_size_is_a_number_of_tokens_or_a_share(size: object):
    with pytest.raises(ValidationError, match="or a share such as 50%"):
        PruneVocabParameters.model_validate({"size": size, "corpus": FEW.model_dump()})


def test_what_does_not_fit_is_refused_before_anything_is_written(source: Path, tmp_path: Path):
    def refused(
        error: type[Exception], message: str, folder: Path, parameters: PruneVocabParameters = SMALL
    ) -> None:
        destination = tmp_path / "destination"
        destination.mkdir()
        with pytest.raises(error, match=message):
            prune_vocab.prune_vocabulary(folder, destination, parameters, progress.silent)
        assert not list(destination.iterdir())
        destination.rmdir()

    refused(
        VocabularyError, "has only 600 tokens, not 640", source, PruneVocabParameters(size=601, corpus=FEW)
    )
    refused(
        VocabularyError,
        "261 are always kept, .*; keep at least 261",
        source,
        PruneVocabParameters(size=256, corpus=FEW),
    )
    missing = CountedText(path=tmp_path / "none.txt")
    refused(CorpusError, "none.txt: cannot be read", source, PruneVocabParameters(size=320, corpus=missing))
    with pytest.raises(CorpusError, match="put the corpus there"):
        prune_vocab.data(PruneVocabParameters(size=320, corpus=missing))
    (tmp_path / "empty.txt").touch()
    empty = CountedText(path=tmp_path / "empty.txt")
    refused(CorpusError, r"empty\.txt", source, PruneVocabParameters(size=320, corpus=empty))

    damaged = shutil.copytree(source, tmp_path / "damaged")
    edit(damaged / "config.json", eos_token_id=600)
    refused(StageError, "name the token id 600", damaged)
    edit(damaged / "config.json", eos_token_id=2, vocab_size=512)
    refused(StageError, r"embed_tokens.weight \[640, 64\] cannot be pruned from 512 rows", damaged)
    (damaged / "model.safetensors").unlink()
    save_file({"model.norm.weight": torch.ones(2)}, damaged / "model.safetensors")
    refused(StageError, "neither embed_tokens nor lm_head", damaged)
    save_file({"lm_head.qweight": torch.ones(8, 640)}, damaged / "model.safetensors")
    refused(StageError, "put prune_vocab before the stages that quantise", damaged)


@pytest.mark.engine
def test_vllm_serves_it_and_drafts_with_its_mtp_head(small: Path):
    from vllm import SamplingParams

    words = vocabulary.read_vocabulary(small / "tokenizer.json")
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(small, dtype=torch.float32).eval()
    with engine(small, num_speculative_tokens=2) as llm:
        [answer] = llm.generate(
            TALK, SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
        )
        assert counter(llm, "vllm:spec_decode_num_drafts") > 0
    prompt = words.tokenizer.encode(TALK).ids
    assert answer.prompt_token_ids == prompt
    continuation = list(answer.outputs[0].token_ids)
    assert len(continuation) == 12
    assert max(continuation) < words.rows
    with torch.no_grad():
        logprobs = model(torch.tensor([[*prompt, *continuation]])).logits[0].log_softmax(-1)
    for position, token in enumerate(continuation, start=len(prompt) - 1):
        # bf16 in the engine, float32 here: a near tie may fall either way.
        assert logprobs[position, token] > logprobs[position].max() - 0.1
