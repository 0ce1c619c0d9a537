"""Work in other processes.

A `worker` runs one function; a `warm_worker` forks itself for each, and the `spawner` for each server. A `task` is a
function with its resources; executors run tasks, `local` on this machine and `ray` on the nodes of a Ray cluster.
"""

from slimqwen.processes.local import LocalExecutor as LocalExecutor
from slimqwen.processes.task import ENGINE_BYTES as ENGINE_BYTES
from slimqwen.processes.task import Executor as Executor
from slimqwen.processes.task import ExecutorError as ExecutorError
from slimqwen.processes.task import Failure as Failure
from slimqwen.processes.task import Outcome as Outcome
from slimqwen.processes.task import Resources as Resources
from slimqwen.processes.task import Result as Result
from slimqwen.processes.task import Task as Task
from slimqwen.processes.task import run_tasks as run_tasks
