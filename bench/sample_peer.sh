#!/usr/bin/env bash
# The GPT's tokens a second here and in PyTorch, one after the other on the same cores: a table.
#
#     bench/sample_peer.sh PYTHON [REPEATS]      PYTHON has a current torch (bench/torch_sample.py); 3 repeats
#
# One sequence, a cache of keys and values, a token drawn from the softmax at a time; weights are as after one update. Each repeat runs Tandem,
# then PyTorch eager and compiled, for each size, dtype and number of threads, each in a process of its own. Of the repeats the highest rate
# counts, for all three alike: what else a machine does only takes. SIZES="small 10m 124m" says which; 124m draws among the 50,257 tokens of
# the byte-level BPE in TOKENIZER, a folder.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { echo "usage: bench/sample_peer.sh PYTHON [REPEATS]" >&2; exit 2; }
python=$1
repeats=${2:-3}
[ -x build/bin/gpt ] || { echo "sample_peer.sh: build/bin/gpt is missing: cmake -B build && cmake --build build" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

declare -A shape=([small]="--layers 4 --heads 4 --width 128 --context 256" [10m]="--size 10m" [124m]="--size 124m --tokenizer ${TOKENIZER:-bytes}")
declare -A tokens=([small]=2000 [10m]=500 [124m]=150)

untrained() # SIZE: 65 characters in a text long enough for any context
{
    for ((i = 0; i < 400; i++)); do awk 'BEGIN { for (c = 32; c <= 96; c++) printf "%c", c }'; done >"$folder/text"
    build/bin/gpt train --data "$folder/text" ${shape[$1]} --batch 1 --steps 1 --eval-batches 1 --out "$folder/$1" >/dev/null 2>&1
}

ours() # SIZE THREADS DTYPE
{
    build/bin/gpt sample --out "$folder/$1" --threads "$2" --dtype "$3" --tokens ${tokens[$1]} --prompt A --json 2>/dev/null |
        grep -o '"tokens_per_s":[0-9.]*' | cut -d: -f2
}

peer() # SIZE THREADS DTYPE MODE
{
    "$python" bench/torch_sample.py --size "$1" --threads "$2" --dtypes "$3" --modes "$4" --tokens ${tokens[$1]} 2>/dev/null |
        grep -o '"tokens_per_s": *[0-9.]*' | grep -o '[0-9.]*$'
}

most() { sort -g | tail -1; }

printf '%-6s %-8s %-6s %11s %14s %16s %8s\n' size threads dtype tandem "torch eager" "torch compiled" ratio
for size in ${SIZES:-small 10m}; do
    untrained "$size"
    for threads in 1 2; do
        for dtype in f32 bf16; do
            tandem='' eager='' compiled=''
            for ((i = 0; i < repeats; i++)); do
                tandem+="$(ours $size $threads $dtype)"$'\n'
                eager+="$(peer $size $threads $dtype eager)"$'\n'
                compiled+="$(peer $size $threads $dtype compile)"$'\n'
            done
            a=$(printf '%s' "$tandem" | most) b=$(printf '%s' "$eager" | most) c=$(printf '%s' "$compiled" | most)
            awk -v s="$size" -v t="$threads" -v d="$dtype" -v a="$a" -v b="$b" -v c="$c" \
                'BEGIN { best = b > c ? b : c; printf "%-6s %-8d %-6s %9.0f/s %12.0f/s %14.0f/s %7.2fx\n", s, t, d, a, b, c, a / best }'
        done
    done
done
