"""What the demo says and ends with where a part of it gives no result."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimqwen.checkpoint import files
from slimqwen.cli import demo
from slimqwen.cli.demo import DemoRecords
from slimqwen.report import site
from slimqwen.search import SearchError
from slimqwen.stats.verdict import Verdict

BUSY = "not decided: other processes used 80 % of the CPU"
LOST = "failed: the server failed while measuring tiny-best: long: RuntimeError: num_accepted_tokens must be in [1, 5]"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that the demo says; it builds no report, and every checkpoint has one size."""
    lines: list[str] = []
    monkeypatch.setattr(demo, "say", lines.append)
    monkeypatch.setattr(files, "bytes_on_disk", lambda _: 8_000_000)
    monkeypatch.setattr(site, "build_page", lambda *_: SimpleNamespace(index=Path("index.html")))
    return lines


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what the demo finds: reasons of parts without a result, and verdicts of the others."""

    def find(missing: dict[str, str], **verdicts: Verdict) -> None:
        def describe(part: str) -> Callable[..., tuple[list[str], Verdict]]:
            return lambda *_: ([f"  {part:<11} figures"], verdicts.get(part, Verdict.PASS))

        parts = {part: describe(part) for part in demo._PARTS}
        evidence = DemoRecords(dict.fromkeys(parts.keys() - missing, ()), missing)
        monkeypatch.setattr(demo, "_PARTS", parts)
        monkeypatch.setattr(demo, "_measure", lambda *_: evidence)

    return find


def test_on_a_busy_host_all_but_the_speed_is_decided(found: Callable[..., None], said: list[str]) -> None:
    found({"speed": BUSY})
    demo.demo()
    assert f"  speed       {BUSY}" in said
    for part in ("size", "fidelity", "acceptance", "quality"):
        assert [line for line in said if line.startswith(f"  {part} ")]
    assert [line for line in said if line.startswith("  serve       not decided: tiny-best is as good")]


def test_a_failed_part_is_named_beside_the_others_with_its_cause(
    found: Callable[..., None], said: list[str]
) -> None:
    found({"speed": LOST})
    with pytest.raises(SearchError, match=r"^failed: speed; the lines above say why"):
        demo.demo()
    assert f"  speed       {LOST}" in said
    assert "  quality     figures" in said


@pytest.mark.parametrize(
    ("missing", "verdicts", "answer"),
    [
        ({}, {}, "slimqwen serve --variant tiny-best: faster"),
        ({}, {"speed": Verdict.INCONCLUSIVE}, "slimqwen serve --variant tiny: tiny-best is as good"),
        ({}, {"quality": Verdict.FAIL}, "slimqwen serve --variant tiny: tiny-best lost more"),
        ({"speed": BUSY}, {"quality": Verdict.FAIL}, "slimqwen serve --variant tiny: tiny-best lost more"),
        ({}, {"fidelity": Verdict.INCONCLUSIVE}, "not decided: `slimqwen gate --variant tiny-best`"),
        ({"acceptance": BUSY}, {}, "not decided: no verdict on acceptance"),
    ],
)
def test_what_to_serve_follows_from_the_verdicts(
    found: Callable[..., None],
    said: list[str],
    missing: dict[str, str],
    verdicts: dict[str, Verdict],
    answer: str,
) -> None:
    found(missing, **verdicts)
    demo.demo()
    (line,) = [line for line in said if line.startswith("  serve ")]
    assert line.startswith(f"  serve       {answer}")
