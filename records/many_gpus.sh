#!/usr/bin/env bash
# All that is to be measured on one machine of 4 or 8 GPUs, most wanted first:
#   records/many_gpus.sh 8 FOLDER [--dry-run]     writes logs and tables into FOLDER; data: DATA_PATH, as for train_gpt.py
# Each command has a limit of time, so that one that hangs leaves the rest. SETTINGS are added to all of them, which is
# how a CPU can try the script: SETTINGS="--preset cpu …" records/many_gpus.sh 2 FOLDER
set -uo pipefail
cd "$(dirname "$0")/.."
gpus=${1:?give the number of GPUs, 4 or 8} folder=${2:?give a folder for the results} dry=${3-}
python=${PYTHON:-python}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
export RUNS_PATH=${RUNS_PATH:-$folder/runs}
# Batches, steps and rates are those of the preset, with a micro-batch for each GPU, which `scaling` has to be told.
read -ra settings <<<"${SETTINGS:---preset corpus --micro_batches $gpus}"

measure() {    # measure SECONDS NAME COMMAND ...: its output goes into FOLDER/NAME.txt
    local limit=$1 name=$2 begin=$SECONDS
    shift 2
    if [ "$dry" = --dry-run ]; then printf "%q " "$@"; echo; return; fi
    timeout --signal=INT --kill-after=30 "$limit" "$@" >"$folder/$name.txt" 2>&1
    echo "$name: exit $?, $((SECONDS - begin)) s" | tee -a "$folder/summary.txt"
}
ranks=("$python" -m torch.distributed.run --standalone "--nproc_per_node=$gpus")
train=("${ranks[@]}" train_gpt.py "${settings[@]}")

measure 60 doctor "${ranks[@]}" -m records.tools.doctor
measure 300 record "${train[@]}" --name "record-$gpus" --seed 101 --runs 5
measure 120 record-second "${train[@]}" --name "record-$gpus-second" --seed 201
small=(--ngram_rows 2097152)
[ -n "${SETTINGS-}" ] || small+=(--steps 1406 --softmax_samples 12288 --softmax_tokens 16384 --extra_samples 0)
measure 300 small-class "${train[@]}" --name "small-$gpus" "${small[@]}" --seed 101 --runs 5
measure 240 scaling "$python" -m records.tools.scaling "${settings[@]}" --ngram_rows "${SCALING_ROWS:-134217728}" \
    --ranks "$(for n in 1 2 4 8; do [ "$n" -le "$gpus" ] && printf '%s,' "$n"; done | sed 's/,$//')" \
    --batch_tokens "${SCALING_BATCHES:-65536,196608,393216}" --out "$folder/scaling.json"
measure 120 profile "${ranks[@]}" -m records.tools.profile "${settings[@]}" --out "$folder/traces"
measure 120 cold-start env "TORCHINDUCTOR_CACHE_DIR=$folder/cold" "TRITON_CACHE_DIR=$folder/cold" "${train[@]}" \
    --name "cold-$gpus" --steps 57 --extra_steps 3 --val_every 0
if [ -z "${SETTINGS-}" ]; then      # on GPUs, at the speedrun's own batches
    short=(--preset speedrun --data_path "${DATA_PATH:-data}" --steps 99 --extra_steps 1 --val_every 0)
    measure 90 speedrun "${ranks[@]}" train_gpt.py "${short[@]}" --name "speedrun-$gpus"
    measure 120 memory "$python" -m records.tools.memory --ranks "$gpus" --limits 80,none "${short[@]:0:4}"
fi
