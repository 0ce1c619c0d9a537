"""The stage `prune_vocab`: a smaller vocabulary, and with it a smaller embedding and lm_head.

`slimqwen.vocabulary` says which tokens stay and why every text still has a spelling. Here the rest of a checkpoint
follows: rows of the embedding and of lm_head, the vocabulary's size and the ids of special tokens in every settings
file. All other tensors, `mtp.*` among them, pass through byte for byte. The checkpoint is read once, from the front
to the back, a block at a time. vocab.json, merges.txt and added_tokens.json repeat tokenizer.json and are left out.

Beside the checkpoint lies vocab_map.json, for clients that send token ids:

    {"schema": "vocab_map/1",
     "old_vocab_size": rows of the embedding before, "new_vocab_size": rows now,
     "new_to_old": [the old id of new id 0, of new id 1, …]}   # ascending; an old id not in it has no row any more

Old ids are those of the stage's input checkpoint.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from slimqwen import checkpoint, vocabulary
from slimqwen.checkpoint import NewTensor, TensorInfo
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress
from slimqwen.recipe.corpus import CorpusError, TextSource, digests, file_digest
from slimqwen.recipe.stage import Facts, Needs, Parameters, Stage
from slimqwen.vocabulary import Ids, Vocabulary

VOCAB_MAP = "vocab_map.json"

_MULTIPLE = 64
"""Engines and quantised kernels want a multiple of this many rows."""

_SETTINGS = ("generation_config.json", "tokenizer_config.json")
_REPETITIONS = ("vocab.json", "merges.txt", "added_tokens.json")
_ID_KEY = re.compile(r"(token_ids?|suppress_tokens|bad_words_ids)$")
_TABLE = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head)\.(\w+)$")
_BY_ROW = ("weight", "bias", "weight_packed", "weight_scale", "weight_zero_point")
_ROWLESS = ("weight_g_idx", "weight_global_scale", "input_scale", "input_zero_point", "input_global_scale")
"""Parts of a quantised lm_head that say nothing about single rows."""

_BLOCK = 2**20
"""Bytes read at a time: fresh buffers of many MiB cost more in page faults than the reading itself."""

_TEXT_BLOCK = 2**16
"""Characters of a .txt file that are read as one document."""

_SCORED_CHARACTERS = 2_000

_IMPORTS_BYTES = 300 * 2**20
_TINYWORLD_IMPORTS_BYTES = 500 * 2**20
_TOKENIZER_FACTOR = 30
"""Memory per byte of tokenizer.json: its JSON in Python, two tokenizers, the ranking."""


class WrongCheckpointError(SlimqwenError):
    """The checkpoint's tables, config and tokenizer do not fit together, or its lm_head is packed in an unknown way."""


class Corpus(TextSource):
    """The text that decides which tokens stay.

    Attributes:
        source: tinyworld generates documents of the embedded world's training distribution; file reads `path`.
        path: a .txt file or a .jsonl file (one {"text": …} a line), relative to the recipe.
        documents: at most how many; a .txt file counts as one for every 64 Ki characters.
        seed: of the generator.
    """

    documents: Annotated[int, Field(ge=1)] = 20_000


