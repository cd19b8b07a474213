"""The built-in executors keep to what executors of other packages are held to.

`local` does so with jobs. Those that need a cluster, a daemon or an account have tests of their own for jobs.
"""

from nemotron_steps.testing import executor_conformance

TestLocal = executor_conformance("local")
TestDocker = executor_conformance(
    "docker", profile={"container_image": "steps:cpu", "mounts": ["/data:/data"]}, jobs=False
)
TestLepton = executor_conformance(
    "lepton", profile={"container_image": "steps:cpu", "resource_shape": "cpu.small"}, jobs=False
)
TestRay = executor_conformance("ray", profile={"ray_address": "http://127.0.0.1:8265"}, jobs=False)
TestSlurm = executor_conformance(
    "slurm", profile={"account": "research", "partition": "batch", "time": "00:10:00"}, jobs=False
)
