"""The program at the other end of a session: it runs commands one after the other, as it is told on a channel.

It is text, run with `python -c` inside the sandbox, and so uses the standard library alone. One JSON object a line
each way:

    {"argv", "cwd", "stdin", "wall_s", "output_bytes"}      ->  {"outcome", "code", "out", "err", "wall_s"}
    {"files": {path: text}}                                 ->  the same; code 0 if all were written

After each command everything that it left running is killed. Arguments: the numbers of the descriptors that it reads
from and writes to, and `alone` where no process of another's can be seen, so that all others may be killed.
"""

from __future__ import annotations

COMMAND_SERVER = r'''
import json, os, selectors, signal, subprocess, sys, time
try:
    import ctypes
    prctl = ctypes.CDLL(None).prctl
    prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the commands, of the same user, may not open its files
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what they leave behind is this process's to reap
except (ImportError, OSError, AttributeError):
    pass
reader, writer = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb")
alone = sys.argv[3] == "alone"


def reap():
    """Take leave of what has ended. Called while no command runs: a command's code is its own to read."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def end(child):
    """Kill the command and whatever it has started, and wait until they are gone: a kill is not the end yet."""
    whom = -1 if alone else -child.pid  # all but this process and the first one, or its group
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    child.wait()
    for _ in range(1000):
        reap()
        try:
            os.kill(whom, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.002)


def run(job):
    begun = time.monotonic()
    try:
        child = subprocess.Popen(job["argv"], cwd=job["cwd"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, start_new_session=True)
    except (OSError, ValueError) as error:
        return {"outcome": "exited", "code": 127, "out": "", "err": str(error)}
    left = memoryview(job["stdin"].encode(errors="surrogatepass"))
    kept = {child.stdout: bytearray(), child.stderr: bytearray()}
    room, outcome = job["output_bytes"], "exited"
    with selectors.DefaultSelector() as selector:
        for stream in kept:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        os.set_blocking(child.stdin.fileno(), False)
        if left:
            selector.register(child.stdin, selectors.EVENT_WRITE)
        else:
            child.stdin.close()
        ended = False
        while selector.get_map():
            if not ended and child.poll() is not None:
                ended = True
                end(child)  # what it left behind may hold the pipes open
            wait = begun + job["wall_s"] - time.monotonic()
            if wait <= 0 and not ended:
                outcome, ended = "timeout", True
                end(child)
            late = ended and wait < 0  # all that it wrote is in the pipes, which what has left its group may hold
            for key, _ in selector.select(0 if late else 0.5 if ended else min(max(wait, 0), 0.05)):
                if key.fileobj is child.stdin:
                    try:
                        left = left[os.write(key.fd, left[:65536]):]
                    except BlockingIOError:
                        continue
                    except OSError:
                        left = b""
                    if not left:
                        selector.unregister(child.stdin)
                        child.stdin.close()
                    continue
                chunk = os.read(key.fd, 1 << 20)  # all that a pipe can hold
                if not chunk:
                    selector.unregister(key.fileobj)
                    continue
                kept[key.fileobj] += chunk[:room]
                if len(chunk) > room and outcome == "exited":  # also of a command that has ended before it was read
                    outcome = "output_limit"
                    if not ended:
                        ended = True
                        end(child)
                room -= min(room, len(chunk))
            if late:
                break
    if not ended:
        try:  # it has closed its outputs and goes on
            child.wait(max(0.0, begun + job["wall_s"] - time.monotonic()))
        except subprocess.TimeoutExpired:
            outcome = "timeout"
        end(child)
    for stream in kept:
        stream.close()
    code = child.returncode
    out, err = (bytes(text).decode(errors="replace") for text in kept.values())
    return {"outcome": outcome, "code": 128 - code if code < 0 else code, "out": out, "err": err}


def write(files):
    try:
        for path, text in files.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(text.encode(errors="surrogatepass"))
    except OSError as error:
        return {"outcome": "exited", "code": 1, "out": "", "err": str(error)}
    return {"outcome": "exited", "code": 0, "out": "", "err": ""}


for line in reader:
    begun = time.monotonic()
    job = json.loads(line)
    answer = write(job["files"]) if "files" in job else run(job)
    answer["wall_s"] = time.monotonic() - begun
    writer.write(json.dumps(answer).encode() + b"\n")
    writer.flush()
'''
