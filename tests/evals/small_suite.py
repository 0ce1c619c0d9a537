"""A suite of three small tasks, what lm-eval returned for it, and its scores by a running server."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimqwen.evals import quality
from slimqwen.evals.suites import lm_eval_run
from slimqwen.evals.suites.generation import Generation
from slimqwen.evals.suites.scored import TaskRun
from slimqwen.evals.suites.suite import ANSWER_MARGIN, BITS_PER_BYTE, Suite, SuiteTask


def score(suite, server, **how):
    """The scores of a running server by task, and their items; no record."""
    runs, files = lm_eval_run.run_suite(
        suite, server, log=server.variant.root / "logs" / "quality.log", **how
    )
    items = [item for run in runs for item in run.items]
    return SimpleNamespace(
        tasks={run.task.name: quality.score_task(run) for run in runs}, items=items, datasets=files
    )


GENERATE = """\
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""
CHOOSE = """\
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{options}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}]
"""
READ = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
SMALL = Suite(
    name="small",
    tasks_folder=Path("eval/tasks"),
    chat_template=False,
    text_prefix="<end>",
    sample="first",
    tasks=(
        SuiteTask(task="small_facts", measure="exact_match", non_inferiority_margin=0.05),
        SuiteTask(task="small_margin", measure=ANSWER_MARGIN, non_inferiority_margin=0.1),
        SuiteTask(task="small_prose", measure=BITS_PER_BYTE, non_inferiority_margin=0.01),
    ),
)


def facts_alone(suite, **changes):
    """The suite with its first task alone, some of whose fields are changed."""
    return suite.model_copy(update={"tasks": (suite.tasks[0].model_copy(update=changes),)})


@pytest.fixture
def recorded():
    """What lm-eval returned for three items of three tasks on an untrained model; facts 1 then made right."""
    results = json.loads(Path(__file__).with_name("lm_eval_results.json").read_text())
    for sample in results["samples"]["small_facts"]:
        sample["resps"] = [[Generation(**sample["resps"][0][0], tokens=4)]]
    results["samples"]["small_facts"][1].update(exact_match=1.0, resps=[[Generation("glass", "stop", 1)]])
    results["samples"]["small_facts"][2].update(resps=[[Generation(" ", "length", 4)]])
    return results


@pytest.fixture
def parse(recorded):
    """Row and items of one of those tasks, some of its fields changed."""

    def one(name, repeats=1, **changes):
        task = next(task for task in SMALL.tasks if task.name == name)
        task = task.model_copy(update={"repeats": repeats, **changes})
        results = {name: recorded["samples"][name]}
        available = recorded["n-samples"][name]["original"]
        items = lm_eval_run.parse_samples(task, {name: available}, [results] * repeats)
        return quality.score_task(TaskRun(task, items, available, SMALL.settings_of(task))), items

    return one


@pytest.fixture
def small_suite(write_task):
    prompts = [f"Q : what sells town {n} ? A :" for n in range(6)]
    write_task("small_facts", [{"prompt": p, "answer": "salt"} for p in prompts], GENERATE)
    options = ["salt", "wool", "iron"]
    write_task("small_margin", [{"prompt": p, "options": options, "right": 1} for p in prompts], CHOOSE)
    write_task("small_prose", [{"text": " ".join([*["town"] * n, "salt"])} for n in range(1, 7)], READ)
    return SMALL
