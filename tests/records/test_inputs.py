"""No record outlives its inputs: an edit of any makes the next verb measure anew, or say why not.

`READERS` has a row for each kind of record; a kind without one fails. A reader returns what the verb that takes such a
record says: the record is not taken (the verb measures anew), or the error. `INPUTS` has what each kind depends on, and
every data file that a record names must be among them.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimqwen import variant
from slimqwen.bench.latency import rounds
from slimqwen.bench.latency.record import Latency
from slimqwen.bench.workload import Workload
from slimqwen.checkpoint.files import carry_all
from slimqwen.errors import SlimqwenError
from slimqwen.evals import acceptance, engine, fidelity, gate, promotion
from slimqwen.evals.checks import CHECKS, Check, GateSettings, Pair
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.suites import suite
from slimqwen.evals.suites.suite import Suite
from slimqwen.plan import devices, rehearsal, start
from slimqwen.plan import record as plan_record
from slimqwen.plan.start import MissingPlanError
from slimqwen.records import provenance, registry, store
from slimqwen.records.settings import Settings
from slimqwen.search import measurements
from slimqwen.search.tune import tuner
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant
from slimqwen.yaml_file import YamlPart
from tests import record_files
from tests.evals.gate_checks import Checks, link_settings
from tests.plan import example

ROOT = Path(__file__).parents[2]
OWN = "eval/own/mine"
PASSAGES = (ROOT / "eval/texts/tinyworld_passages.jsonl").read_text().splitlines(keepends=True)[:750]
FILES = {
    "texts.jsonl": "".join(PASSAGES),
    "questions.jsonl": '{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "Sky?", "answer": "blue"}\n',
    "prompts.jsonl": '{"prompt": "the fox sells"}\n{"prompt": "the town sells"}\n',
    "gate.yaml": "fidelity: {batch: 8}\nacceptance: {tokens: 64}\nengine: {seed: 11}\n",
    "suite.yaml": "metric: exact\n",
    "workload.yaml": "rounds: 2\n",
    "chat.jinja": "{{ messages }}",
}
LINES = f"EVALUATION=mine\nVLLM_CHAT_TEMPLATE={OWN}/chat.jinja\n"


@pytest.fixture
def root(
    tmp_path: Path, add_variant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, stamps: None
) -> Path:
    """A repository with tiny and its variant small, an own evaluation, and stand-ins for the gate's measurements."""
    add_variant("tiny", "VLLM_MODEL=weights/tiny\nVLLM_MAX_MODEL_LEN=256\n")
    add_variant("small", f"BASE=tiny\nVLLM_MODEL=weights/small\n{LINES}", baseline="tiny")
    for name in ("tiny", "small"):
        (tmp_path / "weights" / name).mkdir(parents=True)
        carry_all(ROOT / "weights" / "tiny", tmp_path / "weights" / name)
    link_settings(tmp_path)
    for name in ("own", "workloads"):
        (tmp_path / "eval" / name).unlink()
        (tmp_path / "eval" / name).mkdir()
    (tmp_path / OWN).mkdir()
    for name, text in FILES.items():
        (tmp_path / OWN / name).write_text(text)
    classes = (ROOT / "eval/workloads/classes.yaml").read_text()
    classes = classes.replace("documents: tinyworld_passages", f"documents: {OWN}/texts.jsonl")
    (tmp_path / "eval/workloads/classes.yaml").write_text(classes)
    Checks().install(monkeypatch)
    return tmp_path


Reader = Callable[[], str]
"""What the next verb says of the record: empty if it takes it."""

ANEW = "measured anew"


def small(root: Path) -> Variant:
    return variant.load("small", root)


def check_of(root: Path, name: str, settings: str = "mine") -> Check[Any]:
    pair = Pair(small(root), variant.load("tiny", root), Invocation(["x"]))
    return GateSettings.load(settings, root).checks(pair)[name]


def read_check(name: str, root: Path) -> Reader:
    """The gate takes the record of a check."""
    check_of(root, name).measure(small(root))

    def read() -> str:
        return "" if check_of(root, name).find(small(root)) else ANEW

    return read


def read_gate(root: Path) -> Reader:
    """`variant promote` takes the gate's verdict."""
    gate.measure_gate(small(root), GateSettings.load("mine", root), command=["x"])

    def read() -> str:
        try:
            promotion.promote_variant(small(root))
        except SlimqwenError as error:
            return str(error)
        return ""

    return read


