"""Runs commands inside a sandbox, for `machine.Machine`: its program text is the argument of `python -c`.

Reads JSON lines from standard input and answers each with one: {"run", "timeout_s", "cwd", "most"} -> {"stdout",
"code", "why"}, {"put": {path: base64}} -> {}, {"get": path, "most"} -> {"content": base64}; or {"error", "number",
"file"}.
"""

import base64
import errno
import json
import os
import signal
import subprocess


def main():
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):  # commands must not read requests, or write answers
        os.dup2(nothing, number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for line in requests:
        asked = json.loads(line)
        try:
            kind = next(iter(asked))
            answer = run(**asked) if kind == "run" else put(**asked) if kind == "put" else get(**asked)
        except OSError as error:
            answer = {"error": error.strerror, "number": error.errno, "file": str(error.filename)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def run(run, timeout_s, cwd, most):
    """Runs a command in bash; what it leaves in the background goes on. Output is a file without a name, which such
    processes may go on writing to; the answer has its beginning and its end, half of `most` bytes each."""
    output = os.open("/tmp", os.O_TMPFILE | os.O_RDWR | os.O_APPEND)
    try:
        process = subprocess.Popen(
            ["bash", "-c", run], cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        why = ""
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            why = "wall"
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        size, half = os.fstat(output).st_size, most // 2
        text = os.pread(output, half if size > most else most, 0)
        if size > most:
            text += f"\n... {size - 2 * half} bytes left out ...\n".encode() + os.pread(output, half, size - half)
        return {"stdout": text.decode(errors="replace"), "code": code, "why": why}
    finally:
        os.close(output)


def put(put):
    for path, content in put.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    return {}


def get(get, most):
    with open(get, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        return {"error": f"must have at most {most} bytes", "number": errno.EFBIG, "file": get}
    return {"content": base64.b64encode(content).decode()}


main()
