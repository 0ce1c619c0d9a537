"""The plan's answer for the memory of many cards, from one construction of the models (`python -m` this module).

A plan takes 20 s, nearly all of it before the memory of the card counts: in the layout of the KV cache, and in the CUDA
graphs, which need a state block for each sequence.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.plan import rehearsal, resolution, simulated_gpu
from slimqwen.plan.devices import read_gpus
from slimqwen.serving.command import ServerCommand


def plan_errors(name, root, cards, log):
    """The name of each card -> vLLM's error on it, None where the variant starts.

    Cards share a process, which simulates the first of them and takes of the others only the memory; where config.env
    leaves --max-num-seqs to vLLM, those of one default do.
    """
    leaves_sequences = "VLLM_MAX_NUM_SEQS" not in variants.load(name, root).settings
    groups = defaultdict(list)
    for gpu in cards:
        groups[leaves_sequences and gpu.default_max_num_seqs].append(gpu.name)
    errors = {}
    for names in groups.values():
        with tempfile.NamedTemporaryFile("r") as answer, log.open("a") as output:
            words = [sys.executable, "-m", __name__, str(root), name, answer.name, *names]
            subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, check=True)
            errors |= json.load(answer)
    return errors


def main():
    root, name, answer, *names = sys.argv[1:]
    gpus = [read_gpus(Path(root))[each] for each in names]
    simulated_gpu.simulate_gpu(gpus[0])
    errors = {}
    with rehearsal._blocked_network(), tempfile.TemporaryDirectory() as folder:
        subject, _ = rehearsal._with_checkpoint(variants.load(name, Path(root)), Path(folder))
        command = ServerCommand.resolve(subject, platform="cuda")
        environment = command.process_environment()
        os.environ.clear()
        os.environ.update(environment, HUMMING_DISABLE_PARALLEL_BUILD="1")
        config = resolution.make_engine_config(command.argv[3:])
        target, draft = resolution.build_models(config)
        weight_bytes = sum(resolution.count_weight_bytes(config, target, draft).values())
        resolution.align_blocks(config)
        for gpu in sorted(gpus, key=lambda gpu: -gpu.cuda_memory_bytes):
            try:
                _, layout = resolution.lay_out_kv_cache(config, weight_bytes, gpu.cuda_memory_bytes)
                resolution.resolve_graphs(config, layout)
                errors[gpu.name] = None
            except ValueError as error:
                errors[gpu.name] = str(error)
    Path(answer).write_text(json.dumps(errors))
    sys.stdout.flush()
    os._exit(0)  # skips vLLM's clean-up, which needs a real GPU


if __name__ == "__main__":
    main()
