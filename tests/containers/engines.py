"""Docker and Podman for the tests of containers: a daemon and image stores of their own, in a temporary folder.

A Docker daemon that already answers is used as it is; the image is taken out of it afterwards.
"""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemotron_steps.sandbox.containers import podman_ulimits
from tests.containers import image

ENGINES = ("docker", "podman")
_DAEMON_SECONDS = 60
_ROOM_BYTES = 2 << 30
_STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{folder}/podman/store"
runroot = "{folder}/podman/run"
"""
_PODMAN = '[engine]\nruntime = "{runtime}"\n'


class NoEngineError(Exception):
    """An engine is installed and cannot run a container here."""


@dataclass(frozen=True)
class Engines:
    """Engines that run containers.

    Attributes:
        image: its name, in both.
        environment: variables with which `docker` and `podman` find their stores.
    """

    image: str
    environment: Mapping[str, str]

    def call(self, *command: str, check: bool = True) -> str:
        """What an engine's command prints."""
        done = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True)
        if check and done.returncode != 0:
            raise NoEngineError(f"{' '.join(command[:4])}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def names(self, engine: str, *, running: bool = False) -> list[str]:
        """All its containers of the image; the engine may have others, of somebody else's."""
        some = ["--filter", f"ancestor={self.image}", *([] if running else ["--all"])]
        return self.call(engine, "ps", *some, "--format", "{{.Names}}").split()


@contextmanager
def started(files: Mapping[str, str]) -> Iterator[Engines]:
    """Both engines, with an image that has a repository of these files.

    Raises:
        NoEngineError: one does not run a container.
    """
    with ExitStack() as stack:
        # Not pytest's folder: a socket's path may have a hundred characters.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engines-", dir=_place())))
        stack.callback(_unmount, folder)
        tar = folder / "image.tar"
        (folder / "repository").mkdir()
        image.make(tar, image.commit(folder / "repository", files))
        (folder / "storage.conf").write_text(_STORAGE.format(folder=folder))
        environment = {
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
        }
        if subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
            environment["DOCKER_HOST"] = stack.enter_context(_daemon(folder))
        engines = Engines(f"localhost/steps-test-{secrets.token_hex(4)}:1", environment)
        changes = [word for change in image.CHANGES for word in ("--change", change)]
        stack.callback(engines.call, "docker", "rmi", "--force", engines.image, check=False)
        engines.call("docker", "import", *changes, str(tar), engines.image)
        _configure_podman(engines, folder, [*changes, str(tar)])
        for engine in ENGINES:
            ulimits = podman_ulimits() if engine == "podman" else []
            engines.call(engine, "run", "--rm", "--network", "none", *ulimits, engines.image, "true")
        tar.unlink()
        yield engines


def _place() -> str | None:
    """Memory where there is enough of it: to unpack and remove thousands of files takes a disk seconds."""
    shared = "/dev/shm"
    free = shutil.disk_usage(shared).free if os.access(shared, os.W_OK) else 0
    return shared if free > _ROOM_BYTES else None


def _configure_podman(engines: Engines, folder: Path, imported: list[str]) -> None:
    """Podman with the first runtime that runs here: crun refuses cgroups of both versions at once."""
    runtimes = [name for name in ("crun", "runc") if shutil.which(name)]
    for runtime in runtimes:
        (folder / "containers.conf").write_text(_PODMAN.format(runtime=runtime))
        if runtime == runtimes[0]:
            engines.call("podman", "import", "--quiet", *imported, engines.image)
        try:
            engines.call("podman", "run", "--rm", "--network", "none", *podman_ulimits(), engines.image, "true")
        except NoEngineError:
            if runtime == runtimes[-1]:
                raise
        else:
            return


@contextmanager
def _daemon(folder: Path) -> Iterator[str]:
    """A Docker daemon without networks: its address."""
    address = f"unix://{folder}/docker.sock"
    # Ends with the tests' process, however that ends.
    command = ["setpriv", "--pdeathsig", "TERM", "dockerd", "--host", address]
    command += ["--data-root", f"{folder}/docker", "--exec-root", f"{folder}/exec"]
    command += ["--pidfile", f"{folder}/docker.pid", "--iptables=false", "--bridge=none", "--ip-masq=false"]
    log = folder / "docker.log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        until = time.monotonic() + _DAEMON_SECONDS
        while subprocess.run(["docker", "--host", address, "info"], capture_output=True).returncode != 0:
            if daemon.poll() is not None or time.monotonic() > until:
                raise NoEngineError(f"dockerd does not start here: {log.read_text()[-1000:]}")
            time.sleep(0.1)
        yield address
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def _unmount(folder: Path) -> None:
    """What the engines have mounted below the folder and leave so."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for path in sorted((path for path in mounted if path.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", path], check=False)