def read_latency(root: Path) -> Reader:
    """A search and the demo take the timing of the workload classes; the journal of an interrupted run is its own."""
    workload = Workload.load("classes", root)
    block = provenance.describe(
        ServerCommand.resolve(small(root)), ["x"], provenance.utc_now(), datasets=workload.inputs(root)
    )
    timing = record_files.example("latency", variant="small", provenance=block, workload="classes", rounds=6)
    record_files.write(small(root).folder, timing, [{"x": 1}])

    def read() -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measurements.latency, "measure_latency", lambda *_, **__: [])
            settings = measurements.RecordSettings(("x",))
            measured = measurements.measure_latency(root, (("small",), 6, settings), lambda *_: None)
        return "" if measured.reused else ANEW

    return read


def read_journal(name: Callable[[], object]) -> Reader:
    """A continued run takes the journal of the interrupted one if its name, or a task's key, is still the same."""
    before = name()
    return lambda: "" if name() == before else ANEW


def read_tune(root: Path) -> Reader:
    def name() -> object:
        workload = Workload.load("mine", root)
        return tuner._journal(
            tuner.TuneSubject.of_variant(small(root), workload, [1], None, sessions=False), False
        )

    return read_journal(name)


def read_rounds(root: Path) -> Reader:
    def name() -> object:
        return rounds._journal([SimpleNamespace(variant=small(root))], Workload.load("mine", root), 2, False)  # type: ignore[list-item]

    return read_journal(name)


def read_engine(root: Path) -> Reader:
    def name() -> object:
        settings = GateSettings.load("mine", root).of(engine.EngineSettings)
        return engine._journal(ServerCommand.resolve(small(root)), settings)

    return read_journal(name)


def read_plan(root: Path) -> Reader:
    """`serve` takes the plan."""
    made = rehearsal.digest_inputs(small(root), devices.read_gpu("a10g", root))
    flags = rehearsal.decisive_flags(ServerCommand.resolve(small(root)))
    plan = example.plan().model_copy(
        update={"flags": flags, "inputs": made, "vllm": plan_record.vllm_on("a10g")}
    )
    record = example.record(root, plan).model_copy(update={"variant": "small"})
    store.write_record(small(root).folder, record)

    def read() -> str:
        try:
            start.find_plan(ServerCommand.resolve(small(root)), "a10g")
        except MissingPlanError as error:
            return str(error)
        return ""

    return read


READERS: dict[str, Callable[[Path], Reader] | None] = {
    "fidelity": lambda root: read_check("fidelity", root),
    "acceptance": lambda root: read_check("acceptance", root),
    "quality": lambda root: read_check("quality", root),
    "engine": lambda root: read_check("engine", root),
    "engine, interrupted": read_engine,
    "gate": read_gate,
    "latency": read_latency,
    "latency, interrupted": read_rounds,
    "tune": read_tune,
    "search": None,  # it takes the records of checks, and outputs by the content key of their stage
    "plan": read_plan,
    "start_up": None,  # no verb takes one: reports show it with its source
    "roundings": None,
}


def append(file: Path) -> None:
    """Edit a file that may be a link at its end, so that it can still be read."""
    content = file.read_bytes()
    file.unlink()
    if file.suffix == ".safetensors":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        file.write_bytes(content + (content.splitlines()[-1] if file.suffix == ".jsonl" else b"") + b"\n")


def write(name: str, text: str) -> Callable[[Path, Any], None]:
    return lambda root, _: (root / name).write_text(text) and None


def replace(name: str, *edits: tuple[str, str]) -> Callable[[Path, Any], None]:
    def edit(root: Path, _: Any) -> None:
        text = (root / name).read_text()
        for before, after in edits:
            assert before in text
            text = text.replace(before, after, 1)
        (root / name).unlink()
        (root / name).write_text(text)

    return edit


