#!/usr/bin/env bash
# The GPT's training step here and in PyTorch, one after the other on the same cores: a table.
#
#     bench/gpt_peer.sh PYTHON [REPEATS]      PYTHON has a current torch (bench/torch_gpt.py); 3 repeats
#
# Each repeat runs Tandem, then PyTorch eager and compiled, for each size, dtype and number of threads, each in a process of its own that
# reports the median of its steps. Of the repeats the lowest median counts, for all three alike: what else a machine does only adds. The small
# size is 4 layers, 4 heads, width 128, context 64, batch 12, no dropout; 10m is the nanoGPT one with dropout 0.2, batch 4.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { echo "usage: bench/gpt_peer.sh PYTHON [REPEATS]" >&2; exit 2; }
python=$1
repeats=${2:-3}
[ -x build/bin/gpt ] || { echo "gpt_peer.sh: build/bin/gpt is missing: cmake -B build && cmake --build build" >&2; exit 1; }

declare -A shape=([small]="--layers 4 --heads 4 --width 128 --context 64 --batch 12 --dropout 0" [10m]="--size 10m --batch 4")
declare -A steps=([small]=100 [10m]=12)

ours() # SIZE THREADS DTYPE
{
    build/bin/gpt bench ${shape[$1]} --threads "$2" --dtype "$3" --steps ${steps[$1]} --json 2>/dev/null | grep -o '"step_ms":[0-9.]*' | cut -d: -f2
}

peer() # SIZE THREADS DTYPE MODE
{
    "$python" bench/torch_gpt.py --size "$1" --threads "$2" --dtypes "$3" --modes "$4" --steps ${steps[$1]} 2>/dev/null |
        grep -o '"step_ms": *[0-9.]*' | grep -o '[0-9.]*$'
}

least() { sort -g | sed '/^$/d' | head -1; }

printf '%-6s %-8s %-6s %11s %14s %16s %8s\n' size threads dtype tandem "torch eager" "torch compiled" ratio
for size in ${SIZES:-small 10m}; do
    for threads in 1 2; do
        for dtype in f32 bf16; do
            tandem='' eager='' compiled=''
            for ((i = 0; i < repeats; i++)); do
                tandem+="$(ours $size $threads $dtype)"$'\n'
                eager+="$(peer $size $threads $dtype eager)"$'\n'
                compiled+="$(peer $size $threads $dtype compile)"$'\n'
            done
            a=$(printf '%s' "$tandem" | least) b=$(printf '%s' "$eager" | least) c=$(printf '%s' "$compiled" | least)
            awk -v s="$size" -v t="$threads" -v d="$dtype" -v a="$a" -v b="$b" -v c="$c" \
                'BEGIN { best = b < c ? b : c; printf "%-6s %-8d %-6s %8.2f ms %11.2f ms %13.2f ms %7.2fx\n", s, t, d, a, b, c, best / a }'
        done
    done
done
