"""Show what runs in this repository: recipes, evaluations and servers, until q or Ctrl-C."""

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator

from _console import console, run
from rich.console import Group
from rich.live import Live
from rich.text import Text

from slimqwen import variant, watch


def main() -> int:
    """Look and show, again and again on a terminal, else once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="show it once, as where output is no terminal")
    arguments = parser.parse_args()
    watching = watch.Watch(variant.repository_root())
    seen = watching.look()
    if arguments.once or not sys.stdout.isatty() or console.is_dumb_terminal:
        if seen.servers:  # rates take two looks
            time.sleep(1)
            seen = watching.look()
        console.print(watch.picture(seen, console.width))
        return 0
    told, tell = os.pipe()
    signals: list[int] = []

    def note(number: int, _: object) -> None:
        # An exception out of a handler can be lost wherever it strikes; this is read where it is waited for.
        signals.append(number)
        os.write(tell, b"\0")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    with single_keys(), Live(console=console, screen=True, auto_refresh=False) as shown:
        while True:
            head = Text(f"{time.strftime('%H:%M:%S')}, q ends\n", "dim")
            shown.update(Group(head, watch.picture(seen, console.width)), refresh=True)
            if ends(watch.INTERVAL_S, told):
                break
            seen = watching.look()
    return 143 if signal.SIGTERM in signals else 0


@contextlib.contextmanager
def single_keys() -> Iterator[None]:
    """Take each key as it comes, Ctrl-C too: as a signal it would end `make` with an error."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        changed = termios.tcgetattr(sys.stdin)
        changed[6][termios.VINTR] = b"\0"
        termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def ends(seconds: float, told: int) -> bool:
    """Whether a key that ends it is pressed within so many seconds, or a signal comes.

    Args:
        seconds: to wait.
        told: a file descriptor that a signal's handler writes to.
    """
    until = time.monotonic() + seconds
    heard = [told, *([sys.stdin.fileno()] if sys.stdin.isatty() else [])]
    while (left := until - time.monotonic()) > 0:
        ready = select.select(heard, [], [], left)[0]
        if told in ready:
            return True
        if ready:
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed or any(key in typed for key in b"qQ\x03"):
                return True
    return False


if __name__ == "__main__":
    run(main)
