"""A real S3 endpoint for tests: moto's server on loopback. Conftests import the fixtures."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of moto's server on loopback."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    # A process of its own: Flask's proxies, once imported here, break libraries that look through loaded modules.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, "moto's server ended"
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A home on a bucket of its own."""
    return home_on(s3_endpoint, monkeypatch, f"bucket{abs(hash(request.node.nodeid)) % 10**8}")


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