class PruneVocabParameters(Parameters):
    """What a recipe may say of this stage.

    Attributes:
        size: tokens to keep, rounded up to a multiple of 64 and then met exactly.
        corpus: the text that decides which.
        outputs: the model's own outputs, counted in addition: text as for corpus, or a .json file
            {"<token id>": how often, …}; relative to the recipe.
        outputs_weight: what one token of outputs counts against one of corpus.
    """

    size: Annotated[int, Field(ge=_MULTIPLE)]
    corpus: Corpus = Corpus()
    outputs: Annotated[Path | None, Field(exclude=True)] = None
    outputs_weight: Annotated[int, Field(ge=1)] = 1

    @field_validator("outputs")
    @classmethod
    def _relative_to_recipe(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        return path and (info.context or {}).get("folder", Path()) / path


def run(source: Path, destination: Path, parameters: PruneVocabParameters, progress: Progress) -> Facts:
    """Write source to destination with the tokens that parameters ask for.

    Raises:
        WrongCheckpointError: tables, config and tokenizer do not fit together, or lm_head is packed unknowably.
        UnsupportedTokenizerError: its tokenizer is no byte-level BPE.
        VocabularySizeError: it has fewer tokens than asked for, or more that must stay.
        CorpusError: text or counts are missing or malformed.
    """
    progress("reading the tokenizer", 0, 0)
    config = checkpoint.read_config(source)
    rows: int = checkpoint.text_config(config)["vocab_size"]
    tables = _tables(source, rows)
    words = vocabulary.read(source / "tokenizer.json")
    if words.rows > rows:
        raise WrongCheckpointError(
            f"{source} has {rows} rows for ids up to {words.rows - 1}; mend its config.json"
        )
    counts = _counts(words, parameters, progress)
    kept = _kept(source, words, counts, parameters.size)

    def change(name: str, info: TensorInfo) -> dict[str, NewTensor] | None:
        return {name: tables[name](kept)} if name in tables else None

    checkpoint.rewrite(source, destination, change, progress)
    _write_settings(source, destination, kept, config)
    (destination / "tokenizer.json").write_text(vocabulary.prune(words, kept), encoding="utf-8")
    new_to_old = {"old_vocab_size": rows, "new_vocab_size": len(kept), "new_to_old": kept.tolist()}
    _write_json(destination / VOCAB_MAP, {"schema": "vocab_map/1", **new_to_old}, indent=None)
    return {
        "rows_before": rows,
        "rows_after": len(kept),
        "counted_tokens": int(counts.sum()),
        "coverage": round(float(counts[kept].sum() / counts.sum()), 6),
    }


def needs(source: Path, parameters: PruneVocabParameters) -> Needs:
    """No more disk than source; memory for the libraries and the tokenizer: tensors pass through in blocks."""
    tokenizer = source / "tokenizer.json"
    length = tokenizer.stat().st_size if tokenizer.is_file() else 0
    imports = _TINYWORLD_IMPORTS_BYTES if parameters.corpus.path is None else _IMPORTS_BYTES
    return Needs(
        disk_bytes=checkpoint.bytes_on_disk(source),
        memory_bytes=imports + _TOKENIZER_FACTOR * length,
    )


def data(parameters: PruneVocabParameters) -> dict[str, str]:
    """The digests that decide the counts."""
    found = digests(parameters.corpus)
    if parameters.outputs is not None:
        found["outputs"] = file_digest(parameters.outputs, "outputs")
    return found


def coverage(
    source: Path,
    corpus: Corpus,
    sizes: Sequence[int],
    texts: Mapping[str, Sequence[str]],
    scored: int,
    progress: Progress,
) -> dict[str, Any]:
    """What pruning a checkpoint to each of some sizes would cost on some texts, without writing any.

    A pruned model is the original one whose input ids are mapped back and whose logits are cut to the kept rows, so
    the original, run once per size on the new spelling, gives the pruned model's bits per byte.

    Args:
        source: the checkpoint.
        corpus: the text that decides which tokens stay.
        sizes: as `PruneVocabParameters.size`.
        texts: the texts to measure on, by source.
        scored: how many texts of a source the model reads (0: none), each cut to 2,000 characters, after the token
            that ends a text.
        progress: hears the sizes done.

    Returns:
        {"tokens": …, "sources": {source: {"documents", "bytes", "tokens_per_byte", "bits_per_byte"}},
        "sizes": [{"size", "sources": {source: {"coverage", "tokens_per_byte", "inflation", "bits_per_byte",
        "bits_per_byte_change"}}}]}. Coverage is the share of old tokens that are kept, inflation that of tokens per
        byte after and before, the change a paired `statistics.Difference`.
    """
    from slimqwen.evaluation import statistics

    words = vocabulary.read(source / "tokenizer.json")
    counts = vocabulary.count(words, _documents(corpus))
    before = {name: vocabulary.count(words, documents) for name, documents in texts.items()}
    lengths = {name: sum(len(text.encode()) for text in documents) for name, documents in texts.items()}
    samples = {
        name: [text[:_SCORED_CHARACTERS] for text in documents[:scored]] for name, documents in texts.items()
    }
    weights = {name: [len(text.encode()) for text in documents] for name, documents in samples.items()}
    bits = _bits_per_byte(source) if scored else None
    every_id = np.arange(checkpoint.text_config(checkpoint.read_config(source))["vocab_size"])
    old_bits = {name: bits(words, every_id, sample) for name, sample in samples.items()} if bits else {}
    result: dict[str, Any] = {"tokens": len(words.ids), "sources": {}, "sizes": []}
    for name in texts:
        result["sources"][name] = {
            "documents": len(texts[name]),
            "bytes": lengths[name],
            "tokens_per_byte": int(before[name].sum()) / lengths[name],
        }
        if bits:
            result["sources"][name]["bits_per_byte"] = asdict(statistics.mean(old_bits[name], weights[name]))
    for done, size in enumerate(sizes):
        progress("sizes", done, len(sizes))
        kept = _kept(source, words, counts, size)
        pruned = vocabulary.parse(vocabulary.prune(words, kept), f"{source / 'tokenizer.json'}, pruned")
        rows: dict[str, dict[str, Any]] = {}
        for name, documents in texts.items():
            tokens, old = int(vocabulary.count(pruned, documents).sum()), before[name]
            rows[name] = {
                "coverage": int(old[kept].sum()) / int(old.sum()),
                "tokens_per_byte": tokens / lengths[name],
                "inflation": tokens / int(old.sum()),
            }
            if bits:
                new_bits = bits(pruned, kept, samples[name])
                change = statistics.paired_difference(old_bits[name], new_bits, weights[name])
                rows[name] |= {
                    "bits_per_byte": asdict(statistics.mean(new_bits, weights[name])),
                    "bits_per_byte_change": asdict(change),
                }
        result["sizes"].append({"size": len(kept), "sources": rows})
    return result


def file_documents(path: Path) -> Iterator[str]:
    """The documents of a .txt file (64 Ki characters each, to the line) or a .jsonl file (a {"text": …} a line).

    Raises:
        CorpusError: it is missing or malformed.
    """
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            if path.suffix == ".jsonl":
                for line in stream:
                    if line.strip():
                        yield str(json.loads(line)["text"])
            else:
                while lines := stream.readlines(_TEXT_BLOCK):
                    yield "".join(lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f'{path}: not usable as text ({error!r}); give UTF-8 text, or {{"text": …}} a line of .jsonl'
        ) from None


def _tables(source: Path, rows: int) -> dict[str, Callable[[Ids], NewTensor]]:
    """For every tensor that has a row per token: what makes its pruned form from the ids that stay."""
    tables: dict[str, Callable[[Ids], NewTensor]] = {}
    for name, info in checkpoint.tensors(source).items():
        match = _TABLE.search(name)
        if match is None or match[1] in _ROWLESS or (match[1] == "weight_scale" and info.elements == 1):
            continue
        if match[1] in _BY_ROW and info.shape[0] == rows:
            tables[name] = partial(_rows_of, info)
        elif match[1] == "weight_shape":
            tables[name] = partial(_shape_of, info)
        elif match[1] == "weight_zero_point" and info.dtype == "I32":
            tables[name] = partial(_packed_rows_of, info, rows)
        else:
            raise WrongCheckpointError(
                f"{source}: {name} {list(info.shape)} cannot be cut from {rows} rows; prune before quantising"
            )
    if not tables:
        raise WrongCheckpointError(f"{source} has neither embed_tokens nor lm_head; prune a language model")
    return tables


def _rows_of(info: TensorInfo, kept: Ids) -> NewTensor:
    """A tensor's rows that stay; blocks with none of them are not even read."""
    length = (info.end - info.start) // info.shape[0]
    block = max(1, _BLOCK // length)

    def chunks() -> Iterator[memoryview]:
        for first in range(0, info.shape[0], block):
            last = min(first + block, info.shape[0])
            wanted = kept[np.searchsorted(kept, first) : np.searchsorted(kept, last)] - first
            if len(wanted):
                read = b"".join(info.chunks(first * length, last * length))
                yield np.frombuffer(read, np.uint8).reshape(-1, length)[wanted].data

    return NewTensor(info.dtype, (len(kept), *info.shape[1:]), chunks)


def _packed_rows_of(info: TensorInfo, rows: int, kept: Ids) -> NewTensor:
    """Zero points, which compressed-tensors packs down the rows: a column of words is a stream of bits."""
    words, columns = info.shape
    bits = 32 * words // rows

    def chunks() -> Iterator[bytes]:
        read = np.frombuffer(b"".join(info.chunks()), "<u4").reshape(words, columns)
        streams = np.unpackbits(np.ascontiguousarray(read.T).view(np.uint8), axis=1, bitorder="little")
        picked = streams[:, : rows * bits].reshape(columns, rows, bits)[:, kept]
        packed = np.packbits(picked.reshape(columns, -1), axis=1, bitorder="little").view("<u4")
        yield packed.T.tobytes()

    # A multiple of 64 rows fills its words.
    return NewTensor(info.dtype, (len(kept) * bits // 32, columns), chunks)


def _shape_of(info: TensorInfo, kept: Ids) -> NewTensor:
    """The unpacked shape that compressed-tensors stores as a tensor."""

    def chunks() -> Iterator[bytes]:
        shape = np.frombuffer(b"".join(info.chunks()), "<i8").copy()
        shape[0] = len(kept)
        yield shape.tobytes()

    return NewTensor(info.dtype, info.shape, chunks)


def _counts(words: Vocabulary, parameters: PruneVocabParameters, progress: Progress) -> Ids:
    total = parameters.corpus.documents

    def told(documents: Iterable[str]) -> Iterator[str]:
        for done, document in enumerate(documents):
            progress("counting tokens", done, total)
            yield document

    counts = vocabulary.count(words, told(_documents(parameters.corpus)))
    outputs = parameters.outputs
    if outputs is not None:
        counted = _counts_file(outputs, words) if outputs.suffix == ".json" else None
        more = vocabulary.count(words, file_documents(outputs)) if counted is None else counted
        counts += parameters.outputs_weight * more
    if not counts.any():
        raise CorpusError(f"{parameters.corpus.path}: no text in it; put some there")
    return counts


def _documents(corpus: Corpus) -> Iterator[str]:
    if corpus.path is None:
        # Its tokenizer module imports transformers.
        from slimqwen.tinyworld.documents import LONG_MIX, DocumentSampler
        from slimqwen.tinyworld.tasks import left_out_texts
        from slimqwen.tinyworld.world import World

        world = World()
        stream = DocumentSampler(world, left_out_texts(world), LONG_MIX).stream(corpus.seed)
        return (document.text for document in itertools.islice(stream, corpus.documents))
    return itertools.islice(file_documents(corpus.path), corpus.documents)


def _counts_file(path: Path, words: Vocabulary) -> Ids:
    counts = np.zeros(words.rows, dtype=np.int64)
    try:
        for token, times in json.loads(path.read_bytes()).items():
            if int(token) < 0 or times < 0:
                raise ValueError(f"{token}: {times}")
            counts[int(token)] = times
    except (OSError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise CorpusError(
            f'{path}: not usable as token counts ({error!r}); give {{"<token id>": how often, …}}'
        ) from None
    return counts


def _kept(source: Path, words: Vocabulary, counts: Ids, size: int) -> Ids:
    """The ids that stay: `vocabulary.choose` for the size rounded up, with every id that source's settings name."""
    named: set[int] = set()

    def note(old: int) -> int:
        named.add(old)
        return old

    _renumbered([checkpoint.read_config(source), *_settings(source).values()], note)
    unknown = named - set(words.ids.values())
    if unknown:
        raise WrongCheckpointError(
            f"{source}: its settings name the token id {min(unknown)}, its tokenizer has none such; mend the settings"
        )
    return vocabulary.choose(words, counts, -(-size // _MULTIPLE) * _MULTIPLE, named)


def _settings(source: Path) -> dict[str, Any]:
    return {name: json.loads((source / name).read_bytes()) for name in _SETTINGS if (source / name).is_file()}


def _write_settings(source: Path, destination: Path, kept: Ids, config: Mapping[str, Any]) -> None:
    checkpoint.carry_side_files(source, destination)
    for name in _REPETITIONS:
        (destination / name).unlink(missing_ok=True)
    new_id = dict(zip(kept.tolist(), range(len(kept)), strict=True)).__getitem__
    for name, settings in _settings(source).items():
        _write_json(destination / name, _renumbered(settings, new_id))
    resized = _renumbered(config, new_id)
    for part in (resized, resized.get("text_config", {})):
        if "vocab_size" in part:
            part["vocab_size"] = len(kept)
    checkpoint.write_config(destination, resized)


def _renumbered(settings: Any, new_id: Callable[[int], int]) -> Any:
    """The same JSON with every token id in it replaced."""
    if isinstance(settings, list):
        return [_renumbered(item, new_id) for item in settings]
    if not isinstance(settings, dict):
        return settings
    renumbered = {}
    for key, value in settings.items():
        if key == "added_tokens_decoder":
            renumbered[key] = {str(new_id(int(old))): token for old, token in value.items()}
        else:
            renumbered[key] = (_renumbered_ids if _ID_KEY.search(key) else _renumbered)(value, new_id)
    return renumbered


def _renumbered_ids(value: Any, new_id: Callable[[int], int]) -> Any:
    if isinstance(value, list):
        return [_renumbered_ids(item, new_id) for item in value]
    # Some configs write -1 for none.
    return new_id(value) if isinstance(value, int) and value >= 0 else value


def _write_json(file: Path, content: Any, indent: int | None = 2) -> None:
    file.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def _bits_per_byte(source: Path) -> Callable[[Vocabulary, Ids, Sequence[str]], list[float]]:
    """A function (vocabulary, its ids as the model's, texts) -> bits per byte of each text, in float32."""
    import torch
    import transformers

    config = checkpoint.read_config(source)
    model = (
        getattr(transformers, config["architectures"][0]).from_pretrained(source, dtype=torch.float32).eval()
    )
    generation = _settings(source).get("generation_config.json", {})
    start = generation.get("pad_token_id", checkpoint.text_config(config)["eos_token_id"])

    def score(words: Vocabulary, old_ids: Ids, texts: Sequence[str]) -> list[float]:
        rows = torch.from_numpy(old_ids)
        scores = []
        for text in texts:
            ids = torch.tensor(words.tokenizer.encode(text, add_special_tokens=False).ids)
            read = torch.cat([torch.tensor([start]), rows[ids]])[None, :-1]
            with torch.inference_mode():
                logits = model(read).logits[0][:, rows]
            nats = torch.nn.functional.cross_entropy(logits, ids, reduction="sum").item()
            scores.append(nats / math.log(2) / len(text.encode()))
        return scores

    return score


STAGE = Stage(
    name="prune_vocab",
    parameters=PruneVocabParameters,
    run=run,
    needs=needs,
    data=data,
    code=("slimqwen.vocabulary", "slimqwen.checkpoint"),
    packages=("tokenizers", "numpy"),
)
