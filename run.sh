#!/usr/bin/env bash
# From an empty machine to a trained model:
#   ./run.sh [--name value ...]     environment, data, hardware, then training through torchrun; settings are passed on
#   ./run.sh sample [arguments]     text from the model that was trained last, if it was saved beside its log
#   ./run.sh test [arguments]       what the tests need, then pytest
#   ./run.sh profile [--name value ...]     where the time of each kind of step goes, and traces to look at
#   ./run.sh install [cpu|cuda]     only the environment, also for a GPU that is not here
#   ./run.sh caches pack|unpack FILE        compiled kernels as one file, for the start of the next machine
#   ./run.sh doctor                 whether this machine is in order, and what is slow or broken if it is not
# PYTHON=/path/to/python uses that interpreter and what is installed for it, and installs nothing.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0" 2>/dev/null || echo "$0")")"
trap 'exit 130' INT     # pip ends on Ctrl-C as if it had failed, and what follows would start.

die() { echo "run.sh: $*" >&2; exit 2; }

gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then gpus=$(awk -F, '{ for (i = 1; i <= NF && $i ~ /^ *[0-9GM]/; i++) n++ } END { print n + 0 }' <<<"$CUDA_VISIBLE_DEVICES"); fi
fi
# The lowest compute capability of the GPUs: 9 is Hopper, 10 Blackwell. A driver that does not know it counts as 0.
capability=0
if [ "$gpus" -gt 0 ]; then
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -oE '^[0-9]+' | sort -n | head -1 || true)
fi
if [ "${1-}" = install ]; then
    case "${2-}" in
    cpu) gpus=0 capability=0 ;;
    cuda) gpus=1 capability=10 ;;
    "") ;;
    *) die "install $2: choose cpu or cuda" ;;
    esac
fi

# Install once: the stamp names the requirements, the kind of torch and whether the tests' needs are in.
make_environment() {
    local wanted=$1 torch stamp base flash
    torch=$(grep '^torch==' requirements.txt)
    stamp="$(cksum <requirements.txt) gpus=$((gpus > 0)) capability=${capability:-0}"
    if grep -qxF "$stamp all" .venv/stamp 2>/dev/null || grep -qxF "$stamp $wanted" .venv/stamp 2>/dev/null; then return; fi
    for base in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then break; fi
    done
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || die "needs Python 3.10 or newer; install it, or set PYTHON"
    if [ ! -x .venv/bin/pip ]; then
        echo "run.sh: making the environment in .venv (once)" >&2
        "$base" -m venv .venv || die "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"
    fi
    rm -f .venv/stamp
    pip() { .venv/bin/python -m pip install -q --disable-pip-version-check "$@"; }
    # Where there is no NVIDIA driver only a CPU build will do: the default one on Linux brings gigabytes of CUDA.
    if [ "$gpus" = 0 ] && [ "$(uname)" = Linux ]; then
        pip "$torch+cpu" 2>/dev/null || pip --extra-index-url https://download.pytorch.org/whl/cpu "$torch+cpu" 2>/dev/null ||
            echo "run.sh: no CPU build of $torch to be had from download.pytorch.org: taking PyPI's, which may be gigabytes" >&2
    fi
    if [ "$wanted" = all ]; then pip -r requirements.txt; else pip -r <(sed '/^$/q' requirements.txt); fi ||
        die "pip failed; mend what it says above and run the same command again"
    flash=$(sed -n 's/^#   \(flash-attn-4.*==.*\)/\1/p' requirements.txt)
    if [ "${capability:-0}" -ge 10 ] && [ "$(uname)" = Linux ] && ! pip "$flash"; then
        echo "run.sh: $flash did not install (see above). Torch's own attention runs in its place. It takes up to 1.8" \
            "times as long: 1.5 ms, not 0.8, for 49,152 tokens and a window of 1,408 on an H200" >&2
    fi
    echo "$stamp $wanted" >.venv/stamp
}

