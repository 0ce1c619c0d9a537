"""Step f: a burst of short prompts, then a long one, at the planned memory utilisation; then `tune`."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.processes import spawner
from slimqwen.records import store
from slimqwen.search.tune import Tune, tune_variant
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.http_client import open_client
from slimqwen.serving.server import RunningServer, free_port, run_server
from slimqwen.serving.shared_server import require_healthy
from slimqwen.variant import Variant
from tests.gpu.plans import with_random_weights
from tests.gpu.steps import Here

_MINUTES = 10.0
_PROMPT_TOKENS, _OUTPUT_TOKENS = 16, 32


def run(here: Here) -> str:
    """The burst first, because it shows what short benchmarks do not; `tune` goes on where the last run ended."""
    with spawner.share_spawner():
        burst = here.part("burst", lambda: send_burst(here))
        tuned = here.part("tune", lambda: tune(here))
    return "; ".join(found["line"] for found in (burst, tuned) if "line" in found)


def send_burst(here: Here) -> dict[str, Any]:
    """Send short prompts at once, then one that fills the context, to a server at its own memory utilisation."""
    count = 64 if here.gpu else 8
    subject = with_random_weights("qwen3.5-4b-best", here.root) if here.gpu else rehearsed(here.root)
    command = ServerCommand.resolve(subject, port=free_port())
    with run_server(command, log=here.root / "logs" / "gpu-check-burst.log") as server:
        with ThreadPoolExecutor(count) as clients:
            short = list(clients.map(lambda number: ask(server, number, _PROMPT_TOKENS), range(count)))
        at_burst = used_memory_gib() if here.gpu else None
        long = ask(server, count, command.max_model_len - _OUTPUT_TOKENS - 1)
        require_healthy(server, "sending the burst")
        at_end = used_memory_gib() if here.gpu else None
    assert set(short) == {200}, f"a burst of {count} short prompts: statuses {sorted(set(short))}"
    assert long == 200, f"a prompt near the context's end after a burst: status {long}"
    memory = f", {at_burst:.1f} then {at_end:.1f} GiB of the GPU in use" if at_burst and at_end else ""
    answered = (
        f"{subject.name} answered {count} short prompts at once, then one of {command.max_model_len} tokens"
    )
    return {
        "line": f"{answered}{memory}",
        "gpu_gib": [at_burst, at_end],
    }


def rehearsed(root: Path) -> Variant:
    """The embedded model with drafts and a short context, by which the lengths of all requests go."""
    return variants.load("tiny-mtp4", root).with_lines({"VLLM_MAX_MODEL_LEN": "640"})


def ask(server: RunningServer, number: int, length: int) -> int:
    """Status of the response to a prompt of so many tokens, whose first token no other prompt has."""
    prompt = [100 + number, *((position * 7) % 1000 for position in range(1, length))]
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": _OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    with open_client(timeout_s=120) as client:
        return int(client.post(f"{server.base_url}/v1/completions", json=body).status_code)


def used_memory_gib() -> float:
    """Memory of the first GPU that all processes use, 2^30 bytes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return (
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) / 2**10
    )


def tune(here: Here) -> dict[str, Any]:
    """`tune` of the embedded model, whose drafts are real: for ten minutes in all, over as many runs as that takes."""
    subject = variants.load("tiny-mtp4", here.root) if here.gpu else rehearsed(here.root)
    subject = subject.with_lines({"VLLM_PORT": str(free_port())})
    if here.gpu:
        subject = subject.with_lines({"VLLM_GPU_MEMORY_UTILIZATION": "0.3"})
    minutes = _MINUTES if here.gpu else 0.02  # a rehearsal takes one turn
    path = tune_variant(
        subject, [1], minutes=minutes, command=["make", "gpu-check"], even_if_busy=here.gpu is None
    )
    record = store.read_record(path, Tune)
    here.records.mkdir(parents=True, exist_ok=True)
    kept = [file.replace(here.records / file.name) for file in path.parent.glob(f"{path.stem}.*")]
    return {
        "line": f"tune: {record.verdict}, {' '.join(record.advice)}",
        "records": [file.name for file in kept],
    }
