#!/bin/sh
# layers.sh CHECKOUT: fails, naming file and line, where a folder uses what it may not.
#
# A folder includes its own headers and the public ones of the folders before it:
#     core < nn, optim, data (not each other) < parallel < run < models < examples, bench
# core/json.h, core/file.h, core/hash.h, core/thread.h and core/utf8.h are not installed but serve data, parallel, run, models and bench.
# Models reach parallel/ only through run/. core's second header, rewrite.h, is open to core, nn, optim, parallel, examples and bench.
# nn and models say nothing of ranks or collectives; "nccl" and "mpi" are words of parallel/ alone; CUDA's headers
# belong to *.cu and the device files.
set -eu
cd "$1"
find core nn optim data parallel run models examples bench \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null | sort | xargs awk '
BEGIN {
    may["core"]     = " core rewrite "
    may["nn"]       = " core rewrite nn "
    may["optim"]    = " core rewrite optim "
    may["data"]     = " core data "
    may["parallel"] = " core rewrite nn optim data parallel "
    may["run"]      = " core nn optim data parallel run "
    may["models"]   = " core nn optim data run tandem "
    may["examples"] = " core rewrite nn optim data parallel run tandem "
    may["bench"]    = may["examples"]
    folders = "^(core|nn|optim|data|parallel|run|models|examples|bench|tests)/"
}
function violation(text) { printf "%s:%d: %s\n", FILENAME, FNR, text; found = 1 }
FNR == 1 {
    folder = FILENAME; sub("/.*", "", folder)
    public = FILENAME ~ "^(core/(core|rewrite)|nn/nn|optim/optim|data/data|parallel/parallel|run/run)[.]h$"
}
/^[ \t]*#[ \t]*include[ \t]*[<"]/ {
    angle = $0 ~ "include[ \t]*<"
    name = $0
    sub(/^[^<"]*[<"]/, "", name)
    sub(/[>"].*/, "", name)
    if (name ~ "^tandem/") {
        header = name
        sub("^tandem/", "", header)
        sub("[.]h$", "", header)
        if (index(may[folder], " " header " ") == 0) violation(folder "/ may not include <" name ">")
    } else if (name ~ "(^|/)[.][.]/") {
        violation("an include names its folder, not \"..\": " name)
    } else if (name ~ "^core/(json|file|hash|thread|utf8)[.]h$" && folder ~ "^(data|parallel|run|models|bench)$" && !public) {
        next
    } else if (name ~ folders && name !~ "^" folder "/") {
        violation(folder "/ may not include \"" name "\", which is private to its folder")
    } else if (!angle && public) {
        violation("a public header includes only public headers, not \"" name "\"")
    }
    if (name ~ "^(cuda|cublas|cudnn|nvrtc|cub/)" && FILENAME !~ "(/device_[a-z0-9_]*[.][ch]|[.]cuh?)$")
        violation("CUDA headers belong to *.cu and the device files")
}
folder != "parallel" && /(^|[^A-Za-z]|lib)(nccl|NCCL|mpi|MPI)(run|[^a-z]|$)/ {
    violation("\"nccl\" and \"mpi\" are words of parallel/ alone")
}
(folder == "nn" || folder == "models") && /(^|[^a-z_])(all_reduce|all_gather|reduce_scatter|all_to_all|td_mesh|td_transport|par_[a-z_]+)/ {
    violation(folder "/ says nothing of ranks and collectives")
}
END { exit found }
'
