"""The last line of `make gpu-check`."""

import pytest


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say which steps passed, failed, were left out or are not finished."""
    if "gpu" not in config.option.markexpr:
        return
    from tests.gpu.test_gpu_check import RESULTS

    by_status: dict[str, list[str]] = {}
    for letter, result in RESULTS.items():
        by_status.setdefault(result.status, []).append(letter)
    if by_status:
        said = "; ".join(f"{status}: {', '.join(letters)}" for status, letters in by_status.items())
        print(f"gpu-check: {said}")  # noqa: T201
