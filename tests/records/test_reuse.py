"""Whether a record still holds."""

from slimqwen import variant
from slimqwen.records import provenance, reuse
from slimqwen.records.record import ServedProvenance
from slimqwen.serving.command import ServerCommand


def test_a_record_holds_until_something_that_decides_its_figures_changes():
    tiny = variant.load("tiny")
    command = ServerCommand.resolve(tiny, port=1)
    data = tiny.root / "eval/workloads/classes.yaml"
    block = provenance.describe(command, ["slimqwen"], provenance.utc_now(), datasets=[data]).as_json()

    def changed_inputs(command, changed, **options):
        return reuse.changed_inputs(ServedProvenance.model_validate(block | changed), command, **options)

    def still_holds(command, **changed):
        return not changed_inputs(command, changed)

    assert still_holds(command)
    assert still_holds(ServerCommand.resolve(tiny, port=2))
    with_parser = {"VLLM_ENABLE_AUTO_TOOL_CHOICE": "1", "VLLM_TOOL_CALL_PARSER": "hermes"}
    assert still_holds(ServerCommand.resolve(tiny.with_lines(with_parser), port=1))
    assert not still_holds(ServerCommand.resolve(variant.load("tiny-mtp4"), port=1))
    for changed in (
        {"checkpoint": block["checkpoint"] | {"digest": "0" * 64}},
        {"packages": block["packages"] | {"vllm": "0"}},
        {"hardware": block["hardware"] | {"cpu_count": 99}},
        {"environment": block["environment"] | {"OMP_NUM_THREADS": "99"}},
        {"datasets": {"eval/workloads/classes.yaml": "0" * 64}},
        {"datasets": {"eval/workloads/gone.yaml": "0" * 64}},
        {"files": {"chat-template": "0" * 64}},
    ):
        assert not still_holds(command, **changed), changed
        is_of_machine = changed.keys() <= {"hardware", "environment"}
        assert (not changed_inputs(command, changed, on_any_machine=True)) is is_of_machine, changed
    flags, environment = (
        block["flags"] | {"max-num-seqs": 99},
        block["environment"] | {"OMP_NUM_THREADS": "99"},
    )
    for dtype, holds in ((block["flags"]["dtype"], True), ("float16", False)):
        changed = ServedProvenance.model_validate(
            block | {"flags": flags | {"dtype": dtype}, "environment": environment}
        )
        assert (not reuse.changed_inputs(changed, command, ("dtype", "quantization"))) is holds
