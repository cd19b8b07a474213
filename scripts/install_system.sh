#!/bin/sh
# Debian packages that the code sandbox, fast training on CPU and some tests use. As root: scripts/install_system.sh
#   bubblewrap            the sandbox of model-written code
#   gcc libc6-dev         the kernels in C for float32 on CPU, compiled at first use
#   slurm-wlm munge       a real Slurm on one machine, for the tests marked `slurm` (scripts/setup_slurm.sh)
#   docker.io podman catatonit
#                         real containers, for the tests marked `containers`; catatonit is the first process that
#                         podman run --init asks for
#   chromium              the tests that look at a report in a browser
set -eu
export DEBIAN_FRONTEND=noninteractive
packages="bubblewrap gcc libc6-dev slurm-wlm munge docker.io podman catatonit chromium"
missing=""
for package in $packages; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing
