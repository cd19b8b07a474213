#!/usr/bin/env bash
# One stage of Super3's reinforcement learning on Slurm, told by environment variables.
#
#   EXP_NAME CONFIG_PATH MODEL_PATH TRAIN_PATH VAL_PATH SLURM_PARTITION SLURM_ACCOUNT    needed
#   CONTAINER           image of the job; without one it runs in this Python
#   SANDBOX_CONTAINER   image, a file or of a registry, that Apptainer runs model-written code in; without one, bubblewrap
#   PERSISTENT_CACHE    folder of compiled kernels, kept between jobs
#   EXTRA_MOUNTS        HOST:CONTAINER pairs, with commas between, of CONTAINER
#   SIF_DIR             folder of the repositories' images that rows of SWE 2 name by path
#   SWE_AGENT_URL       SWE 2: where the agent of its config is served; without one, http://127.0.0.1:8800
#
# CONFIG_PATH is a file, which is the config whatever its name, or a published name that is no file here
# (stage1_rlvr.yaml, stage2_swe1.yaml, stage2_swe2.yaml, stage3_rlhf.yaml, small_*; alone or in its published folder),
# which is the built-in config. A
# file's stage is that of the environments or configs that it names, else what its name or its nearest folder says.
# Nodes and GPUs are the config's, and every path is mounted in CONTAINER. Further arguments go to the command:
# overrides, --dry-run, or -r super_launch to wait for the job.
set -euo pipefail

say() { echo "super_launch.sh: $*" >&2; }
refuse() { say "$@"; exit 2; }

missing=""
for name in EXP_NAME CONFIG_PATH MODEL_PATH TRAIN_PATH VAL_PATH SLURM_PARTITION SLURM_ACCOUNT; do
    [ -n "${!name:-}" ] || missing="$missing $name"
done
[ -z "$missing" ] || refuse "set$missing"
case $EXP_NAME in */* | .*) refuse "EXP_NAME=$EXP_NAME must be a name: no slash, no dot in front" ;; esac
command -v nemotron > /dev/null || refuse "there is no nemotron on PATH: activate the environment of nemotron_steps," \
    "or put \`uv run\` in front"

dry=""
where=(-b super_launch)
for word in "$@"; do
    case $word in
        -d | --dry-run) dry=1 ;;
        -r | -b | --run | --batch | --run=* | --batch=*) where=() ;;
    esac
done

stage_of() {
    case $1 in
        *swe1* | *swe_pivot*) stage=swe1 ;;
        *swe2* | *swe_agent*) stage=swe2 ;;
        *rlvr*) stage=rlvr ;;
        *rlhf*) stage=rlhf ;;
        *) return 1 ;;
    esac
}
# Whether the file has a word among its keys, list items and defaults: comments and other values say nothing.
has() { grep -qE "(^|[^[:alnum:]_])($1)" <<< "$content"; }
verified='math_with_judge|code_gen|mcqa|instruction_following|structured_outputs|calendar|reasoning_gym|ns_tools'
verified+='|workplace_assistant|math_formal_lean|equivalence_llm_judge|multichallenge|inverse_if|swerl_gen'

name=$(basename "$CONFIG_PATH" .yaml)
content=""
if [ -f "$CONFIG_PATH" ]; then
    config=$(realpath "$CONFIG_PATH")
    content=$(sed -E 's/(^|[[:space:]])#.*//; /^defaults:/! s/:[[:space:]]+[^][{},&*]+/:/g' "$config")
    [ -n "${content//[[:space:]]/}" ] || refuse "CONFIG_PATH=$CONFIG_PATH is empty"
    if has 'swe_agent|swe2|stage2_swe2'; then stage=swe2
    elif has 'swe_pivot|swe1|stage2_swe1|super3_swe'; then stage=swe1
    elif has "rlvr[123]|stage1_rlvr|super3_rlvr|$verified"; then stage=rlvr
    elif has 'genrm_compare|genrm_model|stage3_rlhf'; then stage=rlhf
    else
        place=$config
        until stage_of "$(basename "$place")"; do
            [ "$place" != / ] || refuse "CONFIG_PATH=$CONFIG_PATH: neither its content nor its name says the stage:" \
                "rlvr, swe1, swe2 or rlhf"
            place=$(dirname "$place")
        done
    fi
    built_in=""
    case $name in stage[123]_* | small_*) built_in="; CONFIG_PATH=$name is the built-in config of that name" ;; esac
    say "$CONFIG_PATH is read as a config of $stage$built_in"
