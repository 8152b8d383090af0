#!/usr/bin/env bash
# Set everything up, check lint and format, and run the tests.
#
#   bash launch/test.sh [ARGUMENTS of pytest, such as tests/ops -k gather]
#
# Tests marked slow are left out; `-m slow` runs them alone, `-m ''` runs all. All three checks run,
# whichever fails.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

set_up_python dev
cd "$project"
status=0
"$PYTHON" -m ruff check || status=1
"$PYTHON" -m ruff format --check || status=1
"$PYTHON" -m pytest -m "not slow" "$@" || status=1 # of two -m, pytest takes the last
exit "$status"