tests=0
program=(train_gpt.py)
if [ "${1-}" = test ]; then tests=1; shift; fi
if [ "${1-}" = sample ]; then program=(-m use.sample); shift; fi
if [ "${1-}" = profile ]; then program=(-m records.tools.profile); shift; fi
if [ "${1-}" = doctor ]; then program=(-m records.tools.doctor); shift; fi
if [ "${1-}" = caches ]; then program=(-m records.tools.caches); shift; fi
if [ -n "${PYTHON-}" ]; then
    python=$PYTHON
    "$python" -c 'from importlib.util import find_spec as f; import sys; sys.exit(not (f("torch") and f("numpy")))' 2>/dev/null ||
        die "PYTHON=$PYTHON is no Python with torch and numpy; install requirements.txt there, or unset PYTHON"
else
    make_environment "$([ $tests = 1 ] && echo all || echo core)"
    python=.venv/bin/python
fi
if [ "${1-}" = install ]; then exit; fi
# Torch has thousands of files. Where nobody keeps their bytecode, as in many containers, every start compiles it anew,
# which takes 5 to 10 s. So it is kept in a folder of its own.
if ! "$python" -c 'import importlib.util as u, os, sys; sys.exit(not os.path.exists(u.cache_from_source(u.find_spec("torch").origin)))' 2>/dev/null; then
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/python-bytecode}
fi
# A token of a small model is too little work for two threads, which would wait for each other.
if [ "${program[*]}" = "-m use.sample" ]; then OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$python" "${program[@]}" "$@"; fi
if [ "${program[*]}" = "-m records.tools.caches" ]; then exec "$python" "${program[@]}" "$@"; fi
if [ $tests = 1 ]; then exec "$python" -m pytest -q -n 2 --dist loadfile tests "$@"; fi

# Ranks: a power of two that the hardware has. The CPU's two ranks share its cores.
ranks=2
if [ "$gpus" -gt 0 ]; then
    for ranks in 8 4 2 1; do if [ "$ranks" -le "$gpus" ]; then break; fi; done
fi
# The small model has two micro-batches.
case "$* " in *--preset[=\ ]"cpu "*) ranks=$((ranks > 2 ? 2 : ranks)) ;; esac
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}

# On a GPU the default is the speedrun on FineWeb: fetch it where there are no shards yet, unless other data is asked for.
case "${program[*]} $*" in
*" --help"*|*" --explain"*|*" --timetable"*) ranks=1 ;;     # They print something and train nothing.
*records.tools.doctor*) ;;
*" --preset"[=\ ]c*|*" --preset"[=\ ]sprint*|*" --data_path"*) ;;
*)
    shards=${DATA_PATH:-data/shards/fineweb}
    if [ "$gpus" -gt 0 ] && ! compgen -G "$shards/*train_*.bin" >/dev/null; then
        echo "run.sh: no shards in $shards: fetching FineWeb (to train on the embedded corpus instead: ./run.sh --preset cpu)" >&2
        "$python" -m data.fineweb --out "$shards"
    fi ;;
esac

# torchrun itself, without its stack trace when a rank has already said in one line what is wrong.
exec "$python" -c '
import logging, sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
logging.disable(logging.CRITICAL)
try:
    main(sys.argv[1:])
except ChildFailedError as error:
    first, cause = error.get_first_failure()
    for rank, failure in error.failures.items():
        # Others have said in one line what is wrong. After the first the launcher ends the rest by SIGTERM.
        if failure.exitcode < 0 and (rank == first or failure.signal_name() != "SIGTERM"):
            name = failure.signal_name()
            cut = "; a file that it had mapped was cut short: a shard, or a compiled kernel in ~/.triton/cache"
            print(f"run.sh: rank {rank} was ended by {name}", cut if name == "SIGBUS" else "", sep="", file=sys.stderr)
    sys.exit(max(cause.exitcode, 1))
except SignalException:
    sys.exit(130)
' --standalone --nproc_per_node="$ranks" "${program[@]}" "$@"
