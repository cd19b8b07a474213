"""A real S3 endpoint for tests: moto's server on loopback. Conftests import the fixtures."""

import itertools
import subprocess
import sys
from collections.abc import Iterator

import pytest

SERVER = """
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
server._thread.join()
"""
"""It says which port it has: one that was free a moment ago may be another's by the time it is asked for."""
_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of moto's server on loopback."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    # A process of its own: Flask's proxies, once imported here, break libraries that look through loaded modules.
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().decode().strip()
        assert port, "moto's server ended"
        url = f"http://127.0.0.1:{port}"
        yield url
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A home on a bucket of its own."""
    return home_on(s3_endpoint, monkeypatch, f"bucket{next(_NUMBERS)}")


def home_on(endpoint: str, monkeypatch: pytest.MonkeyPatch, bucket: str) -> str:
    """The URL of a home on a new bucket, with the environment that reaches it."""
    import fsspec
    import s3fs

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    fsspec.config.conf.clear()
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/home"
