"""The class of a row of `table.py`: one change of vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One change of vLLM.

    Attributes:
        module: the module that makes it, below `slimqwen.vllm_plugin`.
        why: what goes wrong, or is missing, without it.
        upstream: vLLM's issues and pull requests about it.
        places: functions that it replaces, wraps or relies on: `module:name` -> `upstream.digest_source` of each;
            where the body differs between known versions, version of vLLM -> digest. Empty where it uses only what vLLM
            offers to plugins.
        devices: vLLM's platforms that it changes, as `device_type`.
        function: what in the module makes the change. `install` is called by `patches.register` in every process; all
            other functions and classes are called by what vLLM's hook loads.
        fixed_in: first version of vLLM that does not need the patch; None if there is none yet.
    """

    module: str
    why: str
    upstream: str
    places: Mapping[str, str | Mapping[str, str]]
    devices: tuple[str, ...] = ("cpu", "cuda")
    function: str = "install"
    fixed_in: str | None = None

    @property
    def name(self) -> str:
        """Short name for logs: the module's last part, or the function if a module has several patches."""
        return self.module.rpartition(".")[2] if self.function == "install" else self.function.lstrip("_")

    def digests(self, version: str) -> dict[str, str]:
        """Digests of the functions in `places`, by name, as a known version of vLLM has them."""
        return {
            place: digest if isinstance(digest, str) else digest[version]
            for place, digest in self.places.items()
        }

    @property
    def file(self) -> str:
        """The module's file, from the repository's folder."""
        return f"slimqwen/vllm_plugin/{self.module.replace('.', '/')}.py"
