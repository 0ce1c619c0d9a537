"""Executors, which run tasks: `local` on this machine, `ray` on the nodes of a Ray cluster."""

from slimqwen.search.executors.local import LocalExecutor as LocalExecutor
from slimqwen.search.executors.task import ENGINE_BYTES as ENGINE_BYTES
from slimqwen.search.executors.task import Executor as Executor
from slimqwen.search.executors.task import Failure as Failure
from slimqwen.search.executors.task import Outcome as Outcome
from slimqwen.search.executors.task import Resources as Resources
from slimqwen.search.executors.task import Result as Result
from slimqwen.search.executors.task import Task as Task
from slimqwen.search.executors.task import run_tasks as run_tasks
