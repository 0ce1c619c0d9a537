"""What a look sees of real processes, and its picture; the servers are stand-ins that give a real server's text."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from slimqwen import running, variant, watch
from slimqwen.running import Activity, Work
from slimqwen.serving import launch
from slimqwen.serving.live import Figures, Server
from slimqwen.watch import Seen, ServerSeen, State, Watch, WorkSeen
from tests.recipe.workshop import Workshop

NOW = 1_000_000.0
NONE = Figures(*[None] * 11)
BUSY = Figures(
    running=8,
    waiting=3,
    kv_cache=0.42,
    prompt_tokens_per_s=1234.4,
    generation_tokens_per_s=56.0,
    acceptance_length=2.91,
    acceptance_rate=0.477,
    ttft_s=0.0521,
    itl_s=0.0053,
    prefix_hits=0.031,
    preemptions=2,
)

STAND_IN = """
import http.server, pathlib, socket, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        while pathlib.Path("deaf").exists():
            time.sleep(0.05)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(pathlib.Path("metrics.txt").read_bytes())

    def log_message(self, *_):
        pass

while not pathlib.Path("ready").exists():
    time.sleep(0.02)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def serve(tmp_path):
    """Start what looks like a server of the repository tmp_path; it listens once there is a file `ready`."""
    package = tmp_path / "vllm/entrypoints/launchers/api_server"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:3]):
        (folder / "__init__.py").touch()
    (package / "entry.py").write_text(STAND_IN)
    shutil.copy(Path(__file__).parent / "serving/data/metrics.txt", tmp_path)
    started = []

    def run(name, port=None):
        words = ["--model", str(tmp_path / "weights/tiny"), "--port", str(port or launch.free_port())]
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", *words],
            cwd=tmp_path,
            env=os.environ | {launch.VARIANT_VARIABLE: name},
        )
        started.append(process)
        return process

    yield run
    (tmp_path / "deaf").unlink(missing_ok=True)
    for process in started:
        process.kill()
        process.wait()


def look_until(watching: Watch, *states: State) -> Seen:
    """Look until the servers are in these states, by port."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        seen = watching.look()
        if tuple(one.state for one in seen.servers) == states:
            return seen
        time.sleep(0.05)
    raise AssertionError(seen)


def text(seen: Seen, width: int) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(watch.picture(seen, width))
    return captured.get()


def test_a_server_is_seen_from_its_start_to_its_end(serve, tmp_path):
    watching = Watch(tmp_path)
    process = serve("tiny-mtp4")
    starting = look_until(watching, State.STARTING).servers[0]
    assert (starting.server.variant, starting.figures) == ("tiny-mtp4", None)

    (tmp_path / "ready").touch()
    serving = look_until(watching, State.SERVING).servers[0]
    assert serving.figures.acceptance_length == pytest.approx(1 + 317 / 95)
    assert watching.look().servers[0].figures.generation_tokens_per_s == 0

    (tmp_path / "deaf").touch()
    assert look_until(watching, State.SILENT).servers[0].figures is not None
    (tmp_path / "deaf").unlink()
    look_until(watching, State.SERVING)

    process.kill()
    ended = look_until(watching, State.ENDED).servers[0]
    assert (ended.server, ended.figures) == (starting.server, None)
    assert watching.look().servers[0].ended == ended.ended


def test_one_server_s_death_leaves_the_others_watched(serve, tmp_path):
    (tmp_path / "ready").touch()
    watching = Watch(tmp_path)
    first, _ = serve("a"), serve("b")
    look_until(watching, State.SERVING, State.SERVING)
    first.kill()

    servers = {
        one.server.variant: one.state for one in look_until(watching, State.SERVING, State.ENDED).servers
    }
    assert servers == {"a": State.ENDED, "b": State.SERVING}


def test_a_server_that_follows_another_on_its_port_takes_its_place(serve, tmp_path):
    (tmp_path / "ready").touch()
    watching = Watch(tmp_path)
    port = launch.free_port()
    first = serve("a", port)
    look_until(watching, State.SERVING)
    first.kill()
    look_until(watching, State.ENDED)
    serve("a", port)
    look_until(watching, State.SERVING)


def test_of_many_servers_that_ended_the_latest_are_kept(serve, tmp_path):
    watching = Watch(tmp_path)
    for number in range(5):
        process = serve(f"v{number}")
        deadline = time.monotonic() + 20
        while f"v{number}" not in [one.server.variant for one in watching.look().servers]:
            assert time.monotonic() < deadline
        process.kill()
        process.wait()

    assert [one.server.variant for one in watching.look().servers] == ["v4", "v3", "v2"]


def test_a_server_that_never_answered_in_time_is_not_called_starting(serve, tmp_path):
    (tmp_path / "ready").touch()
    (tmp_path / "deaf").touch()
    serve("a")
    look_until(Watch(tmp_path), State.SILENT)


RECIPE_RUN = """
import sys
from pathlib import Path
from slimqwen import running
from slimqwen.recipe import recipe_file, runner
from tests.recipe.fake_stages import STAGES

