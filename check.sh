#!/usr/bin/env bash
# Builds Tandem and runs its tests.
#
#     ./check.sh          every test under gcc's address and undefined-behaviour sanitizers, then what a Release build
#                         is needed for: binaries, timing, installation, kernels for GPUs on the host; CUDA where its toolkit
#                         is: that it compiles, and what it compiles when it runs. Minutes.
#     ./check.sh --all    also the full matrices (once, in a Release build) and every test with clang, plain and sanitized, under
#                         ThreadSanitizer and valgrind, and in a fresh Debian. About an hour.
#     ./check.sh --gpu    what needs a GPU, and compute-sanitizer over its kernels; without a GPU that everything compiles.
#
# JOBS and TEST_JOBS set how many compilers (all cores) and tests (2) run at a time.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=cmake/setup.sh
. cmake/setup.sh

jobs=${JOBS:-$(nproc)}
test_jobs=${TEST_JOBS:-2}
patience=1
failures=()
cuda=()

usage()
{
    echo "check.sh takes nothing, --all or --gpu, not '$*'." >&2
    exit 2
}

# stage NAME COMMAND...: says what runs and how long it took; on failure shows the output and remembers the name.
stage()
{
    local name=$1 begin=$SECONDS log
    shift
    log=$(mktemp)
    printf '%-46s' "$name"
    if "$@" >"$log" 2>&1; then
        printf ' %4d s\n' $((SECONDS - begin))
        rm "$log"
        return 0
    fi
    printf ' FAILED after %d s\n' $((SECONDS - begin))
    tail -n 100 "$log"
    rm "$log"
    failures+=("$name")
    return 1
}

# configure_and_build DIRECTORY TARGET OPTION...
configure_and_build()
{
    local build=$1 target=$2
    shift 2
    configure "$build" -DTANDEM_TESTS=ON -DTANDEM_PATIENCE="$patience" "$@" && cmake --build "$build" --target "$target" -j "$jobs"
}

# run_tests NAME DIRECTORY CTEST_OPTION...: ctest's own lines, less those that announce, then what was skipped.
run_tests()
{
    local name=$1 build=$2 begin=$SECONDS
    shift 2
    echo "$name"
    if ! ctest --test-dir "$build" -j "$test_jobs" --output-on-failure --no-label-summary --no-tests=error "$@" 2>&1 |
        { grep --line-buffered -v -E '^(Internal ctest|Test project| +Start +[0-9]+:)' || true; }; then
        failures+=("$name")
    fi
    grep -h '^skipped: ' "$build/Testing/Temporary/LastTest.log" || true
    echo "$name took $((SECONDS - begin)) s"
}

# ---- What the stages are -----------------------------------------------------------------------------------

sanitized_gcc()
{
    stage "build: gcc, ASan + UBSan" configure_and_build build/check-gcc all -DCMAKE_C_COMPILER=gcc \
        -DCMAKE_BUILD_TYPE=Debug -DTANDEM_SANITIZE=address,undefined || return 0
    run_tests "tests: gcc, ASan + UBSan" build/check-gcc
}

release_gcc()
{
    stage "build: gcc, Release" configure_and_build build binaries -DCMAKE_BUILD_TYPE=Release "${cuda[@]}" || return 0
    stage "build: gcc, Release, tests" configure_and_build build release_tests -DCMAKE_BUILD_TYPE=Release "${cuda[@]}" || return 0
    run_tests "tests: gcc, Release" build -L '^(release|cuda|on_host)$'
    grep -q '[.]cu[.]o' build/build.ninja 2>/dev/null || echo "skipped: CUDA's code: the CUDA Toolkit 13 or cuDNN 9's headers are not on this machine"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L | grep -q '^GPU'; }

# compute_sanitizer TOOL TEST [FLAGS...]: one test of test_cuda, in one process. Values that nobody wrote are looked for where memory is not
# erased.
compute_sanitizer()
{
    local tool=$1 test=$2
    shift 2
    stage "tests: compute-sanitizer, $tool" env CK_RUN_CASE="$test" OMP_WAIT_POLICY=passive compute-sanitizer --tool "$tool" \
        --error-exitcode 9 --target-processes all "$@" build/check-gpu/tests/test_cuda || true
}

