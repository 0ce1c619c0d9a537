"""Start the server of an image inside its container, ask it a question, end it, and print the results as a JSON line.

The image's Python runs this text, so it uses only the standard library, and no network but the loopback.
Arguments: the port, then the words that start the server.
"""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

QUESTION = {
    "messages": [{"role": "user", "content": "Hello! Who are you?"}],
    "max_tokens": 32,
    "temperature": 0,
}
READY_S, END_S = 1800, 300


def ask_server(url: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Send a request, and return status and content of the response; status 0 if there is no response.

    Args:
        url: URL of the endpoint.
        body: content of a POST request as JSON; None for a GET request.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=300
        ) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, b""
    except OSError:
        return 0, b""


def main() -> None:
    """Start, ask and end the server; print a JSON line with the responses of /ping, the message and the exit code."""
    url, words = f"http://127.0.0.1:{sys.argv[1]}", sys.argv[2:]
    answers: list[int] = []
    seen: dict[str, Any] = {"answers_of_ping": answers, "message": {}, "exit_code": None}
    started = time.monotonic()
    server = subprocess.Popen(words, stdout=sys.stderr)
    while 200 not in answers and server.poll() is None and time.monotonic() - started < READY_S:
        status, _ = ask_server(f"{url}/ping")
        if status not in answers:
            answers.append(status)
        time.sleep(0.2)
    if 200 in answers:
        status, content = ask_server(f"{url}/v1/chat/completions", QUESTION)
        if status == 200:
            seen["message"] = json.loads(content)["choices"][0]["message"]
    server.send_signal(signal.SIGTERM)
    try:
        seen["exit_code"] = server.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
