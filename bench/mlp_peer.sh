#!/usr/bin/env bash
# The MLP's training step here and in PyTorch, one after the other on the same cores: a table of the medians.
#
#     bench/mlp_peer.sh PYTHON [REPEATS]      PYTHON has a current torch (bench/torch_mlp.py); 3 repeats
#
# Each repeat runs Tandem, then PyTorch eager and compiled, for each dtype and number of threads; of the repeats' medians the middle one
# counts. Nothing else should run meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { echo "usage: bench/mlp_peer.sh PYTHON [REPEATS]" >&2; exit 2; }
python=$1
repeats=${2:-3}
[ -x build/bin/mlp ] || { echo "mlp_peer.sh: build/bin/mlp is missing: cmake -B build && cmake --build build" >&2; exit 1; }

ours() # THREADS DTYPE
{
    build/bin/mlp bench --batch 128 --threads "$1" --dtype "$2" --steps 300 --json 2>/dev/null | grep -o '"step_ms":[0-9.]*' | cut -d: -f2
}

peer() # THREADS DTYPE MODE
{
    "$python" bench/torch_mlp.py --threads "$1" --dtypes "$2" --modes "$3" --steps 300 2>/dev/null | grep -o '"step_ms": *[0-9.]*' | grep -o '[0-9.]*$'
}

middle() { sort -g | awk '{ a[NR] = $1 } END { print a[int((NR + 1) / 2)] }'; }

printf '%-8s %-6s %10s %14s %16s %8s\n' threads dtype tandem "torch eager" "torch compiled" ratio
for threads in 1 2; do
    for dtype in f32 bf16; do
        tandem='' eager='' compiled=''
        for ((i = 0; i < repeats; i++)); do
            tandem+="$(ours $threads $dtype)"$'\n'
            eager+="$(peer $threads $dtype eager)"$'\n'
            compiled+="$(peer $threads $dtype compile)"$'\n'
        done
        a=$(printf '%s' "$tandem" | middle) b=$(printf '%s' "$eager" | middle) c=$(printf '%s' "$compiled" | middle)
        awk -v t="$threads" -v d="$dtype" -v a="$a" -v b="$b" -v c="$c" \
            'BEGIN { best = b < c ? b : c; printf "%-8d %-6s %7.2f ms %11.2f ms %13.2f ms %7.2fx\n", t, d, a, b, c, best / a }'
    done
done
