#!/usr/bin/env bash
# Set everything up and train a small Mixture-of-Experts language model on the Python standard
# library's own text: on all GPUs, or on a CPU with 2 ranks, in a few minutes. It ends with the
# figures and leaves runs/quickstart/report.html (quickstart-2 the next time, and so on).
#
# A short run without the balance loss goes first; the report shows both beside each other.
#
#   bash launch/quickstart.sh [ARGUMENTS of launch/train_lm.py, such as --steps=1000 --dtype=bf16]
#
# NPROC sets the number of ranks, which must divide the number of experts, 8. launch/setup.sh has
# the switches of the installation.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

set_up_python report,train
runs=$project/runs
name=quickstart
for ((number = 2; ; number++)); do
    [[ -e $runs/$name || -e $runs/$name-unbalanced ]] || break
    name=quickstart-$number
done

train() {
    EP_MOE_PYTHON=$PYTHON "$project/launch/torchrun.sh" "$project/launch/train_lm.py" \
        --config "$project/configs/runs/quickstart.yaml" --runs_dir "$runs" "$@"
}

echo "$name-unbalanced: the first steps without the balance loss"
train "$@" --name "$name-unbalanced" --model.moe.aux_loss_coef=0 \
    --model.moe.aux_loss_scope=micro_batch --stop_after=100 --resume=null --record_routing.steps='[]' --report=false
echo
echo "$name: the run itself"
train --name "$name" --compare_with "$name-unbalanced" "$@"
