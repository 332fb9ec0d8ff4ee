#!/usr/bin/env bash
# From a checkout to trained models: installs what is missing from Debian's packages, builds, trains a classifier of
# Fashion-MNIST's pictures of clothes, shows that two ranks follow the same curve as one, and trains a small GPT on the King James
# Bible, which then writes a few lines.
#
#     ./quickstart.sh
#
# What it trains is in build/quickstart. It can be run again.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=cmake/setup.sh
. cmake/setup.sh

data=/usr/share/datasets/fashion-mnist
out=build/quickstart
begin=$SECONDS

die()
{
    echo "quickstart.sh: $*" >&2
    exit 1
}

[ $# -eq 0 ] || die "takes no arguments, but got '$*'."

install_packages "${packages[@]}"
installed=$SECONDS

build()
{
    configure build -DCMAKE_BUILD_TYPE=Release -DTANDEM_CUDA=OFF && cmake --build build --target binaries -j "$(nproc)"
}

mkdir -p build || die "the checkout's folder cannot be written: copy it to one of yours."
echo "Building Release in build/"
if ! build >build/quickstart.log 2>&1; then
    tail -n 30 build/quickstart.log >&2
    die "the build failed as shown above; the whole text is in build/quickstart.log. An old build folder can be removed: rm -r build"
fi
[ -d "$data" ] || die "the pictures are not in $data: apt-get install --reinstall dataset-fashion-mnist"

# train MODEL FOLDER FLAG...
train()
{
    local model=$1 to=$2
    shift 2
    rm -rf "${out:?}/$to"
    mkdir -p "$out"
    "build/bin/$model" train --out "$out/$to" "$@" ||
        die "training stopped: the line above says why. The command was: build/bin/$model train --out $out/$to $*"
}

echo
echo "Training: 784-1024-1024-10, 60,000 pictures, 3 epochs"
train mlp mlp --data "$data" --epochs 3

echo
echo "20 steps in f64 on one rank, then on two under ddp"
train mlp one --data "$data" --dtype f64 --batch 144 --steps 20 --log-every 1 --ranks 1
train mlp two --data "$data" --dtype f64 --batch 144 --steps 20 --log-every 1 --ranks 2 --strategy ddp

# The losses of both runs side by side, and the largest relative difference. Sums taken in another order may differ in
# the last digits of f64.
awk '
function number(key,   at) {
    if (!match($0, "\"" key "\":[ ]*[-+0-9.eE]+")) return ""
    at = substr($0, RSTART, RLENGTH)
    sub(/^[^:]*:[ ]*/, "", at)
    return at
}
{
    step = number("step")
    loss = number("loss")
    if (step == "" || loss == "" || (FILENAME, step) in seen) next
    seen[FILENAME, step] = 1
    if (FILENAME == ARGV[1]) { one[step] = loss; order[++ones] = step }
    else { two[step] = loss; twos++ }
}
END {
    printf "%6s  %-20s  %-20s\n", "step", "loss, one rank", "loss, two ranks"
    for (i = 1; i <= ones; i++) {
        a = one[order[i]]; b = two[order[i]]
        difference = a == b ? 0 : (a > b ? a - b : b - a) / (a > 0 ? a : 1)
        if (!(difference <= worst)) worst = difference
        if (i == 1 || i % 5 == 0) printf "%6d  %-20s  %-20s\n", order[i], a, b
    }
    printf "largest relative difference over %d steps: %.1e\n", ones, worst
    if (ones != 20 || twos != 20) { print "20 losses of each run were expected, got " ones + 0 " and " twos + 0; exit 1 }
    exit !(worst <= 1e-10)
}' "$out/one/metrics.jsonl" "$out/two/metrics.jsonl" ||
    die "the curves of one and two ranks differ by more than 1e-10: please report this with the files in $out."

accuracy=$(awk 'match($0, /"accuracy":[ ]*[0-9.eE+-]+/) { at = substr($0, RSTART, RLENGTH); sub(/^[^:]*:[ ]*/, "", at); print at; exit }' "$out/mlp/summary.json")
[ -n "$accuracy" ] || die "$out/mlp/summary.json holds no accuracy."
plot=$out/mlp/loss.png
[ -s "$plot" ] || die "the loss plot $plot was not written: is gnuplot working?"

# Every verse as a line, without its place.
bible -f gen1:1-rev22:21 | sed 's/^[^ ]* *//' >"$out/bible.txt"
[ -s "$out/bible.txt" ] || die "Debian's bible-kjv gave no text: apt-get install --reinstall bible-kjv"

echo
echo "Training: a GPT of 0.8 million parameters on the characters of the King James Bible"
train gpt gpt --data "$out/bible.txt" --layers 4 --heads 4 --width 128 --context 64 --dropout 0 --batch 12 --steps 1000 --log-every 100

echo
echo "It writes:"
echo
build/bin/gpt sample --out "$out/gpt" --prompt "In the beginning" --tokens 300 --temperature 0.8 || die "sampling stopped: the line above says why."

echo
printf 'Test accuracy: %.4f\n' "$accuracy"
echo "Loss plot:     $plot"
echo "Took $((SECONDS - begin)) s, $((installed - begin)) s of them for packages."
