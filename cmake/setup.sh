# shellcheck shell=bash disable=SC2034 # the lists are read by the scripts that source this
# Sourced by check.sh and quickstart.sh: what Tandem needs of Debian's packages, how they are installed, and how a
# build folder is configured.

# To build, and to run what quickstart.sh runs.
packages=(build-essential cmake ninja-build pkg-config libdnnl-dev zlib1g-dev libyajl-dev libpcre2-dev check
    gnuplot-nox dataset-fashion-mnist bible-kjv)
# check.sh besides: mpirun, for ranks of several machines.
packages_check=(openmpi-bin)
# check.sh --all besides.
packages_all=(clang libclang-rt-dev libomp-dev valgrind)

# install_packages NAME...: those not there yet. Says in one sentence what is wrong and ends the script if it cannot.
install_packages()
{
    local missing=() name sudo=()
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        echo "This is not a Debian system: install the equivalents of $* and build with cmake by hand." >&2
        exit 1
    fi
    for name in "$@"; do
        # shellcheck disable=SC2016 # dpkg-query's own variable
        case $(dpkg-query -W -f '${db:Status-Status} ' "$name" 2>/dev/null || true) in
        'installed '*) ;;
        *) missing+=("$name") ;;
        esac
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" -ne 0 ]; then
        if ! command -v sudo >/dev/null; then
            echo "Debian packages are missing and only root can install them: apt-get install ${missing[*]}" >&2
            exit 1
        fi
        sudo=(sudo)
    fi
    echo "Installing ${missing[*]}"
    if ! "${sudo[@]}" apt-get -qq update ||
        ! "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "${missing[@]}" >/dev/null; then
        echo "Debian's packages could not be installed: see apt-get's message above, then try: apt-get install ${missing[*]}" >&2
        exit 1
    fi
}

# configure BUILD OPTION...: with Ninja, unless the folder was first configured with something else.
configure()
{
    local build=$1 generator=(-G Ninja)
    shift
    if [ -f "$build/CMakeCache.txt" ]; then
        generator=()
    fi
    cmake "${generator[@]}" -B "$build" "$@"
}
