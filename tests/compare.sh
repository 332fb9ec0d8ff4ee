#!/bin/sh
# compare.sh COMPARE SCRATCH: bench/compare between programs that only say how fast they are: what it writes, and what it refuses.
set -eu
compare=$1 scratch=$2
rm -rf "$scratch"
mkdir -p "$scratch/bin" "$scratch/lacking" "$scratch/out"
cd "$scratch"

fake() # FILE: from standard input, executable
{
    cat >"$1"
    chmod +x "$1"
}

# 2 ms and 1,863,690 parameters, as the MLP has; the GPT is short of one.
fake bin/mlp <<'END'
#!/bin/sh
echo "mlp $*" >>asked
used=3221225472
grep -q ^python asked 2>/dev/null && used=9663676416 # with what PyTorch holds
echo '{ "params": 1863690, "step_ms": 2.0, "peak_bytes": 1073741824, "planned_peak_bytes": 1073741824, "device_used_bytes": '$used', "host_us": 11.5, "first_step_ms": 250 }'
END
fake bin/gpt <<'END'
#!/bin/sh
echo '{ "params": 10745087, "step_ms": 2.0, "peak_bytes": 1073741824 }'
END
# PyTorch's side: 5 ms, compiled 3 ms; a mode fails.
fake bin/python <<'END'
#!/bin/sh
[ "$1" != -c ] || exit 0
for shape in "$@"; do :; done
case $shape in *'"mlp"'*) params=1863690 ;; *) params=10745088 ;; esac
echo "python $*" >>asked
echo '{ "torch": "2", "cuda": "13.0", "cudnn": 91900, "cublaslt": 130100, "nccl": "2.29.3" }'
while read -r verb value; do
    echo "$verb" >>asked
    case "$verb $value" in
    'prepare graph') echo '{ "error": "no graph" }' ;;
    prepare*) ms=5; [ "$value" != compile ] || ms=3; echo "{ \"params\": $params, \"peak_bytes\": 2147483648 }" ;;
    *) echo "{ \"step_ms\": $ms }" ;;
    esac
done
END
fake bin/nvidia-smi <<'END'
#!/bin/sh
[ "$2" -lt 2 ] || { echo 'No devices were found'; exit 6; }
echo "NVIDIA H200, 580.1, 1980, 3201, 1980, 345.22, 700.00, 41, [N/A], 12345, ${MIB:-143771}"
END

has() # FILE TEXT
{
    grep -qF -- "$2" "$1" || { echo "$1 lacks '$2':"; cat "$1"; exit 1; }
}

run() # NAME...: on the GPU that nvidia-smi tells of; what it says in ./said
{
    PATH=$scratch/bin:$PATH "$compare" --bin bin --python "$scratch/bin/python" --rounds 2 --out out "$@" >said 2>&1
}

refused() # TEXT ARGUMENT...: it fails and says TEXT
{
    text=$1
    shift
    if run "$@"; then echo "not refused: $*"; exit 1; fi
    has said "$text"
}

printf '# Results\n\nEach table.\n\n## Another\n\nstays\n' >out/RESULTS.md
run mlp
has out/RESULTS.md '| mlp | 1.000 | 1.000 | 3.00 | 11.5 us | 0.25 s | 0.25 s |'
run mlp # in place of the section before
has out/RESULTS.md '| mlp | bf16 | 1,863,690 | 2 ms (0.0%) | 0.064M rows/s | 0.1% | 1.00 | 3 ms (0.0%) | compile of 5 | 0.0% | 2.00 | 5 ms | 1.50x |'
has out/RESULTS.md '580.1'
has out/RESULTS.md 'stays'
[ "$(grep -c '^## ' out/RESULTS.md)" -eq 2 ]
has said 'torch graph: no graph'
has "$(echo out/results/mlp-h200-*.json)" '"power.draw": 345.22'

if grep -qx rest asked; then echo 'PyTorch gave back memory that nobody needed'; exit 1; fi

# Several ranks: as many batches, torchrun on the other side, a section of their own beside the other.
rm asked
run mlp --ranks 2 --strategy ddp,fsdp
has asked 'mlp bench --device cuda --dtype bf16 --batch 256 --clip 0.0 --steps 20 --json --hidden 1024,1024 --ranks 2 --strategy fsdp'
has asked 'python -m torch.distributed.run --standalone --nproc-per-node 2 '
has asked '--device cuda --strategy ddp --dtype bf16'
has out/RESULTS.md '## Training steps against PyTorch, 2 NVIDIA H200'
has out/RESULTS.md '| mlp | ddp | bf16 | 1,863,690 | 256 | 2 ms (0.0%) | 128k rows/s | 0.1% | 1.00 | 3 ms (0.0%) | compile of 2 | 0.0% | 2.00 | 5 ms | 1.50x |'
has out/RESULTS.md '| mlp | fsdp |'
has out/RESULTS.md '580.1'
[ "$(grep -c '^## ' out/RESULTS.md)" -eq 3 ]
run mlp --ranks 2 --windows
has asked '--ranks 2 --strategy ddp --windows'
has out/RESULTS.md '| mlp | ddp, windows | bf16 |'
has out/RESULTS.md '| mlp | ddp | bf16 |'
cp out/RESULTS.md before
run --section
cmp before out/RESULTS.md

# Where a GPU has no room for both, PyTorch gives its memory back before each of our turns.
rm asked
MIB=3000 run mlp --ranks 2
[ "$(grep -cx rest asked)" -eq 2 ]
[ "$(grep -cx prepare asked)" -eq 4 ]
refused '3 ranks have 2 GPUs, and each needs one of its own: no NVIDIA GPU 2' mlp --ranks 3
refused "PyTorch has no 'hsdp:2x1'" mlp --ranks 2 --strategy hsdp:2x1
refused '--strategy is for --ranks N' mlp --strategy ddp
refused '--windows is for --ranks N, of 2 or more, with a GPU each' mlp --windows
refused "device 'cuda:1' is not cpu or cuda, of which each rank has one" mlp --ranks 2 --device cuda:1

# Another model than PyTorch's is no comparison; others are measured all the same.
refused 'gpt-10m: Tandem trains 10745087 parameters, PyTorch 10745088' gpt-10m mlp
[ "$(find out/results -name '*.json' | wc -l)" -eq 4 ]

# What is missing is said in a sentence.
refused 'lacking/mlp is missing' mlp --bin lacking
refused 'false has no PyTorch' mlp --python false
rm bin/nvidia-smi
if ! command -v nvidia-smi >/dev/null; then
    refused 'no NVIDIA GPU' mlp
fi
run mlp --device cpu --dtypes f32 --threads 1
has out/RESULTS.md '| mlp | 128 | 1 | f32 | 2.00 ms (0%) | 5.00 ms | 3.00 ms | 3.00 ms (0%) | 1.50x |'
run mlp --device cpu --dtypes f32 --ranks 2
has out/RESULTS.md '## Training steps against PyTorch, 2 ranks on a CPU'
has out/RESULTS.md '| mlp | ddp | f32 | 1,863,690 | 256 | 2 ms (0.0%) | 128k rows/s | - | 1.00 | 3 ms (0.0%) | compile of 2 | - | 2.00 | 5 ms | 1.50x |'
