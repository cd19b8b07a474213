#!/usr/bin/env bash
# Builds wheel and sdist into dist/, and tries the wheel, away from the checkout, on each Python given: it says its
# version, lists, plans, and runs a tiny chain whose artifacts say which version made them.
#   scripts/try_wheel.sh python3.11 python3.12 python3.13
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
builder=${BUILDER:-.venv/bin/python}
rm -rf dist
"$builder" -m build --outdir dist . > /dev/null
wheel=$(echo dist/*.whl)
version=$("$builder" -c 'import re, sys; print(re.search(r"-([^-]+)-py3", sys.argv[1])[1])' "$wheel")
test -f "dist/nemotron_steps-$version.tar.gz"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for python in "${@:-python3}"; do
  echo "== $version on $("$python" --version)"
  "$python" -m venv "$scratch/venv"
  bin=$scratch/venv/bin
  "$bin/pip" install -q --disable-pip-version-check uv
  install=("$bin/uv" pip install -q --python "$bin/python" -c requirements/constraints.txt)
  "${install[@]}" torch==2.13.0
  "${install[@]}" "$root/${wheel}[engine,data]"
  mkdir "$scratch/work"
  (
    cd "$scratch/work"
    test "$("$bin/steps" --version)" = "$version"
    "$bin/steps" list > /dev/null
    "$bin/steps" plan rl/nemo_rl/rlhf -c tiny > /dev/null
    "$bin/steps" run rl/nemo_rl/rlvr -c tiny grpo.max_num_steps=2 'inputs.policy.overrides=["sft.max_num_steps=20"]'
    "$bin/steps" artifacts show rl/nemo_rl/rlvr/model:latest | grep -F "$version"
  )
  rm -rf "$scratch/venv" "$scratch/work"
done
