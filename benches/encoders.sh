#!/usr/bin/env bash
# Time and peak memory of whole processes, as ratios that mean the same on every machine: time in units of
# `sha256sum` over the checkpoint, which a conversion has to do anyway, memory in units of the checkpoint's size.
#
#   benches/encoders.sh CHECKPOINT [SILANE …]
#
# Without binaries the release build is measured; with several, each gets its lines. The best of three runs counts.
set -euo pipefail

if [ $# -eq 0 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
checkpoint=$(realpath "$1")
shift
if [ $# -eq 0 ]; then
    cd "$(dirname "$0")/.."
    cargo build --release --quiet
    set -- "${CARGO_TARGET_DIR:-target}/release/silane"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The smallest of three, each by itself: seconds, and kilobytes at the peak.
measure() {
    for _ in 1 2 3; do
        # GNU time writes to the file; a command that fails shows why and ends the script.
        /usr/bin/time -f '%e %M' -o "$work/run" "$@" >/dev/null 2>"$work/said" || { cat "$work/said" >&2; return 1; }
        cat "$work/run"
    done | awk 'NR == 1 || $1 < s { s = $1 } NR == 1 || $2 < k { k = $2 } END { print s, k }'
}

kilobytes=$(du -skL "$checkpoint" | cut -f1)
read -r unit _ < <(measure find -L "$checkpoint" -type f -exec sha256sum {} +)

report() {
    read -r seconds peak && [ -n "$peak" ] || return 1
    awk -v name="$1" -v s="$seconds" -v u="$unit" -v p="$peak" -v k="$kilobytes" \
        'BEGIN { printf "%-18s time %8.2f   peak memory %6.2f\n", name, s / (u > 0 ? u : 0.01), p / k }'
}

for silane; do
    [ $# -eq 1 ] || echo "$silane"
    package=$work/model.mlpackage
    measure "$silane" convert "$checkpoint" -o "$package" --no-tokenizer --force | report "convert"
    measure "$silane" validate "$package" --reference "$checkpoint" | report "validate"
    measure "$silane" validate "$package" --reference "$checkpoint" --precision fp32 | report "validate in fp32"
done
