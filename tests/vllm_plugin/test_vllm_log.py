import logging

from slimqwen.vllm_plugin import vllm_log


def test_lines_go_where_vllms_go_unless_the_process_has_its_own_logging(monkeypatch):
    theirs = logging.NullHandler()
    ours = logging.getLogger("slimqwen")
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [theirs])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "level", ours.level)  # put back at the end
    vllm_log.join()
    assert ours.handlers == []  # pytest has its own
    monkeypatch.setattr(ours, "propagate", False)
    vllm_log.join()
    assert ours.handlers == [theirs]
