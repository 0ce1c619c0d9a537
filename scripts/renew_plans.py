"""Make recorded plans of GPUs anew, all of them after an upgrade of vLLM; needs the environment of PLATFORM=cuda.

One process a GPU imports vLLM and forks for each variant. Plans that are made lie in .cache/renewed-plans, so that a
second run goes on; the records are written when all are there.
"""

import hashlib
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.identity import source
from slimqwen.plan import record, rehearsal, shapes
from slimqwen.plan.devices import CPU, read_gpus
from slimqwen.plan.facts import Plan
from slimqwen.records import provenance


def main(*wanted: str) -> None:
    """Make the plans of the named variants for the named GPUs; without names, of all variants or for all GPUs."""
    root, started = variants.repository_root(), provenance.utc_now()
    gpus = read_gpus(root)
    names = [name for name in wanted if name not in gpus] or variants.names(root)
    only = [name for name in wanted if name in gpus]
    planned = {
        name: [plan.gpu for plan in record.list_recorded_plans(root, name) if plan.gpu != CPU]
        for name in names
    }
    code = source.reach("slimqwen.plan.rehearsal.main").digest[:12]
    folder = root / ".cache" / "renewed-plans" / f"{version('vllm')}-{code}"
    by_gpu: dict[str, list[str]] = defaultdict(list)
    for name, cards in planned.items():
        for gpu in cards:
            if not _kept(folder, name, gpu).is_file() and (not only or gpu in only):
                by_gpu[gpu].append(name)
    for gpu, unmade in by_gpu.items():
        log = root / "logs" / f"renew-plans-{gpu}.log"
        subjects = [variants.load(name, root) for name in unmade]
        for plan in rehearsal.rehearse_variants(subjects, gpus[gpu], log=log):
            file = _kept(folder, plan.variant, gpu)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(plan.model_dump_json())
            print(f"{gpu}: {plan.variant}: {plan.error or 'planned'}", flush=True)
    missing = [
        gpu for name, cards in planned.items() for gpu in cards if not _kept(folder, name, gpu).is_file()
    ]
    if missing:
        print(f"to go: {len(missing)} plans, on {', '.join(sorted(set(missing)))}")
        return
    for name, cards in planned.items():
        plans = [Plan.model_validate_json(_kept(folder, name, gpu).read_bytes()) for gpu in cards]
        if plans:
            subject = variants.load(name, root)
            print(record.write_plans(subject, plans, command=sys.argv, started=started))


def _kept(folder: Path, name: str, gpu: str) -> Path:
    """File of a plan by what it is made of: an edited config.env or recipe asks for another."""
    subject = variants.load(name)
    lines = sorted((key, line.value) for key, line in subject.settings.items())
    made_of = repr((lines, sorted(shapes.variant_shape(subject).tensors.items())))
    return folder / gpu / f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.json"


if __name__ == "__main__":
    main(*sys.argv[1:])
