#!/usr/bin/env bash
# Peak memory of `silane quantize` on a package of one large weight, scheme by scheme: that of the whole process
# above what a tiny package takes, in units of the weight's size in fp16.
#
#   benches/memory.sh [--rows R] [--columns C] [--silane SILANE] [SCHEME …]
#
# The weight has 4096 x 4096 elements unless told. Without a binary the release build is measured. Each scheme is
# measured as it compresses the weight, and as its result is made dense and compressed anew.
set -euo pipefail
cd "$(dirname "$0")/.."

schemes=(int8 int8:t int8:o uint8 int4 int4:b32 uint4:b32 lut1 lut2:g8 lut3:g8 lut4 lut4:g16 lut4:g16i lut4:g2048i lut4:g16:i8
    lut6 lut6:g16 lut8 lut8:g32 lut4:v2 lut4:v2:g16 lut8:v4 sparse10 sparse50 2:4 sparse50+int8 sparse50+int8:t
    sparse50+int4:b32 sparse50+lut4 sparse50+lut4:g16 sparse50+lut4:g16i 2:4+lut4:g16)
rows=4096 columns=4096 silane='' given=()
while [ $# -gt 0 ]; do
    case $1 in
    --rows) rows=$2 && shift ;;
    --columns) columns=$2 && shift ;;
    --silane) silane=$2 && shift ;;
    -*) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
    *) given+=("$1") ;;
    esac
    shift
done
[ ${#given[@]} -eq 0 ] || schemes=("${given[@]}")
if [ -z "$silane" ]; then
    cargo build --release --quiet
    silane=${CARGO_TARGET_DIR:-target}/release/silane
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
make() { cargo bench --quiet --bench quant -- --rows "$1" --columns "$2" --package "$3"; }
make "$rows" "$columns" "$work/large.mlpackage"
make 64 64 "$work/tiny.mlpackage"

# Kilobytes at the peak of `quantize` from one package to another.
peak() {
    # GNU time writes to the file; a command that fails shows why and ends the script.
    /usr/bin/time -f %M -o "$work/run" "$silane" quantize "$@" --force >/dev/null 2>"$work/said" ||
        { cat "$work/said" >&2; return 1; }
    cat "$work/run"
}

# That above the tiny package's, in units of the weight.
above() {
    local tiny large
    tiny=$(peak "$work/tiny$1.mlpackage" -o "$work/tiny$2.mlpackage" "${@:3}")
    large=$(peak "$work/large$1.mlpackage" -o "$work/large$2.mlpackage" "${@:3}")
    awk -v t="$tiny" -v l="$large" -v n="$((rows * columns))" 'BEGIN { printf "%.2f\n", (l - t) * 1024 / (2 * n) }'
}

printf '%-22s %10s %12s %12s\n' scheme compress decompress recompress
for scheme in "${schemes[@]}"; do
    compress=$(above '' -small --scheme "$scheme" --allow-slow)
    decompress=$(above -small -dense --decompress)
    recompress=$(above -small -again --scheme "$scheme" --allow-slow --recompress)
    printf '%-22s %10s %12s %12s\n' "$scheme" "$compress" "$decompress" "$recompress"
done