root = Path(sys.argv[1])
with running.publishing(root, ["scripts/run_recipe.py", "run", "--variant", "v"]) as tell:
    read = recipe_file.read(root / "v.yaml", STAGES)
    runner.run(read, "v", root / "weights", lambda name: root / "weights" / name, report=tell)
"""


def test_the_stage_of_a_running_recipe_is_seen(tmp_path):
    shop = Workshop(tmp_path)
    shop.recipe(shop.add(1, seconds=30))
    process = subprocess.Popen(
        [sys.executable, "-c", RECIPE_RUN, str(tmp_path)], cwd=variant.repository_root()
    )
    try:
        watching, deadline = Watch(tmp_path), time.monotonic() + 60
        while not (seen := watching.look()).work or not seen.work[0].stages:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()

    assert seen.work[0].stages == (("add", State.RUNNING),)
    assert seen.work[0].work.variants == ["v"]


@pytest.fixture
def recipe_run(tmp_path, add_variant):
    """This process as one that runs the recipe of tiny-best: `enter(stage)` holds its log open as the runner does."""
    config = add_variant("v", "VLLM_MODEL=weights/v\n")
    shutil.copy(variant.load("tiny-best").recipe, config.parent)
    logs = tmp_path / "weights/store/.logs"
    logs.mkdir(parents=True)

    @contextlib.contextmanager
    def enter(stage):
        with (logs / f"{stage}-{'0' * 16}.log").open("wb"):
            yield

    with running.publishing(tmp_path, ["scripts/run_recipe.py", "run", "--variant", "v"]):
        deadline = time.monotonic() + 10
        while not running.find(tmp_path):
            assert time.monotonic() < deadline
        yield enter


def test_stages_before_the_running_one_are_done_and_those_after_it_wait(recipe_run, tmp_path):
    watching = Watch(tmp_path)
    assert watching.look().work[0].stages == ()
    with recipe_run("prune_vocab"):
        assert watching.look().work[0].stages == (
            ("calibrate", State.DONE),
            ("prune_vocab", State.RUNNING),
            ("sample_outputs", State.WAITING),
            ("redistill_mtp", State.WAITING),
            ("bake_cache", State.WAITING),
        )


def test_between_two_stages_the_one_that_was_seen_running_is_done(recipe_run, tmp_path):
    watching = Watch(tmp_path)
    with recipe_run("calibrate"):
        watching.look()
    assert [state for _, state in watching.look().work[0].stages] == [State.DONE, *[State.WAITING] * 4]


def test_a_stage_that_the_variant_s_recipe_does_not_name_is_seen_alone(recipe_run, tmp_path):
    with recipe_run("quantise_lm_head"):
        assert Watch(tmp_path).look().work[0].stages == (("quantise_lm_head", State.RUNNING),)


def server(name: str, port: int, state: State, figures: Figures | None = NONE) -> ServerSeen:
    one = Server(pid=port, started=NOW - 250, variant=name, model="/w/weights/tiny", port=port)
    return ServerSeen(one, state, NOW if state is State.ENDED else None, figures)


def work(command: str, *activities: Activity) -> Work:
    return Work(
        pid=4711,
        process_started=0,
        command=command.split(),
        variants=[],
        began=NOW - 3700,
        activities=list(activities),
    )


def activity(name: str, done: float, total: float) -> Activity:
    return Activity(name=name, done=done, total=total, done_before=0, began=NOW - 60, told=NOW)


RECIPE = WorkSeen(
    work("scripts/run_recipe.py run --variant tiny-best", activity("counting tokens", 12_000, 60_000)),
    (("calibrate", State.DONE), ("prune_vocab", State.RUNNING), ("bake_cache", State.WAITING)),
)
EVALUATION = WorkSeen(
    work("scripts/eval_quality.py --variant tiny", activity("loading lm-eval", 0, 0)),
    (),
)
ALL = Seen(
    NOW,
    (RECIPE, EVALUATION),
    (
        server("tiny-mtp4", 8080, State.SERVING, BUSY),
        server("tiny-seq8", 8081, State.STARTING, None),
        server("cyankiwi-seq8-shortcot-w4lm-v64k-mtp4", 8082, State.ENDED, None),
    ),
)


@pytest.mark.parametrize("width", [80, 120])
def test_the_picture_has_all_that_was_seen_and_fits(width):
    shown = text(ALL, width)

    assert max(len(line) for line in shown.splitlines()) <= width
    for told in (
        "run_recipe run --variant tiny-best",
        "pid 4711, 1:01:40",
        "eval_quality --variant tiny",
        "tiny-mtp4",
        "8082",
        "1,234",
        "56",
        "8, 3",
        "42%",
        "2.91, 48%",
        "52.1",
        "5.3",
        "3.1%",
        "serving",
        "starting",
        "ended",
        "for 4:10",
    ):
        assert told in shown, told


@pytest.mark.parametrize("width", [80, 120])
def test_a_recipe_shows_its_stages_and_under_the_running_one_what_it_is_at(width):
    lines = [" ".join(line.split()) for line in text(Seen(NOW, (RECIPE,), ()), width).splitlines()]

    assert lines[1:3] == ["done calibrate", "running prune_vocab"]
    assert lines[3].startswith("counting tokens ━")
    assert lines[3].endswith("12,000 of 60,000 4:00 left")
    assert lines[4] == "waiting bake_cache"


def test_an_activity_without_a_known_end_shows_how_long_it_has_lasted():
    assert "loading lm-eval" in text(Seen(NOW, (EVALUATION,), ()), 80)
    assert "for 1:00" in text(Seen(NOW, (EVALUATION,), ()), 80)


def test_a_long_name_is_folded_and_not_cut():
    lines = text(Seen(NOW, (), ALL.servers), 80).splitlines()
    assert "".join(line[59:75].strip() for line in lines[:3]) == "cyankiwi-seq8-shortcot-w4lm-v64k-mtp4"


@pytest.mark.parametrize(("width", "blocks"), [(80, 3), (120, 2)])
def test_more_servers_than_fit_beside_each_other_stand_below(width, blocks):
    servers = tuple(server(f"v{number}", 8000 + number, State.SERVING) for number in range(7))
    shown = text(Seen(NOW, (), servers), width)

    assert sum(line.startswith("server ") for line in shown.splitlines()) == blocks
    assert all(f"v{number}" in shown and str(8000 + number) in shown for number in range(7))


def test_where_nothing_runs_it_says_so_and_what_to_start():
    shown = text(Seen(NOW, (), ()), 80)
    assert "Nothing runs here" in shown
    assert "make serve VARIANT=tiny" in shown


def test_names_are_shown_as_they_are_and_never_taken_for_markup():
    one = WorkSeen(work("x.py [red]", activity("reading [bold]a[/bold]", 1, 2)), ())
    assert "x [red]" in text(Seen(NOW, (one,), ()), 80)
    assert "reading [bold]a[/bold]" in text(Seen(NOW, (one,), ()), 80)


@pytest.mark.parametrize("width", [1, 20, 40])
def test_a_terminal_too_narrow_is_no_error(width):
    assert text(ALL, width)
