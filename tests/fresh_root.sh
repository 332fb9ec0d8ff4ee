#!/usr/bin/env bash
# Proves quickstart.sh on a machine with nothing but git and the checkout: a minimal Debian 12 made by mmdebstrap from
# this machine's own package sources, a clone of the checkout in it, and quickstart.sh in a chroot, twice.
#
#     tests/fresh_root.sh [FOLDER]       as root; about 2 GB in FOLDER (a temporary one), removed afterwards
#
# Uncommitted changes are carried along. The second run, with its packages in, must take less than LIMIT_S (240) s.
set -euo pipefail
cd "$(dirname "$0")/.."

die()
{
    echo "fresh_root.sh: $*" >&2
    exit 1
}
[ "$(id -u)" -eq 0 ] || die "making a root needs root: run it with sudo."
command -v mmdebstrap >/dev/null || die "mmdebstrap is missing: apt-get install mmdebstrap"

folder=$(mktemp -d "${1:-${TMPDIR:-/tmp}}/fresh_root.XXXXXX")
root=$folder/root
trap 'rm -rf --one-file-system "$folder"' EXIT

# The sources in use here, and apt's settings about how far to trust their dates.
mapfile -t sources < <(find /etc/apt/sources.list /etc/apt/sources.list.d -name '*.list' -size +0 -o -name '*.sources' -size +0 2>/dev/null)
[ ${#sources[@]} -gt 0 ] || die "this machine's /etc/apt names no package sources."
mapfile -t options < <(apt-config dump | grep -E '^Acquire::(Check-|http::Proxy|https::Proxy)' || true)

# Nothing but git, and what apt itself needs for sources behind https.
include=git
! grep -q 'https://' "${sources[@]}" || include+=,ca-certificates

begin=$SECONDS
mmdebstrap --quiet --variant=minbase --include="$include" "${options[@]/#/--aptopt=}" \
    bookworm "$root" "${sources[@]}" || die "mmdebstrap could not make the root."
echo "A minimal Debian 12 with git took $((SECONDS - begin)) s"

# What git knows and what it does not ignore: no build folder travels.
mkdir -p "$root/checkout"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ ! -e "$file" ] || cp --parents "$file" "$root/checkout"
done
cp /etc/resolv.conf "$root/etc/resolv.conf"

# inside COMMAND: in the root, with /proc and /dev mounted in a namespace that ends with the command.
inside()
{
    # shellcheck disable=SC2016 # the inner shell's own parameters
    unshare --mount --propagation private sh -c '
        mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" &&
        exec chroot "$1" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 TERM=dumb sh -c "$2"
    ' sh "$root" "$1"
}

for run in first second; do
    begin=$SECONDS
    inside 'cd /checkout && ./quickstart.sh' || die "the $run run of quickstart.sh failed as shown above."
    took=$((SECONDS - begin))
    echo "The $run run of quickstart.sh took $took s"
    if [ $run = first ]; then
        rm -rf "$root/checkout/build"
    fi
done
[ "$took" -le "${LIMIT_S:-240}" ] || die "the run with its packages in took $took s, more than ${LIMIT_S:-240} s."