gpu()
{
    stage "build: gcc and nvcc, Release" configure_and_build build/check-gpu all -DCMAKE_BUILD_TYPE=Release -DTANDEM_CUDA=ON || return 0
    run_tests "tests: gcc and nvcc, Release" build/check-gpu -L '^(gpu|cuda)$'
    PATH=$PATH:/usr/local/cuda/bin
    if ! has_gpu; then
        echo "skipped: compute-sanitizer: no CUDA device"
    elif ! command -v compute-sanitizer >/dev/null; then
        echo "skipped: compute-sanitizer, of the CUDA Toolkit, is not installed"
    else
        compute_sanitizer memcheck test_operations_equal_the_cpu_in_poisoned_memory
        compute_sanitizer racecheck test_operations_equal_the_cpu_in_poisoned_memory
        compute_sanitizer initcheck test_operations_equal_the_cpu_as_graphs
        compute_sanitizer memcheck test_losses_of_16_bits_equal_the_cpu
        compute_sanitizer racecheck test_losses_of_16_bits_equal_the_cpu
        compute_sanitizer memcheck test_deterministic_attention_gives_the_same_bits
        compute_sanitizer racecheck test_deterministic_attention_gives_the_same_bits --kernel-name-exclude kernel_substring=cudnn # its own copies
        compute_sanitizer memcheck test_updates_by_rows_equal_the_cpu
        compute_sanitizer racecheck test_updates_by_rows_equal_the_cpu
    fi
}

all_gcc()
{
    stage "build: gcc, Release, all tests" configure_and_build build all -DCMAKE_BUILD_TYPE=Release "${cuda[@]}" || return 0
    TANDEM_TEST_ALL=1 run_tests "tests: gcc, Release, full matrices" build
}

all_clang()
{
    stage "build: clang, Release, shared library" configure_and_build build/check-clang all \
        -DCMAKE_C_COMPILER=clang -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON "${cuda[@]}" &&
        run_tests "tests: clang, Release, shared library" build/check-clang
    stage "build: clang, ASan + UBSan" configure_and_build build/check-clang-sanitized all \
        -DCMAKE_C_COMPILER=clang -DCMAKE_BUILD_TYPE=Debug -DTANDEM_SANITIZE=address,undefined -DTANDEM_KERNELS_ON_HOST=ON &&
        run_tests "tests: clang, ASan + UBSan" build/check-clang-sanitized
    return 0
}

# The OpenMP runtime is not instrumented: threads of ours are watched, its own are held to one.
thread_sanitizer()
{
    stage "build: gcc, TSan" configure_and_build build/check-tsan all -DCMAKE_C_COMPILER=gcc \
        -DCMAKE_BUILD_TYPE=Debug -DTANDEM_SANITIZE=thread || return 0
    OMP_NUM_THREADS=1 OMP_THREAD_LIMIT=1 run_tests "tests: gcc, TSan" build/check-tsan -L '^threads$'
}

under_valgrind()
{
    stage "build: gcc, for valgrind" configure_and_build build/check-valgrind all -DCMAKE_C_COMPILER=gcc \
        -DCMAKE_BUILD_TYPE=Debug -DTANDEM_CUDA=OFF "-DCMAKE_CROSSCOMPILING_EMULATOR=valgrind;-q;--error-exitcode=9;--leak-check=full;--errors-for-leak-kinds=definite;--suppressions=$PWD/cmake/suppressions/valgrind.txt" ||
        return 0
    # Why AVX: cmake/suppressions/valgrind.txt.
    DNNL_MAX_CPU_ISA=AVX run_tests "tests: valgrind" build/check-valgrind -L '^valgrind$'
}

# For information: the sources are formatted by hand where a table reads better.
formatting()
{
    command -v clang-format >/dev/null || return 0
    local differ
    differ=$(git ls-files '*.c' '*.h' | while read -r file; do
        clang-format --dry-run -Werror "$file" 2>/dev/null || echo "$file"
    done | wc -l)
    echo "clang-format would change $differ of $(git ls-files '*.c' '*.h' | wc -l) files"
}

# ---- main --------------------------------------------------------------------------------------------------

case ${1-} in
'' | --all | --gpu) ;;
*) usage "$@" ;;
esac
[ $# -le 1 ] || usage "$@"
# One architecture says whether kernels compile; a machine with a GPU may go on to use what is built here.
if ! has_gpu; then
    cuda=(-DTANDEM_CUDA_ARCHITECTURES=90a-real)
fi

install_packages "${packages[@]}" "${packages_check[@]}"
stage "folders use only those before them" sh cmake/layers.sh . || true
if [ "${1-}" = --gpu ]; then
    gpu
elif [ "${1-}" = --all ]; then
    install_packages "${packages_all[@]}"
    patience=10
    sanitized_gcc
    all_gcc
    all_clang
    thread_sanitizer
    under_valgrind
    formatting
    if command -v mmdebstrap >/dev/null && [ "$(id -u)" -eq 0 ]; then
        stage "quickstart.sh in a fresh Debian 12" tests/fresh_root.sh || true
    else
        echo "skipped: tests/fresh_root.sh needs root and Debian's package mmdebstrap"
    fi
    if command -v slurmctld >/dev/null && command -v munged >/dev/null && [ "$(id -u)" -eq 0 ]; then
        stage "ranks under Slurm, on a cluster of its own" tests/slurm.sh build || true
    else
        echo "skipped: tests/slurm.sh needs root and Debian's packages slurm-wlm, munge and libpmix-dev"
    fi
else
    sanitized_gcc
    release_gcc
fi

if [ ${#failures[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failures[@]}" >&2
    exit 1
fi
