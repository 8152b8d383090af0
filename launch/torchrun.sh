#!/usr/bin/env bash
# Start a program on every rank, on one node or on many.
#
#   launch/torchrun.sh PROGRAM.py [ARGUMENTS]
#   NPROC=4 launch/torchrun.sh PROGRAM.py
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun.sh PROGRAM.py  # NODE_RANK=1 on the other
#   NNODES=2 RDZV_ENDPOINT=node0:29400 launch/torchrun.sh PROGRAM.py      # the same on both nodes
#
#   NPROC            ranks on this node, one a GPU; by default all its GPUs, or 2 where it has none
#   NNODES           nodes (1)
#   NODE_RANK, MASTER_ADDR, MASTER_PORT (29500)    fixed places for the nodes
#   RDZV_ENDPOINT, RDZV_ID (ep_moe)                the nodes find their places where they meet
#   OMP_NUM_THREADS  CPU threads of a rank; by default the cores of this node shared out
#   EP_MOE_PYTHON    the interpreter; by default that of the project's .venv, else python3
#
# The program must bind its rank to the GPU LOCAL_RANK before its first collective, as
# ep_moe.init_process() does.
set -euo pipefail

if [[ $# -eq 0 || $1 == -h || $1 == --help ]]; then
    sed -n '2,/^set/{s/^# \{0,1\}//;/^set/!p}' "${BASH_SOURCE[0]}"
    exit $(($# == 0))
fi

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$project/.venv/bin/python
[[ -x $python ]] || python=python3
python=${EP_MOE_PYTHON:-$python}

# What torch sees decides, not nvidia-smi: CUDA_VISIBLE_DEVICES hides GPUs, and a CPU build of
# torch has none.
facts=$("$python" -c 'import os, torch
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
print(torch.cuda.device_count(), cores)')
read -r gpus cores <<<"$facts"

ranks=${NPROC:-$((gpus > 0 ? gpus : 2))}
if ! [[ $ranks =~ ^[1-9][0-9]*$ ]]; then
    echo "torchrun.sh: NPROC = $ranks, but it must be a number of ranks, 1 or more" >&2
    exit 2
fi
if ((gpus > 0 && ranks > gpus)); then
    echo "torchrun.sh: NPROC = $ranks, but this node shows $gpus GPU(s), one a rank:" \
        "set NPROC=$gpus or less, or CUDA_VISIBLE_DEVICES= to run on the CPU" >&2
    exit 2
fi

nodes=${NNODES:-1}
if [[ -n ${RDZV_ENDPOINT:-} ]]; then
    where=(--rdzv-backend=c10d --rdzv-endpoint="$RDZV_ENDPOINT" --rdzv-id="${RDZV_ID:-ep_moe}")
elif ((nodes == 1)); then
    where=(--standalone)
else
    need="with NNODES = $nodes, set RDZV_ENDPOINT, or both NODE_RANK and MASTER_ADDR"
    where=(--node-rank="${NODE_RANK:?$need}" --master-addr="${MASTER_ADDR:?$need}"
        --master-port="${MASTER_PORT:-29500}")
fi

threads=$((cores / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
exec "$python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$ranks" \
    "${where[@]}" "$@"