def rewrite_code(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(suite, "_digest_code", lambda *starts: f"other {starts}")


EDITS: dict[str, Callable[[Path, Any], None]] = {
    **{
        name: lambda root, _, name=name: append(root / name)  # type: ignore[misc]
        for name in (
            *(f"{OWN}/{file}" for file in ("texts.jsonl", "questions.jsonl", "prompts.jsonl", "chats.jsonl")),
            f"{OWN}/chat.jinja",
            "eval/workloads/classes.yaml",
            "weights/small/config.json",
            "weights/small/tokenizer.json",
            "weights/small/chat_template.jinja",
            "weights/small/model.safetensors",
            "weights/tiny/config.json",
        )
    },
    f"{OWN}/gate.yaml": write(
        f"{OWN}/gate.yaml", "fidelity: {batch: 4}\nacceptance: {seed: 2}\nengine: {seed: 3}\n"
    ),
    f"{OWN}/suite.yaml": write(f"{OWN}/suite.yaml", "metric: contains\n"),
    f"{OWN}/workload.yaml": write(f"{OWN}/workload.yaml", "rounds: 3\n"),
    "no gate.yaml": lambda root, _: (root / OWN / "gate.yaml").unlink(),
    "eval/own.yaml": replace(
        "eval/own.yaml", ("max_gen_toks: 256", "max_gen_toks: 9"), ("most_texts: 60", "most_texts: 59"),
        ("seed: 1\n", "seed: 2\n"), ("seed: 11\n", "seed: 12\n"),
    ),
    "the margin": write(f"{OWN}/suite.yaml", "metric: exact\nnon_inferiority_margin: 0.2\n"),
    "thinking": write(f"{OWN}/suite.yaml", "metric: exact\nthinking: false\n"),
    "questions in a table": lambda root, _: (root / OWN / "questions.jsonl").rename(root / OWN / "questions.json"),
    "eval/devices.yaml": replace("eval/devices.yaml", ("bandwidth_gb_per_s: 600", "bandwidth_gb_per_s: 9")),
    "a line of config.env": replace("experiments/small/config.env", ("VLLM_MODEL", "VLLM_DTYPE=float32\nVLLM_MODEL")),
    "the baseline's context": replace("experiments/tiny/config.env", ("LEN=256", "LEN=255")),
    "the code that scores": rewrite_code,
}  # fmt: skip
"""An edit of each input; a name with a slash is the file's."""

_MODEL = tuple(name for name in EDITS if name.startswith("weights/small/"))
_GATE = (
    f"{OWN}/gate.yaml",
    "no gate.yaml",
    "eval/own.yaml",
    f"{OWN}/texts.jsonl",
    "a line of config.env",
    *_MODEL,
)
_BASELINE = ("weights/tiny/config.json", "the baseline's context")
_QUESTIONS = (
    f"{OWN}/questions.jsonl", "questions in a table", f"{OWN}/suite.yaml", "eval/own.yaml", "the margin", "thinking",
    "the code that scores", f"{OWN}/chat.jinja", "a line of config.env", *_MODEL,
)  # fmt: skip
_TIMED = (f"{OWN}/chat.jinja", "a line of config.env", *_MODEL)
INPUTS: dict[str, tuple[str, ...]] = {
    "fidelity": (*_GATE, *_BASELINE, f"{OWN}/chat.jinja"),
    "acceptance": (*_GATE, *_BASELINE),
    "quality": _QUESTIONS,
    "engine": (*_GATE, f"{OWN}/chat.jinja"),
    "engine, interrupted": (*_GATE[:1], *_GATE[2:], f"{OWN}/chat.jinja"),
    "gate": tuple(dict.fromkeys((*_GATE, *_BASELINE, *_QUESTIONS))),
    "latency": ("eval/workloads/classes.yaml", f"{OWN}/texts.jsonl", *_TIMED),
    "latency, interrupted": (f"{OWN}/prompts.jsonl", f"{OWN}/workload.yaml", *_TIMED),
    "tune": (f"{OWN}/prompts.jsonl", f"{OWN}/workload.yaml", *_TIMED),
    "plan": ("weights/small/config.json", "eval/devices.yaml", "a line of config.env"),
}


def test_every_kind_of_record_has_a_row() -> None:
    kinds = {name.partition(",")[0] for name in READERS}
    assert kinds == set(registry.kinds())
    assert INPUTS.keys() == {name for name, reader in READERS.items() if reader}


@pytest.mark.parametrize("kind", [kind for kind, reader in READERS.items() if reader])
def test_an_edit_of_any_input_makes_the_next_verb_measure_anew_or_say_why_not(
    kind: str, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader = READERS[kind]
    assert reader is not None
    read = reader(root)
    assert read() == "", "a record whose inputs are as they were is taken"
    kept = snapshot(root)
    for name in INPUTS[kind]:
        with pytest.MonkeyPatch.context() as patch:
            EDITS[name](root, patch)
            assert read(), f"{kind}: {name}"
        restore(root, kept)
        assert read() == "", f"{kind}: {name} is as it was"


@pytest.mark.parametrize("kind", [*(check.name for check in CHECKS), "latency"])
def test_every_data_file_of_a_record_is_an_input_that_is_edited(kind: str, root: Path) -> None:
    reader = READERS[kind]
    assert reader is not None
    reader(root)
    model = registry.kinds()[kind]
    (path,) = store.records(small(root).folder, model)
    block = store.read_record(path).provenance
    assert {name.partition("#")[0] for name in block.datasets} <= set(INPUTS[kind])
    if block.files and model.deciding_flags is None:
        assert f"{OWN}/chat.jinja" in INPUTS[kind]


@pytest.mark.parametrize("kind", [kind for kind, reader in READERS.items() if reader is None])
def test_a_kind_without_a_reader_is_read_by_reports_alone(kind: str) -> None:
    model = registry.kinds()[kind]
    own = Path(__import__(model.__module__, fromlist=["x"]).__file__)
    for file in (ROOT / "slimqwen").rglob("*.py"):
        if file.parent.name == "report" or file.parent == own.parent:
            continue
        reads = rf"\b(records|results|read_record|find_reusable)\([^)]*\b{model.__name__}\b"
        assert not re.search(reads, file.read_text())


def snapshot(root: Path) -> dict[Path, bytes]:
    """The files that edits may touch."""
    names = ["eval/own.yaml", "eval/devices.yaml"]
    names += [f"experiments/{name}/config.env" for name in ("tiny", "small")]
    files = [*(root / name for name in names), *(root / OWN).iterdir(), *(root / "eval/workloads").iterdir()]
    return {file: file.read_bytes() for file in files if file.is_file()}


def restore(root: Path, kept: dict[Path, bytes]) -> None:
    """Undo the edits; a checkpoint is carried anew."""
    for file in (root / OWN).iterdir():
        if file not in kept:
            file.unlink()
    for file, content in kept.items():
        if not file.is_file() or file.read_bytes() != content:
            file.unlink(missing_ok=True)
            file.write_bytes(content)
    for name in ("tiny", "small"):
        for source in (ROOT / "weights" / "tiny").iterdir():
            target = root / "weights" / name / source.name
            if target.exists() and target.read_bytes() != source.read_bytes():
                target.unlink()
                target.write_bytes(source.read_bytes())


PUBLISHED: dict[str, Callable[[Path], object]] = {
    "a task's data": lambda root: append(root / "eval/tasks/tinyworld/facts.jsonl"),
    "a task's definition": lambda root: append(root / "eval/tasks/tinyworld/facts.yaml"),
    "a task's scoring": lambda root: append(root / "eval/tasks/tinyworld/scoring.py"),
    "a further task": lambda root: append_line(root, f"  - {PROSE}"),
    "the margin": lambda root: change_suite(root, "non_inferiority_margin: 0.04", "non_inferiority_margin: 0.02"),
    "the assumption": lambda root: change_suite(root, "assumed_discordance: 0.03", "assumed_discordance: 0.05"),
    "a floor": lambda root: change_suite(root, "measure: exact_match", "measure: exact_match, floor: 0.5"),
    "overrides": lambda root: change_suite(root, "exact_match", "exact_match, overrides: {num_fewshot: 1}"),
    "thinking": lambda root: change_suite(root, "chat_template: false", "chat_template: true"),
    "repeats": lambda root: change_suite(root, "measure: exact_match", "measure: exact_match, repeats: 2"),
    "the text prefix": lambda root: change_suite(root, 'text_prefix: "<|endoftext|>"', 'text_prefix: "<|im_end|>"'),
    "the sample": lambda root: change_suite(root, "sample: first", "sample: drawn"),
}  # fmt: skip
SUITE = "eval/suites/tinyworld.yaml"
PROSE = "{task: tinyworld_prose, measure: bits_per_byte, non_inferiority_margin: 0.01}"


def change_suite(root: Path, before: str, after: str) -> None:
    replace(SUITE, (before, after))(root, None)


def append_line(root: Path, line: str) -> None:
    (root / SUITE).write_text(f"{(root / SUITE).read_text()}{line}\n")


@pytest.fixture
def published(root: Path) -> Path:
    """The repository, with small judged by the suite tinyworld, whose tasks are copies."""
    (root / "eval/tasks").unlink()
    (root / "eval/tasks/tinyworld").mkdir(parents=True)
    carry_tasks = (ROOT / "eval/tasks/tinyworld").iterdir()
    for file in carry_tasks:
        (root / "eval/tasks/tinyworld" / file.name).write_bytes(file.read_bytes())
    return root


@pytest.mark.parametrize("edit", PUBLISHED)
def test_a_published_suite_is_compared_with_its_tasks_and_settings_as_they_are(
    published: Path, edit: str
) -> None:
    one, check = small(published), check_of(published, "quality", "tinyworld")
    path = check.measure(one)
    # lm-eval's run names the data of the tasks beside their definitions.
    record = json.loads(path.read_text())
    facts = published / "eval/tasks/tinyworld/facts.jsonl"
    record["provenance"]["datasets"] |= provenance.data_digests([facts], published)
    path.write_text(json.dumps(record))
    assert check.find(one) == path
    PUBLISHED[edit](published)
    assert check_of(published, "quality", "tinyworld").find(one) is None


@pytest.mark.parametrize("check", ["fidelity", "acceptance", "engine"])
def test_a_file_of_settings_that_is_added_makes_the_checks_measure_anew(root: Path, check: str) -> None:
    """The record names the files that were there, and these are as they were."""
    (root / OWN / "gate.yaml").unlink()
    read = read_check(check, root)
    assert read() == ""
    (root / OWN / "gate.yaml").write_text(
        {"fidelity": "fidelity: {batch: 4}\n"}.get(check, f"{check}: {{seed: 3}}\n")
    )
    assert read() == ANEW


@pytest.mark.parametrize("check", ["fidelity", "acceptance", "engine"])
def test_settings_of_another_check_leave_a_record_as_it_is(root: Path, check: str) -> None:
    gate_file = root / OWN / "gate.yaml"
    read = read_check(check, root)
    own = next(line for line in FILES["gate.yaml"].splitlines(keepends=True) if line.startswith(check))
    gate_file.write_text(f"# a comment\n{own}responses: {{runaway_share: 0.02}}\n")
    assert read() == ""
    replace("eval/own.yaml", ("max_gen_toks: 256", "max_gen_toks: 9"))(root, None)
    assert read() == ""
    gate_file.write_text("responses: {runaway_share: 0.02}\n")
    assert read() == ANEW
    gate_file.unlink()
    read = read_check(check, root)
    gate_file.write_text("responses: {runaway_share: 0.02}\n")
    assert read() == "", "a file that is added, without the section"


@pytest.mark.parametrize("check", ["fidelity", "acceptance", "engine"])
def test_a_record_that_digested_the_whole_file_is_taken_until_that_is_edited(root: Path, check: str) -> None:
    read = read_check(check, root)
    (path,) = store.records(small(root).folder, registry.kinds()[check])
    record = json.loads(path.read_text())
    digests = record["provenance"]["datasets"]
    for name in [name for name in digests if "#" in name]:
        file = root / name.partition("#")[0]
        digests |= provenance.data_digests([file], root)
        del digests[name]
    path.write_text(json.dumps(record))
    assert read() == ""
    append(root / OWN / "gate.yaml")
    assert read() == ANEW


def test_settings_of_every_kind_name_the_files_that_they_come_from(root: Path) -> None:
    """A section's own class reads what the whole file says; a file that is added is an input from then on."""
    (root / OWN / "gate.yaml").unlink()
    for settings in (fidelity.FidelitySettings, acceptance.AcceptanceSettings, Suite, Workload):
        kind: type[Settings] = settings
        assert root / "eval/own.yaml" in kind.load("mine", root).files(root)
    (root / OWN / "gate.yaml").write_text("fidelity: {batch: 2}\n")
    part = YamlPart(root / OWN / "gate.yaml", ("fidelity",))
    assert part in fidelity.FidelitySettings.load("mine", root).inputs(root)
    assert Latency.deciding_flags is None
