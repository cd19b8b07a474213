"""The program at the other end of a session: it runs commands one after the other, as it is told on a channel.

It is text, run with `python -c` inside the sandbox, and so uses the standard library of Python 3.6 alone. One JSON
object a line each way:

    {"argv", "cwd", "stdin", "wall_s", "output_bytes"}      ->  {"outcome", "code", "out", "err", "wall_s"}
    {"files": {path: text}}                                 ->  the same; code 0 if all were written

An empty line, or a further one before the answer, gives a command up: it is killed, and answered for all the same.
After each command everything that it left running is killed. Arguments: the numbers of the descriptors that it reads
from and writes to, and `alone` where no process of another's can be seen, so that all others may be killed.
"""

from __future__ import annotations

COMMAND_SERVER = r'''
import json, os, selectors, signal, subprocess, sys, time
try:
    import ctypes
    prctl = ctypes.CDLL(None).prctl
    closed = prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE: the commands, of the same user, may not open its files
except (ImportError, OSError, AttributeError):
    closed = False
if not closed:
    sys.exit("this python3 cannot keep its files from its commands (ctypes, prctl): no session")
prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what they leave behind is this process's to reap
signal.signal(signal.SIGINT, lambda *_: None)  # of a command; unlike SIG_IGN it is not inherited
channel, writer = int(sys.argv[1]), os.fdopen(int(sys.argv[2]), "wb")
told = bytearray()  # what has come on the channel beyond the line that was taken last
alone = sys.argv[3] == "alone"


def line():
    """The next one that is not empty; None at the end."""
    seen = 0
    while True:
        end = told.find(b"\n", seen)
        if end >= 0:
            taken = bytes(told[:end])
            del told[:end + 1]
            if taken:
                return taken
        else:
            seen = len(told)
            part = os.read(channel, 1 << 20)
            if not part:
                return None
            told.extend(part)


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
    unread, until = set(kept), begun + job["wall_s"]
    room, outcome, given_up, pause = job["output_bytes"], "exited", bool(told), 0.0005

    def feed():
        nonlocal left
        try:
            left = left[os.write(child.stdin.fileno(), left[:65536]):]
        except BlockingIOError:
            return
        except OSError:
            left = b""
        if not left:
            selector.unregister(child.stdin)
            child.stdin.close()

    def take(stream, size=65536):
        nonlocal room, outcome
        try:
            chunk = os.read(stream.fileno(), size)
        except BlockingIOError:
            return  # the command itself was quicker: it may open its outputs to read
        if not chunk:
            selector.unregister(stream)
            unread.remove(stream)
        kept[stream] += chunk[:room]
        if len(chunk) > room and outcome == "exited":  # also of a command that has ended before it was read
            outcome = "output_limit"
        room -= min(room, len(chunk))

    def serve(seconds):
        nonlocal given_up
        for key, _ in selector.select(seconds):
            if key.fileobj == channel:
                given_up = True
                selector.unregister(channel)
            elif key.fileobj is child.stdin:
                feed()
            else:
                take(key.fileobj)

    with selectors.DefaultSelector() as selector:
        for stream in (child.stdin, *kept):
            os.set_blocking(stream.fileno(), False)
        for stream in kept:
            selector.register(stream, selectors.EVENT_READ)
        selector.register(channel, selectors.EVENT_READ)
        if left:
            selector.register(child.stdin, selectors.EVENT_WRITE)
        else:
            child.stdin.close()
        while child.poll() is None and outcome == "exited" and not given_up:
            wait = until - time.monotonic()
            if wait <= 0:
                outcome = "timeout"
            elif unread:
                serve(min(wait, 0.05))
            else:  # it has closed its outputs and goes on
                serve(min(wait, pause))
                pause = min(2 * pause, 0.05)
        end(child)  # what it left behind may hold the pipes open
        if not child.stdin.closed:
            selector.unregister(child.stdin)
            child.stdin.close()
        # What has left its group may hold them still, and write; it has the command's time and no more.
        while unread and not given_up and time.monotonic() < until:
            serve(until - time.monotonic())
        for stream in [*unread]:
            take(stream, 1 << 20)  # all that a pipe holds
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
    except (OSError, ValueError) as error:
        return {"outcome": "exited", "code": 1, "out": "", "err": str(error)}
    return {"outcome": "exited", "code": 0, "out": "", "err": ""}


for job in iter(line, None):
    begun = time.monotonic()
    job = json.loads(job)
    answer = write(job["files"]) if "files" in job else run(job)
    answer["wall_s"] = time.monotonic() - begun
    writer.write(json.dumps(answer).encode() + b"\n")
    writer.flush()
'''
