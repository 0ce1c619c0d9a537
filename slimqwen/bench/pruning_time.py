"""Benchmark of pruning: a 4B-shaped checkpoint pruned to 65,536 tokens and its file copied, in turns: A B A B.

The checkpoint is made on the spot (248,320 x 2,560, 32 layers, bf16, a synthetic vocabulary) and removed afterwards.
Both sides start with none of their input in the page cache and end when their output is on the disk.
"""

import json
import multiprocessing
import os
import random
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slimqwen.bench import BenchError
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import bytes_on_disk
from slimqwen.checkpoint.tensors import NewTensor, write_tensors
from slimqwen.progress import Progress, silent
from slimqwen.recipe.stages import prune_vocab
from slimqwen.records import provenance, store
from slimqwen.records.record import Block, Count, NonNegative, Positive, Record
from slimqwen.records.table import Table

NEEDED_BYTES = 18 * 10**9
ROWS, TOKENS, KEPT = 248_320, 248_044, 65_536
HIDDEN, INTERMEDIATE = 2560, 9216
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPEED_FLOOR, MEMORY_CEILING = 0.6, 1.5e9


class Rows(Block):
    """Rows of the vocabulary matrices."""

    before: Positive
    after: Positive


class Timed(Block):
    """One copy or prune."""

    seconds: NonNegative
    peak_anonymous_bytes: Count


class Speed(Block):
    """Seconds of a copy / seconds of a prune."""

    rounds: tuple[NonNegative, ...] = Field(min_length=1)
    median: NonNegative
    floor: NonNegative = Field(description="Least median that passes.")


class PeakMemory(Block):
    """Peak anonymous memory of pruning, bytes."""

    max: NonNegative
    ceiling: NonNegative = Field(description="Largest peak that passes.")


class BenchPruneVocab(Record):
    """Time and memory of pruning a 4B-shaped checkpoint, relative to copying its file; of no variant."""

    kind = "bench_prune_vocab"
    verb = "bench prune-vocab"

    variant: Literal[""] = ""
    checkpoint_bytes: Count
    rows: Rows
    copies: tuple[Timed, ...] = Field(min_length=1, description="In the order of the rounds.")
    prunes: tuple[Timed, ...] = Field(min_length=1, description="In the order of the rounds.")
    copy_seconds_over_prune_seconds: Speed
    peak_anonymous_bytes: PeakMemory
    passed: bool

    def tables(self, path: Path) -> list[Table]:
        """Time, speed and memory of each copy and prune."""
        headings = ("work", "seconds", "GB/s", "peak anonymous MB")
        rows = tuple(
            (
                work,
                f"{run.seconds:.1f}",
                f"{self.checkpoint_bytes / run.seconds / 1e9:.2f}",
                f"{run.peak_anonymous_bytes / 1e6:.0f}",
            )
            for work, runs in (("copy", self.copies), ("prune", self.prunes))
            for run in runs
        )
        speed = self.copy_seconds_over_prune_seconds
        note = f"Pruning runs at {speed.median:.0%} of the speed of copying, at least {speed.floor:.0%} pass."
        notes = (note, *provenance.source_notes(self, path))
        return [Table("Pruning a 4B-shaped vocabulary", headings, rows, notes)]


def write(
    root: Path, rounds: int, layers: int, *, command: Sequence[str], progress: Progress = silent
) -> Path:
    """Time pruning and copying in turns and write the record.

    Raises:
        BenchError: less than 18 GB of disk is free.
    """
    started = provenance.utc_now()
    work = root / ".cache" / "bench-prune-vocab"
    work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work).free
    if free < NEEDED_BYTES:
        raise BenchError(f"18 GB of disk are needed, {free / 1e9:.1f} are free; free some and run again")
    try:
        source = work / "source"
        progress("making the checkpoint", 0, 0)
        make_checkpoint(source, layers)
        size = bytes_on_disk(source)
        copies, prunes = [], []
        for done in range(rounds):
            progress("copy and prune", done, rounds)
            copies.append(measure(copy, source, work / "output"))
            prunes.append(measure(prune, source, work / "output"))
    finally:
        shutil.rmtree(work)
    ratios = [copied.seconds / pruned.seconds for copied, pruned in zip(copies, prunes, strict=True)]
    speed, memory = statistics.median(ratios), max(pruned.peak_anonymous_bytes for pruned in prunes)
    record = BenchPruneVocab(
        checkpoint_bytes=size,
        rows=Rows(before=ROWS, after=KEPT),
        copies=tuple(copies),
        prunes=tuple(prunes),
        copy_seconds_over_prune_seconds=Speed(rounds=tuple(ratios), median=speed, floor=SPEED_FLOOR),
        peak_anonymous_bytes=PeakMemory(max=memory, ceiling=MEMORY_CEILING),
        passed=speed >= SPEED_FLOOR and memory <= MEMORY_CEILING,
        provenance=provenance.circumstances(root, command, started, load_average=os.getloadavg()),
    )
    return store.write(root / "results", record)


