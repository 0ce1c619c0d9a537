"""A repository in small for sweeps: its suite, and its quality records without their times."""

import json
from pathlib import Path
from typing import Any

from slimqwen.records import store
from slimqwen.search.sweep.required_tasks import Options
from tests.search.sweep.stand_in import ITEMS, OPTIONS_COMMAND

SUITE = """
chat_template: false
sample: first
tasks:
  - {task: facts, measure: exact_match, non_inferiority_margin: 0.1}
  - {task: prose, measure: bits_per_byte, non_inferiority_margin: 0.1}
"""
OPTIONS = Options(measures=("quality",), command=OPTIONS_COMMAND, parts=3, limit=ITEMS)


def contents(root: Path) -> dict[str, Any]:
    """Quality records without their times, with their items, by variant."""
    found = {}
    for path in sorted(root.glob("experiments/*/quality_*.json")):
        record = json.loads(path.read_text())
        record["items"]["file"] = record["provenance"]["started"] = record["provenance"]["ended"] = None
        found.setdefault(path.parent.name, []).append([record, store.read_items(path)])
    return found
