#!/bin/sh
# layers.sh LAYERS: the layering check accepts what it should and refuses, by file and line, what it should.
set -eu
layers=$1
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/core/ops" "$root/nn" "$root/optim" "$root/data" "$root/parallel" "$root/run" "$root/models/mlp" "$root/examples" "$root/bench"
failed=0

# accept FILE LINE: one line of source that is allowed.  refuse FILE LINE TEXT: one that is not, and what is said.
accept()
{
    printf '%s\n' "$2" >"$root/$1"
    if ! said=$(sh "$layers" "$root"); then
        echo "refused: $1: $2: $said"
        failed=1
    fi
    rm "$root/$1"
}
refuse()
{
    printf '\n%s\n' "$2" >"$root/$1"
    if said=$(sh "$layers" "$root" 2>/dev/null); then
        echo "accepted: $1: $2"
        failed=1
    fi
    case $said in
    "$1:2: $3"*) ;;
    *) echo "$1: $2: said \"$said\", not \"$3\""; failed=1 ;;
    esac
    rm "$root/$1"
}

accept core/ops/a.c '#include "core/internal.h"'
accept core/ops/a.c '#include "op.h"'
accept nn/a.c '#include <tandem/rewrite.h>'
accept parallel/a.c '#include <nccl.h>'
accept parallel/a.c '#include <tandem/optim.h>'
accept run/a.c '#include <tandem/parallel.h>'
accept run/a.c '#include "core/json.h"'
accept run/a.c '#include "core/file.h"'
accept run/a.c '#include "core/thread.h"'
accept parallel/a.c '#include "core/hash.h"'
accept models/mlp/a.c '#include "core/json.h"'
accept models/mlp/a.c '#include "core/file.h"'
accept bench/a.c '#include "core/json.h"'
accept models/mlp/a.c '#include <tandem/tandem.h>'
accept examples/a.c '#include <tandem/tandem.h>'
accept core/a.c '/* simplify and compile: no word of another folder */'
refuse nn/a.c '#include "core/internal.h"' 'nn/ may not include "core/internal.h"'
refuse nn/a.c '#include <core/internal.h>' 'nn/ may not include "core/internal.h"'
refuse nn/a.c '#include "../core/internal.h"' 'an include names its folder'
refuse nn/a.c '#  include <tandem/optim.h>' 'nn/ may not include <tandem/optim.h>'
refuse optim/a.c '#include <tandem/data.h>' 'optim/ may not include <tandem/data.h>'
refuse data/a.c '#include <tandem/rewrite.h>' 'data/ may not include <tandem/rewrite.h>'
refuse core/a.c '#include <tandem/nn.h>' 'core/ may not include <tandem/nn.h>'
refuse parallel/a.c '#include <tandem/run.h>' 'parallel/ may not include <tandem/run.h>'
refuse run/a.c '#include <tandem/tandem.h>' 'run/ may not include <tandem/tandem.h>'
refuse nn/a.c '#include "core/json.h"' 'nn/ may not include "core/json.h", which is private to its folder'
refuse models/mlp/a.c '#include "core/internal.h"' 'models/ may not include "core/internal.h", which is private to its folder'
refuse models/mlp/a.c '#include <tandem/parallel.h>' 'models/ may not include <tandem/parallel.h>'
refuse models/mlp/a.c 'par_open(0);' 'models/ says nothing of ranks'
refuse run/a.c '/* as mpirun does */' '"nccl" and "mpi"'
refuse nn/nn.h '#include "layer.h"' 'a public header includes only public headers'
refuse run/a.c 'ncclAllReduce(0);' '"nccl" and "mpi"'
refuse core/a.c 'MPI_Init(0);' '"nccl" and "mpi"'
refuse core/a.c '#include <cuda_runtime.h>' 'CUDA headers'
exit $failed
