"""Time pruning a 4B-shaped checkpoint to 65,536 tokens against copying its file, in turns: A B A B.

The checkpoint is made on the spot (248,320 x 2,560, 32 layers, bf16, a synthetic vocabulary) and removed afterwards.
Both sides start with nothing of it in the page cache and end when their output is on the disk.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from _console import console, progress_bar, run
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slimqwen import checkpoint, progress, variant
from slimqwen.checkpoint import NewTensor
from slimqwen.errors import SlimqwenError
from slimqwen.recipe import prune_vocab
from slimqwen.records import provenance, results

NEEDED_BYTES = 18 * 10**9
ROWS, TOKENS, KEPT = 248_320, 248_044, 65_536
HIDDEN, INTERMEDIATE = 2560, 9216
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPEED_FLOOR, MEMORY_CEILING = 0.6, 1.5e9


class NoRoomError(SlimqwenError):
    """The disk has too little room for the benchmark, or nobody agreed to its use."""


def main() -> int:
    """Check the room, make the checkpoint, measure, write the record, show it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of copy and prune (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=32, help="of the model (default: %(default)s)")
    parser.add_argument("--yes", action="store_true", help="do not ask before 18 GB of disk are used")
    arguments = parser.parse_args()
    root, started = variant.repository_root(), provenance.utc_now()
    work = root / ".cache" / "bench-prune-vocab"
    work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work).free
    if free < NEEDED_BYTES:
        raise NoRoomError(
            f"this needs 18 GB of free disk, there are {free / 1e9:.1f}; free some and run it again"
        )
    if not arguments.yes and not sys.stdin.isatty():
        raise NoRoomError(
            "this writes up to 18 GB and nobody is there to agree; say so: make bench-prune-vocab YES=1"
        )
    if not arguments.yes and input("this writes up to 18 GB and removes them again; go on? [y/N] ") != "y":
        return 1
    try:
        with progress_bar() as report:
            source = work / "source"
            report("making the checkpoint", 0, 0)
            make_checkpoint(source, arguments.layers)
            size = checkpoint.bytes_on_disk(source)
            copies, prunes = [], []
            for done in range(arguments.rounds):
                report("copy and prune", done, arguments.rounds)
                copies.append(measured(copy, source, work / "output"))
                prunes.append(measured(prune, source, work / "output"))
    finally:
        shutil.rmtree(work)
    ratios = [copied["seconds"] / pruned["seconds"] for copied, pruned in zip(copies, prunes, strict=True)]
    speed, memory = statistics.median(ratios), max(pruned["peak_anonymous_bytes"] for pruned in prunes)
    record = {
        "schema": "bench_prune_vocab/1",
        "checkpoint_bytes": size,
        "rows": {"before": ROWS, "after": KEPT},
        "copies": copies,
        "prunes": prunes,
        "copy_seconds_over_prune_seconds": {"rounds": ratios, "median": speed, "floor": SPEED_FLOOR},
        "peak_anonymous_bytes": {"max": memory, "ceiling": MEMORY_CEILING},
        "passed": speed >= SPEED_FLOOR and memory <= MEMORY_CEILING,
        "provenance": {
            **provenance.circumstances(root, sys.argv, started),
            "load_average": list(os.getloadavg()),
        },
    }
    file = results.add(root, record)
    table = Table("", "seconds", "GB/s", "peak anonymous MB", box=None, pad_edge=False)
    for name, runs in (("copy", copies), ("prune", prunes)):
        for one in runs:
            table.add_row(
                name,
                f"{one['seconds']:.1f}",
                f"{size / one['seconds'] / 1e9:.2f}",
                f"{one['peak_anonymous_bytes'] / 1e6:.0f}",
            )
    console.print(table)
    console.print(f"prune runs at {speed:.0%} of the speed of copying (wanted: {SPEED_FLOOR:.0%})")
    console.print(f"record: {file.relative_to(root)}", markup=False)
    return 0


def make_checkpoint(folder: Path, layers: int) -> None:
    """A text-only Qwen3.5-4B with meaningless weights, in one file."""
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

    def filled(shape: tuple[int, ...]) -> NewTensor:
        def chunks() -> Iterator[bytes]:
            for start in range(0, tensor.bytes, len(block)):
                yield block[: tensor.bytes - start]

        tensor = NewTensor("BF16", shape, chunks)
        return tensor

    folder.mkdir()
    checkpoint.write_tensors(
        folder / "model.safetensors", {name: filled(shape) for name, shape in shapes.items()}
    )
    checkpoint.write_config(folder, {**config.to_dict(), "architectures": ["Qwen3_5ForCausalLM"]})
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(synthetic_tokenizer(), encoding="utf-8")
    rank = random.Random(1)
    counts = {token: int(1e9 / (1 + rank.randrange(TOKENS))) for token in range(TOKENS)}
    (folder.parent / "counts.json").write_text(json.dumps(counts))
    (folder.parent / "corpus.txt").write_text("a few words")


def synthetic_tokenizer() -> str:
    """A byte-level BPE of Qwen3.5's size: random merges of shorter tokens."""
    chance = random.Random(0)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    known, merges = set(tokens), []
    while len(tokens) < TOKENS:
        left, right = (
            tokens[min(chance.randrange(len(tokens)) for _ in range(2))],
            chance.choice(tokens[:4096]),
        )
        if len(left + right) < 20 and left + right not in known:
            merges.append((left, right))
            tokens.append(left + right)
            known.add(left + right)
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
    """Run the stage, its ranking from a file of counts so that no corpus's length enters the time."""
    corpus = prune_vocab.Corpus(source="file", path=source.parent / "corpus.txt")
    parameters = prune_vocab.PruneVocabParameters(
        size=KEPT, corpus=corpus, outputs=source.parent / "counts.json"
    )
    prune_vocab.run(source, destination, parameters, progress.silent)


def measured(work: Callable[[Path, Path], None], source: Path, output: Path) -> dict[str, float]:
    """Wall seconds and peak anonymous memory of the work in a process of its own, its output removed afterwards."""
    for file in source.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    output.mkdir()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=timed, args=(work, source, output, sender))
    child.start()
    sender.close()
    try:
        seconds, peak = receiver.recv()
    except EOFError:
        raise SlimqwenError(f"{work.__name__} failed; its error stands above") from None
    finally:
        child.join()
        shutil.rmtree(output)
    return {"seconds": round(seconds, 3), "peak_anonymous_bytes": peak}


def timed(work: Callable[[Path, Path], None], source: Path, output: Path, sender: Connection) -> None:
    """What the process runs."""
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            peak = max(
                peak, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
            )

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.monotonic()
    work(source, output)
    for file in output.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    seconds = time.monotonic() - begin
    ended.set()
    watcher.join()
    sender.send((seconds, peak))


if __name__ == "__main__":
    run(main)