else
    said=$name
    case $name in
        stage[123]_*) config=default ;;
        small_*) config=small ;;
        rlvr[123]) config=$name ;;
        default | small | test) config=$name said=$(basename "$(dirname "$(dirname "$CONFIG_PATH")")") ;;
        *) said="" ;;
    esac
    case ${CONFIG_PATH#./} in
        "$(basename "$CONFIG_PATH")" | examples/configs/super/*) ;;
        /* | ../*) said="" ;;
        stage[123]_*/config/* | src/*/stage[123]_*/config/*) ;;
        *) said="" ;;
    esac
    stage_of "$said" || refuse "CONFIG_PATH=$CONFIG_PATH is neither a file nor a published config: stage1_rlvr.yaml," \
        "stage2_swe1.yaml, stage2_swe2.yaml or stage3_rlhf.yaml"
    say "$CONFIG_PATH is no file here: the built-in config, nemotron super3 rl $stage -c $config"
fi

mounts=()
if [ -n "${EXTRA_MOUNTS:-}" ]; then
    IFS=, read -r -a mounts <<< "$(sed -E 's/^ +| +$//g; s/ *, */,/g' <<< "$EXTRA_MOUNTS")"
    for pair in "${mounts[@]}"; do
        [[ $pair == ?*:/* ]] || refuse "EXTRA_MOUNTS: '$pair' must be HOST:CONTAINER, as in $pair:$pair"
    done
fi
idle() { [ -z "${!1:-}" ] || say "$1 does nothing $2"; }
# What a run needs and a dry run may lack.
lacks() { if [ -n "$dry" ]; then say "$@"; else refuse "$@"; fi; }

# Paths have to be there; other values may be names of the home's artifacts, or of a hub's model.
absent=""
for name in MODEL_PATH TRAIN_PATH VAL_PATH; do
    case ${!name} in
        /* | ./* | ../* | *.jsonl) [ -e "${!name}" ] || absent+=" $name=${!name}" ;;
    esac
done
[ -z "$absent" ] || lacks "there is no such file or folder here:$absent"

quoted() { printf "%s='%s'" "$1" "${2//\'/\\\'}"; }
request=("$stage" -c "$config" --input "policy=$MODEL_PATH" "$(quoted data.train.data_path "$TRAIN_PATH")"
    "$(quoted data.validation.data_path "$VAL_PATH")")
sandboxed='code_gen|math_formal_lean|ns_tools'
if [ "$stage" != rlvr ] && ! has "$sandboxed"; then
    idle SANDBOX_CONTAINER "for $stage"
elif [ -n "${SANDBOX_CONTAINER:-}" ]; then
    case $SANDBOX_CONTAINER in
        *://*) image=$SANDBOX_CONTAINER ;;
        /* | ./* | ../* | *.sif | *.sqsh)
            [ -f "$SANDBOX_CONTAINER" ] || lacks "SANDBOX_CONTAINER=$SANDBOX_CONTAINER: there is no such file"
            image=$(realpath -ms "$SANDBOX_CONTAINER") ;;
        *) image=docker://$SANDBOX_CONTAINER ;;
    esac
    for environment in ${sandboxed//|/ }; do
        request+=("++env.nemo_gym.environments.$environment.sandbox=apptainer"
            "$(quoted "++env.nemo_gym.environments.$environment.sandbox_image" "$image")")
    done
fi
if [ "$stage" != swe2 ]; then
    idle SIF_DIR "for $stage"
elif [ -n "${SIF_DIR:-}" ]; then
    [ -d "$SIF_DIR" ] || lacks "SIF_DIR=$SIF_DIR: there is no such folder"
    mounts+=("$(realpath -ms "$SIF_DIR"):$(realpath -ms "$SIF_DIR")")
fi
if [ -n "${PERSISTENT_CACHE:-}" ]; then
    [ -n "$dry" ] || mkdir -p "$PERSISTENT_CACHE"
    PERSISTENT_CACHE=$(realpath -ms "$PERSISTENT_CACHE")
    mounts+=("$PERSISTENT_CACHE:$PERSISTENT_CACHE")
fi
if [ -z "${CONTAINER:-}" ]; then
    idle EXTRA_MOUNTS "without CONTAINER"
elif [ -n "$content" ]; then
    mounts+=("$(dirname "$config"):$(dirname "$config")")
fi

# As TOML writes them.
text() { local value=${1//\\/\\\\}; printf '"%s"' "${value//\"/\\\"}"; }
list() { local each; for each in "$@"; do printf '%s, ' "$(text "$each")"; done; }

# The job reads the profile as well, so it stays, beside the runs.
profiles=$(realpath -m "${STEPS_HOME:-.steps}/launch/$EXP_NAME.toml")
mkdir -p "$(dirname "$profiles")"
{
    echo "[super_launch]"
    echo 'executor = "slurm"'
    echo "job_name = $(text "$EXP_NAME")"
    echo "account = $(text "$SLURM_ACCOUNT")"
    echo "partition = $(text "$SLURM_PARTITION")"
    echo "exclusive = true"
    if [ -n "${CONTAINER:-}" ]; then
        echo "container_image = $(text "$CONTAINER")"
        echo "mounts = [$(list "${mounts[@]}")]"
    else
        echo 'container_image = ""'
    fi
    if [ -n "${PERSISTENT_CACHE:-}" ]; then
        echo "[super_launch.env_vars]"
        echo "XDG_CACHE_HOME = $(text "$PERSISTENT_CACHE")"
        echo "VLLM_CACHE_ROOT = $(text "$PERSISTENT_CACHE/vllm")"
        echo "FLASHINFER_WORKSPACE_BASE = $(text "$PERSISTENT_CACHE/flashinfer")"
    fi
} > "$profiles"
export NEMOTRON_ENV_FILE=$profiles

exec nemotron super3 rl "${request[@]}" "${where[@]}" "$@"
