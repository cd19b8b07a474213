#!/usr/bin/env bash
# One stage of Super3's reinforcement learning on Slurm, told by environment variables.
#
#   EXP_NAME CONFIG_PATH MODEL_PATH TRAIN_PATH VAL_PATH SLURM_PARTITION SLURM_ACCOUNT    needed
#   CONTAINER           image of the job; without one it runs in this Python
#   SANDBOX_CONTAINER   RLVR: image (of Apptainer) that model-written code runs in; without one, bubblewrap
#   PERSISTENT_CACHE    folder of compiled kernels, kept between jobs
#   EXTRA_MOUNTS        HOST:CONTAINER pairs, with commas between, of CONTAINER
#   SIF_DIR             folder of the repositories' images that rows of SWE 2 name by path, mounted in CONTAINER
#   SWE_AGENT_URL       SWE 2: where the agent of its config is served; without one, http://127.0.0.1:8800
#
# CONFIG_PATH is a published config (stage1_rlvr.yaml, stage2_swe1.yaml, stage2_swe2.yaml, stage3_rlhf.yaml, small_*), a
# config of the stage, or a file of yours whose name says the stage. Further arguments go to the command: overrides,
# --dry-run, or -r super_launch to wait for the job.
set -euo pipefail

missing=""
for name in EXP_NAME CONFIG_PATH MODEL_PATH TRAIN_PATH VAL_PATH SLURM_PARTITION SLURM_ACCOUNT; do
    [ -n "${!name:-}" ] || missing="$missing $name"
done
if [ -n "$missing" ]; then
    echo "super_launch.sh: set$missing" >&2
    exit 2
fi

config=$(basename "$CONFIG_PATH" .yaml)
case $config in
    *rlvr*) stage=rlvr ;;
    *swe1*) stage=swe1 ;;
    *swe2*) stage=swe2 ;;
    *rlhf*) stage=rlhf ;;
    *) echo "super_launch.sh: CONFIG_PATH=$CONFIG_PATH names no stage: rlvr, swe1, swe2 or rlhf" >&2; exit 2 ;;
esac
case $config in
    stage*) config=default ;;
    small*) config=small ;;
    *) [ ! -f "$CONFIG_PATH" ] || config=$CONFIG_PATH ;;
esac

idle() {
    [ -z "${!1:-}" ] || echo "super_launch.sh: $1 does nothing $2" >&2
}
[ "$stage" = rlvr ] || idle SANDBOX_CONTAINER "for $stage"
if [ -z "${CONTAINER:-}" ]; then
    idle EXTRA_MOUNTS "without CONTAINER"
    idle SIF_DIR "without CONTAINER"
fi

request=("$stage" -c "$config" --input "policy=$MODEL_PATH" "data.train.data_path=$TRAIN_PATH"
    "data.validation.data_path=$VAL_PATH")
if [ -n "${SANDBOX_CONTAINER:-}" ] && [ "$stage" = rlvr ]; then
    for environment in code_gen math_formal_lean ns_tools; do
        request+=("+env.nemo_gym.environments.$environment.sandbox=apptainer"
            "+env.nemo_gym.environments.$environment.sandbox_image='$SANDBOX_CONTAINER'")
    done
fi

overrides=()
for word in "$@"; do
    case $word in -*) ;; *=*) overrides+=("$word") ;; esac
done

# As many nodes as the config wants, overrides included.
wanted=$(nemotron super3 rl "${request[@]}" "${overrides[@]}" --dry-run --json | python3 -c '
import json, sys
configs = json.load(sys.stdin)["configs"]
cluster = configs[list(configs)[-1]]["cluster"]
print(cluster["num_nodes"], cluster["gpus_per_node"])')
read -r nodes gpus <<< "$wanted"

quoted() { python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"; }
text() { python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$1"; }

# The job reads the profile as well, so it stays, beside the runs.
profiles=$(realpath -m "${STEPS_HOME:-.steps}/launch/$EXP_NAME.toml")
mkdir -p "$(dirname "$profiles")"
{
    echo "[super_launch]"
    echo 'executor = "slurm"'
    echo "job_name = $(text "$EXP_NAME")"
    echo "account = $(text "$SLURM_ACCOUNT")"
    echo "partition = $(text "$SLURM_PARTITION")"
    echo "nodes = $nodes"
    echo "gpus_per_node = $gpus"
    echo "exclusive = true"
    mounts=()
    if [ -n "${EXTRA_MOUNTS:-}" ]; then
        IFS=, read -r -a mounts <<< "$EXTRA_MOUNTS"
    fi
    for folder in "${PERSISTENT_CACHE:-}" "${SIF_DIR:-}"; do
        [ -z "$folder" ] || mounts+=("$folder:$folder")
    done
    if [ -n "${CONTAINER:-}" ]; then
        echo "container_image = $(text "$CONTAINER")"
        echo "mounts = $(quoted "${mounts[@]}")"
    fi
    if [ -n "${PERSISTENT_CACHE:-}" ]; then
        echo "[super_launch.env_vars]"
        echo "XDG_CACHE_HOME = $(text "$PERSISTENT_CACHE")"
        echo "VLLM_CACHE_ROOT = $(text "$PERSISTENT_CACHE/vllm")"
        echo "FLASHINFER_WORKSPACE_BASE = $(text "$PERSISTENT_CACHE/flashinfer")"
    fi
} > "$profiles"
export NEMOTRON_ENV_FILE=$profiles

where=(-b super_launch)
for word in "$@"; do
    case $word in -r | --run | -b | --batch) where=() ;; esac
done
exec nemotron super3 rl "${request[@]}" "${where[@]}" "$@"
