#!/usr/bin/env bash
# Every scheme on one weight, and the same of coremltools' where it is installed: weights a second and squared error.
#
#   benches/quant.sh [--rows R] [--columns C] [SCHEME …]
#
# PYTHON names the interpreter that has coremltools, `python3` unless told; without it only silane is measured.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cargo bench --quiet --bench quant -- --save "$work/weight" "$@" | tee "$work/out"
if "${PYTHON:-python3}" -c 'import coremltools' 2>/dev/null; then
    read -r rows _ columns _ <"$work/out"
    "${PYTHON:-python3}" benches/quant_coremltools.py "$work/weight" "$rows" "$columns" "$work/out" 2>/dev/null
else
    echo "coremltools is not installed for ${PYTHON:-python3}; set PYTHON to compare"
fi