def make_checkpoint(folder: Path, layers: int) -> None:
    """Write a text-only Qwen3.5-4B with meaningless weights into one file."""
    import torch
    import transformers

    config = transformers.Qwen3_5TextConfig(
        vocab_size=ROWS,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
        eos_token_id=TOKENS,
    )
    with torch.device("meta"):
        model = transformers.Qwen3_5ForCausalLM(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes |= {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN), "mtp.norm.weight": (HIDDEN,)}
    block = random.Random(0).randbytes(2**24)

    def random_tensor(shape: tuple[int, ...]) -> NewTensor:
        def chunks() -> Iterator[bytes]:
            for start in range(0, tensor.bytes, len(block)):
                yield block[: tensor.bytes - start]

        tensor = NewTensor("BF16", shape, chunks)
        return tensor

    folder.mkdir()
    write_tensors(
        folder / "model.safetensors", {name: random_tensor(shape) for name, shape in shapes.items()}
    )
    write_config(folder, {**config.to_dict(), "architectures": ["Qwen3_5ForCausalLM"]})
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(synthetic_tokenizer(), encoding="utf-8")
    rank = random.Random(1)
    counts = {token: int(1e9 / (1 + rank.randrange(TOKENS))) for token in range(TOKENS)}
    (folder.parent / "counts.json").write_text(json.dumps(counts))
    (folder.parent / "corpus.txt").write_text("a few words")


def synthetic_tokenizer() -> str:
    """A byte-level BPE of Qwen3.5's size: random merges of shorter tokens."""
    rng = random.Random(0)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    known_tokens, merges = set(tokens), []
    while len(tokens) < TOKENS:
        left = tokens[min(rng.randrange(len(tokens)) for _ in range(2))]
        right = rng.choice(tokens[:4096])
        if len(left + right) < 20 and left + right not in known_tokens:
            merges.append((left, right))
            tokens.append(left + right)
            known_tokens.add(left + right)
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer.to_str(pretty=True)


def copy(source: Path, destination: Path) -> None:
    """Copy the checkpoint's files as they are."""
    for file in source.iterdir():
        shutil.copyfile(file, destination / file.name)


def prune(source: Path, destination: Path) -> None:
    """Run `prune_vocab` with token counts from a file, so that no time goes into reading a corpus."""
    corpus = prune_vocab.Corpus(path=source.parent / "corpus.txt")
    parameters = prune_vocab.PruneVocabParameters(
        size=KEPT, corpus=corpus, outputs=source.parent / "counts.json"
    )
    prune_vocab.run(source, destination, parameters, silent)


def measure(work: Callable[[Path, Path], None], source: Path, output: Path) -> Timed:
    """Run the work in a process of its own and remove its output afterwards."""
    for file in source.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    output.mkdir()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run_timed, args=(work, source, output, sender))
    child.start()
    sender.close()
    try:
        seconds, peak = receiver.recv()
    except EOFError:
        raise BenchError(f"{work.__name__} failed; its error stands above") from None
    finally:
        child.join()
        shutil.rmtree(output)
    return Timed(seconds=round(seconds, 3), peak_anonymous_bytes=peak)


def run_timed(work: Callable[[Path, Path], None], source: Path, output: Path, sender: Connection) -> None:
    """Run the work in this process and send its wall seconds and peak anonymous bytes."""
    process, peak, ended = psutil.Process(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            memory = process.memory_info()
            # The shared part is what maps files.
            peak = max(peak, memory.rss - memory.shared)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    work(source, output)
    for file in output.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    seconds = time.monotonic() - began
    ended.set()
    watcher.join()
    sender.send((seconds, peak))
