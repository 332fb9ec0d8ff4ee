#!/bin/sh
# install.sh BUILD PROJECT SCRATCH: installs BUILD under SCRATCH, then builds and runs PROJECT against it: through
# find_package(Tandem) from C and C++17, and through pkg-config. Each public header is compiled alone as well.
set -eu
build=$1 project=$2 scratch=$3
prefix=$scratch/prefix
rm -rf "$scratch"
mkdir -p "$scratch"

cmake --install "$build" --prefix "$prefix" >"$scratch/install.log"
cmake -S "$project" -B "$scratch/build" -DCMAKE_PREFIX_PATH="$prefix" >"$scratch/configure.log"
cmake --build "$scratch/build"
"$scratch/build/from_c"
"$scratch/build/from_cxx"

PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name tandem.pc)")
export PKG_CONFIG_PATH
library=$(pkg-config --variable=libdir tandem)
# shellcheck disable=SC2046 # flags are words
cc -std=c17 -o "$scratch/from_pkg_config" "$project/program.c" $(pkg-config --cflags --libs tandem) -Wl,-rpath,"$library"
"$scratch/from_pkg_config"

for header in "$prefix"/include/tandem/*.h; do
    echo "#include <tandem/$(basename "$header")>" >"$scratch/alone.c"
    cc -std=c17 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I"$prefix/include" "$scratch/alone.c"
    c++ -x c++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I"$prefix/include" "$scratch/alone.c"
done

# A shared library carries its version and shows only what is declared public.
if [ -e "$library/libtandem.so" ]; then
    readelf -d "$library/libtandem.so" | grep -q 'SONAME.*libtandem[.]so[.][0-9]'
    hidden=$(nm -D --defined-only "$library/libtandem.so" | awk '$3 !~ /^(td|nn|opt|data|par|run)_/ { print $3 }')
    if [ -n "$hidden" ]; then
        echo "libtandem.so shows symbols without a prefix of Tandem's: $hidden"
        exit 1
    fi
fi
